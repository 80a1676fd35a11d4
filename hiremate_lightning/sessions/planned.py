"""What is planned for the kinds of steps that a session has seen: made, adapted, and corrected by what is measured."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..garbage import collecting_what_it_leaves
from ..measuring.describing import describe
from ..measuring.recording import StepRecord
from ..measuring.resident import Resident, ResidentMemory, more_kept_plainly
from ..memory.free_memory import free_bytes
from ..memory.metering import MemoryMeter
from ..options import SessionOptions
from ..out_of_memory import InfeasibleBudgetError
from ..planning.plan import Plan
from ..planning.planner import GUARD_BYTES, guard_bytes, make_plan, resolve, unplanned
from ..planning.shared_solving import shared
from ..planning.solvers import worker
from ..planning.solvers.base import Strategy
from ..planning.solvers.curve import Remembering
from ..records.costs import step_time_ms
from ..records.scaling import are_same
from ..records.schedule import keep_all, lower
from ..records.simulation import simulate
from ..records.step import Step
from ..reporting.report import Stages
from ..rewriting.joint import may_choose_anew
from ..running.execution import Part
from ..running.program import build
from ..torch_private import runtime
from ..units import Budget, format_bytes
from .current_step import Planned
from .first_steps import FirstSteps
from .kinds import CERTAIN, Kind, Kinds, Known
from .limits import Limits
from .parts import Parts
from .shortage import HELD_STEPS, Shortage
from .watching import Expected, WatchPolicy

log = logging.getLogger("hiremate_lightning")

CLEARLY_MORE = 1.1  # than was said of a step in which nothing fits: it is said again
CORRECTIONS = 3  # of a plan whose peak is measured above the budget: where code outside varies, none may be enough


class PlannedKinds:
    """The plans of one model, by kind of step.

    Args:
        options: What was asked for.
        name: Of the model.
        memory: What exists before a step.
        parts: The captured graphs.
        stages: Shows the stages of planning, and counts their time.
        watching: Decides which steps are measured.
        say: Warns.
        say_over: Warns of a step above its budget, and names what may be the cause.

    Attributes:
        options: What was asked for; the budget may change.
        plans: The plans so far.
        kinds: The kinds of steps.
        first_steps: What steps run that have no plan of their own.
        listeners: Called with each plan when it is made, and again when it has been measured.
        shortage: Steps that do not fit the budget, while it is found out which budget they fit.
        name: Of the model.
        proved: Says how many captured graphs are proved.
        rounded: Lists the values of these that differ by rounding.
    """

    def __init__(
        self,
        options: SessionOptions,
        name: str,
        memory: ResidentMemory,
        parts: Parts,
        stages: Stages,
        watching: WatchPolicy,
        say: Callable[[str], None],
        say_over: Callable[[str], None],
    ) -> None:
        self.options = options
        self.plans: dict[Kind, Plan] = {}
        self.kinds = Kinds()
        self.first_steps = FirstSteps(stages)
        self.listeners: list[Callable[[Plan], None]] = []
        self.proved: Callable[[], str] = str
        self.rounded: Callable[[], tuple[str, ...]] = tuple
        self.name, self._memory, self._parts, self._stages, self._say = name, memory, parts, stages, say
        self._say_over = say_over
        self._watching = watching
        self._known: dict[Kind, Known] = {}
        self._limits = self._new_limits()
        self.shortage = Shortage()
        self._checkpointing_said = False
        self._first_said = False  # that the first step of another kind may take more than its budget
        self._least_said: dict[Kind, int] = {}  # peaks that were announced, of steps in which nothing fits
        self._unfit: set[Kind] = set()  # whose plans were made with gradients dying that do not
        self._seen_bytes: dict[Kind, int] = {}  # predicted peaks of the states of each plan whose peak was measured
        self._searching: set[Kind] = set()  # whose next step is the first in which cuDNN chooses algorithms
        self._auto_bytes: int | None = None
        self._left_bytes = 0  # that each plan leaves free for code that runs without one
        self._dropped: Plan | None = None  # the latest one of those that were dropped

    @property
    def latest(self) -> Plan | None:
        """The plan of the latest kind of step, None before there is one."""
        return self._dropped if self.kinds.latest is None else self.plans[self.kinds.latest]

    @property
    def known(self) -> Mapping[Kind, Known]:
        """The kinds of steps that were seen."""
        return self._known

    def leave(self, size_bytes: int) -> None:
        """Leave so many bytes free from now on, for code without a plan: between two steps, all plans are made anew."""
        self._left_bytes, self._dropped = size_bytes, self.latest
        for known in (self.plans, self._known, self._limits, self._unfit, self._searching, self._seen_bytes):
            known.clear()
        self.kinds.clear()
        self.first_steps.forget_plans()

    def set_budget(self, budget: Budget) -> None:
        """Change the budget; steps already seen are planned anew, nothing is captured again.

        Raises:
            InfeasibleBudgetError: If nothing fits it; then all is as it was.
        """
        before = self.options, self._limits
        self.options, self._limits = replace(self.options, budget=budget), self._new_limits()
        try:
            decided = {kind: self._decide(kind) for kind in self._known}
        except InfeasibleBudgetError as error:
            enough = self._error_of_all()
            self.options, self._limits = before
            raise enough or error from None
        except BaseException:  # Ctrl-C too
            self.options, self._limits = before
            raise
        self._least_said.clear()
        for kind, plan in decided.items():
            self._take(kind, plan)

    def meet(self, finished: StepRecord | None, resident: Resident, foreseen: Collection[Kind]) -> None:
        """Plan the step that has ended, if any, and let plans meet what exists before the one that begins.

        Args:
            finished: The record of the step that has ended, None where it is not to be planned.
            resident: What exists.
            foreseen: The kinds that the step may be of, the likeliest first.

        Raises:
            InfeasibleBudgetError: If nothing fits the budget and all was seen that may need more; it names what is
                enough for all steps seen.
        """
        self.shortage.begin_step(resident, self._memory)
        try:
            if finished is not None:
                with collecting_what_it_leaves():
                    self.learn(finished, resident)
            for kind in self.kinds.all_likely(foreseen):
                self.adapt(kind, resident)
        except InfeasibleBudgetError as error:
            log.info("%s goes on, to find out what all of its steps need: %s", self.name, error)
            self.shortage.hold(error)
        if self.shortage.is_held and self.shortage.is_to_be_said:
            self.shortage.is_held = False
            error_of_all = self._error_of_all()
            if error_of_all is not None:
                raise error_of_all
            for kind in self._known:  # what needed more has gone
                self._make_plan(kind)
        if self.shortage.is_to_be_announced:
            self._say_over(
                f"The budget {self.options.budget} is too small: steps run at the least memory until all that may need "
                f"more was seen, at most {HELD_STEPS}. Then an error says which budget is enough."
            )

    def _error_of_all(self) -> InfeasibleBudgetError | None:
        return self.shortage.error(self._known, self.options, self.budget_bytes, self.name)

    def must_return(self, part: Part, positions: Collection[int]) -> None:
        """Learn that gradients were handed to autograd beside those that exist, where a plan may count on adding."""
        for kind, known in self._known.items():
            returning = known.returning(part, positions)
            if returning is not known:
                self._known[kind] = returning
                self._unfit.add(kind)
                self._say(
                    "Gradients can't be added where they appear any more, since a hook sees them, another term of the "
                    "loss has some too, or autograd.grad asks for them: two sets of them are planned for from now on."
                )

    def gets_a_plan(self, kind: Kind) -> bool:
        """Whether to plan a kind of step: it has come again, or some of it had to run at the least memory."""
        is_worth_it = self.kinds.sights[kind] > 1 or kind not in self.kinds.by_plans
        return is_worth_it and (self._captured_before(kind) is not None or self.may_plan_more())

    def _captured_before(self, kind: Kind) -> Known | None:
        """Find the same step at the same sizes: Dynamo captures a size anew once it has symbols for it."""
        parts = [part for number in kind if (part := self._parts.find(number)) is not None]
        graphs = [part.captured.graph for part in parts]
        if len(graphs) < len(kind):
            return None
        return next((k for k in self._known.values() if are_same([c.graph for c in k.captured], graphs)), None)

    def may_plan_more(self) -> bool:
        """Whether there are fewer plans than allowed; if not, that is announced."""
        count = len({id(known.solve) for known in self._known.values()})
        if count < self.options.max_plans:
            return True
        self._say(
            f"There are {count} plans already (max_plans): other steps run as was planned for another input "
            "shape, where that fits, or else at the least memory. Each new shape takes seconds as it first appears: "
            "pad to a few shapes, or raise max_plans."
        )
        return False

    def learn(self, record: StepRecord, resident: Resident) -> None:
        """Plan a kind of step that was not seen before; one that may be small by chance waits where nothing fits."""
        kind = record.signature
        twin = self._captured_before(kind)
        calls, order = describe(record, self._parts.profiles)
        runs = [run for run in record.runs if run.index in record.backwards]
        self._known[kind] = Known(
            calls=tuple(calls) if twin is None else twin.calls,
            order=tuple(order),
            parts=tuple(run.part for run in runs),
            captured=tuple(run.part.captured for run in runs),
            places=tuple(run.index for run in runs),
            missing=tuple(run.missing for run in runs),
            added=tuple(run.added for run in runs),
            resident=resident,
            solve=self._new_solver() if twin is None else twin.solve,
            margin_bytes=self._left_bytes,
            without_backward_bytes=sum(
                more_kept_plainly(run.graph, run.program.schedule)
                for run in record.runs
                if run.index not in record.backwards
            ),
        )
        self.shortage.see(kind, resident, record.is_measured)
        if self.shortage.is_held:
            return
        try:
            self._make_plan(kind)
        except InfeasibleBudgetError as error:
            if self._may_be_small_by_chance(kind):
                log.info("%s waits for larger steps: %s", self.name, error)
                del self._known[kind]
                return
            if not self._left_bytes:
                raise
            self._known[kind] = replace(self._known[kind], margin_bytes=0)  # it is measured, and would be said
            self._make_plan(kind)
        self._see_first(kind, record.peak_bytes or 0)

    def _see_first(self, kind: Kind, peak_bytes: int) -> None:
        """Say where the first step of another kind, which ran before it was planned, took more than its budget."""
        plan = self.plans[kind]
        excess = peak_bytes - max(plan.budget_bytes, plan.planned_peak_bytes)
        if excess > GUARD_BYTES and len(self.plans) > 1 and not self._first_said:
            self._first_said = True
            took = f"{format_bytes(peak_bytes)}, {format_bytes(excess)} above its budget"
            self._say(
                f"The first step of another kind took {took}: it had no plan yet. So may others that data or input "
                "shapes bring; the next step of each has its plan."
            )

    def _may_be_small_by_chance(self, kind: Kind) -> bool:
        """Whether a share says little at the first sight: forwards have no backward, as of dropped layers."""
        has_dropped = len(self._known[kind].places) < len(kind)
        return self.options.budget.share is not None and has_dropped and self.kinds.sights[kind] == 1

    def _new_solver(self) -> Strategy:
        return shared(Remembering(worker.apart(self.options.plan.solver)), runtime.process_group_store())

    def _new_limits(self) -> defaultdict[Kind, Limits]:
        is_share = self.options.budget.share is not None
        return defaultdict(lambda: Limits(is_share))

    def _make_plan(self, kind: Kind) -> None:
        """Plan a known step and let its programs take over."""
        self._take(kind, self._decide(kind))

    def _decide(self, kind: Kind) -> Plan:
        """Plan a known step; nothing runs by the plan yet.

        Raises:
            InfeasibleBudgetError: If nothing fits the budget.
        """
        known = self._known[kind]
        step, resident_bytes = known.merge(), known.resident.size_bytes
        with self._stages.reporter.stage("solving"):
            plan = make_plan(
                step,
                self.options.budget,
                self._limit_bytes(kind, step),
                resident_bytes,
                self.options.plan,
                target=self.name,
                planning=self._stages.take(),
                margin_bytes=known.margin_bytes,
                solve=known.solve,
                progress=self._stages.reporter.solving(step_time_ms(step.graph, step.profile)),
            )
        return replace(plan, resident_parts=known.resident.kinds, proved=self.proved(), rounded=self.rounded())

    def _take(self, kind: Kind, plan: Plan) -> None:
        """Let the programs of a plan take over, and announce it."""
        known = self._known[kind]
        decided = zip(known.captured, known.places, known.merge().split(plan.solution.recompute), strict=True)
        programs = {place: build(captured, lower(captured.graph, decisions)) for captured, place, decisions in decided}
        self.plans[kind] = plan
        self._seen_bytes.pop(kind, None)
        self._limits[kind].planned(plan.planned_peak_bytes + known.margin_bytes)
        self._watching.planned(kind)
        self.first_steps.forget_plans()
        self.kinds.install(kind, programs)
        self._stages.reporter.planned(plan)
        again = {plan.graph.nodes[node].op for node in plan.schedule.recomputed(plan.graph)}
        if may_choose_anew(again, self._memory.device):
            self._searching.add(kind)
            self._say(
                "torch.backends.cudnn.benchmark is on: convolutions that are computed again may take another algorithm "
                "than before, and differ in the last bits. Turn it off for the same numbers bit for bit."
            )
        if plan.planned_peak_bytes > plan.budget_bytes:
            self._limits[kind].nothing_fits(known.resident, plan.planned_peak_bytes)
            self._say_least(kind, plan.planned_peak_bytes)
        self._say_checkpointing(plan)
        self._tell(plan)

    def _say_checkpointing(self, plan: Plan) -> None:
        """Say, once, that a plan takes the place of what the user's code runs again by itself."""
        if self._checkpointing_said or all(node.checkpoint is None for node in plan.graph.nodes):
            return
        self._checkpointing_said = True
        kept = simulate(plan.graph, plan.profile, lower(plan.graph, keep_all(plan.graph)))
        own, without = format_bytes(plan.unplanned.peak_bytes), format_bytes(kept.peak_bytes)
        self._say(
            f"{self.name} calls torch.utils.checkpoint, in whose place the plan decides what runs again. A step adds "
            f"{own} with checkpoint, and would add {without} without: shares of a budget are of the former."
        )

    def _say_least(self, kind: Kind, peak_bytes: int) -> None:
        """Say what a step takes in which nothing fits, planned or measured, clearly more than was said."""
        if peak_bytes > CLEARLY_MORE * self._least_said.get(kind, 0):
            self._least_said[kind] = peak_bytes
            least, budget = format_bytes(peak_bytes), format_bytes(self.plans[kind].budget_bytes)
            self._say_over(f"Nothing fits the budget of {budget}: the step runs at the least memory found, {least}.")

    def adapt(self, kind: Kind, resident: Resident) -> None:
        """Meet what exists before this step: the plan stays where it still fits, else the step is planned anew."""
        known, plan = self._known[kind], self.plans[kind]
        if resident == known.resident and kind not in self._unfit:
            return
        self.shortage.see(kind, resident)
        if self.shortage.is_held:
            return
        limits, is_least = self._limits[kind], plan.planned_peak_bytes > plan.budget_bytes
        if kind in self._unfit:
            self._unfit.discard(kind)
            limits.forget_least()
        has_more_state = resident.state_bytes > known.resident.state_bytes
        self._known[kind] = known = replace(known, resident=resident)
        step = known.merge()
        budget_bytes = self._limit_bytes(kind, step)
        adapted = replace(
            plan,
            graph=step.graph,
            profile=step.profile,
            budget_bytes=budget_bytes,
            resident_bytes=resident.size_bytes,
            resident_parts=resident.kinds,
        )
        was_of_more = (plan.measured.peak_bytes or 0) > budget_bytes
        if was_of_more or has_more_state:  # resident bytes, or fewer: measured again
            adapted = adapted.with_measured(peak_bytes=None)
            self._seen_bytes.pop(kind, None)
        peak_bytes = adapted.planned_peak_bytes + known.margin_bytes
        if not limits.stays(resident, peak_bytes, is_least):
            log.info("%s is planned anew: resident bytes are now %s", self.name, format_bytes(resident.size_bytes))
            self._make_plan(kind)
            return
        self.plans[kind] = adapted
        self._tell(adapted)
        if adapted.planned_peak_bytes > budget_bytes:
            self._say_least(kind, adapted.planned_peak_bytes)
        if plan.solution.recompute_ms > 0 and limits.have_risen(resident, peak_bytes):
            log.info("%s is planned anew: the budget is now %s", self.name, format_bytes(budget_bytes))
            limits.planned(peak_bytes)  # tried once
            with suppress(InfeasibleBudgetError):  # then the plan stays
                self._make_plan(kind)

    def peak_measured(self, kind: Kind, peak_bytes: int, resident: Resident) -> None:
        """Compare a measured peak with the budget; where it is over, plan with less, a few times at most.

        Args:
            kind: Of the step.
            peak_bytes: Its peak.
            resident: What existed before it. Where another kind was foreseen, the plan was made for something else.
        """
        if kind in self._searching:
            self._searching.remove(kind)
            return  # cuDNN tried its algorithms, with all the memory that these may take: the next step counts
        solution, known = self.plans[kind].solution, self._known[kind]
        try:
            self.adapt(kind, resident)
        except InfeasibleBudgetError:  # to be raised where such a step begins: this one has run
            self._known[kind] = known
            return
        plan, known = self.plans[kind], self._known[kind]
        if plan.solution is not solution:
            return  # planned anew: the step ran by the plan before
        self._seen_bytes[kind] = max(self._seen_bytes.get(kind, 0), plan.planned_peak_bytes)
        if peak_bytes <= (plan.measured.peak_bytes or 0):
            return
        self.update(kind, peak_bytes=peak_bytes)
        excess = peak_bytes - plan.budget_bytes
        if plan.planned_peak_bytes > plan.budget_bytes:
            self._say_least(kind, peak_bytes)
            return
        if excess <= 0:
            return
        text = f"The measured peak {format_bytes(peak_bytes)} is {format_bytes(excess)} above the budget"
        if known.corrections == CORRECTIONS:
            self._say_over(
                f"{text}, after planning with a margin: something outside of the planned modules takes the memory."
            )
            return
        margin_bytes = peak_bytes - plan.planned_peak_bytes  # more than the last one, which was left free
        self._known[kind] = replace(known, margin_bytes=margin_bytes, corrections=known.corrections + 1)
        try:
            self._make_plan(kind)
        except InfeasibleBudgetError:
            self._known[kind] = replace(known, corrections=known.corrections + 1)
            self._say_over(f"{text}, and no plan leaves that margin: the plan stays.")
        else:
            log.info("%s: planned again, with that margin", text)

    def expect(self, size_bytes: int, foreseen: Sequence[Kind]) -> Expected:
        """Return what is known of the step that begins, called with arguments of a size.

        Args:
            size_bytes: That size.
            foreseen: The kinds that it may be of, planned or not, the likeliest first.
        """
        kind, following = self.kinds.likely(foreseen), self.kinds.following(foreseen)
        likeliest = next(iter(foreseen), None)
        if kind is None:
            return Expected(None, likeliest, size_bytes, is_on_host=self._memory.device.type == "cpu")
        next_one = None if following is None else self._expect(following, following, 0)
        return replace(self._expect(kind, likeliest, size_bytes), following=next_one)

    def _expect(self, kind: Kind, foreseen: Kind | None, size_bytes: int) -> Expected:
        """Return what is known of a step of a planned kind."""
        plan, is_free = self.plans[kind], not MemoryMeter.is_running(self._memory.device)
        may_grow = is_free and self._known[kind].outside_bytes > GUARD_BYTES
        seen_bytes = self._seen_bytes.get(kind, plan.planned_peak_bytes)
        higher_bytes = plan.planned_peak_bytes - seen_bytes
        is_higher = is_free and higher_bytes > guard_bytes(plan.budget_bytes)  # and not by a loss that is kept
        has_peak, has_time = plan.measured.peak_bytes is not None, plan.measured.step_ms is not None
        return Expected(kind, foreseen, size_bytes, has_peak, has_time, may_grow, is_higher)

    def confused(self, expected: Kind, kind: Kind) -> None:
        """Learn that a step turned out another kind than it began as."""
        self.kinds.confuse(expected, kind)
        plan = max((self.plans[expected], self.plans[kind]), key=lambda plan: plan.unplanned_peak_bytes)
        if plan.solution.recompute_ms > 0:
            self._say(
                "A step began by the plan of another kind of step, and went another way: it may have taken more than "
                f"its budget of {format_bytes(plan.budget_bytes)}. From now on such steps begin by the plan of the "
                f"kind that needs most, until {CERTAIN} steps in a row have come as foreseen."
            )

    def any_is_unfit(self, foreseen: Collection[Kind]) -> bool:
        """Whether a step of these kinds may run by a plan that counts on gradients to die which do not."""
        return not self._unfit.isdisjoint(self.kinds.all_likely(foreseen))

    def update(self, kind: Kind, **measured: Any) -> None:
        """Note on the plan of a kind of step what was measured."""
        plan = self.plans[kind] = self.plans[kind].with_measured(**measured)
        if plan.measured.step_ms is not None:
            self._stages.reporter.measured(plan)
        self._tell(plan)

    def foreseen(self) -> Iterator[Planned]:
        """Give each kind that is planned, and what its plan recomputes."""
        return ((self._known[kind], plan.solution.recompute) for kind, plan in self.plans.items())

    def gains_nothing(self, kind: Kind, plain_bytes: float) -> bool:
        """Whether a plan that was measured and timed recomputes nothing, where its step fits without it.

        Args:
            kind: The kind of step.
            plain_bytes: What it adds without its plan.
        """
        plan, known = self.plans[kind], self._known[kind]
        waits = known.without_backward_bytes or known.resident.plain_waiting_bytes
        if plan.solution.recompute_ms or plan.measured.step_ms is None or waits:
            return False
        is_whole = self.options.budget.share == 1  # of what plain training adds
        return is_whole or plan.resident_bytes + plain_bytes + known.margin_bytes <= plan.budget_bytes

    def same_code(self, step: Kind | Known) -> Kind:
        """Return the first known kind of step that runs the code of a known step, at whatever sizes."""
        own = step if isinstance(step, Known) else self._known[step]
        return next(other for other, known in self._known.items() if known is own or known.goes_on_as(own, 0))

    def _tell(self, plan: Plan) -> None:
        for listener in self.listeners:
            listener(plan)

    def _limit_bytes(self, kind: Kind, step: Step) -> int:
        """Give the budget of a known kind of step with what exists before it now, resident bytes included."""
        resident = self._known[kind].resident
        return self._limits[kind].budget_bytes(resident, self.budget_bytes(step, resident, kind))

    def budget_bytes(self, step: Step, resident: Resident, kind: Kind | None = None) -> int:
        """Give the budget of a step, resident bytes included; a share is of the largest step that is known.

        A share is of what plain training adds, graphs that wait for their backward included.

        Args:
            step: The step.
            resident: What exists before it.
            kind: Its kind, None where that is not known yet.
        """
        if self._auto_bytes is None:
            self._auto_bytes = resolve(Budget(), resident.size_bytes, 0, free_bytes(self._memory.device))
        if self.options.budget.is_auto:
            return self._auto_bytes
        planned = ((plan, self._known[other].resident) for other, plan in self.plans.items() if other != kind)
        others = (plan.unplanned.peak_bytes + before.plain_waiting_bytes for plan, before in planned)
        added_bytes = max(unplanned(step).peak_bytes + resident.plain_waiting_bytes, *others, 0)
        return resolve(self.options.budget, resident.size_bytes - resident.waiting_bytes, added_bytes, 0)

    def has_room_for_waiting(self) -> bool:
        """Whether all known steps fit as plain training runs them, with all that forwards save which wait."""
        return all(
            plan.unplanned_peak_bytes + self._known[kind].more_bytes + self._known[kind].margin_bytes
            <= plan.budget_bytes
            for kind, plan in self.plans.items()
        )
