"""The steps of one model: each begins, is planned for and measured, and ends or fails.

A forward after a backward begins a new one. What was learned from a step that has ended is used as the next one begins.
Programs are chosen by the captured graphs that have run so far in the step, so several kinds of steps (a GAN's two,
another input shape) have their own plans side by side.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..measuring.profiling import TimedRun
from ..measuring.recording import StepRecord
from ..measuring.resident import Resident
from ..measuring.resident_memory import ALL, LITTERED_STEPS, WATCHED_STEPS, YOUNG, ResidentMemory
from ..memory.metering import MemoryMeter
from ..out_of_memory import InfeasibleBudgetError, explain
from ..planning.planner import GUARD_BYTES, guard_bytes
from ..torch_private import backward_pass
from ..torch_private.tensor_state import tensors_among
from .announcements import Announcements
from .current_step import CurrentStep, PlainRun
from .deciding import Decision
from .first_steps import FirstSteps
from .kinds import Kind
from .largest import LargestSizes
from .parts import Parts
from .plain_steps import ModuleCall
from .planned import PlannedKinds
from .small_parts import SmallParts
from .unplanned import UnplannedSteps
from .watching import Expected, Saw, Watch, WatchPolicy

COUNTED_AGAIN = 64  # steps, after which resident bytes are counted once more


class Steps:
    """Begins and ends the steps of one model.

    Args:
        memory: What exists before a step.
        planned: The plans.
        unplanned: Decides which steps run as the user wrote them.
        first_steps: Chooses what steps run.
        watching: Decides which steps are measured.
        announcements: Warns.
        parts: The captured graphs.
        largest: Foresees steps of the largest sizes.

    Attributes:
        current: The step under way, None between two steps.
        ended: The step that ended last, until the next one begins; None where none has, or it failed.
        count: The number of steps that have begun.
        small_parts: Code that runs without a plan, for which plans leave room.
    """

    def __init__(
        self,
        memory: ResidentMemory,
        planned: PlannedKinds,
        unplanned: UnplannedSteps,
        first_steps: FirstSteps,
        watching: WatchPolicy,
        announcements: Announcements,
        parts: Parts,
        largest: LargestSizes,
    ) -> None:
        self.current: CurrentStep | None = None
        self.ended: CurrentStep | None = None
        self.count = 0
        self.small_parts = SmallParts()
        self._memory, self._planned, self._unplanned = memory, planned, unplanned
        self._first_steps, self._watching, self._announcements = first_steps, watching, announcements
        self._parts, self._kinds, self._largest = parts, planned.kinds, largest
        self._is_passed_by = False  # by steps that ran since the latest one
        self._next_is_timed = False
        self._met: dict[Kind, tuple[int, int]] = {}  # growths, and retained bytes, that the plan of each kind has met

    @property
    def plain(self) -> PlainRun | None:
        """How the step under way runs as the user wrote it; None where it runs captured, or there is none."""
        return None if self.current is None else self.current.plain

    def resident(self) -> Resident:
        """Return what existed when the step began; where that was not counted, what exists now."""
        found = None if self.current is None else self.current.resident
        return found or self._memory.count(())

    def was_passed_by(self) -> None:
        """Learn that a step ran without its plan: its gradients were made unseen, so are not seen freed in the next."""
        self._is_passed_by = True

    def ran_unseen(self) -> None:
        """Learn that a call ran of which nothing is to be learned: a step before it ends, one under way is unseen."""
        self.was_passed_by()
        if self.current is not None and self.current.is_over:
            self.end(at_once=False)
        elif self.current is not None:
            self.current.is_unseen = True

    def time_next(self) -> None:
        """Time the operations of the next step, whatever else is watched in it."""
        self._next_is_timed = True

    def take_record(self) -> StepRecord | None:
        """Return the record of the step that has ended, where it was to be planned; it won't be any more."""
        ended, self.ended = self.ended, None
        return ended.record if ended is not None and ended.is_to_be_planned else None

    # ---------------------------------------------------------------- the beginning

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
            self._unplanned.called(self.current, call)

    def _was_trial(self, step: CurrentStep, call: ModuleCall | None) -> bool:
        """Whether a first step was one call to see what the same module returns, as pipelines make one."""
        if self.count > 1 or len(step.forwards) != 1 or call is None or step.record is None:
            return False
        return [own.name for own in step.calls] == [call.name] and step.record.left_nothing

    def called_inside_backward(self) -> None:
        """Learn of a call inside of a backward: what it runs is not seen as a part of the step."""
        self.current = self.current or CurrentStep()
        self.current.is_unseen = True  # it can't be ended here: autograd would restore the profiler

    def _begin(self, arguments: list[torch.Tensor], calls: list[ModuleCall]) -> None:
        began_at = time.perf_counter()
        before, self.ended = self.ended, None
        if self._is_passed_by:
            self._memory.step_ended(None)
            self._is_passed_by = False
        finished = before if before is not None and before.is_to_be_planned else None
        if self.small_parts.came_in(self.count):
            self._planned.leave(self.small_parts.size_bytes)
            finished = None
        if not self.count:
            self._planned.maker.announce()
        self.count += 1
        size_bytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in arguments)
        waiting = len(self._parts.waiting())
        foreseen = self._kinds.foresee((size_bytes, waiting))
        step = self.current = CurrentStep(size_bytes, waiting, foreseen, calls, began_at=began_at)
        self._planned.take_better()
        self._watching.settle()
        self._memory.step_begins(arguments)
        self._announcements.step_begins(len(self._parts.retained()))
        if finished is not None:
            self._memory.collect_garbage()
        if finished is not None or self._counts_resident(step):
            step.resident = self._memory.count_before_step(arguments)
            self._first_steps.count(step.resident)
            self._meet(finished, step, step.resident)
        if before is not None and before.timing is not None:
            self._unplanned.note_release(before.timing)
        if before is not None and before.is_usual:
            self._unplanned.next_begins(before, began_at - before.began_at)
        settled = self._unplanned.step_begins(step)
        self._watch(step, arguments)
        if settled is not None:
            is_watched = step.look is not None and step.look.watch is not Watch.NOTHING
            step.timing = self._unplanned.releases.step_begins(settled, step.plain is not None, is_watched)

    def _counts_resident(self, step: CurrentStep) -> bool:
        """Whether to count resident bytes now: they settle within a few steps, and counting takes time."""
        is_due = self.count < WATCHED_STEPS or self.count % COUNTED_AGAIN == 0 or self._memory.has_grown()
        is_due = is_due or self._planned.shortage.is_held or self._kinds.any_is_unfit(step.foreseen)
        return is_due or not all(map(self._has_met, self._planned.likely(step)))

    def _has_met(self, kind: Kind) -> bool:
        """Whether the plan of a kind has met as much as exists: other plans let more be retained, state has grown."""
        growths, retained_bytes = self._met.get(kind, (0, 0))
        return growths == self._memory.growths and retained_bytes >= self._memory.retained_bytes()

    def first_forward(self, number: int, arguments: Sequence[Any]) -> None:
        """Check the plan of a kind that was not foreseen against the memory that exists, before a step begins by it.

        Args:
            number: Of the captured graph that is about to run.
            arguments: What it is given.
        """
        step = self.current
        kind = None if step is None else self._kinds.choose((number,), step.expected, step.start)[0]
        if step is not None and kind is not None and not self._has_met(kind):
            resident = step.resident or self._memory.count_before_step(tensors_among(arguments))
            self._planned.meet_all([kind], resident)
            self._note_met([kind])

    def _note_met(self, kinds: Iterable[Kind]) -> None:
        self._met |= dict.fromkeys(kinds, (self._memory.growths, self._memory.retained_bytes()))

    def _meet(self, finished: CurrentStep | None, step: CurrentStep, resident: Resident) -> None:
        """Plan the step that has ended, and check plans against the memory that exists now.

        Raises:
            InfeasibleBudgetError: If nothing fits the budget; it says what could not be captured.
        """
        record = None if finished is None else finished.record
        try:
            before = None if finished is None else finished.resident
            self._note_met(self._planned.meet(record, resident, before, step))
        except InfeasibleBudgetError as error:
            if reasons := self._announcements.why_over():
                explain(error, f"hiremate:{reasons}")
            if named := str(self._largest):
                explain(error, f"hiremate: the budget is to be enough for the largest sizes: {named}.")
            raise
        if finished is not None and finished.kind not in self._planned.plans:
            self._watching.missed(finished.kind)
        elif finished is not None:
            self._unplanned.was_planned(finished.kind, finished.calls)
            for kind, calls in self._largest.called_ahead(finished.kind, finished.calls):
                self._unplanned.was_planned(kind, calls)

    def _watch(self, step: CurrentStep, arguments: list[torch.Tensor]) -> None:
        """Choose by whose plan a step begins, and begin to watch it."""
        if step.plain is not None:
            step.look = self._watching.plain_step_begins(self._unplanned.is_to_be_measured(step.plain))
        else:
            plans, all_likely = self._planned.plans, self._kinds.all_likely(step.foreseen)
            step.expected = max(all_likely, key=lambda kind: plans[kind].unplanned_peak_bytes, default=None)
            step.look = self._watching.step_begins(self._expect(step))
        if step.look.is_measured:
            step.record = self._begin_record(step, arguments)
        if step.look.is_timed or self._next_is_timed:
            step.timed, self._next_is_timed = TimedRun(self._memory.device), False

    def _expect(self, step: CurrentStep) -> Expected:
        """Return what is known of a step that begins."""
        kind, following = self._kinds.likely(step.foreseen), self._kinds.following(step.foreseen)
        foreseen = next(iter(step.foreseen), None)
        if kind is None:
            is_on_host = self._memory.device.type == "cpu"
            return Expected(None, foreseen, step.size_bytes, is_on_host=is_on_host)
        next_one = None if following is None else self._expect_planned(following, following, 0)
        return replace(self._expect_planned(kind, foreseen, step.size_bytes), following=next_one)

    def _expect_planned(self, kind: Kind, foreseen: Kind | None, size_bytes: int) -> Expected:
        """Return what is known of a step of a planned kind."""
        record, plan = self._kinds[kind], self._planned.plans[kind]
        higher_bytes = 0 if record.seen_bytes is None else plan.planned_peak_bytes - record.seen_bytes
        may_grow = self._kinds.described(kind).outside_bytes > GUARD_BYTES
        is_higher = higher_bytes > guard_bytes(plan.budget_bytes)  # and not by a loss that is kept
        is_free = (may_grow or is_higher) and not MemoryMeter.is_running(self._memory.device)
        return Expected(
            kind, foreseen, size_bytes, record.status, may_grow=is_free and may_grow, is_higher=is_free and is_higher
        )

    def _begin_record(self, step: CurrentStep, arguments: list[torch.Tensor]) -> StepRecord:
        """Begin to measure a step."""
        generation = YOUNG if step.look is not None and step.look.watch is Watch.GLANCE else ALL
        if self._memory.collect_garbage(LITTERED_STEPS, generation) or step.resident is None:
            step.resident = self._memory.count_before_step(arguments, generation)
        resident = step.resident
        sees_frees = self._memory.sees_frees(resident)
        sizes = (resident.size_bytes, resident.stale_bytes, resident.left_bytes)
        record = StepRecord(self._memory.device, *sizes, sees_frees, self._memory.root)
        self._memory.watch_releases(record, arguments, generation)
        if not record.is_measured and not backward_pass.is_running():
            self._announcements.profiled()
        return record

    # ---------------------------------------------------------------- the end

    def backward_starts(self) -> None:
        """Learn that a backward starts."""
        step = self.current
        if step is None or not step.has_backward:  # there is none for a backward of one that failed, or has ended
            self._memory.backward_starts(self.count)
        if step is not None:
            step.has_backward = True

    def fail(self) -> None:
        """Drop the step under way, after an exception."""
        step, self.current, self.ended = self.current, None, None
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
        if step.is_unseen:
            self.ended = None
            step.drop()
        elif step.plain is not None:
            self._end_plain(step, step.plain, at_once)
        elif step.forwards or step.record is not None:
            self._end_captured(step, at_once)

    def _end_plain(self, step: CurrentStep, plain: PlainRun, at_once: bool) -> None:
        self.ended = step
        if plain.released is not None:
            self._kinds.note(plain.released, step.start)
        self._memory.step_ended(step.record, plain.likely)
        if step.record is not None:
            step.record.close(at_once)
        self._unplanned.ended(step, plain)

    def _end_captured(self, step: CurrentStep, at_once: bool) -> None:
        is_usual = self._announcements.step_ended(self._parts.count)
        step.has_captured = not is_usual
        self.ended, kind, expected, record = step, step.kind, step.expected, step.record
        is_own = step.ran_by(self._kinds.taken_for(kind))
        self._kinds.ended(kind, step.start, step.is_by_plans)
        self._unplanned.was_foreseen(step)
        plans = self._planned.plans
        if not is_own and expected is not None and kind in plans and expected != kind:
            self._planned.confused(expected, kind)
        self._memory.step_ended(record, kind)
        if record is not None:
            record.close(at_once)
        saw = self._learn_from(step, is_own)
        if step.look is not None:
            self._watching.step_ended(step.look, kind, saw, is_usual)
        is_missed = kind not in plans and (record is None or not record.is_whole)
        if is_missed and self._planned.decide_to_plan(kind) is Decision.FIRST:
            self._watching.missed(kind)

    def _learn_from(self, step: CurrentStep, is_own: bool) -> Saw:
        """Keep the record of a step to plan its kind, or compare its peak or time with those of its plan.

        Args:
            step: The step.
            is_own: Whether it ran by the plan of its kind throughout, or of a kind that it is taken for.
        """
        record, kind, plans = step.record, step.kind, self._planned.plans
        if record is None:
            is_planned = is_own and kind in plans
            if step.timed is not None and is_planned and plans[kind].measured.peak_bytes is not None:
                self._planned.update(kind, step_ms=step.timed.total_ms, recompute_ms=step.timed.recompute_ms)
            return Saw.NOTHING
        if not record.is_whole:
            return Saw.NOTHING
        self._planned.see_backwards(kind, record)
        if kind not in self._planned.plans:
            if record.backwards:
                record.timed = step.timed
                step.is_to_be_planned = self._planned.decide_to_plan(kind) is Decision.FIRST
                self._watching.found(kind)
            return Saw.NOTHING
        if not is_own or step.resident is None or not record.is_measured:
            return Saw.NOTHING
        if record.peak_bytes is None:
            return Saw.NO_FREES
        self._planned.peak_measured(kind, record.peak_bytes, self._memory.as_seen(step.resident))
        return Saw.PEAK
