"""Plans of kinds of steps, made within the budget as asked for; nothing runs by them yet, and nothing is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..measuring.describing import describe
from ..measuring.recording import StepRecord
from ..measuring.resident import Resident, ResidentMemory, more_kept_plainly
from ..memory.free_memory import free_bytes
from ..options import SessionOptions
from ..planning.plan import Plan
from ..planning.planner import make_plan, resolve, unplanned
from ..planning.shared_solving import shared
from ..planning.solvers import worker
from ..planning.solvers.curve import Remembering
from ..records.costs import step_time_ms
from ..records.scaling import are_same
from ..records.schedule import lower
from ..records.step import Step
from ..reporting.report import Stages
from ..running.program import Program, build
from ..torch_private import runtime
from ..units import Budget
from .kinds import Kind, Kinds
from .known import Known, KnownCall
from .limits import Limits
from .parts import Parts


class PlanMaker:
    """Makes the plans of one model.

    Args:
        options: What was asked for.
        name: Of the model.
        kinds: The kinds of its steps.
        memory: What exists before a step.
        parts: The captured graphs.
        stages: Shows the stages of planning, and counts their time.

    Attributes:
        options: What was asked for; the budget may change.
        left_bytes: Bytes that each plan leaves free for code that runs without one.
        proved: Says how many captured graphs are proved.
        rounded: Lists the values of these that differ by rounding.
    """

    def __init__(
        self, options: SessionOptions, name: str, kinds: Kinds, memory: ResidentMemory, parts: Parts, stages: Stages
    ) -> None:
        self.options, self.left_bytes = options, 0
        self.proved: Callable[[], str] = str
        self.rounded: Callable[[], tuple[str, ...]] = tuple
        self._name, self._kinds, self._memory, self._parts, self._stages = name, kinds, memory, parts, stages
        self._auto_bytes: int | None = None  # what was free at first

    def new_limits(self) -> Limits:
        """Return the budgets of a kind of step of which none was seen."""
        return Limits(self.options.budget.share is not None)

    def budget_bytes(self, step: Step, resident: Resident, kind: Kind | None = None) -> int:
        """Return the budget of a step, resident bytes included; a share is of the largest step that is known.

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
        others = ((plan, self._kinds.described(other)) for other, plan in self._kinds.plans.items() if other != kind)
        plain = (plan.unplanned.peak_bytes + known.resident.plain_waiting_bytes for plan, known in others)
        added_bytes = max(unplanned(step).peak_bytes + resident.plain_waiting_bytes, *plain, 0)
        return resolve(self.options.budget, resident.size_bytes - resident.waiting_bytes, added_bytes, 0)

    def captured_before(self, kind: Kind) -> Known | None:
        """Find the same step at the same sizes: Dynamo captures a size anew once it has symbols for it."""
        parts = [part for number in kind if (part := self._parts.find(number)) is not None]
        graphs = [part.captured.graph for part in parts]
        if len(graphs) < len(kind):
            return None
        known = self._kinds.known.values()
        return next((k for k in known if are_same([call.captured.graph for call in k.calls], graphs)), None)

    def describe(self, record: StepRecord, resident: Resident) -> Known:
        """Describe a kind of step by the record of one, and by what exists before the next."""
        twin = self.captured_before(record.signature)
        described, order = describe(record, self._parts.profiles)
        calls = described if twin is None else [own.call for own in twin.calls]
        runs = [run for run in record.runs if run.index in record.backwards]
        others = [run for run in record.runs if run.index not in record.backwards]
        solver = worker.apart(self.options.plan.solver)
        return Known(
            calls=tuple(
                KnownCall(call, run.part, run.part.captured, run.index, run.parameters, run.missing, run.added)
                for call, run in zip(calls, runs, strict=True)
            ),
            order=tuple(order),
            resident=resident,
            solve=shared(Remembering(solver), runtime.process_group_store()) if twin is None else twin.solve,
            limits=self.new_limits(),
            margin_bytes=self.left_bytes,
            without_backward_bytes=sum(more_kept_plainly(run.graph, run.program.schedule) for run in others),
        )

    def make(self, kind: Kind) -> tuple[Plan, dict[int, Program]]:
        """Plan a described kind of step, and build its programs.

        Raises:
            InfeasibleBudgetError: If nothing fits the budget.
        """
        known = self._kinds.described(kind)
        step, before = known.merge(), known.resident
        limits = known.limits.meeting(before, self.budget_bytes(step, before, kind))
        self._kinds.change(kind, known=replace(known, limits=limits))
        with self._stages.reporter.stage("solving"):
            plan = make_plan(
                step,
                self.options.budget,
                limits.budget_bytes,
                before.size_bytes,
                self.options.plan,
                target=self._name,
                planning=self._stages.take(),
                margin_bytes=known.margin_bytes,
                solve=known.solve,
                progress=self._stages.reporter.solving(step_time_ms(step.graph, step.profile)),
            )
        plan = replace(plan, resident_parts=before.kinds, proved=self.proved(), rounded=self.rounded())
        pairs = zip(known.calls, step.split(plan.solution.recompute), strict=True)
        return plan, {own.place: build(own.captured, lower(own.captured.graph, rows)) for own, rows in pairs}
