"""The life of a step: read `Steps.called`, `Steps._begin`, `Steps.start` and `Steps.end`; the rest is their detail.

A call after a backward ends a step and begins the next one. Then these act, in this order:

- `planned` plans the step that has ended, and adapts likely plans to the memory that exists now;
- `eager_steps` chooses whether the new step runs eager; if not, `History.expect` chooses the plan by which it begins;
- `step_watch` begins to measure the step, if that is due.

The program of each captured graph is chosen as it runs (`graph_programs`), by the graphs that have run in the step so
far. So several step signatures (the two of a GAN, another input shape) have their own plans side by side.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..calls.module_call import ModuleCall
from ..measuring.recording import StepMeasurement
from ..measuring.resident import Resident
from ..measuring.resident_memory import WATCHED_STEPS
from ..measuring.runs import Run
from ..memory.allocator import free_bytes
from ..out_of_memory import explain
from ..planning.plan import describe_peak
from ..records.step import MergedStep
from ..running.accumulation import Leaves
from ..running.execution import Conductor, GraphRuntime
from ..running.program import Program
from ..signatures.step_signature import StepSignature
from ..signatures.watching import Shown
from ..torch_private import backward_pass
from ..torch_private.tensor_state import tensors_among
from .current_step import CurrentStep
from .eager_steps import EagerSteps
from .graph_programs import GraphPrograms
from .modes import Eager, GivenBack
from .planned import PlannedSignatures
from .planned_model import PlannedModel
from .step_watch import StepWatch

COUNTED_AGAIN = 64  # count resident bytes again after so many steps


class Steps(Conductor):
    """Begins and ends the steps of one model, and conducts their captured graphs.

    Attributes:
        current: The step under way, None between two steps.
        ended: The step that ended last, until the next one begins; None if it failed.
        count: The number of steps that have begun.
        runs: The number of forwards that have begun.
        watch: Watches steps.
    """

    def __init__(
        self, model: PlannedModel, planned: PlannedSignatures, eager_steps: EagerSteps, graph_programs: GraphPrograms
    ) -> None:
        self.current: CurrentStep | None = None
        self.ended: CurrentStep | None = None
        self.count = self.runs = 0
        self._model, self._planned, self._eager_steps = model, planned, eager_steps
        self._graph_programs, self._watching, self._messages = graph_programs, model.watching, model.messages
        self._memory, self._runtimes, self._history = model.memory, model.runtimes, model.history
        self._is_passed_by = False  # whether code trained without its plan since the latest step
        self.watch = StepWatch(model, eager_steps)

    @property
    def eager(self) -> Eager | None:
        """The eager mode of the step under way; None if it runs captured, or there is no step."""
        return None if self.current is None else self.current.eager

    @property
    def measurement(self) -> StepMeasurement | None:
        """The measurement of the step under way; None if it is not measured."""
        return None if self.current is None else self.current.measurement

    def resident(self) -> Resident:
        """Return the memory that existed when the step began; if that was not counted, the memory that exists now."""
        return (self.current or CurrentStep()).resident_in(self._memory)

    def was_passed_by(self) -> None:
        """Mark that a step ran without its plan: the next step can't see that gradients of this one are freed."""
        self._is_passed_by = True

    def ran_unseen(self) -> None:
        """Count a call that ran unobserved: end the step under way if it is over, else mark it as unobserved."""
        self.runs += 1
        self.was_passed_by()
        if self.current is not None and self.current.is_over and not backward_pass.is_running():
            self.end()
        elif self.current is not None:
            self.current.is_unseen = True

    def take_ended(self) -> CurrentStep | None:
        """Return, once, the step that has ended, for the caller to plan it; None if it gets no plan."""
        ended, self.ended = self.ended, None
        return ended if ended is not None and ended.is_to_be_planned else None

    # ---------------------------------------------------------------- the life of a step

    def called(self, arguments: Any, call: ModuleCall | None = None) -> None:
        """End the step if it is over, and begin the next one or go on, since a planned module is called.

        Without a `call`, code is called around planned modules that is not captured itself.
        """
        step, is_first = self.current, self.count < 2
        if step is not None and (step.is_over or (is_first and call is not None and step.was_trial_of(call))):
            self.end()
        if self.current is None:
            try:
                self._begin(tensors_among(arguments), [] if call is None else [call])
            except BaseException:  # Ctrl-C too: the next step must not go on with half of this one
                self.fail()
                raise
        elif call is not None:
            self._eager_steps.called(self.current, call)

    def _begin(self, arguments: list[torch.Tensor], calls: list[ModuleCall]) -> None:
        """Begin a step; plan the one before it, if that is due."""
        finished = self.take_ended()
        if self._is_passed_by:
            self._memory.step_ended(None)
            self._is_passed_by = False
        if not self.count:
            self._planned.maker.announce()
        self.count += 1
        size_bytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in arguments)
        start = size_bytes, len(self._runtimes.waiting())
        step = self.current = CurrentStep(start, self._history.foresee(start), calls)
        self._memory.step_begins(arguments)
        self._messages.count_retained(len(self._runtimes.retained()))
        if finished is not None or self._counts_resident(step):
            if finished is not None:
                self._memory.collect_garbage()
            step.resident = self._memory.count_before_step(arguments)
            self._planned.plan_and_adapt(finished, step.resident, step)
        self._eager_steps.choose_mode(step)
        if step.eager is None:
            step.expected = self._history.expect(step.foreseen)
            step.may_need_more = self._history.begins_unknown(step.foreseen, step.expected)
        self.watch.begin(step, arguments)

    # ---------------------------------------------------------------- the beginning, in detail

    def called_inside_backward(self) -> None:
        """Mark the step under way as unobserved, since a planned module is called inside of a backward."""
        self.current = self.current or CurrentStep()
        self.current.is_unseen = True  # the step can't be ended here: autograd would restore the profiler

    def _counts_resident(self, step: CurrentStep) -> bool:
        """Whether to count resident bytes now: they settle within a few steps, and counting takes time."""
        is_due = self.count < WATCHED_STEPS or self.count % COUNTED_AGAIN == 0 or self._memory.has_grown()
        if is_due or self._planned.shortage.trains_on:
            return True
        all_likely = self._history.all_likely(step.foreseen)
        counts_on_frees = any(signature.recorded.counts_on_freed_gradients for signature in all_likely)
        return counts_on_frees or not all(map(self._planned.is_adapted, self._planned.to_adapt(step)))

    # ---------------------------------------------------------------- its captured graphs

    def start(self, runtime: GraphRuntime, arguments: Sequence[Any]) -> tuple[Program, Run | None]:
        """Return the program of a forward that begins, and its measurement if the step is measured."""
        self.runs += 1
        self._model.tracing.close()
        step = self.current or CurrentStep()  # a forward between two steps belongs to neither
        self.watch.goes_on()
        if self.current is not None and not step.forwards:
            self._first_forward(step, runtime, arguments)
        forward = self._graph_programs.decide(step, runtime)
        step.forwards.append(forward)
        if runtime.captured.made_from is not None:
            step.timed = None  # single operations of made code can't be timed: they have no numbers of their own
        program = forward.program if step.timed is None else step.timed.wrap(forward.program)
        return program, None if step.measurement is None else step.measurement.begin(runtime, program, arguments)

    def _first_forward(self, step: CurrentStep, runtime: GraphRuntime, arguments: Sequence[Any]) -> None:
        """Choose the signature by whose plan a step begins; adapt its plan to memory if that was not done."""
        self._runtimes.measure_once(runtime)
        signature, _ = self._history.choose((runtime.number,), step.expected, step.start, lambda signature: True)
        step.expected = signature or step.expected
        if signature is not None and not self._planned.is_adapted(signature):
            resident = step.resident or self._memory.count_before_step(tensors_among(arguments))
            self._planned.adapt_plans([signature], resident)

    def choose_program(self, runtime: GraphRuntime) -> Program:
        """Choose the program by which a captured graph is about to run, for its proof.

        `start` chooses again, and may find another one if the graph is the first of its step.
        """
        return self._graph_programs.decide(self.current or CurrentStep(), runtime).program

    def free_bytes(self, step: MergedStep, device: torch.device) -> int:
        """Return the bytes that the budget of a captured step, and the device, leave beside the live memory."""
        resident = self.resident()
        room, plan = self._planned.maker.find_room(step, resident), self._history.latest_plan
        budget_bytes = max(room.budget_bytes, 0 if plan is None else plan.budget_bytes)
        live_bytes = resident.size_bytes + (0 if self.current is None else self.current.live_bytes)
        if device.type == "cuda":
            live_bytes = max(live_bytes, torch.cuda.memory_allocated(device))
        room = replace(room, budget_bytes=budget_bytes, resident_bytes=live_bytes)
        return min(room.step_bytes, free_bytes(device))

    def forward_done(self, run: Run | None, outputs: Sequence[Any]) -> None:
        """Record the end of a forward."""
        if self.current is not None:
            if run is not None and self.current.measurement is not None:
                self.current.measurement.forward_done(run, outputs)
            self.watch.watch_after(self.current)

    def backward_starts(self, run: Run | None, tangents: Sequence[Any], leaves: Leaves, retains: bool) -> None:
        """Record the start of a captured backward."""
        self._mark_backward()
        if self.measurement is not None:
            self.measurement.backward_starts(run, tangents, leaves, retains)

    def eager_backward_starts(self) -> None:
        """Record the start of a backward of an eager step."""
        if backward_pass.will_run_again():
            self._eager_steps.graph_stays()
        self._mark_backward()
        if self.measurement is not None:
            self.measurement.eager_backward_starts()

    def _mark_backward(self) -> None:
        step = self.current
        self.watch.mark_backward()
        if step is None or not step.has_backward:  # no step: the backward is of one that failed or has ended
            self._memory.learn_frees(self.count)
        if step is not None:
            step.has_backward = True

    def was_overwritten(self, runtime: GraphRuntime, storages: Collection[int]) -> None:
        """Recompute nothing from values of a captured graph that other code overwrites before the backward."""
        runtime.captured = runtime.captured.reading_once(storages)
        self._graph_programs.forget_least(runtime)

    def settings_changed(self) -> None:
        """Warn that code is recomputed under other settings of PyTorch than its forward ran under."""
        self._model.warn(
            "Settings of PyTorch (autocast, torch.backends, precision, deterministic algorithms) changed between the "
            f"forward of {self._model.name} and its backward: gradients may differ from those of plain PyTorch by "
            "rounding. Put forward and backward into one `with` block."
        )

    def must_return(self, runtime: GraphRuntime, positions: Collection[int]) -> None:
        """Count two sets of gradients in plans from now on, since gradients of a graph were not added in place."""
        self._planned.must_return(runtime, positions)

    def backward_done(self, run: Run | None) -> None:
        """Record the end of a backward."""
        if self.measurement is not None:
            self.measurement.backward_done(run)

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return a name for a tensor that begins a sentence: of a parameter or buffer its path, else its shape."""
        root = self._model.root
        named = (("Parameter", root.named_parameters()), ("Buffer", root.named_buffers()))
        names = (f"{kind} {name!r}" for kind, tensors in named for name, value in tensors if value is tensor)
        return next(names, super().name_of(tensor))

    def ran_out(self, error: torch.OutOfMemoryError) -> None:
        """Add the planned peak and the allocated bytes to an error."""
        peak = describe_peak(self._model.name, self._history.latest_plan)
        explain(error, f"hiremate: {peak}{self._memory.describe()}")

    # ---------------------------------------------------------------- the end

    def fail(self) -> None:
        """Drop the step under way, after an exception."""
        step, self.current, self.ended = self.current, None, None
        self.watch.failed()
        self._memory.batch = []
        if step is not None:
            step.drop()

    def end_at_once(self) -> None:
        """End the step under way now, with its measurement."""
        self._memory.batch = []
        if self.measurement is not None:
            self.measurement.close()
        self.end()

    def end(self) -> None:
        """End the step under way, and its measurement; what was learned is used when the next one begins.

        The batch is kept, since it may belong to the next step already.
        """
        step, self.current = self.current, None
        if step is None:
            return
        self._messages.step_took(time.perf_counter() - step.began_s, self._model.reporter.total.all_s)
        if step.is_unseen:
            self.ended = None
            step.drop()
        elif step.eager is not None:
            self._end_eager(step, step.eager)
        elif step.forwards or step.measurement is not None:
            self._end_captured(step)

    def _end_eager(self, step: CurrentStep, eager: Eager) -> None:
        """Store what an eager step has shown: its peak, if it was measured."""
        self.ended = step
        if isinstance(eager, GivenBack):
            self._history.note(eager.likely, step.start)
        self._memory.step_ended(step.measurement, eager.likely.graphs)
        if step.measurement is not None:
            step.measurement.close(at_once=False)
        self._eager_steps.ended(step, eager)

    def _end_captured(self, step: CurrentStep) -> None:
        """Store what a captured step has shown: its signature, its memory, and a record or a peak for its plan."""
        step.has_captured = self._messages.count_captured(self._runtimes.traced_count)
        self.ended, signature = step, self._history.get_or_make(step.graphs)
        measurement = step.measurement
        is_own = step.ran_by(self._history.taken_for(signature))
        self._history.ended(signature, step.start, step.is_by_plans, step.taken_over.fits_nothing)
        self._eager_steps.learn_from_taken_over(step, signature)
        if not is_own:
            self._planned.compare_with_expected(step, signature)
        self._memory.step_ended(measurement, signature.graphs, step.has_captured)
        if measurement is not None:
            measurement.close(at_once=False)
        self._graph_programs.learn_sizes(step)
        shown = self._learn_from(step, signature, is_own)
        if step.look is not None:
            self._watching.step_ended(step.look, signature, shown)
        is_missed = signature.plan is None and (measurement is None or not measurement.is_whole)
        self.watch.ended(step, signature)
        if is_missed and self._planned.admit(signature):
            self._watching.missed(signature)

    def _learn_from(self, step: CurrentStep, signature: StepSignature, is_own: bool) -> Shown:
        """Keep the record of a step to plan its signature, or store its peak or time in the plan of the signature.

        The latter if `is_own`: each graph followed the plan of its signature, or of one that it may be taken for.
        """
        measurement = step.measurement
        if measurement is None:
            is_measured = is_own and signature.plan is not None and signature.plan.measured.peak_bytes is not None
            if step.timed is not None and is_measured:
                self._planned.update(signature, step_ms=step.timed.total_ms, recompute_ms=step.timed.recompute_ms)
            return Shown.NOTHING
        if not measurement.is_whole:
            return Shown.NOTHING
        self._planned.see_backwards(signature, measurement)
        if signature.plan is None:
            if measurement.backwards:
                if measurement.peak_bytes is not None and not step.has_captured:
                    self._graph_programs.learn_margin(step, measurement.peak_bytes)
                measurement.timed = step.timed
                step.is_to_be_planned = self._planned.admit(signature)
                self._watching.found(signature)
            elif step.has_backward and not step.has_captured and measurement.peak_bytes is not None:
                self._planned.piece_measured(measurement.peak_bytes)
            return Shown.NOTHING
        if not is_own or step.resident is None or not measurement.is_measured:
            return Shown.NOTHING
        if measurement.peak_bytes is None:
            return Shown.NO_FREES
        self._planned.peak_measured(signature, measurement.peak_bytes, self._memory.as_seen(step.resident), measurement)
        return Shown.PEAK
