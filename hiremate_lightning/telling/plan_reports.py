"""What a user is told of the plans of one model: each once, and why a budget or a plan is another one now."""

from __future__ import annotations

from dataclasses import replace

from ..kinds.step_kind import StepKind, Told
from ..planning.plan import Plan, plan_title
from ..reporting.report import Reporter
from ..units import format_bytes

CLEARLY = 0.002  # of a budget: smaller changes are not said


class PlanReports:
    """Tells of plans by kind of step.

    Args:
        reporter: Shows what is said.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def planned(self, kind: StepKind, plan: Plan, remark: str = "") -> None:
        """Show a new plan; before it, what came since the one before."""
        self._say_why(kind, plan, is_new=True)
        self._reporter.planned(plan, remark)

    def note(self, text: str) -> None:
        """Print a line that belongs to the plan shown last."""
        self._reporter.note(text)

    def kept(self, kind: StepKind, plan: Plan) -> None:
        """Print why the budget changed under a plan that stays."""
        self._say_why(kind, plan, is_new=False)

    def measured(self, kind: StepKind, plan: Plan) -> None:
        """Show what was measured of a plan, once; again where it takes more than the budget, and did not before."""
        told = kind.told or _told(plan)
        is_over = (plan.measured.peak_bytes or 0) > plan.budget_bytes
        if told.measured is not plan.solution or (is_over and not told.is_over):
            self._reporter.measured(plan)
        kind.told = replace(told, measured=plan.solution, is_over=is_over)

    def _say_why(self, kind: StepKind, plan: Plan, is_new: bool) -> None:
        before, now = kind.told, _told(plan)
        kind.told = now if before is None else replace(now, measured=before.measured, is_over=before.is_over)
        if before is None or before.asked != now.asked:
            return
        moved_bytes = now.budget_bytes - before.budget_bytes
        came, gone = _more("came", before, now), _more("is gone", now, before)
        old, new = format_bytes(before.budget_bytes), format_bytes(now.budget_bytes)
        if abs(moved_bytes) > CLEARLY * before.budget_bytes and old != new:
            changed = f"{came}, and a share is of what a step adds to that" if came and moved_bytes > 0 else ""
            changed = f"{gone}, and a share is of what a step adds to the rest" if gone and moved_bytes < 0 else changed
            why = changed or "a share is of the largest step"
            self._reporter.note(f"{plan_title(plan)}: budget {old} -> {new}, since {why}")
        elif is_new and came:
            self._reporter.note(f"{plan_title(plan)} is made again, since {came}")


def _told(plan: Plan) -> Told:
    return Told(plan.budget_bytes, str(plan.budget), plan.resident_parts)


def _more(verb: str, before: Told, now: Told) -> str:
    """Return, in words or "", of which part most more exists before a step now."""
    known = dict(before.parts)
    more = [(size - known.get(name, 0), name) for name, size in now.parts]
    size, name = max(more, default=(0, ""))
    return f"{format_bytes(size)} of {name} {verb}" if size > 0 else ""
