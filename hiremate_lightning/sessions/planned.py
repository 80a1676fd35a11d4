"""What is planned for the kinds of steps that a session has seen: made, adapted, and corrected by what is measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from ..garbage import collecting_what_it_leaves
from ..measuring.recording import StepRecord
from ..measuring.resident import Resident
from ..measuring.resident_memory import ResidentMemory
from ..memory.free_memory import free_bytes
from ..options import SessionOptions
from ..out_of_memory import InfeasibleBudgetError
from ..planning.plan import Plan
from ..planning.planner import GUARD_BYTES
from ..reporting.report import Reporter
from ..rewriting.joint import may_choose_anew
from ..running.execution import Part
from ..running.program import Program
from ..units import Budget, format_bytes
from .announcements import Announcements
from .current_step import CurrentStep
from .deciding import Decision, decide_beside, decide_first, decide_measured
from .first_steps import FirstSteps
from .kinds import CERTAIN, Kind, Kinds
from .known import Known
from .largest import LargestSizes
from .plan_maker import PlanMaker
from .plan_reports import PlanReports
from .shortage import HELD_STEPS, Shortage
from .waiting import LAST
from .watching import WatchPolicy

log = logging.getLogger("hiremate_lightning")

CLEARLY_MORE = 1.1  # than was said of steps in which nothing fits: it is said again
SAVES_NOTHING = 0.99  # of what a step adds without its plan: a plan that takes as much, or more, saves no memory


class PlannedKinds:
    """The plans of one model, by kind of step.

    Args:
        name: Of the model.
        maker: Makes the plans.
        kinds: The kinds of its steps.
        first_steps: Chooses what steps run, those too that have no plan of their own.
        memory: What exists before a step.
        reporter: Shows plans.
        watching: Decides which steps are measured.
        announcements: Warns.
        largest: Foresees steps of the largest sizes.

    Attributes:
        name: Of the model.
        maker: Makes the plans.
        kinds: The kinds of steps, with their plans.
        listeners: Called with each plan when it is made, and again when it has been measured.
        shortage: Steps that do not fit the budget, while it is found out which budget they fit.
    """

    def __init__(
        self,
        name: str,
        maker: PlanMaker,
        kinds: Kinds,
        first_steps: FirstSteps,
        memory: ResidentMemory,
        reporter: Reporter,
        watching: WatchPolicy,
        announcements: Announcements,
        largest: LargestSizes,
    ) -> None:
        self.name, self.maker, self.kinds, self._first_steps = name, maker, kinds, first_steps
        self._memory, self._watching, self._announcements = memory, watching, announcements
        self._reports = PlanReports(reporter)
        self._largest, self._ahead = largest, set[Kind]()  # kinds that are planned ahead
        self.listeners: list[Callable[[Plan], None]] = []
        self.shortage = Shortage()
        self._dropped: Plan | None = None  # the latest one of those that were dropped
        self._said_bytes = 0  # the largest peak that was announced, where nothing fits
        maker.failed = announcements.not_made

    @property
    def options(self) -> SessionOptions:
        """What was asked for."""
        return self.maker.options

    @property
    def plans(self) -> Mapping[Kind, Plan]:
        """The plans so far."""
        return self.kinds.plans

    @property
    def latest(self) -> Plan | None:
        """The plan of the latest kind of step, None before there is one."""
        return self._dropped if self.kinds.latest is None else self.plans[self.kinds.latest]

    def leave(self, size_bytes: int) -> None:
        """Leave so many bytes free from now on, for code without a plan: between two steps, all plans are made anew."""
        self.maker.left_bytes, self._dropped = size_bytes, self.latest
        self.kinds.clear()
        self._first_steps.forget_plans()

    def set_budget(self, budget: Budget) -> None:
        """Change the budget; steps already seen are planned anew, nothing is captured again.

        Raises:
            InfeasibleBudgetError: If nothing fits it; then all is as it was.
        """
        before, records, level = self.options, self.kinds.records, self.maker.waiting.level
        self.maker.options = replace(before, budget=budget)
        for kind, known in self.kinds.known.items():
            self.kinds.change(kind, known=replace(known, limits=self.maker.new_limits()))
        try:
            self.maker.settle()
            made = {kind: self.maker.make(kind) for kind in self.kinds.known}
        except BaseException as error:  # Ctrl-C too: budgets change for all kinds of steps or for none
            enough = self._error_of_all() if isinstance(error, InfeasibleBudgetError) else None
            self.maker.options, self.maker.waiting.level = before, level
            self.maker.drop()  # it is for the other budget
            self.kinds.restore(records)
            raise enough or error from None
        self._said_bytes = 0
        for kind, (plan, programs) in made.items():
            self._install(kind, plan, programs)
        for kind, (plan, _) in made.items():
            self._announce(kind, plan)
        for plan, _ in made.values():
            self._tell(plan)

    def take_better(self) -> None:
        """Let plans take over, between two steps, that were made in the background."""
        with self._holding():
            for kind, plan, programs in self.maker.better():
                self._take(kind, plan, programs)

    def likely(self, step: CurrentStep) -> list[Kind]:
        """List the planned kinds by whose plan a step may begin."""
        return [kind for kind in self.kinds.all_likely(step.foreseen) if self.kinds.starts_so(kind, step.start)]

    def meet(
        self, finished: StepRecord | None, resident: Resident, before: Resident | None, step: CurrentStep
    ) -> list[Kind]:
        """Plan the step that has ended, if any, and check each likely plan against the memory before the next.

        Args:
            finished: The record of the step that has ended, None where it is not to be planned.
            resident: What exists.
            before: What existed before the step that has ended: other graphs may have waited than now.
            step: The step that begins.

        Returns:
            The kinds whose plans were checked.

        Raises:
            InfeasibleBudgetError: If nothing fits the budget and all was seen that may need more; it names what is
                enough for all steps seen.
        """
        self.shortage.begin_step(resident, self._memory)
        with self._holding():
            if finished is not None:
                with collecting_what_it_leaves():
                    is_piece = before is not None and (before.waiting or resident.waiting)
                    self.learn(finished, before.with_state(resident.state_bytes) if before and is_piece else resident)
        likely = self.likely(step)
        self.meet_all(likely, resident)
        if self.shortage.is_held and self.shortage.is_to_be_said:
            self.shortage.is_held = False
            error_of_all = self._error_of_all()
            if error_of_all is not None:
                raise error_of_all
            for kind in self.kinds.known:  # what needed more has gone
                self._replan(kind)
        if self.shortage.is_to_be_announced:
            self._announcements.held(self.options.budget, HELD_STEPS)
        return likely

    def meet_all(self, kinds: Sequence[Kind], resident: Resident) -> None:
        """Check the plans of kinds of steps against the memory that exists; where none fits, train on for a while."""
        with self._holding():
            if self.maker.waiting.is_to_settle(resident, kinds):
                self._replan(*self.maker.settle(resident))
            for kind in kinds:
                self.adapt(kind, resident)

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Let training go on where a step does not fit, until it is known what all of its steps need."""
        try:
            yield
        except InfeasibleBudgetError as error:
            log.info("%s goes on, to find out what all of its steps need: %s", self.name, error)
            self.shortage.hold(error)

    def _error_of_all(self) -> InfeasibleBudgetError | None:
        records = self.kinds.records
        for kind, known in self.kinds.known.items():
            records[kind] = replace(records[kind], known=self.maker.waiting.at(kind, known, LAST))
        return self.shortage.error(records, self.options, self.maker.budget_bytes, self.name)

    def see_backwards(self, kind: Kind, record: StepRecord) -> None:
        """See whether a step has other backwards than the one that was seen of its kind.

        One with more of them is planned anew, and so is one of which a step was recorded that takes more than all that
        follow. Where a graph waits for a later step, both kinds of pieces are to come.
        """
        known, backwards = self.kinds[kind].known, tuple(sorted(set(record.backwards)))
        waits = any(run.is_waiting for run in record.unfinished)
        if waits and (not backwards or (known is not None and backwards != known.places)):
            self.maker.waiting.found_alike(kind)
            return
        is_settled = known is not None and known.is_provisional and not record.has_dropped_by_plan
        if known is not None and (is_settled or set(known.places) < set(backwards)):
            self._dropped = self.latest
            self.kinds.latest = None if self.kinds.latest == kind else self.kinds.latest
            self.kinds.change(kind, known=None, plan=None, programs={})

    def must_return(self, part: Part, positions: Collection[int]) -> None:
        """Learn that gradients were handed to autograd beside those that exist, where a plan may count on adding."""
        for kind, known in self.kinds.known.items():
            returning = known.returning(part, positions)
            if returning is not known:
                self.kinds.change(kind, known=returning, is_unfit=True)
                self._announcements.returned()

    # ---------------------------------------------------------------- which kinds get a plan

    def decide_to_plan(self, kind: Kind) -> Decision:
        """Decide whether a kind of step gets a plan that has none; announce it where there are too many."""
        record = self.kinds[kind]
        is_worth_it = record.sights > 1 or not record.is_by_plans
        has_place = is_worth_it and (self.maker.captured_before(kind) is not None or self.has_place())
        decision = decide_first(is_worth_it, has_place)
        if decision is Decision.FULL:
            self.announce_full()
        return decision

    def has_place(self) -> bool:
        """Whether there are fewer plans than allowed."""
        return self.kinds.plan_count < self.options.max_plans

    def announce_full(self) -> None:
        """Warn that there are as many plans as allowed."""
        self._announcements.full(self.kinds.plan_count)

    def learn(self, record: StepRecord, resident: Resident) -> None:
        """Plan a kind of step that was not seen before; one that may be small by chance waits where nothing fits."""
        kind = record.signature
        known, waiting = self.maker.describe(record, resident), self.maker.waiting
        self.kinds.describe(kind, waiting.at(kind, known))
        self._note_before(kind, resident)
        ahead = self._foresee_largest(kind, resident)
        self.shortage.are_measured = self.shortage.are_measured and record.is_measured
        if self.shortage.is_held:
            return
        try:
            self._replan(*(self.maker.settle(resident) if waiting.concerns(kind, known) else ()), *ahead, kind)
        except InfeasibleBudgetError as error:
            known = self.kinds.described(kind)
            if self._may_be_small_by_chance(kind, known):
                log.info("%s waits for larger steps: %s", self.name, error)
                self.kinds.change(kind, known=None)
                return
            if not self.maker.left_bytes:
                raise
            self.kinds.change(kind, known=replace(known, margin_bytes=0))  # it is measured, and would be said
            self._replan(kind)
        self.see_first(kind, record.peak_bytes or 0)

    def _foresee_largest(self, kind: Kind, resident: Resident) -> list[Kind]:
        """Describe the step of the largest sizes that runs the code of a kind; list it where it has no plan yet."""
        found = self._largest.foresee(kind, self.kinds.described(kind), resident)
        if found is None or self.kinds[found[0]].known is not None:
            return []
        larger, known = found
        self.kinds.describe(larger, self.maker.anew(known))
        self.kinds.change(larger, waited=self.kinds[kind].waited)
        self._note_before(larger, known.resident)
        self._ahead.add(larger)
        return [larger]

    def _note_before(self, kind: Kind, resident: Resident) -> None:
        resident = self.maker.waiting.resident_at(resident, LAST)
        self.kinds.change(kind, before={**self.kinds[kind].before, resident.kept: resident})

    def see_first(self, kind: Kind, peak_bytes: int) -> None:
        """Warn where the first step of another kind, which ran before it was planned, took more than its budget."""
        plan = self.plans[kind]
        excess_bytes = peak_bytes - max(plan.budget_bytes, plan.planned_peak_bytes)
        if excess_bytes > GUARD_BYTES and len(self.plans) > 1:
            self._announcements.first_step(peak_bytes, excess_bytes)

    def _may_be_small_by_chance(self, kind: Kind, known: Known) -> bool:
        """Whether a share says little at the first sight: forwards have no backward, as of dropped layers."""
        has_dropped = len(known.calls) < len(kind)
        return self.options.budget.share is not None and has_dropped and self.kinds[kind].sights == 1

    # ---------------------------------------------------------------- plans are made

    def _replan(self, *kinds: Kind) -> None:
        """Plan known steps and let their programs take over."""
        for kind in dict.fromkeys(kinds):
            self._take(kind, *self.maker.make(kind))

    def _take(self, kind: Kind, plan: Plan, programs: Mapping[int, Program]) -> None:
        self._install(kind, plan, programs)
        self._announce(kind, plan)
        self._tell(plan)

    def _install(self, kind: Kind, plan: Plan, programs: Mapping[int, Program]) -> None:
        """Let the programs of a plan take over."""
        known = self.kinds.described(kind)
        limits = known.limits.with_plan(plan.planned_peak_bytes + known.margin_bytes)
        if plan.planned_peak_bytes > plan.budget_bytes:
            limits = limits.with_least(known.resident, plan.planned_peak_bytes)
        again = {plan.graph.nodes[node].op for node in plan.schedule.recomputed(plan.graph)}
        searches = may_choose_anew(again, self._memory.device)
        is_searching = searches or self.kinds[kind].is_searching
        self.kinds.install(kind, plan, programs, known=replace(known, limits=limits), is_searching=is_searching)
        self._watching.planned(kind)
        self._first_steps.forget_plans()

    def _announce(self, kind: Kind, plan: Plan) -> None:
        """Report a plan, and warn of what it brings."""
        ahead = f"ahead: {self._largest}" if kind in self._ahead else ""
        remark = "until a better plan is solved in the background" if plan.is_meanwhile else ahead
        self._reports.planned(kind, plan, remark)
        if split := self._announcements.split():
            self._reports.note(f"  {split}")
        if self.kinds[kind].is_searching:
            self._announcements.algorithms()
        if plan.planned_peak_bytes > plan.budget_bytes:
            self._say_least(kind, plan.planned_peak_bytes)
        self._announcements.checkpointing(plan)

    def _say_least(self, kind: Kind, peak_bytes: int) -> None:
        """Warn of what a step takes in which nothing fits, planned or measured, clearly more than was said of any."""
        if not self.kinds.described(kind).is_provisional and peak_bytes > CLEARLY_MORE * self._said_bytes:
            self._said_bytes = peak_bytes
            self._announcements.least(peak_bytes, self.plans[kind].budget_bytes)

    def _tell(self, plan: Plan) -> None:
        for listener in self.listeners:
            listener(plan)

    # ---------------------------------------------------------------- plans are checked, and made anew

    def adapt(self, kind: Kind, resident: Resident) -> None:
        """Check a plan against the memory that exists before this step; plan anew where it no longer fits."""
        record, plan, known = self.kinds[kind], self.plans[kind], self.kinds.described(kind)
        found, resident = resident, self.maker.waiting.resident_at(resident)
        if resident == known.resident and not record.is_unfit:
            return
        self._note_before(kind, found)
        if self.shortage.is_held:
            return
        has_more_state = resident.state_bytes > known.resident.state_bytes
        limits = known.limits.without_least() if record.is_unfit else known.limits
        met = self.maker.waiting.at(kind, replace(known, resident=resident, limits=limits))
        step, limits = met.merge(), self.maker.limits(kind, met)
        known = replace(met, limits=limits)
        is_old = has_more_state or (plan.measured.peak_bytes or 0) > limits.budget_bytes  # of more resident bytes
        seen_bytes = None if is_old else record.seen_bytes
        self.kinds.change(kind, known=known, is_unfit=False, seen_bytes=seen_bytes)
        adapted = plan.changed(
            graph=step.graph,
            profile=step.profile,
            budget_bytes=limits.budget_bytes,
            resident_bytes=resident.size_bytes,
            resident_parts=resident.kinds,
        )
        adapted = adapted.with_measured(peak_bytes=None) if is_old else adapted  # measured again
        peak_bytes = adapted.planned_peak_bytes + known.margin_bytes
        decision = decide_beside(
            stays=limits.stays(resident, peak_bytes, is_least=plan.planned_peak_bytes > plan.budget_bytes),
            is_risen=limits.have_risen(resident, peak_bytes),
            recomputes=plan.solution.recompute_ms > 0,
        )
        self._adapt(kind, adapted, peak_bytes, decision)

    def _adapt(self, kind: Kind, adapted: Plan, peak_bytes: int, decision: Decision) -> None:
        """Let a plan stay that meets what exists, or make another one."""
        if decision is Decision.LESS_ROOM:
            log.info("%s is planned anew: resident bytes are now %s", self.name, format_bytes(adapted.resident_bytes))
            self._replan(kind)
            return
        self.kinds.change(kind, plan=adapted)
        self._reports.kept(kind, adapted)
        self._tell(adapted)
        if adapted.planned_peak_bytes > adapted.budget_bytes:
            self._say_least(kind, adapted.planned_peak_bytes)
        if decision is Decision.MORE_ROOM:
            log.info("%s is planned anew: the budget is now %s", self.name, format_bytes(adapted.budget_bytes))
            known = self.kinds.described(kind)
            self.kinds.change(kind, known=replace(known, limits=known.limits.with_plan(peak_bytes)))  # tried once
            with suppress(InfeasibleBudgetError):  # then the plan stays
                self._replan(kind)

    def peak_measured(self, kind: Kind, peak_bytes: int, resident: Resident) -> None:
        """Compare a measured peak with the budget; where it is over, plan with less, a few times at most.

        Args:
            kind: Of the step.
            peak_bytes: Its peak.
            resident: What existed before it. Where another kind was foreseen, the plan was made for something else.
        """
        if self.kinds[kind].is_searching:  # cuDNN tried its algorithms, with all the memory that these may take
            self.kinds.change(kind, is_searching=False)
            return
        solution, before = self.plans[kind].solution, self.kinds[kind]
        try:
            self.adapt(kind, resident)
        except InfeasibleBudgetError:  # to be raised where such a step begins: this one has run
            self.kinds.change(kind, known=before.known, is_unfit=before.is_unfit)
            return
        plan, known = self.plans[kind], self.kinds.described(kind)
        if plan.solution is not solution:
            return  # planned anew: the step ran by the plan before
        self.kinds.change(kind, seen_bytes=max(self.kinds[kind].seen_bytes or 0, plan.planned_peak_bytes))
        if peak_bytes <= (plan.measured.peak_bytes or 0):
            return
        self.update(kind, peak_bytes=peak_bytes)
        is_least = plan.planned_peak_bytes > plan.budget_bytes
        if is_least:
            self._say_least(kind, peak_bytes)
        self._correct(kind, peak_bytes, decide_measured(peak_bytes - plan.budget_bytes, is_least, known.corrections))

    def _correct(self, kind: Kind, peak_bytes: int, decision: Decision) -> None:
        """Plan with a margin where a peak was measured above the budget, or say why not."""
        plan, known = self.plans[kind], self.kinds.described(kind)
        excess_bytes = peak_bytes - plan.budget_bytes
        text = f"The measured peak {format_bytes(peak_bytes)} is {format_bytes(excess_bytes)} above the budget"
        if decision is Decision.HOPELESS:
            self._announcements.say_over(
                f"{text}, after planning with a margin: something outside of the planned modules takes the memory."
            )
        if decision is not Decision.ABOVE_BUDGET:
            return
        margin_bytes = peak_bytes - plan.planned_peak_bytes  # more than the last one, which was left free
        corrected = replace(known, corrections=known.corrections + 1)
        self.kinds.change(kind, known=replace(corrected, margin_bytes=margin_bytes))
        try:
            self._replan(*(self.maker.settle() if known.waits else ()), kind)
        except InfeasibleBudgetError:
            self.kinds.change(kind, known=corrected)
            self._announcements.say_over(f"{text}, and no plan leaves that margin: the plan stays.")
        else:
            log.info("%s: planned again, with that margin", text)

    def update(self, kind: Kind, **measured: Any) -> None:
        """Note on the plan of a kind of step what was measured."""
        plan = self.plans[kind].with_measured(**measured)
        self.kinds.change(kind, plan=plan)
        if plan.measured.step_ms is not None and not plan.is_meanwhile:
            self._reports.measured(kind, plan)
        self._tell(plan)

    def confused(self, expected: Kind, kind: Kind) -> None:
        """Learn that a step turned out another kind than it began as."""
        self.kinds.confuse(expected, kind)
        plan = max((self.plans[expected], self.plans[kind]), key=lambda plan: plan.unplanned_peak_bytes)
        if plan.solution.recompute_ms > 0:
            self._announcements.confused(plan.budget_bytes, CERTAIN)

    # ---------------------------------------------------------------- what others ask

    def gains_nothing(self, kind: Kind, plain_bytes: int) -> bool:
        """Whether a plan that was measured and timed is not what its step fits the budget by.

        It recomputes nothing where the step fits without it, or nothing fits and it saves no memory either.

        Args:
            kind: The kind of step.
            plain_bytes: What it adds without its plan.
        """
        plan, known = self.plans[kind], self.kinds.described(kind)
        if plan.measured.step_ms is None or known.waits:
            return False
        if plan.planned_peak_bytes > plan.budget_bytes:
            more_bytes = plain_bytes - plan.planned.peak_bytes
            return self.saves_nothing(kind) and more_bytes < free_bytes(self._memory.device)
        if plan.solution.recompute_ms:
            return False
        is_whole = self.options.budget.share == 1  # of what plain training adds
        return is_whole or plan.resident_bytes + plain_bytes + known.margin_bytes <= plan.budget_bytes

    def saves_nothing(self, kind: Kind) -> bool:
        """Whether nothing fits the budget of a kind, and its plan takes what the step takes without it, or nearly."""
        plan = self.plans[kind]
        is_over = plan.planned_peak_bytes > plan.budget_bytes
        return is_over and plan.planned.peak_bytes >= SAVES_NOTHING * plan.unplanned.peak_bytes
