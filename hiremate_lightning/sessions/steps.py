"""The life of a step: read `Steps.called`, `Steps._begin`, `Steps.start` and `Steps.end`, the rest is their detail.

A call after a backward ends a step and begins the next one. What was learned from the step that has ended is used then:
its signature is planned, likely plans are checked against the memory that exists now, the way of the new step is
chosen, and what is watched in it. As each captured graph of the step runs, its program is chosen (`graph_programs`), by
those that have run so far in the step, so several step signatures (a GAN's two, another input shape) have their own
plans side by side.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..calls.given import ModuleCall
from ..measuring.recording import StepRecord
from ..measuring.resident import Resident
from ..measuring.resident_memory import WATCHED_STEPS
from ..measuring.runs import Run
from ..memory.allocator import free_bytes
from ..out_of_memory import explain
from ..planning.plan import describe_peak
from ..records.step import Step
from ..running.accumulation import Leaves
from ..running.execution import Conductor, Part
from ..running.program import Program
from ..signatures.step_signature import StepSignature
from ..signatures.watching import Saw
from ..torch_private import backward_pass
from ..torch_private.tensor_state import tensors_among
from .current_step import CurrentStep
from .eager_steps import EagerSteps
from .graph_programs import GraphPrograms
from .modes import Eager, GivenBack
from .planned import PlannedSignatures
from .planned_model import PlannedModel
from .step_watch import StepWatch

COUNTED_AGAIN = 64  # steps, after which resident bytes are counted once more


class Steps(Conductor):
    """Begins and ends the steps of one model, and conducts their captured graphs.

    Attributes:
        current: The step under way, None between two steps.
        ended: The step that ended last, until the next one begins; None where none has, or it failed.
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
        self._graph_programs, self._watching, self._announcements = graph_programs, model.watching, model.announcements
        self._memory, self._parts, self._history = model.memory, model.parts, model.history
        self._is_passed_by = False  # by steps that ran since the latest one
        self.watch = StepWatch(model, eager_steps)

    @property
    def eager(self) -> Eager | None:
        """How the step under way runs as the user wrote it; None where it runs captured, or there is none."""
        return None if self.current is None else self.current.eager

    @property
    def record(self) -> StepRecord | None:
        """What is measured in the step under way; None for nothing."""
        return None if self.current is None else self.current.record

    def resident(self) -> Resident:
        """Return what existed when the step began; where that was not counted, what exists now."""
        return (self.current or CurrentStep()).resident_in(self._memory)

    def was_passed_by(self) -> None:
        """Learn that a step ran without its plan: its gradients were made unseen, so are not seen freed in the next."""
        self._is_passed_by = True

    def ran_unseen(self) -> None:
        """Learn that a call ran of which nothing is to be learned: a step before it ends, one under way is unseen."""
        self.was_passed_by()
        if self.current is not None and self.current.is_over and not backward_pass.is_running():
            self.end()
        elif self.current is not None:
            self.current.is_unseen = True

    def take_record(self) -> StepRecord | None:
        """Take the record of the step that has ended, to be planned by the caller; None where it gets no plan."""
        ended, self.ended = self.ended, None
        return ended.record if ended is not None and ended.is_to_be_planned else None

    # ---------------------------------------------------------------- the life of a step

    def called(self, arguments: Any, call: ModuleCall | None = None) -> None:
        """Learn of a call of a planned module, or of what is around it and runs no captured code itself."""
        if self.current is not None and (self.current.is_over or self._was_trial(self.current, call)):
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
        """Begin a step. What was learned from the one before is used here, and nowhere else."""
        before, self.ended = self.ended, None
        if self._is_passed_by:
            self._memory.step_ended(None)
            self._is_passed_by = False
        finished = before if before is not None and before.is_to_be_planned else None
        if not self.count:
            self._planned.maker.announce()
        self.count += 1
        size_bytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in arguments)
        start = size_bytes, len(self._parts.waiting())
        step = self.current = CurrentStep(start, self._history.foresee(start), calls)
        self._memory.step_begins(arguments)
        self._announcements.step_begins(len(self._parts.retained()))
        if finished is not None or self._counts_resident(step):
            if finished is not None:
                self._memory.collect_garbage()
            step.resident = self._memory.count_before_step(arguments)
            self._planned.meet(finished, step.resident, step)
        self._eager_steps.step_begins(step)
        self.watch.begin(step, arguments)

    # ---------------------------------------------------------------- the beginning, in detail

    def _was_trial(self, step: CurrentStep, call: ModuleCall | None) -> bool:
        """Whether a first step was one call to see what the same module returns, as pipelines make one."""
        if self.count > 1 or len(step.forwards) != 1 or call is None or step.record is None:
            return False
        return [before.name for before in step.calls] == [call.name] and step.record.left_nothing

    def called_inside_backward(self) -> None:
        """Learn of a call inside of a backward: what it runs is not seen as a part of the step."""
        self.current = self.current or CurrentStep()
        self.current.is_unseen = True  # it can't be ended here: autograd would restore the profiler

    def _counts_resident(self, step: CurrentStep) -> bool:
        """Whether to count resident bytes now: they settle within a few steps, and counting takes time."""
        is_due = self.count < WATCHED_STEPS or self.count % COUNTED_AGAIN == 0 or self._memory.has_grown()
        likely = self._history.all_likely(step.foreseen)
        is_due = is_due or self._planned.shortage.is_held or any(one.counts_on_freed_gradients for one in likely)
        return is_due or not all(map(self._planned.was_checked, self._planned.likely(step)))

    # ---------------------------------------------------------------- its captured graphs

    def start(self, part: Part, arguments: Sequence[Any]) -> tuple[Program, Run | None]:
        """Choose the program of a forward."""
        self.runs += 1
        self._model.tracing.close()
        step = self.current or CurrentStep()  # what runs between two steps is none of either
        self.watch.forward_starts()
        if self.current is not None and not step.forwards:
            self._first_forward(step, part, arguments)
        forward = self._graph_programs.decide(step, part)
        step.forwards.append(forward)
        if part.captured.made_from is not None:
            step.timed = None  # operations are timed one by one: in made code these have no numbers of their own
        program = forward.program if step.timed is None else step.timed.wrap(forward.program)
        return program, None if step.record is None else step.record.begin(part, program, arguments)

    def _first_forward(self, step: CurrentStep, part: Part, arguments: Sequence[Any]) -> None:
        """Choose the signature by whose plan a step begins; check a plan that was not foreseen against what exists."""
        self._parts.costs_of(part)
        signature, _ = self._history.choose((part.number,), step.expected, step.start, lambda signature: True)
        step.expected = signature or step.expected
        if signature is not None and not self._planned.was_checked(signature):
            resident = step.resident or self._memory.count_before_step(tensors_among(arguments))
            self._planned.check_plans([signature], resident)

    def program_of(self, part: Part) -> Program:
        """Return the program by which a part is about to run, for its proof."""
        return self._graph_programs.decide(self.current or CurrentStep(), part).program

    def free_bytes(self, step: Step, device: torch.device) -> int:
        """Return the bytes that the budget of a captured step, and the device, leave beside what is there."""
        resident = self.resident()
        room, plan = self._planned.maker.room(step, resident), self._planned.latest
        budget_bytes = max(room.budget_bytes, 0 if plan is None else plan.budget_bytes)
        live_bytes = resident.size_bytes + (0 if self.current is None else self.current.live_bytes)
        if device.type == "cuda":
            live_bytes = max(live_bytes, torch.cuda.memory_allocated(device))
        room = replace(room, budget_bytes=budget_bytes, resident_bytes=live_bytes)
        return min(room.step_bytes, free_bytes(device))

    def forward_done(self, run: Run | None, outputs: Sequence[Any]) -> None:
        """Note the end of a forward."""
        if self.current is not None:
            if run is not None and self.current.record is not None:
                self.current.record.forward_done(run, outputs)
            self.watch.forward_done(self.current)

    def backward_starts(self, run: Run | None, tangents: Sequence[Any], leaves: Leaves, retains: bool) -> None:
        """Note the start of a backward."""
        self._backward_starts()
        if self.record is not None:
            self.record.backward_starts(run, tangents, leaves, retains)

    def eager_backward_starts(self) -> None:
        """Note the start of a backward of a step that runs eager."""
        if backward_pass.will_run_again():
            self._eager_steps.graph_stays()
        self._backward_starts()
        if self.record is not None:
            self.record.eager_backward_starts()

    def _backward_starts(self) -> None:
        step = self.current
        self.watch.backward_starts()
        if step is None or not step.has_backward:  # there is none for a backward of one that failed, or has ended
            self._memory.backward_starts(self.count)
        if step is not None:
            step.has_backward = True

    def was_overwritten(self, part: Part, storages: Collection[int]) -> None:
        """Learn of values that other code overwrites before the backward: nothing can be computed from them then."""
        part.captured = part.captured.reading_once(storages)
        self._graph_programs.forget_least(part)

    def settings_changed(self) -> None:
        """Learn that code is computed again in other settings of PyTorch than it was computed in."""
        self._model.say(
            "Settings of PyTorch (autocast, torch.backends, precision, deterministic algorithms) changed between the "
            f"forward of {self._model.name} and its backward: gradients may differ from those of plain PyTorch by "
            "rounding. Put forward and backward into one `with` block."
        )

    def must_return(self, part: Part, positions: Collection[int]) -> None:
        """Learn that gradients were handed to autograd beside those that exist, where a plan may count on adding."""
        self._planned.must_return(part, positions)

    def backward_done(self, run: Run | None) -> None:
        """Note the end of a backward."""
        if self.record is not None:
            self.record.backward_done(run)

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return the name of a parameter or a buffer, or else describe a tensor, to begin a sentence with."""
        root = self._model.root
        named = (("Parameter", root.named_parameters()), ("Buffer", root.named_buffers()))
        names = (f"{kind} {name!r}" for kind, own in named for name, value in own if value is tensor)
        return next(names, super().name_of(tensor))

    def ran_out(self, error: torch.OutOfMemoryError) -> None:
        """Note on an error what was planned and what is allocated."""
        peak = describe_peak(self._model.name, self._planned.latest)
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
        """End the step under way, which has ended just now."""
        self._memory.batch = []
        if self.record is not None:
            self.record.close()
        self.end()

    def end(self) -> None:
        """End the step under way, and its measurement; what was learned is used when the next one begins.

        Where it has ended some time before, the batch is that of the next step.
        """
        step, self.current = self.current, None
        if step is None:
            return
        self._announcements.step_took(time.perf_counter() - step.began_s, self._model.reporter.total.all_s)
        if step.is_unseen:
            self.ended = None
            step.drop()
        elif step.eager is not None:
            self._end_eager(step, step.eager)
        elif step.forwards or step.record is not None:
            self._end_captured(step)

    def _end_eager(self, step: CurrentStep, eager: Eager) -> None:
        self.ended = step
        if isinstance(eager, GivenBack):
            self._history.note(eager.likely, step.start)
        self._memory.step_ended(step.record, eager.likely.graphs)
        if step.record is not None:
            step.record.close(at_once=False)
        self._eager_steps.ended(step, eager)

    def _end_captured(self, step: CurrentStep) -> None:
        captured_nothing = self._announcements.step_ended(self._parts.traced_count)
        step.has_captured = not captured_nothing
        self.ended, signature = step, self._history.get_or_make(step.graphs)
        expected, record = step.expected, step.record
        is_own = step.ran_by(self._history.taken_for(signature))
        self._history.ended(signature, step.start, step.is_by_plans)
        signature.sights.fits_nothing = signature.sights.fits_nothing or step.fits_nothing
        self._eager_steps.learn_from_taken_over(step, signature)
        if expected is not None and step.forwards and step.forwards[0].signature is expected is not signature:
            began_again = step.graphs[0] in step.graphs[1:]  # as after a forward without a backward
            if not is_own and (signature.plan is not None or not began_again):
                self._planned.confused(expected, signature, step.is_by_plans)
        self._memory.step_ended(record, signature.graphs, step.has_captured)
        if record is not None:
            record.close(at_once=False)
        self._graph_programs.step_ended(step)
        saw = self._learn_from(step, signature, is_own)
        if step.look is not None:
            self._watching.step_ended(step.look, signature, saw)
        is_missed = signature.plan is None and (record is None or not record.is_whole)
        self.watch.ended(step, signature)
        if is_missed and self._planned.admit(signature):
            self._watching.missed(signature)

    def _learn_from(self, step: CurrentStep, signature: StepSignature, is_own: bool) -> Saw:
        """Keep the record of a step to plan its signature, or compare its peak or time with those of its plan.

        The latter where it is its own: it ran throughout by the plan of its signature, or of a signature that it is
        taken for.
        """
        record = step.record
        if record is None:
            is_measured = is_own and signature.plan is not None and signature.plan.measured.peak_bytes is not None
            if step.timed is not None and is_measured:
                self._planned.update(signature, step_ms=step.timed.total_ms, recompute_ms=step.timed.recompute_ms)
            return Saw.NOTHING
        if not record.is_whole:
            return Saw.NOTHING
        self._planned.see_backwards(signature, record)
        if signature.plan is None:
            if record.backwards:
                if record.peak_bytes is not None and not step.has_captured:
                    self._graph_programs.learn_margin(step, record.peak_bytes)
                record.timed = step.timed
                step.is_to_be_planned = self._planned.admit(signature)
                self._watching.found(signature)
            elif step.has_backward and not step.has_captured and record.peak_bytes is not None:
                self._planned.piece_measured(record.peak_bytes)
            return Saw.NOTHING
        if not is_own or step.resident is None or not record.is_measured:
            return Saw.NOTHING
        if record.peak_bytes is None:
            return Saw.NO_FREES
        self._planned.peak_measured(signature, record.peak_bytes, self._memory.as_seen(step.resident), record)
        return Saw.PEAK
