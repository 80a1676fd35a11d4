"""Begins the measurement of a step, and watches in other steps whether code outside of the plan allocates more."""

from __future__ import annotations

import torch

from ..measuring.profiling import TimedRun
from ..measuring.recording import StepMeasurement
from ..measuring.resident_memory import LITTERED_STEPS
from ..memory.metering import Between, DevicePeak, MemoryMeter
from ..signatures.step_signature import StepSignature
from ..signatures.watching import Look, WatchFacts
from ..torch_private import backward_pass
from .current_step import CurrentStep
from .eager_steps import EagerSteps
from .planned_model import PlannedModel


class StepWatch:
    """Measures and times the steps that `WatchPolicy` chooses."""

    def __init__(self, model: PlannedModel, eager_steps: EagerSteps) -> None:
        self._memory, self._history, self._warn = model.memory, model.history, model.warn
        self._eager_steps, self._watching = eager_steps, model.watching
        self._between, self._device_peak = Between(), DevicePeak()

    def begin(self, step: CurrentStep, arguments: list[torch.Tensor]) -> None:
        """Begin to measure or time a step, if that is due."""
        device = self._memory.device
        if step.eager is not None:
            step.look = Look(is_measured=self._eager_steps.is_to_be_measured(step.eager))
        else:
            beginning = WatchFacts(
                self._history.likely(step.foreseen),
                next(iter(step.foreseen), None),
                step.start[0],
                needs_iteration=self._memory.iterations.needs_measured_steps,
                is_free=not MemoryMeter.is_running(device),
                is_on_host=device.type == "cpu",
            )
            step.look = self._watching.choose_look(beginning)
        if step.look.is_measured:
            step.measurement = self._begin_measurement(step, arguments)
        if step.look.is_timed:
            step.timed = TimedRun(device)
        peak_bytes = None if step.expected is None or step.is_watched else step.expected.own_plan.measured.peak_bytes
        if peak_bytes is not None and device.type == "cuda":
            self._device_peak.begin(device, peak_bytes)

    # ---------------------------------------------------------------- memory outside of the plan

    def goes_on(self) -> None:
        """Discard what was allocated since the forward before: the step goes on with another forward."""
        self._between.take()

    def watch_after(self, step: CurrentStep) -> None:
        """On a CPU, begin to count what is allocated after the last forward of a planned step."""
        is_last = step.expected is not None and step.graphs == step.expected.graphs and not step.is_watched
        if is_last and self._memory.device.type == "cpu":
            self._between.begin()

    def mark_backward(self) -> None:
        """Mark the start of a captured backward in the watch on the device's peak."""
        self._device_peak.backward_starts()

    def failed(self) -> None:
        """Discard what was seen of a step that has failed."""
        self._between.take()
        self._device_peak.take()

    def ended(self, step: CurrentStep, signature: StepSignature) -> None:
        """Store in its signature whether a captured step took more outside of its plan than measured steps."""
        allocated_bytes, peak_bytes = self._between.take(), self._device_peak.take()
        if step.measurement is not None:
            if step.measurement.is_measured and step.measurement.is_whole:
                signature.watched.add_measured(step.measurement.allocated_bytes)
        elif signature is step.expected and signature.plan is not None:
            signature.watched.add_unmeasured(signature.plan, allocated_bytes, peak_bytes)

    def _begin_measurement(self, step: CurrentStep, arguments: list[torch.Tensor]) -> StepMeasurement:
        """Begin to measure a step."""
        if self._memory.collect_garbage(LITTERED_STEPS) or step.resident is None:
            step.resident = self._memory.count_before_step(arguments)
        sees_frees = self._memory.sees_frees(step.resident)
        measurement = StepMeasurement(self._memory.device, step.resident, sees_frees, self._memory.root)
        self._memory.watch_releases(measurement, arguments)
        if not measurement.is_measured and not backward_pass.is_running():
            self._warn("Another profiler is running: peaks and code outside the plan can't be measured meanwhile.")
        return measurement
