"""What is watched of a step: what is expected of it, the measurement that begins with it, and what grows beside it."""

from __future__ import annotations

import torch

from ..measuring.profiling import TimedRun
from ..measuring.recording import StepRecord
from ..measuring.resident_memory import LITTERED_STEPS
from ..memory.metering import Between, DevicePeak, MemoryMeter
from ..planning.headroom import GUARD_BYTES, guard_bytes
from ..signatures.step_signature import StepSignature
from ..signatures.watching import Expected, Look, WatchPolicy
from ..torch_private import backward_pass
from .current_step import CurrentStep
from .eager_steps import EagerSteps
from .planned_model import PlannedModel


class StepWatch:
    """Begins to watch steps as the policy decides."""

    def __init__(self, model: PlannedModel, eager_steps: EagerSteps, watching: WatchPolicy) -> None:
        self._memory, self._history, self._say = model.memory, model.history, model.announcements.say
        self._eager_steps, self._watching = eager_steps, watching
        self._between, self._device_peak = Between(), DevicePeak()

    def begin(self, step: CurrentStep, arguments: list[torch.Tensor]) -> None:
        """Choose by whose plan a step begins, and begin to watch it."""
        if step.eager is not None:
            step.look = Look(is_measured=self._eager_steps.is_to_be_measured(step.eager))
        else:
            all_likely = self._history.all_likely(step.foreseen)
            step.expected = max(all_likely, key=lambda signature: signature.own_plan.unplanned_peak_bytes, default=None)
            step.is_unknown = step.expected is not None and self._history.begins_unknown(step.foreseen, step.expected)
            step.look = self._watching.step_begins(self._expect(step))
        if step.look.is_measured:
            step.record = self._begin_record(step, arguments)
        if step.look.is_timed:
            step.timed = TimedRun(self._memory.device)
        peak_bytes = None if step.expected is None or step.is_watched else step.expected.own_plan.measured.peak_bytes
        if peak_bytes is not None and self._memory.device.type == "cuda":
            self._device_peak.begin(self._memory.device, peak_bytes)

    # ---------------------------------------------------------------- what steps take outside of their plan

    def forward_starts(self) -> None:
        """Learn that a forward starts: what was seen since the one before is not all of its step."""
        self._between.take()

    def forward_done(self, step: CurrentStep) -> None:
        """Learn that a forward has ended: where it is the last of a planned step, look at what follows."""
        is_last = step.expected is not None and step.graphs == step.expected.graphs and not step.is_watched
        if is_last and self._memory.device.type == "cpu":
            self._between.begin()

    def backward_starts(self) -> None:
        """Learn that a captured backward starts."""
        self._device_peak.backward_starts()

    def failed(self) -> None:
        """Learn that a step has failed."""
        self._between.take()
        self._device_peak.take()

    def ended(self, step: CurrentStep, signature: StepSignature) -> None:
        """Learn of a captured step that has ended: whether it took more outside of its plan than measured ones."""
        allocated_bytes, peak_bytes, own = self._between.take(), self._device_peak.take(), signature.watched
        if step.record is not None:
            if step.record.is_measured and step.record.is_whole:
                own.allocated_bytes = max(own.allocated_bytes or 0, step.record.allocated_bytes)
            return
        if signature.plan is None or signature is not step.expected or own.allocated_bytes is None:
            return
        guard = guard_bytes(signature.plan.budget_bytes)
        if allocated_bytes is not None and allocated_bytes > own.allocated_bytes + guard:
            own.allocated_bytes, own.has_grown = allocated_bytes, True
        own.has_grown = own.has_grown or peak_bytes > max(
            signature.plan.budget_bytes, signature.plan.measured.peak_bytes or 0
        )

    def _expect(self, step: CurrentStep) -> Expected:
        """Return what is known of a step that begins."""
        signature, foreseen = self._history.likely(step.foreseen), next(iter(step.foreseen), None)
        if signature is None:
            is_on_host = self._memory.device.type == "cpu"
            return Expected(None, foreseen, step.size_bytes, is_on_host=is_on_host)
        plan = signature.own_plan
        predicted_bytes = plan.measured.predicted_bytes
        higher_bytes = 0 if predicted_bytes is None else plan.planned_peak_bytes - predicted_bytes
        may_grow = signature.recorded.outside_bytes > GUARD_BYTES
        is_higher = higher_bytes > guard_bytes(plan.budget_bytes)  # and not by a loss that is kept
        is_piece = self._memory.iterations.needs_measured_steps
        has_grown = signature.watched.has_grown
        is_any = may_grow or has_grown or is_higher or is_piece
        is_free = is_any and not MemoryMeter.is_running(self._memory.device)
        return Expected(
            signature,
            foreseen,
            step.size_bytes,
            has_peak=plan.measured.peak_bytes is not None,
            has_time=plan.measured.step_ms is not None,
            may_grow=is_free and may_grow,
            has_grown=is_free and has_grown,
            is_higher=is_free and is_higher,
            is_piece=is_free and is_piece,
        )

    def _begin_record(self, step: CurrentStep, arguments: list[torch.Tensor]) -> StepRecord:
        """Begin to measure a step."""
        if self._memory.collect_garbage(LITTERED_STEPS) or step.resident is None:
            step.resident = self._memory.count_before_step(arguments)
        sees_frees = self._memory.sees_frees(step.resident)
        record = StepRecord(self._memory.device, step.resident, sees_frees, self._memory.root)
        self._memory.watch_releases(record, arguments)
        if not record.is_measured and not backward_pass.is_running():
            self._say("Another profiler is running: peaks and code outside the plan can't be measured meanwhile.")
        return record
