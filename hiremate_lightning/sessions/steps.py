"""The life of a step: read `Steps.called`, `Steps._begin` and `Steps.end`, the rest is their detail.

A call after a backward ends a step and begins the next one. What was learned from the step that has ended is used then:
its signature is planned, likely plans are checked against the memory that exists now, the way of the new step is
chosen, and what is watched in it. Its captured graphs choose their programs as they come (`graph_programs`), by those
that have run so far in the step, so several step signatures (a GAN's two, another input shape) have their own plans
side by side.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..calls.given import ModuleCall
from ..measuring.recording import StepRecord
from ..measuring.resident import Resident
from ..measuring.resident_memory import WATCHED_STEPS
from ..planning.headroom import guard_bytes
from ..signatures.step_signature import StepSignature
from ..signatures.watching import Saw, WatchPolicy
from ..torch_private import backward_pass
from ..torch_private.tensor_state import tensors_among
from .current_step import CurrentStep
from .eager_steps import EagerSteps
from .graph_programs import GraphPrograms
from .modes import Eager, GivenBack
from .planned import PlannedSignatures
from .planned_model import PlannedModel
from .step_watch import StepWatch
from .templates import predicted_peak_bytes

COUNTED_AGAIN = 64  # steps, after which resident bytes are counted once more


class Steps:
    """Begins and ends the steps of one model.

    Attributes:
        current: The step under way, None between two steps.
        ended: The step that ended last, until the next one begins; None where none has, or it failed.
        count: The number of steps that have begun.
        watch: Watches steps.
    """

    def __init__(
        self,
        model: PlannedModel,
        planned: PlannedSignatures,
        eager_steps: EagerSteps,
        graph_programs: GraphPrograms,
        watching: WatchPolicy,
    ) -> None:
        self.current: CurrentStep | None = None
        self.ended: CurrentStep | None = None
        self.count = 0
        self._planned, self._eager_steps, self._graph_programs = planned, eager_steps, graph_programs
        self._watching, self._announcements = watching, model.announcements
        self._memory, self._parts, self._history = model.memory, model.parts, model.history
        self._reporter = model.reporter
        self._is_passed_by = False  # by steps that ran since the latest one
        self.watch = StepWatch(model, eager_steps, watching)

    @property
    def eager(self) -> Eager | None:
        """How the step under way runs as the user wrote it; None where it runs captured, or there is none."""
        return None if self.current is None else self.current.eager

    @property
    def under_way(self) -> CurrentStep:
        """The step under way; an empty one where there is none."""
        return self.current or CurrentStep()

    def resident(self) -> Resident:
        """Return what existed when the step began; where that was not counted, what exists now."""
        return self.under_way.resident_in(self._memory)

    def was_passed_by(self) -> None:
        """Learn that a step ran without its plan: its gradients were made unseen, so are not seen freed in the next."""
        self._is_passed_by = True

    def ran_unseen(self) -> None:
        """Learn that a call ran of which nothing is to be learned: a step before it ends, one under way is unseen."""
        self.was_passed_by()
        if self.current is not None and self.current.is_over and not backward_pass.is_running():
            self.end(at_once=False)
        elif self.current is not None:
            self.current.is_unseen = True

    def take_record(self) -> StepRecord | None:
        """Take the record of the step that has ended, to be planned by the caller; None where it gets no plan."""
        ended, self.ended = self.ended, None
        return ended.record if ended is not None and ended.is_to_be_planned else None

    # ---------------------------------------------------------------- the life of a step

    def called(self, arguments: Any, call: ModuleCall | None = None) -> None:
        """Learn of a call of a planned module, or of what is around it: it may begin a step.

        Args:
            arguments: What it is given.
            call: The call, None where what is called runs no captured code itself.
        """
        if self.current is not None and (self.current.is_over or self._was_trial(self.current, call)):
            self.end(at_once=False)
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
        waiting = len(self._parts.waiting())
        foreseen = self._history.foresee((size_bytes, waiting))
        step = self.current = CurrentStep(size_bytes, waiting, foreseen, calls)
        self._memory.step_begins(arguments)
        self._announcements.step_begins(len(self._parts.retained()))
        if finished is not None or self._counts_resident(step):
            self._meet(finished, step, arguments)
        if before is not None and before.timing is not None:
            self._eager_steps.note_release(before.timing)
        gainless = self._eager_steps.step_begins(step)
        self.watch.begin(step, arguments)
        is_eager, now_s = step.eager is not None, self._eager_steps.clock()
        if gainless is not None and gainless.trial.step_begins(is_eager, step.is_watched, now_s):
            step.timing = gainless.trial

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
        is_due = is_due or self._planned.shortage.is_held or self._history.any_counts_on_freed_gradients(step.foreseen)
        return is_due or not all(map(self._was_checked, self._planned.likely(step)))

    def _was_checked(self, signature: StepSignature) -> bool:
        """Whether the plan of a signature was checked with as much in use: state grows, other plans retain more."""
        growths, retained_bytes = signature.checked_at
        return growths == self._memory.growths and retained_bytes >= self._memory.retained_bytes()

    def first_forward(self, number: int, arguments: Sequence[Any]) -> None:
        """Choose the signature by whose plan a step begins; check a plan that was not foreseen against what exists.

        Args:
            number: Of the captured graph that is about to run.
            arguments: What it is given.
        """
        step = self.current
        if step is None:
            return
        signature, _ = self._history.choose((number,), step.expected, step.start, lambda signature: True)
        step.expected = signature or step.expected
        if signature is not None and not self._was_checked(signature):
            resident = step.resident or self._memory.count_before_step(tensors_among(arguments))
            self._planned.check_plans([signature], resident)
            self._note_checked([signature])

    def _note_checked(self, signatures: Iterable[StepSignature]) -> None:
        met = self._memory.growths, self._memory.retained_bytes()
        for signature in signatures:
            signature.checked_at = met

    def _meet(self, finished: CurrentStep | None, step: CurrentStep, arguments: list[torch.Tensor]) -> None:
        """Count what exists, plan the step that has ended, and check plans against the memory that exists now.

        Raises:
            InfeasibleBudgetError: If nothing fits the budget; it says what could not be captured.
        """
        if finished is not None:
            self._memory.collect_garbage()
        resident = step.resident = self._memory.count_before_step(arguments)
        self._graph_programs.note_resident(resident)
        record = None if finished is None else finished.record
        before = None if finished is None else finished.resident
        self._note_checked(self._planned.meet(record, resident, before, step))
        if finished is None:
            return
        signature = self._history[finished.graphs]
        if signature.plan is None:
            self._watching.missed(signature)
        else:
            self._planned.note_given(signature, finished.calls)

    # ---------------------------------------------------------------- the end

    def backward_starts(self) -> None:
        """Learn that a backward starts."""
        step = self.current
        self.watch.backward_starts()
        if step is None or not step.has_backward:  # there is none for a backward of one that failed, or has ended
            self._memory.backward_starts(self.count)
        if step is not None:
            step.has_backward = True

    def fail(self) -> None:
        """Drop the step under way, after an exception."""
        step, self.current, self.ended = self.current, None, None
        self.watch.failed()
        self._memory.batch = []
        if step is not None:
            step.drop()

    def end(self, at_once: bool = True) -> None:
        """End the step under way, and its measurement; what was learned is used when the next one begins.

        Args:
            at_once: Whether it has ended just now, or some time before the next one.
        """
        step, self.current = self.current, None
        if at_once:  # else it is the batch of the next step
            self._memory.batch = []
        if step is None:
            return
        self._announcements.step_took(time.perf_counter() - step.began_s, self._reporter.total.all_s)
        if step.is_unseen:
            self.ended = None
            step.drop()
        elif step.eager is not None:
            self._end_eager(step, step.eager, at_once)
        elif step.forwards or step.record is not None:
            self._end_captured(step, at_once)

    def _end_eager(self, step: CurrentStep, eager: Eager, at_once: bool) -> None:
        self.ended = step
        if isinstance(eager, GivenBack):
            self._history.note(eager.likely, step.start)
        self._memory.step_ended(step.record, eager.likely.graphs)
        if step.record is not None:
            step.record.close(at_once)
        self._eager_steps.ended(step, eager)

    def _end_captured(self, step: CurrentStep, at_once: bool) -> None:
        captured_nothing = self._announcements.step_ended(self._parts.traced_count)
        step.has_captured = not captured_nothing
        self.ended, signature, expected, record = step, self._history[step.graphs], step.expected, step.record
        is_own = step.ran_by(self._history.taken_for(signature))
        self._history.ended(signature, step.start, step.is_by_plans)
        signature.sights.fits_nothing = signature.sights.fits_nothing or step.comparison.fits_nothing
        self._eager_steps.learn_from_taken_over(step, signature)
        is_other = not is_own and expected is not None and expected is not signature and step.began_by(expected)
        if is_other and expected is not None and (signature.plan is not None or not step.began_again):
            self._planned.confused(expected, signature, step.is_by_plans)
        self._memory.step_ended(record, signature.graphs, step.has_captured)
        if record is not None:
            record.close(at_once)
        self._graph_programs.step_ended(step)
        saw = self._learn_from(step, signature, is_own)
        if step.look is not None:
            self._watching.step_ended(step.look, signature, saw)
        is_missed = signature.plan is None and (record is None or not record.is_whole)
        self.watch.ended(step, signature)
        if is_missed and self._planned.admit(signature):
            self._watching.missed(signature)

    def _learn_margin(self, step: CurrentStep, record: StepRecord) -> None:
        """Leave more room to steps of new sizes where one took more than was predicted for the plan that it ran by."""
        predicted_bytes = None if step.has_captured else predicted_peak_bytes(step)
        if predicted_bytes is None or record.peak_bytes is None:
            return
        excess_bytes = record.peak_bytes - predicted_bytes - guard_bytes(predicted_bytes)  # which plans leave free
        if excess_bytes > self._history.margin_bytes:
            self._history.margin_bytes = excess_bytes
            self._graph_programs.forget_plans()

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
                self._learn_margin(step, record)
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
