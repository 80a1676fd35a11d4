"""What is planned for the kinds of steps that a session has seen: made, adapted, and corrected by what is measured.

A plan is made anew where

- the user names another budget (`set_budget`), or the budget has clearly risen (`check_plan`);
- more exists before the step than it was made for, or gradients stay that it counts as freed (`check_plan`);
- graphs that wait come to hold more, or less (`check_plans`, `learn`);
- a step ran more backwards than the recorded one (`see_backwards`);
- its peak is measured above the budget (`peak_measured`), a few times at most;
- what needed more than the budget has gone (`meet`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..calls.given import ModuleCall
from ..garbage import collecting_what_it_leaves
from ..kinds.history import CERTAIN, starts_so
from ..kinds.recorded_step import RecordedStep
from ..kinds.shortage import HELD_STEPS, Shortage
from ..kinds.step_kind import StepKind
from ..kinds.watching import WatchPolicy
from ..measuring.recording import StepRecord
from ..measuring.resident import Resident
from ..messages.plan_reports import PlanReports
from ..out_of_memory import explain
from ..planning.headroom import GUARD_BYTES
from ..planning.outcome import Short, first_short
from ..planning.plan import Plan
from ..rewriting.joint import may_choose_anew
from ..running.execution import Part
from ..units import Budget, format_bytes
from .current_step import CurrentStep
from .graph_programs import GraphPrograms
from .largest import LargestSizes, given_at
from .plan_maker import Fits, PlanMaker, adapted_to
from .planned_model import PlannedModel
from .waiting import Holds

log = logging.getLogger("hiremate_lightning")


CORRECTIONS = 3  # of a plan whose peak is measured above the budget: where code outside varies, none may be enough


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
        self.maker, self._memory, self._announcements = maker, model.memory, model.announcements
        self._graph_programs, self._watching, self._largest = graph_programs, watching, largest
        self._reports = PlanReports(model.stages.reporter, model.announcements)
        self.listeners = self._reports.listeners
        self.shortage = Shortage()
        self._dropped: Plan | None = None  # the latest one of those that were dropped

    @property
    def latest(self) -> Plan | None:
        """The plan of the latest kind of step, None before there is one."""
        return self._dropped if self.history.latest is None else self.history.latest.own_plan

    def set_budget(self, budget: Budget) -> None:
        """Change the budget; steps already seen are planned anew, nothing is captured again.

        Raises:
            InfeasibleBudgetError: If nothing fits it; then all is as it was.
        """
        before, waiting = self._model.options, self.maker.waiting
        holds, steps = waiting.holds, {kind: kind.recorded for kind in self.history.recorded}
        self._model.options = replace(before, budget=budget)
        for kind, step in steps.items():
            kind.step = replace(step, limits=self.maker.new_limits())
        try:
            made = self._make_all(steps)
        except BaseException:  # Ctrl-C too: budgets change for all kinds of steps or for none
            self._model.options, waiting.holds = before, holds
            for kind, step in steps.items():
                kind.step = None if kind.sights.has_no_template else step
            raise
        self._reports.budget_changed()
        self._install(made)

    def _make_all(self, kinds: Iterable[StepKind]) -> dict[StepKind, Fits]:
        """Make the plans of kinds of steps; nothing runs by them yet.

        Raises:
            InfeasibleBudgetError: If nothing fits the budget; it names what is enough for all steps seen.
        """
        made = dict[StepKind, Fits]()
        self.maker.choose_waiting(may_hold_more=True)
        for kind in kinds:
            outcome = self.maker.make(kind)
            if isinstance(outcome, Short):
                raise (self.maker.short_of_all(self.shortage) or outcome).error()
            if outcome is not None:
                made[kind] = outcome
        return made

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
        if finished is not None:
            with collecting_what_it_leaves():
                self._hold(self.learn(finished, resident, before and before.with_state(resident.state_bytes)))
        likely = self.likely(step)
        self.check_plans(likely, resident)
        if self.shortage.is_held and self.shortage.is_to_be_raised:
            self._end_shortage()
        if self.shortage.is_to_be_announced:
            self._announcements.held(self._model.options.budget, HELD_STEPS)
        return likely

    def _end_shortage(self) -> None:
        """Plan all kinds of steps anew, where what needed more than the budget has gone.

        Raises:
            InfeasibleBudgetError: If nothing fits the budget.
        """
        self.shortage.is_held = False
        planned = (self._plan_somehow(kind) for kind in self.history.recorded)
        short = self.maker.short_of_all(self.shortage) or first_short(planned)
        if short is None:
            return
        error = short.error()
        if reasons := self._announcements.why_over():
            explain(error, f"hiremate:{reasons}")
        if named := str(self._largest):
            explain(error, f"hiremate: the budget is to be enough for the largest sizes: {named}.")
        raise error

    def _plan_somehow(self, kind: StepKind) -> Short | None:
        """Plan a step; where nothing leaves its margin, without: a peak above the budget is measured, and said."""
        short = self._plan(kind)
        if short is None or not kind.recorded.margin_bytes:
            return short
        kind.step = replace(kind.recorded, margin_bytes=0)
        return self._plan(kind)

    def check_plans(self, kinds: Sequence[StepKind], resident: Resident) -> None:
        """Check the plans of kinds of steps against the memory that exists; where none fits, train on for a while."""
        alike = [kind for kind in self.history.recorded if kind.backwards_vary and not kind.recorded.decided]
        for kind in alike:  # its calls run as graphs that wait from now on
            kind.step = self.maker.waiting.at(kind, kind.recorded)
        has_more_state = resident.state_bytes > self.maker.state_bytes  # which exists before all pieces of an iteration
        self.maker.state_bytes = max(self.maker.state_bytes, resident.state_bytes)
        short = self._plan(*alike) if alike or has_more_state else None
        self._hold(short or first_short(self.check_plan(kind, resident) for kind in kinds))

    def _hold(self, short: Short | None) -> None:
        """Let training go on where a step does not fit, until it is known what all of its steps need."""
        if short is not None:
            log.info("%s goes on, to find out what all of its steps need: %s", self._name, short)
            self.shortage.hold(short)

    def see_backwards(self, kind: StepKind, record: StepRecord) -> None:
        """See whether a step has other backwards than the one that was seen of its kind.

        One with more of them is planned anew, and so is one of which a step was recorded that takes more than all that
        follow. Where a graph waits for a later step, both kinds of pieces are to come.
        """
        step, backwards = kind.step, tuple(sorted(set(record.backwards)))
        waits = any(run.is_waiting for run in record.unfinished)
        if waits and (not backwards or (step is not None and backwards != step.places)):
            kind.backwards_vary = True
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

    def gets_plan(self, kind: StepKind) -> bool:
        """Whether a kind without a plan gets one; warn where there are `max_plans` already."""
        if not kind.sights.is_worth_a_plan(self._model.parts.are_made(kind.graphs)):
            return False
        has_place = self.maker.captured_before(kind) is not None or self._model.has_place
        if not has_place:
            self._model.announce_full()
        return has_place

    def learn(self, record: StepRecord, resident: Resident, before: Resident | None = None) -> Short | None:
        """Plan a kind of step that was not seen before; one that may be small by chance waits where nothing fits.

        It is planned beside what exists now, as before the next step of a loop of one kind: gradients may exist by now,
        and outputs. Where graphs wait, the next step is another piece of the iteration: what existed before this one
        counts.

        Args:
            record: What the step ran.
            resident: What exists now.
            before: What existed before the step, with the state that optimizers have now; None where that is not known.

        Returns:
            What the step needs, where nothing fits the budget.
        """
        kind, residents = self.history[record.graphs], [resident]
        if before is not None:
            residents = sorted((before, resident), key=lambda seen: seen.size_bytes)
            resident = before if before.waiting or resident.waiting else resident
        self.history.record(kind, self.maker.waiting.at(kind, self.maker.describe(record, resident)))
        for seen in residents:
            self._note_before(kind, seen)
        ahead = self._foresee_largest(kind, resident)
        self.shortage.are_measured = self.shortage.are_measured and record.is_measured
        if self.shortage.is_held:
            return None
        self.maker.state_bytes = max(self.maker.state_bytes, resident.state_bytes)
        is_share = self._model.options.budget.share is not None  # of the largest step, which may be this one
        short = self._plan(*ahead, kind, may_hold_more=is_share)
        is_first_share = is_share and kind.sights.count == 1
        if short is not None and is_first_share and len(kind.recorded.calls) < len(kind.graphs):  # dropped layers, say
            log.info("%s waits for larger steps: %s", self._name, short)
            kind.step = None
            return None
        short = short or self._share_budget(*ahead, kind)
        if short is None:
            self.warn_of_first_step(kind, record.peak_bytes or 0)
        return short

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
        resident = self.maker.waiting.resident_at(resident, Holds.LEAST)
        kind.before = {**kind.before, resident.gradients: resident}

    def warn_of_first_step(self, kind: StepKind, peak_bytes: int) -> None:
        """Warn where the first step of another kind, which ran before it was planned, took more than its budget."""
        if kind.plan is None:
            return  # it could not be planned
        plan = kind.own_plan
        excess_bytes = peak_bytes - max(plan.budget_bytes, plan.planned_peak_bytes)
        if excess_bytes > GUARD_BYTES and len(self.history.planned) > 1:
            self._announcements.first_step(peak_bytes, excess_bytes)

    # ---------------------------------------------------------------- plans take over

    def _plan(self, *kinds: StepKind, may_hold_more: bool = False) -> Short | None:
        """Plan recorded steps, for the first time or anew, until nothing fits one of them; return what that needs.

        Where one does not fit beside graphs that wait and hold everything, these hold the least from now on, until they
        may hold more again.
        """
        for kind in dict.fromkeys((*self.maker.choose_waiting(may_hold_more), *kinds)):
            outcome = self.maker.make(kind)
            if isinstance(outcome, Short):
                return outcome
            if outcome is not None:
                self._install({kind: outcome})
        return None

    def _install(self, made: Mapping[StepKind, Fits]) -> None:
        """Let the programs of plans take over; users and listeners hear of them."""
        for kind, fits in made.items():
            self._take(kind, fits)
        for kind, fits in made.items():
            self._reports.planned(kind, fits.plan, f"ahead: {self._largest}" if kind.is_ahead else "")
        for fits in made.values():
            self._reports.notify(fits.plan)

    def _take(self, kind: StepKind, fits: Fits) -> None:
        step, plan = kind.recorded, fits.plan
        limits = step.limits.with_plan(plan.planned_peak_bytes + step.margin_bytes)
        if plan.planned_peak_bytes > plan.budget_bytes:
            limits = limits.with_least(step.resident, plan.planned_peak_bytes)
        recomputed = {plan.graph.nodes[node].op for node in plan.schedule.recomputed(plan.graph)}
        searches = may_choose_anew(recomputed, self._memory.device)
        kind.step, kind.is_searching = replace(step, limits=limits), searches or kind.is_searching
        self.history.install(kind, plan, fits.programs)
        self._watching.planned(kind)
        self._graph_programs.forget_plans()

    def update(self, kind: StepKind, **measured: Any) -> None:
        """Note on the plan of a kind of step what was measured."""
        plan = kind.plan = self.maker.with_proofs(kind.own_plan).with_measured(**measured)
        if plan.measured.step_ms is not None:
            self._reports.measured(kind, plan)
        self._reports.notify(plan)

    # ---------------------------------------------------------------- plans are checked, and made anew

    def _has_risen(self, kind: StepKind) -> bool:
        """Whether the budget is another one now than that of a plan, since another kind of steps has come."""
        is_share = self._model.options.budget.share is not None
        return is_share and self.maker.limits(kind, kind.recorded).budget_bytes != kind.own_plan.budget_bytes

    def _share_budget(self, *known: StepKind) -> Short | None:
        """Let the other kinds of steps have the budget too that came with some: a share is of the largest step."""
        is_share = self._model.options.budget.share is not None
        others = [kind for kind in self.history.planned if is_share and kind not in known]
        return first_short(self.check_plan(kind, kind.recorded.resident) for kind in others)

    def check_plan(self, kind: StepKind, resident: Resident) -> Short | None:
        """Check a plan against the memory that exists before this step; plan anew where it no longer fits.

        Returns:
            What the step needs, where nothing fits the budget.
        """
        plan, step = kind.own_plan, kind.recorded
        resident_now = self.maker.waiting.resident_at(resident)
        is_met = resident_now == step.resident and not kind.counts_on_freed_gradients
        if is_met and not self._has_risen(kind):
            return None
        self._note_before(kind, resident)
        if self.shortage.is_held:
            return None
        has_more_state = resident_now.state_bytes > step.resident.state_bytes
        limits = step.limits.without_least() if kind.counts_on_freed_gradients else step.limits
        met = self.maker.waiting.at(kind, replace(step, resident=resident_now, limits=limits))
        limits = self.maker.limits(kind, met)
        kind.step, kind.counts_on_freed_gradients = replace(met, limits=limits), False
        if has_more_state or (plan.measured.peak_bytes or 0) > limits.budget_bytes:
            plan = plan.with_measured(peak_bytes=None, predicted_bytes=None)  # it was measured beside other bytes
        adapted = adapted_to(kind.recorded, plan)
        peak_bytes = adapted.planned_peak_bytes + met.margin_bytes
        if not limits.stays(resident_now, peak_bytes, is_least=plan.planned_peak_bytes > plan.budget_bytes):
            log.info("%s is planned anew: resident bytes are now %s", self._name, format_bytes(resident_now.size_bytes))
            return self._plan(kind)
        kind.plan = adapted
        self._reports.kept(kind, adapted)
        if limits.have_risen(resident_now, peak_bytes) and not plan.solution.is_plain:
            log.info("%s is planned anew: the budget is now %s", self._name, format_bytes(limits.budget_bytes))
            kind.step = replace(kind.recorded, limits=limits.with_plan(peak_bytes))  # tried once
            self._plan(kind)  # where nothing fits, the plan stays
        return None

    def peak_measured(
        self, kind: StepKind, peak_bytes: int, resident: Resident, record: StepRecord | None = None
    ) -> None:
        """Compare a measured peak with the budget; where it is over, plan with less, a few times at most.

        Args:
            kind: Of the step.
            peak_bytes: Its peak.
            resident: What existed before it. Where another kind was foreseen, the plan was made for something else.
            record: What it ran, where it is to be planned anew for what it has more than the step that was planned.
        """
        if kind.is_searching:  # cuDNN tried its algorithms, with all the memory that these may take
            kind.is_searching = False
            return
        solution, step, counts_on_freed_gradients = kind.own_plan.solution, kind.step, kind.counts_on_freed_gradients
        if self.check_plan(kind, resident) is not None:  # to be raised where such a step begins: this one has run
            kind.step, kind.counts_on_freed_gradients = step, counts_on_freed_gradients
            return
        if kind.plan is None or kind.plan.solution is not solution:
            return  # planned anew, or dropped: the step ran by the plan before
        plan = kind.plan
        before_bytes, predicted_bytes = plan.measured.peak_bytes or 0, plan.measured.predicted_bytes or 0
        if peak_bytes > before_bytes or plan.planned_peak_bytes > predicted_bytes:
            highest_bytes = max(peak_bytes, before_bytes)
            predicted_bytes = max(plan.planned_peak_bytes, predicted_bytes)
            self.update(kind, peak_bytes=highest_bytes, predicted_bytes=predicted_bytes)
        if peak_bytes <= before_bytes:
            return
        if plan.planned_peak_bytes > plan.budget_bytes:
            self._reports.say_least(kind, peak_bytes)
        elif peak_bytes > plan.budget_bytes:
            larger = None if record is None else self.maker.describe_larger(kind, record, resident)
            self._correct(kind, peak_bytes, larger)

    def _correct(self, kind: StepKind, peak_bytes: int, larger: RecordedStep | None) -> None:
        """Plan a larger step, or with a margin, where a peak was measured above the budget; or say why not."""
        plan, step = kind.own_plan, kind.recorded
        excess_bytes = peak_bytes - plan.budget_bytes
        text = f"The measured peak {format_bytes(peak_bytes)} is {format_bytes(excess_bytes)} above the budget"
        if step.corrections >= CORRECTIONS:
            self._announcements.say_over(
                f"{text}, after planning with a margin: something outside of the planned modules takes the memory."
            )
            return
        margin_bytes = peak_bytes - plan.planned_peak_bytes  # more than the last one, which was left free
        corrected = replace(step, corrections=step.corrections + 1)
        tries = [] if larger is None else [replace(larger, corrections=corrected.corrections)]
        tries.append(replace(corrected, margin_bytes=margin_bytes))
        if plan.solution.aways:  # the allocator rounds less up where nothing is offloaded
            tries.append(replace(corrected, margin_bytes=0, keeps_on_device=True))
        for kind.step in tries:
            if self._plan(kind) is None:
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
