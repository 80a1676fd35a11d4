"""The plans of the step signatures that a session has seen: made, adapted, and corrected by measured peaks.

A signature is planned again if

- the user names another budget (`set_budget`), or the budget has clearly risen (`adapt_plan`);
- more memory exists before the step than the plan counts, or gradients stay that it counts as freed (`adapt_plan`);
- waiting graphs (whose backward comes in a later step) are to hold more, or less (`adapt_plans`, `learn`);
- a step ran more backwards than the recorded one (`see_backwards`);
- its peak is measured above the budget (`peak_measured`): for the step as it is now, or with a margin; at most
  `CORRECTIONS` times;
- memory that needed more than the budget was freed (`plan_and_adapt`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..housekeeping import collecting_what_it_leaves, log
from ..measuring.recording import StepMeasurement
from ..measuring.resident import Resident
from ..out_of_memory import explain
from ..planning.headroom import GUARD_BYTES, Short, first_short
from ..planning.plan import Plan
from ..rewriting.nodes import may_choose_anew
from ..running.execution import GraphRuntime
from ..signatures.history import CERTAIN, starts_so
from ..signatures.limits import Limits
from ..signatures.recorded_step import RecordedStep
from ..signatures.shortage import HELD_STEPS, Shortage
from ..signatures.step_signature import StepSignature
from ..units import Budget, format_bytes
from .current_step import CurrentStep
from .graph_programs import GraphPrograms
from .messages import Listener, PlanReports
from .plan_maker import Fits, PlanMaker
from .planned_model import PlannedModel
from .waiting import Holds

CORRECTIONS = 3  # correct a plan at most so often after peaks above the budget: uncaptured code may vary at each step


class PlannedSignatures:
    """The plans of one model, by step signature.

    Attributes:
        maker: Makes the plans.
        shortage: The state of the search for a budget that is enough, while steps do not fit the present one.
    """

    def __init__(
        self, model: PlannedModel, maker: PlanMaker, graph_programs: GraphPrograms, listeners: list[Listener]
    ) -> None:
        self._model, self._name, self._history = model, model.name, model.history
        self.maker, self._memory, self._messages = maker, model.memory, model.messages
        self._graph_programs = graph_programs
        self._reports = PlanReports(model.reporter, model.messages, listeners)
        self.shortage = Shortage()

    def set_budget(self, budget: Budget) -> None:
        """Change the budget and plan all recorded steps again; nothing is captured again.

        Raises:
            InfeasibleBudgetError: If nothing fits it; the error names a budget that is enough for all steps seen.
                Budget and plans stay as they were.
        """
        with self._undone_on_failure():
            self._model.options = replace(self._model.options, budget=budget)
            for signature in self._history.recorded:
                self._history.record(signature, replace(signature.recorded, limits=Limits(budget.is_share)))
            self.maker.choose_waiting(may_hold_more=True)
            made = dict[StepSignature, Fits | None]()
            for signature in self._history.recorded:
                outcome = self._make(signature)
                if isinstance(outcome, Short):
                    raise (self.maker.short_of_all(self.shortage) or outcome).error()
                made[signature] = outcome
        self._reports.budget_changed()
        self._install(made)

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """Put back the budget, all recorded steps, and what waiting graphs hold, if the context fails."""
        options, holds = self._model.options, self.maker.waiting.holds
        steps = {signature: signature.recorded for signature in self._history.recorded}
        try:
            yield
        except BaseException:  # Ctrl-C too: budgets change for all step signatures or for none
            self._model.options, self.maker.waiting.holds = options, holds
            for signature, step in steps.items():
                self._history.record(signature, step)
            raise

    def to_adapt(self, step: CurrentStep) -> list[StepSignature]:
        """List the signatures whose plans a step needs adapted: all likely ones before which as many graphs waited."""
        return [signature for signature in self._history.all_likely(step.foreseen) if starts_so(signature, step.start)]

    def plan_and_adapt(self, finished: CurrentStep | None, resident: Resident, step: CurrentStep) -> None:
        """Plan the step that has ended, and adapt each likely plan to the memory that exists now.

        Args:
            finished: The step that has ended; None if it is not to be planned.
            resident: The memory that exists now.
            step: The step that begins.

        Raises:
            InfeasibleBudgetError: If nothing fits the budget, and enough steps were seen to know what all of them need;
                the error names a budget that is enough for them.
        """
        self._graph_programs.note_resident(resident)
        self.shortage.begin_step(resident, self._memory)
        if finished is not None and finished.measurement is not None:
            before = finished.resident and finished.resident.with_state(resident.state_bytes)
            with collecting_what_it_leaves():
                self._train_on(self.learn(finished.measurement, resident, before))
        self.adapt_plans(self.to_adapt(step), resident)
        if self.shortage.trains_on and self.shortage.is_to_be_raised:
            self._end_shortage()
        if self.shortage.is_to_be_warned_of:
            self._messages.warn_over(
                f"The budget {self._model.options.budget} is too small. Up to {HELD_STEPS} steps run at the least "
                "memory, to see what all of them need; then an error names the budget that is enough."
            )
        if finished is not None:
            signature = self._history.get_or_make(finished.graphs)
            if signature.plan is None:
                self._model.watching.missed(signature)
            else:
                self._history.store_calls(signature, finished.calls)

    def _end_shortage(self) -> None:
        """Plan all step signatures again, or raise if one still does not fit.

        Raises:
            InfeasibleBudgetError: If nothing fits the budget.
        """
        self.shortage.trains_on = False
        planned = (self._plan_somehow(signature) for signature in self._history.recorded)
        short = self.maker.short_of_all(self.shortage) or first_short(planned)
        if short is None:
            return
        error = short.error()
        if reasons := self._messages.why_over():
            explain(error, f"hiremate:{reasons}")
        if named := str(self._model.largest):
            explain(error, f"hiremate: the budget is to be enough for the largest sizes: {named}.")
        raise error

    def _plan_somehow(self, signature: StepSignature) -> Short | None:
        """Plan a step; if no plan leaves its margin free, plan without one: peaks above the budget are warned of."""
        short = self._plan(signature)
        if short is None or not signature.recorded.margin_bytes:
            return short
        self._history.record(signature, replace(signature.recorded, margin_bytes=0))
        return self._plan(signature)

    def adapt_plans(self, signatures: Sequence[StepSignature], resident: Resident) -> None:
        """Adapt the plans of signatures to the memory that exists; if one does not fit, train on for a while."""
        varying = [one for one in self._history.recorded if one.backwards_vary and not one.recorded.decided]
        for signature in varying:  # from now on calls of such a step run by the programs of waiting graphs
            self._history.record(signature, self.maker.waiting.at(signature, signature.recorded))
        has_more_state = self.maker.note_state(resident)  # before each piece of an iteration from now on
        short = self._plan(*varying) if varying or has_more_state else None
        self._train_on(short or first_short(self.adapt_plan(signature, resident) for signature in signatures))
        for signature in signatures:
            signature.adapted_at = self._memory.growths, self._memory.retained_bytes()

    def is_adapted(self, signature: StepSignature) -> bool:
        """Whether the plan of a signature was adapted since memory last grew, with as many retained bytes."""
        growths, retained_bytes = signature.adapted_at
        return growths == self._memory.growths and retained_bytes >= self._memory.retained_bytes()

    def _train_on(self, short: Short | None) -> None:
        """Let training go on though a step does not fit, until it is known what all steps need."""
        if short is not None:
            log.info("%s goes on, to find out what all of its steps need: %s", self._name, short)
            self.shortage.train_on(short)

    def see_backwards(self, signature: StepSignature, measurement: StepMeasurement) -> None:
        """Compare the backwards of a step with those of the recorded step of its signature.

        Drop the recorded step, to record another, if it has fewer backwards, or took more than all later steps will. If
        a graph waits for a later step and the backwards differ, mark the signature: `backwards_vary`.
        """
        step, backwards = signature.step, tuple(sorted(set(measurement.backwards)))
        waits = any(run.is_waiting for run in measurement.unfinished)
        if waits and (not backwards or (step is not None and backwards != step.places)):
            signature.backwards_vary = True
            return
        dropped_less = step is not None and step.is_provisional and not measurement.has_dropped_by_plan
        if step is not None and (dropped_less or set(step.places) < set(backwards)):
            self._history.drop(signature)

    def must_return(self, runtime: GraphRuntime, positions: Collection[int]) -> None:
        """Count two sets of gradients in plans from now on, since gradients of a graph were not added in place."""
        for signature in self._history.recorded:
            returning = signature.recorded.returning(runtime, positions)
            if returning is not signature.recorded:
                self._history.record(signature, returning)
                self._messages.warn(
                    "Gradients can't be accumulated in place any more: a hook sees them, another term of the loss has "
                    "some too, they are kept in a narrower type than they are computed in, or autograd.grad asks for "
                    "them. From now on plans count two sets of gradients."
                )

    # ---------------------------------------------------------------- which signatures get a plan

    def admit(self, signature: StepSignature) -> bool:
        """Decide whether a signature without a plan gets one; warn if there are `max_plans` already."""
        runtimes = self._model.runtimes.numbered(signature.graphs)
        if not signature.past.is_worth_a_plan(any(runtime.captured.made_from is not None for runtime in runtimes)):
            return False
        return not self._model.warn_if_full()

    def learn(self, measurement: StepMeasurement, resident: Resident, before: Resident | None = None) -> Short | None:
        """Plan a step signature from the record of a step.

        The plan counts the memory that exists now, `resident`, as before the next step of a loop: gradients and outputs
        may exist by now. If graphs wait, the next step is another piece of the iteration: then the plan counts
        `before`, the memory before this step with the optimizer state of now, if it is known. A first step that dropped
        layers gets no plan yet if its share of the budget is too small.

        Returns:
            What the step needs, if nothing fits the budget.
        """
        signature, residents = self._history.get_or_make(measurement.graphs), [resident]
        if before is not None:
            residents = sorted((before, resident), key=lambda seen: seen.size_bytes)
            resident = before if before.waiting or resident.waiting else resident
        self._history.record(
            signature, self.maker.waiting.at(signature, self.maker.recorded_step(measurement, resident))
        )
        for seen in residents:
            self._note_before(signature, seen)
        ahead = self._foresee_largest(signature, resident)
        self.shortage.are_measured = self.shortage.are_measured and measurement.is_measured
        if self.shortage.trains_on:
            return None
        self.maker.note_state(resident)
        is_share = self._model.options.budget.is_share  # a share of the largest step, which may be this one
        short = self._plan(*ahead, signature, may_hold_more=is_share)
        is_first = short is not None and is_share and signature.past.count == 1
        if is_first and len(signature.recorded.calls) < len(signature.graphs):  # some layers were dropped by chance
            log.info("%s waits for larger steps: %s", self._name, short)
            self._history.drop(signature)
            return None
        if is_share:  # all step signatures share one budget, which may have grown
            other_signatures = [other for other in self._history.planned if other not in (*ahead, signature)]
            short = short or first_short(self.adapt_plan(other, other.recorded.resident) for other in other_signatures)
        if short is None:
            self.warn_of_first_step(signature, measurement.peak_bytes or 0)
        return short

    def _foresee_largest(self, signature: StepSignature, resident: Resident) -> list[StepSignature]:
        """Record the step of the largest sizes of a signature's code; return it in a list if it is new."""
        foreseen = self._model.largest.foresee(signature, resident)
        if foreseen is None:
            return []
        graphs, step, becomes = foreseen
        larger = self._history.get_or_make(graphs)
        signature.largest = larger, becomes
        if larger.step is not None:
            return []
        self._history.record(larger, self.maker.anew(step))
        larger.past.waited, larger.is_ahead = signature.past.waited, True
        self._note_before(larger, step.resident)
        return [larger]

    def _note_before(self, signature: StepSignature, resident: Resident) -> None:
        """Store the memory before a step of a signature, by the state of its gradients."""
        resident = self.maker.waiting.resident_at(resident, Holds.LEAST)
        signature.before = {**signature.before, resident.gradients: resident}

    def warn_of_first_step(self, signature: StepSignature, peak_bytes: int) -> None:
        """Warn if the first step of a further signature, which had no plan yet, took more than its budget."""
        plan = signature.plan
        if plan is None or len(self._history.planned) < 2:
            return  # it could not be planned, or is the only one
        excess_bytes = peak_bytes - max(plan.budget_bytes, plan.planned_peak_bytes)
        if excess_bytes > GUARD_BYTES:
            took = f"{format_bytes(peak_bytes)}, {format_bytes(excess_bytes)} above its budget"
            self._messages.warn(
                f"The first step of another signature took {took}, since it had no plan yet. Other new signatures may "
                "do so too, once each: from its second step on a signature has a plan.",
                topic="first step",
            )

    # ---------------------------------------------------------------- plans take over

    def _plan(self, *signatures: StepSignature, may_hold_more: bool = False) -> Short | None:
        """Plan recorded steps until nothing fits one of them; return what that step needs.

        If a step does not fit beside waiting graphs that hold everything, these hold the least from now on, until a
        call with `may_hold_more`.
        """
        for signature in dict.fromkeys((*self.maker.choose_waiting(may_hold_more), *signatures)):
            outcome = self._make(signature)
            if isinstance(outcome, Short):
                return outcome
            self._install({signature: outcome})
        return None

    def _make(self, signature: StepSignature) -> Fits | Short | None:
        """Make the plan of a recorded step within its present budget, which is stored even if nothing fits."""
        step = signature.recorded
        self._history.record(signature, replace(step, limits=self.maker.limits(signature, step)))
        return self.maker.make(signature)

    def _install(self, made: Mapping[StepSignature, Fits | None]) -> None:
        """Run signatures by their new plans, and report the plans; drop signatures that get none."""
        plans = dict[StepSignature, Plan]()
        for signature, fits in made.items():
            if fits is None:
                signature.past.has_no_programs = True
                self._history.drop(signature)
                continue
            step, plan = signature.recorded, fits.plan
            plans[signature] = plan
            limits = step.limits.with_plan(plan.planned_peak_bytes + step.margin_bytes)
            if plan.exceeds_budget:
                limits = limits.with_least(step.resident, plan.planned_peak_bytes)
            recomputed = {plan.graph.nodes[node].op for node in plan.schedule.recomputed(plan.graph)}
            signature.is_searching |= may_choose_anew(recomputed, self._memory.device)
            self._history.record(signature, replace(step, limits=limits))
            self._history.install(signature, plan, fits.programs)
            self._model.watching.planned(signature)
            self._graph_programs.forget_plans()
        for signature, plan in plans.items():
            self._reports.planned(signature, plan, f"ahead: {self._model.largest}" if signature.is_ahead else "")
        for plan in plans.values():
            self._reports.notify(plan)

    def update(self, signature: StepSignature, **measured: Any) -> None:
        """Store measured values in the plan of a step signature, and report them."""
        plan = self.maker.with_proofs(signature.own_plan).with_measured(**measured)
        self._history.install(signature, plan, signature.programs)
        if plan.measured.step_ms is not None:
            self._reports.measured(signature, plan)
        self._reports.notify(plan)

    # ---------------------------------------------------------------- plans are adapted, and made again

    def adapt_plan(self, signature: StepSignature, resident: Resident) -> Short | None:
        """Adapt a plan to the memory that exists before this step; plan again if it no longer fits.

        Returns:
            What the step needs, if nothing fits the budget.
        """
        plan, step = signature.own_plan, signature.recorded
        resident_now = self.maker.waiting.resident_at(resident)
        is_met = resident_now == step.resident and not step.counts_on_freed_gradients
        is_share = self._model.options.budget.is_share  # a share changes as larger steps come
        if is_met and not (is_share and self.maker.limits(signature, step).budget_bytes != plan.budget_bytes):
            return None
        self._note_before(signature, resident)
        if self.shortage.trains_on:
            return None
        step, adapted = self.maker.adapted(signature, resident_now)
        self._history.record(signature, step)
        limits, peak_bytes = step.limits, adapted.planned_peak_bytes + step.margin_bytes
        if not limits.stays(resident_now, peak_bytes, plan.exceeds_budget):
            log.info("%s is planned anew: resident bytes are now %s", self._name, format_bytes(resident_now.size_bytes))
            return self._plan(signature)
        self._history.install(signature, adapted, signature.programs)
        self._reports.kept(signature, adapted)
        if limits.have_risen(resident_now, peak_bytes) and not plan.solution.keeps_all:
            log.info("%s is planned anew: the budget is now %s", self._name, format_bytes(limits.budget_bytes))
            tried_once = replace(signature.recorded, limits=limits.with_plan(peak_bytes))
            self._history.record(signature, tried_once)
            self._plan(signature)  # if nothing fits, the plan stays
        return None

    def peak_measured(
        self, signature: StepSignature, peak_bytes: int, resident: Resident, measurement: StepMeasurement | None = None
    ) -> None:
        """Store a measured peak of a plan; if it is above the budget, correct the plan, `CORRECTIONS` times at most.

        The plan is first adapted to the memory that existed before the step: that may have been missed if another
        signature was foreseen. The record of the step shows what it has beyond the planned step.
        """
        if signature.is_searching:  # cuDNN tried its algorithms, with all the memory that these may take
            signature.is_searching = False
            return
        solution, step = signature.own_plan.solution, signature.recorded
        if self.adapt_plan(signature, resident) is not None:  # this step has run: the next one raises
            self._history.record(signature, step)
            return
        if signature.plan is None or signature.plan.solution is not solution:
            return  # the signature was planned again or dropped: this step ran by the plan before
        plan = signature.plan
        before_bytes, predicted_bytes = plan.measured.peak_bytes or 0, plan.measured.predicted_bytes or 0
        if peak_bytes > before_bytes or plan.planned_peak_bytes > predicted_bytes:
            highest_bytes = max(peak_bytes, before_bytes)
            predicted_bytes = max(plan.planned_peak_bytes, predicted_bytes)
            self.update(signature, peak_bytes=highest_bytes, predicted_bytes=predicted_bytes)
        if peak_bytes <= before_bytes:
            return
        if plan.exceeds_budget:
            self._reports.warn_least(signature, peak_bytes)
        elif peak_bytes > plan.budget_bytes:
            larger = None if measurement is None else self.maker.larger_step(signature, measurement, resident)
            self._correct(signature, peak_bytes, larger)

    def _correct(self, signature: StepSignature, peak_bytes: int, larger: RecordedStep | None) -> None:
        """Plan again after a peak above the budget, or warn that no plan is enough.

        First plan the step as it is now, if it takes more than the planned one; else leave a margin free.
        """
        plan, step = signature.own_plan, signature.recorded
        excess_bytes = peak_bytes - plan.budget_bytes
        text = f"The measured peak {format_bytes(peak_bytes)} is {format_bytes(excess_bytes)} above the budget"
        if step.corrections >= CORRECTIONS:
            self._messages.warn_over(
                f"{text}, after planning with a margin: something outside of the planned modules takes the memory."
            )
            return
        margin_bytes = peak_bytes - plan.planned_peak_bytes  # exceeds the margin of the present plan
        corrected = replace(step, corrections=step.corrections + 1)
        tries = [replace(corrected, margin_bytes=margin_bytes)]
        if larger is not None:
            as_it_is_now = replace(larger, corrections=corrected.corrections, keeps_on_device=step.keeps_on_device)
            tries.insert(0, as_it_is_now)
        if plan.solution.offloads:  # the allocator rounds up less without offloads
            tries.append(replace(corrected, margin_bytes=0, keeps_on_device=True))
        for tried_step in tries:
            self._history.record(signature, self.maker.waiting.at(signature, tried_step))
            if self._plan(signature) is None:
                log.info("%s: planned again, with less", text)
                return
        corrected = self.maker.waiting.at(signature, corrected)  # waiting graphs may hold less since the tries
        self._history.record(signature, corrected)
        self._messages.warn_over(f"{text}, and no plan leaves that margin: the plan stays.")

    def piece_measured(self, peak_bytes: int) -> None:
        """Warn if a step that ran only backwards of earlier forwards, without a plan, took more than the budget."""
        plans = [signature.own_plan for signature in self._history.planned]
        budget_bytes = max((plan.budget_bytes for plan in plans), default=peak_bytes)  # the largest, if it is a share
        said_bytes = max((plan.planned_peak_bytes for plan in plans), default=0)  # exceeds the budget if nothing fits
        if peak_bytes > max(budget_bytes, said_bytes):
            took = f"{format_bytes(peak_bytes)}, {format_bytes(peak_bytes - budget_bytes)} above the budget"
            self._messages.warn(
                f"A part of an iteration took {took}, and has no plan: it runs the backward of an earlier forward, not "
                "of its own. Name a budget that is smaller by the excess, or call that backward before the next "
                "forward.",
                topic="piece",
            )

    def compare_with_expected(self, step: CurrentStep, signature: StepSignature) -> None:
        """Remember that a step began by the plan of another signature than its own; warn unless its plans fitted it."""
        expected, graphs = step.expected, step.graphs
        if expected is None or expected is signature or not graphs or step.forwards[0].signature is not expected:
            return
        if signature.plan is None and graphs[0] in graphs[1:]:
            return  # it began again, for example after a forward without a backward
        self._history.confuse(expected)
        plans = (expected.plan, signature.plan)
        plan = max((p for p in plans if p is not None), key=lambda plan: plan.unplanned_peak_bytes)
        if not (plan.solution.keeps_all or step.is_by_plans):
            self._messages.warn(
                "A step called other code than expected, so it began by the wrong plan: it may have taken more than "
                f"its budget of {format_bytes(plan.budget_bytes)}. From now on such steps begin by the plan that needs "
                f"most, until {CERTAIN} steps in a row have come as expected."
            )
