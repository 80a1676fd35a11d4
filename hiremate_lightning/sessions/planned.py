"""What is planned for the kinds of steps that a session has seen: made, adapted, and corrected by what is measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from ..calls.given import ModuleCall
from ..garbage import collecting_what_it_leaves
from ..kinds.deciding import Decision, decide_beside, decide_first, decide_measured
from ..kinds.history import CERTAIN, starts_so
from ..kinds.shortage import HELD_STEPS, Shortage
from ..kinds.step_kind import GraphNumbers, StepKind
from ..kinds.watching import WatchPolicy
from ..measuring.recording import StepRecord
from ..measuring.resident import Resident
from ..memory.allocator import free_bytes
from ..out_of_memory import InfeasibleBudgetError
from ..planning.plan import Plan
from ..planning.planner import GUARD_BYTES
from ..rewriting.joint import may_choose_anew
from ..running.execution import Part
from ..running.program import Program
from ..telling.plan_reports import PlanReports
from ..units import Budget, format_bytes
from .current_step import CurrentStep
from .graph_programs import GraphPrograms
from .largest import LargestSizes, given_at
from .plan_maker import PlanMaker
from .planned_model import PlannedModel
from .waiting import LAST

log = logging.getLogger("hiremate_lightning")

CLEARLY_MORE = 1.1  # than was said of steps in which nothing fits: it is said again


class PlannedKinds:
    """The plans of one model, by kind of step.

    Args:
        model: The planned model.
        maker: Makes the plans.
        graph_programs: Chooses the program of each captured graph.
        watching: Decides which steps are measured.
        largest: Foresees steps of the largest sizes.

    Attributes:
        maker: Makes the plans.
        history: The kinds of steps, with their plans.
        listeners: Called with each plan when it is made, and again when it has been measured.
        shortage: Steps that do not fit the budget, while it is found out which budget they fit.
    """

    def __init__(
        self,
        model: PlannedModel,
        maker: PlanMaker,
        graph_programs: GraphPrograms,
        watching: WatchPolicy,
        largest: LargestSizes,
    ) -> None:
        self._model, self._name, self.history = model, model.name, model.history
        self.maker, self._graph_programs = maker, graph_programs
        self._memory, self._watching, self._announcements = model.memory, watching, model.announcements
        self._reports, self._largest = PlanReports(model.stages.reporter), largest
        self.listeners: list[Callable[[Plan], None]] = []
        self.shortage = Shortage()
        self._dropped: Plan | None = None  # the latest one of those that were dropped
        self._said_bytes = 0  # the largest peak that was announced, where nothing fits

    @property
    def plans(self) -> Mapping[GraphNumbers, Plan]:
        """The plans so far, by the captured graphs of their steps."""
        return self.history.plans

    @property
    def latest(self) -> Plan | None:
        """The plan of the latest kind of step, None before there is one."""
        return self._dropped if self.history.latest is None else self.history.latest.own_plan

    def set_budget(self, budget: Budget) -> None:
        """Change the budget; steps already seen are planned anew, nothing is captured again.

        Raises:
            InfeasibleBudgetError: If nothing fits it; then all is as it was.
        """
        before, level = self._model.options, self.maker.waiting.level
        steps = {kind: kind.recorded for kind in self.history.recorded}
        self._model.options = replace(before, budget=budget)
        for kind, step in steps.items():
            kind.step = replace(step, limits=self.maker.new_limits())
        try:
            self.maker.choose_level()
            made = {kind: new for kind in steps if (new := self.maker.make(kind)) is not None}
        except BaseException as error:  # Ctrl-C too: budgets change for all kinds of steps or for none
            enough = self._error_of_all() if isinstance(error, InfeasibleBudgetError) else None
            self._model.options, self.maker.waiting.level = before, level
            for kind, step in steps.items():
                kind.step = None if kind.sights.has_no_template else step
            raise enough or error from None
        self._said_bytes = 0
        for kind, (plan, programs) in made.items():
            self._install(kind, plan, programs)
        for kind, (plan, _) in made.items():
            self._announce(kind, plan)
        for plan, _ in made.values():
            self._tell(plan)

    def likely(self, step: CurrentStep) -> list[StepKind]:
        """List the planned kinds by whose plan a step may begin."""
        return [kind for kind in self.history.all_likely(step.foreseen) if starts_so(kind, step.start)]

    def meet(
        self, finished: StepRecord | None, resident: Resident, before: Resident | None, step: CurrentStep
    ) -> list[StepKind]:
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
                    self.learn(finished, resident, before and before.with_state(resident.state_bytes))
        likely = self.likely(step)
        self.check_plans(likely, resident)
        if self.shortage.is_held and self.shortage.is_to_be_raised:
            self.shortage.is_held = False
            error_of_all = self._error_of_all()
            if error_of_all is not None:
                raise error_of_all
            for kind in self.history.recorded:  # what needed more has gone
                try:
                    self._plan(kind)
                except InfeasibleBudgetError as error:
                    self._plan_without_margin(kind, error)
        if self.shortage.is_to_be_announced:
            self._announcements.held(self._model.options.budget, HELD_STEPS)
        return likely

    def check_plans(self, kinds: Sequence[StepKind], resident: Resident) -> None:
        """Check the plans of kinds of steps against the memory that exists; where none fits, train on for a while."""
        with self._holding():
            self.maker.waiting.note_before(resident, kinds)
            if self.maker.waiting.is_due:
                self._plan(*self.maker.choose_level(resident))
            for kind in kinds:
                self.check_plan(kind, resident)

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Let training go on where a step does not fit, until it is known what all of its steps need."""
        try:
            yield
        except InfeasibleBudgetError as error:
            log.info("%s goes on, to find out what all of its steps need: %s", self._name, error)
            self.shortage.hold(error)

    def _error_of_all(self) -> InfeasibleBudgetError | None:
        steps = [(kind, self.maker.waiting.at(kind, kind.recorded, LAST)) for kind in self.history.recorded]
        return self.shortage.error(steps, self._model.options, self.maker.budget_bytes, self.maker.host, self._name)

    def see_backwards(self, kind: StepKind, record: StepRecord) -> None:
        """See whether a step has other backwards than the one that was seen of its kind.

        One with more of them is planned anew, and so is one of which a step was recorded that takes more than all that
        follow. Where a graph waits for a later step, both kinds of pieces are to come.
        """
        step, backwards = kind.step, tuple(sorted(set(record.backwards)))
        waits = any(run.is_waiting for run in record.unfinished)
        if waits and (not backwards or (step is not None and backwards != step.places)):
            self.maker.waiting.found_alike(kind)
            return
        dropped_less = step is not None and step.is_provisional and not record.has_dropped_by_plan
        if step is not None and (dropped_less or set(step.places) < set(backwards)):
            self._dropped = self.latest
            self.history.drop(kind)

    def must_return(self, part: Part, positions: Collection[int]) -> None:
        """Learn that gradients were handed to autograd beside those that exist, where a plan may count on adding."""
        for kind in self.history.recorded:
            returning = kind.recorded.returning(part, positions)
            if returning is not kind.step:
                kind.step, kind.counts_on_freed_gradients = returning, True
                self._announcements.returned()

    # ---------------------------------------------------------------- which kinds get a plan

    def decide_to_plan(self, kind: StepKind) -> Decision:
        """Decide whether a kind of step gets a plan that has none; announce it where there are too many."""
        is_worth_it = kind.sights.is_worth_a_plan(self._model.parts.are_made(kind.graphs))
        has_place = is_worth_it and (self.maker.captured_before(kind) is not None or self._model.has_place)
        decision = decide_first(is_worth_it, has_place)
        if decision is Decision.FULL:
            self._model.announce_full()
        return decision

    def learn(self, record: StepRecord, resident: Resident, before: Resident | None = None) -> None:
        """Plan a kind of step that was not seen before; one that may be small by chance waits where nothing fits.

        It is planned beside what exists now, as before the next step of a loop of one kind: gradients may exist by now,
        and outputs. Where graphs wait, the next step is another piece of the iteration: what existed before this one
        counts.

        Args:
            record: What the step ran.
            resident: What exists now.
            before: What existed before the step, with the state that optimizers have now; None where that is not known.
        """
        kind, found = self.history[record.graphs], [resident]
        if before is not None:
            found = sorted((before, resident), key=lambda seen: seen.size_bytes)
            resident = before if before.waiting or resident.waiting else resident
        step, waiting = self.maker.describe(record, resident), self.maker.waiting
        self.history.record(kind, waiting.at(kind, step))
        for seen in found:
            self._note_before(kind, seen)
        ahead = self._foresee_largest(kind, resident)
        self.shortage.are_measured = self.shortage.are_measured and record.is_measured
        if self.shortage.is_held:
            return
        try:
            self._plan(*(self.maker.choose_level(resident) if waiting.concerns(kind, step) else ()), *ahead, kind)
        except InfeasibleBudgetError as error:
            if self._may_be_small_by_chance(kind):
                log.info("%s waits for larger steps: %s", self._name, error)
                kind.step = None
                return
            self._plan_without_margin(kind, error)
        self._share_budget(*ahead, kind)
        self.warn_of_first_step(kind, record.peak_bytes or 0)

    def note_given(self, kind: StepKind, calls: Sequence[ModuleCall]) -> None:
        """Learn what the calls of a kind are given that has a plan now: steps of other sizes are predicted from it."""
        kind.given, kind.code = tuple(calls), self.history.same_code(kind.recorded)
        if kind.largest is not None:
            larger, becomes = kind.largest
            larger.given, larger.code = given_at(becomes, calls), self.history.same_code(larger.recorded)

    def _foresee_largest(self, kind: StepKind, resident: Resident) -> list[StepKind]:
        """Describe the step of the largest sizes that runs the code of a kind; list it where it has no plan yet."""
        foreseen = self._largest.foresee(kind, resident)
        if foreseen is None:
            return []
        graphs, step, becomes = foreseen
        larger = self.history[graphs]
        kind.largest = larger, becomes
        if larger.step is not None:
            return []
        self.history.record(larger, self.maker.anew(step))
        larger.sights.waited, larger.is_ahead = kind.sights.waited, True
        self._note_before(larger, step.resident)
        return [larger]

    def _note_before(self, kind: StepKind, resident: Resident) -> None:
        """Note what existed before a step of a kind, in place of what did before one with the same gradients."""
        resident = self.maker.waiting.resident_at(resident, LAST)
        kind.before = {**kind.before, resident.gradients: resident}

    def warn_of_first_step(self, kind: StepKind, peak_bytes: int) -> None:
        """Warn where the first step of another kind, which ran before it was planned, took more than its budget."""
        if kind.plan is None:
            return  # it could not be planned
        plan = kind.own_plan
        excess_bytes = peak_bytes - max(plan.budget_bytes, plan.planned_peak_bytes)
        if excess_bytes > GUARD_BYTES and len(self.history.planned) > 1:
            self._announcements.first_step(peak_bytes, excess_bytes)

    def _may_be_small_by_chance(self, kind: StepKind) -> bool:
        """Whether a share says little at the first sight: forwards have no backward, as of dropped layers."""
        has_dropped = len(kind.recorded.calls) < len(kind.graphs)
        return self._model.options.budget.share is not None and has_dropped and kind.sights.count == 1

    # ---------------------------------------------------------------- plans are made

    def _plan(self, *kinds: StepKind) -> None:
        """Plan recorded steps, for the first time or anew, and let their programs take over."""
        for kind in dict.fromkeys(kinds):
            if (made := self.maker.make(kind)) is not None:
                self._take(kind, *made)

    def _plan_without_margin(self, kind: StepKind, error: InfeasibleBudgetError) -> None:
        """Plan a step in which nothing leaves its margin: a peak above the budget is measured, and said."""
        if not kind.recorded.margin_bytes:
            raise error
        kind.step = replace(kind.recorded, margin_bytes=0)
        self._plan(kind)

    def _take(self, kind: StepKind, plan: Plan, programs: Mapping[int, Program]) -> None:
        self._install(kind, plan, programs)
        self._announce(kind, plan)
        self._tell(plan)

    def _has_risen(self, kind: StepKind) -> bool:
        """Whether the budget is another one now than that of a plan, since another kind of steps has come."""
        is_share = self._model.options.budget.share is not None
        return is_share and self.maker.limits(kind, kind.recorded).budget_bytes != kind.own_plan.budget_bytes

    def _share_budget(self, *known: StepKind) -> None:
        """Let the other kinds of steps have the budget too that came with some: a share is of the largest step."""
        for kind in self.history.planned if self._model.options.budget.share is not None else ():
            if kind not in known:
                self.check_plan(kind, kind.recorded.resident)

    def _install(self, kind: StepKind, plan: Plan, programs: Mapping[int, Program]) -> None:
        """Let the programs of a plan take over."""
        step = kind.recorded
        limits = step.limits.with_plan(plan.planned_peak_bytes + step.margin_bytes)
        if plan.planned_peak_bytes > plan.budget_bytes:
            limits = limits.with_least(step.resident, plan.planned_peak_bytes)
        again = {plan.graph.nodes[node].op for node in plan.schedule.recomputed(plan.graph)}
        searches = may_choose_anew(again, self._memory.device)
        kind.step, kind.is_searching = replace(step, limits=limits), searches or kind.is_searching
        self.history.install(kind, plan, programs)
        self._watching.planned(kind)
        self._graph_programs.forget_plans()

    def _announce(self, kind: StepKind, plan: Plan) -> None:
        """Report a plan, and warn of what it brings."""
        self._reports.planned(kind, plan, f"ahead: {self._largest}" if kind.is_ahead else "")
        if split := self._announcements.split():
            self._reports.note(f"  {split}")
        if kind.is_searching:
            self._announcements.algorithms()
        if plan.planned_peak_bytes > plan.budget_bytes:
            self._say_least(kind, plan.planned_peak_bytes)
        self._announcements.checkpointing(plan)

    def _say_least(self, kind: StepKind, peak_bytes: int) -> None:
        """Warn of what a step takes in which nothing fits, planned or measured, clearly more than was said of any."""
        if not kind.recorded.is_provisional and peak_bytes > CLEARLY_MORE * self._said_bytes:
            self._said_bytes = peak_bytes
            self._announcements.least(peak_bytes, kind.own_plan.budget_bytes)

    def _tell(self, plan: Plan) -> None:
        for listener in self.listeners:
            listener(plan)

    # ---------------------------------------------------------------- plans are checked, and made anew

    def check_plan(self, kind: StepKind, resident: Resident) -> None:
        """Check a plan against the memory that exists before this step; plan anew where it no longer fits."""
        plan, step = kind.own_plan, kind.recorded
        at_level = self.maker.waiting.resident_at(resident)
        is_met = at_level == step.resident and not kind.counts_on_freed_gradients
        if is_met and not self._has_risen(kind):
            return
        self._note_before(kind, resident)
        if self.shortage.is_held:
            return
        has_more_state = at_level.state_bytes > step.resident.state_bytes
        limits = step.limits.without_least() if kind.counts_on_freed_gradients else step.limits
        met = self.maker.waiting.at(kind, replace(step, resident=at_level, limits=limits))
        merged, limits = met.merge(), self.maker.limits(kind, met)
        is_outdated = (
            has_more_state or (plan.measured.peak_bytes or 0) > limits.budget_bytes
        )  # it was measured beside other resident bytes
        kind.step, kind.counts_on_freed_gradients = replace(met, limits=limits), False
        adapted = plan.changed(
            graph=merged.graph,
            profile=merged.profile,
            budget_bytes=limits.budget_bytes,
            resident_bytes=at_level.size_bytes,
            resident_parts=at_level.kinds,
        )
        if is_outdated:  # measured again
            adapted = adapted.with_measured(peak_bytes=None, predicted_bytes=None)
        peak_bytes = adapted.planned_peak_bytes + met.margin_bytes
        decision = decide_beside(
            stays=limits.stays(at_level, peak_bytes, is_least=plan.planned_peak_bytes > plan.budget_bytes),
            is_risen=limits.have_risen(at_level, peak_bytes),
            recomputes=not plan.solution.is_plain,
        )
        self._carry_out(kind, adapted, peak_bytes, decision)

    def _carry_out(self, kind: StepKind, adapted: Plan, peak_bytes: int, decision: Decision) -> None:
        """Let a plan stay that meets what exists, or make another one."""
        if decision is Decision.LESS_ROOM:
            log.info("%s is planned anew: resident bytes are now %s", self._name, format_bytes(adapted.resident_bytes))
            self._plan(kind)
            return
        kind.plan = adapted
        self._reports.kept(kind, adapted)
        self._tell(adapted)
        if adapted.planned_peak_bytes > adapted.budget_bytes:
            self._say_least(kind, adapted.planned_peak_bytes)
        if decision is Decision.MORE_ROOM:
            log.info("%s is planned anew: the budget is now %s", self._name, format_bytes(adapted.budget_bytes))
            kind.step = replace(kind.recorded, limits=kind.recorded.limits.with_plan(peak_bytes))  # tried once
            with suppress(InfeasibleBudgetError):  # then the plan stays
                self._plan(kind)

    def peak_measured(self, kind: StepKind, peak_bytes: int, resident: Resident) -> None:
        """Compare a measured peak with the budget; where it is over, plan with less, a few times at most.

        Args:
            kind: Of the step.
            peak_bytes: Its peak.
            resident: What existed before it. Where another kind was foreseen, the plan was made for something else.
        """
        if kind.is_searching:  # cuDNN tried its algorithms, with all the memory that these may take
            kind.is_searching = False
            return
        solution, step, counts_on_freed_gradients = kind.own_plan.solution, kind.step, kind.counts_on_freed_gradients
        try:
            self.check_plan(kind, resident)
        except InfeasibleBudgetError:  # to be raised where such a step begins: this one has run
            kind.step, kind.counts_on_freed_gradients = step, counts_on_freed_gradients
            return
        if kind.plan is None or kind.plan.solution is not solution:
            return  # planned anew, or dropped: the step ran by the plan before
        plan = kind.plan
        predicted_bytes = max(plan.measured.predicted_bytes or 0, plan.planned_peak_bytes)
        if peak_bytes <= (plan.measured.peak_bytes or 0):
            kind.plan = plan.with_measured(predicted_bytes=predicted_bytes)
            return
        self.update(kind, peak_bytes=peak_bytes, predicted_bytes=predicted_bytes)
        is_least, corrections = plan.planned_peak_bytes > plan.budget_bytes, kind.recorded.corrections
        if is_least:
            self._say_least(kind, peak_bytes)
        self._correct(kind, peak_bytes, decide_measured(peak_bytes - plan.budget_bytes, is_least, corrections))

    def _correct(self, kind: StepKind, peak_bytes: int, decision: Decision) -> None:
        """Plan with a margin where a peak was measured above the budget, or say why not."""
        plan, step = kind.own_plan, kind.recorded
        excess_bytes = peak_bytes - plan.budget_bytes
        text = f"The measured peak {format_bytes(peak_bytes)} is {format_bytes(excess_bytes)} above the budget"
        if decision is Decision.HOPELESS:
            self._announcements.say_over(
                f"{text}, after planning with a margin: something outside of the planned modules takes the memory."
            )
        if decision is not Decision.ABOVE_BUDGET:
            return
        margin_bytes = peak_bytes - plan.planned_peak_bytes  # more than the last one, which was left free
        corrected = replace(step, corrections=step.corrections + 1)
        tries = [replace(corrected, margin_bytes=margin_bytes)]
        if plan.solution.aways:  # the allocator rounds less up where nothing goes away
            tries.append(replace(corrected, margin_bytes=0, keeps_on_device=True))
        for kind.step in tries:
            with suppress(InfeasibleBudgetError):
                self._plan(*(self.maker.choose_level() if step.waits else ()), kind)
                log.info("%s: planned again, with less", text)
                return
        kind.step = corrected
        self._announcements.say_over(f"{text}, and no plan leaves that margin: the plan stays.")

    def piece_measured(self, peak_bytes: int) -> None:
        """Compare the peak of a step with the budget that runs backwards of earlier forwards only: it has no plan."""
        plans = [kind.own_plan for kind in self.history.planned]
        budget_bytes = max((plan.budget_bytes for plan in plans), default=peak_bytes)  # a share's differ
        said_bytes = max((plan.planned_peak_bytes for plan in plans), default=0)  # where nothing fits
        if peak_bytes > max(budget_bytes, said_bytes):
            self._announcements.piece(peak_bytes, peak_bytes - budget_bytes)

    def update(self, kind: StepKind, **measured: Any) -> None:
        """Note on the plan of a kind of step what was measured."""
        plan = kind.plan = self.maker.with_proofs(kind.own_plan).with_measured(**measured)
        if plan.measured.step_ms is not None:
            self._reports.measured(kind, plan)
        self._tell(plan)

    def note_proofs(self) -> None:
        """Note on all plans what is proved by now: where memory is missing, code is proved in later steps."""
        for kind in self.history.planned:
            kind.plan = self.maker.with_proofs(kind.own_plan)

    def confused(self, expected: StepKind, kind: StepKind, is_by_plans: bool) -> None:
        """Learn that a step turned out another kind than it began as.

        Args:
            expected: What it began as.
            kind: What it was.
            is_by_plans: Whether it went on by plans that fitted.
        """
        self.history.confuse(expected)
        plans = (expected.plan, kind.plan)
        plan = max((p for p in plans if p is not None), key=lambda plan: plan.unplanned_peak_bytes)
        if not (plan.solution.is_plain or is_by_plans):
            self._announcements.confused(plan.budget_bytes, CERTAIN)

    # ---------------------------------------------------------------- what others ask

    def gains_nothing(self, kind: StepKind, plain_bytes: int) -> bool:
        """Whether a plan that was measured and timed is not what its step fits the budget by.

        It recomputes nothing where the step fits without it, or nothing fits and it saves no memory either.

        Args:
            kind: The kind of step.
            plain_bytes: What it adds without its plan.
        """
        plan, step = kind.own_plan, kind.recorded
        if plan.measured.step_ms is None or step.waits:
            return False
        if plan.planned_peak_bytes > plan.budget_bytes:
            return self.saves_nothing(kind, plain_bytes)
        if not plan.solution.is_plain:
            return False
        is_whole = self._model.options.budget.share == 1  # of what plain training adds
        return is_whole or plan.resident_bytes + plain_bytes + step.margin_bytes <= plan.budget_bytes

    def saves_nothing(self, kind: StepKind, plain_bytes: int) -> bool:
        """Whether nothing fits, the plan saves no memory either, and there is memory to run without it.

        Args:
            kind: The kind of step.
            plain_bytes: What it adds without its plan.
        """
        if not kind.own_plan.saves_nothing or kind.recorded.waits:
            return False
        more_bytes = plain_bytes - kind.own_plan.planned.peak_bytes
        return kind.trial.is_released is not None or more_bytes < free_bytes(self._memory.device)
