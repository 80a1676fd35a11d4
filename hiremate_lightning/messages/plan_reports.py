"""What a user is told of the plans of one model: each once, and why a budget or a plan is another one now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..planning.headroom import largest_words
from ..planning.plan import Plan, plan_title
from ..reporting.report import Reporter
from ..signatures.step_signature import StepSignature, Told
from ..units import format_bytes
from .announcements import Announcements

CLEARLY_MORE = 1.1  # than was said of steps in which nothing fits: it is said again
CLEARLY = 0.002  # of a budget: smaller changes are not said
BATCH = "batch"  # the part of what exists before a step that comes with it

Parts = tuple[tuple[str, int], ...]  # of what exists before a step: names and bytes


class PlanReports:
    """Reports plans by step signature.

    Args:
        reporter: Shows what is said.
        announcements: Warns.

    Attributes:
        listeners: Called with each plan when it is made, and again when it has been measured.
    """

    def __init__(self, reporter: Reporter, announcements: Announcements) -> None:
        self._reporter, self._announcements = reporter, announcements
        self.listeners: list[Callable[[Plan], None]] = []
        self._said_bytes = 0  # the largest peak that was announced, where nothing fits

    def notify(self, plan: Plan) -> None:
        """Call the listeners with a plan."""
        for listener in self.listeners:
            listener(plan)

    def planned(self, signature: StepSignature, plan: Plan, remark: str = "") -> None:
        """Show a new plan, after what came since the one before, and warn of what it brings."""
        self._say_why(signature, plan, is_new=True)
        self._reporter.planned(plan, remark)
        if split := self._announcements.split():
            self._reporter.note(f"  {split}")
        if signature.is_searching:
            self._announcements.algorithms()
        if plan.planned_peak_bytes > plan.budget_bytes:
            self.say_least(signature, plan.planned_peak_bytes)
        self._announcements.checkpointing(plan)

    def kept(self, signature: StepSignature, plan: Plan) -> None:
        """Report a plan that stays to the listeners, and print why its budget changed."""
        self._say_why(signature, plan, is_new=False)
        self.notify(plan)
        if plan.planned_peak_bytes > plan.budget_bytes:
            self.say_least(signature, plan.planned_peak_bytes)

    def say_least(self, signature: StepSignature, peak_bytes: int) -> None:
        """Warn of what a step takes in which nothing fits, planned or measured, clearly more than was said of any."""
        if not signature.recorded.is_provisional and peak_bytes > CLEARLY_MORE * self._said_bytes:
            self._said_bytes = peak_bytes
            plan = signature.own_plan
            largest = largest_words(plan.graph, plan.profile, plan.schedule, plan.planned)
            self._announcements.least(peak_bytes, plan.budget_bytes, largest)

    def budget_changed(self) -> None:
        """Forget what was said of a budget that nothing fits."""
        self._said_bytes = 0

    def measured(self, signature: StepSignature, plan: Plan) -> None:
        """Show what was measured of a plan, once; again where it takes more than the budget, and did not before."""
        told = signature.told or _told(plan)
        is_over = (plan.measured.peak_bytes or 0) > plan.budget_bytes
        if told.measured is not plan.solution or (is_over and not told.is_over):
            self._reporter.measured(plan)
        signature.told = replace(told, measured=plan.solution, is_over=is_over)

    def _say_why(self, signature: StepSignature, plan: Plan, is_new: bool) -> None:
        before, now = signature.told, _told(plan)
        if before is None or before.asked != now.asked:
            signature.told = now if before is None else _as_measured(before, now)
            return
        why, came = _why(before, now), _more("came", before.parts, now.parts)
        if why:
            budgets = f"{format_bytes(before.budget_bytes)} -> {format_bytes(now.budget_bytes)}"
            self._reporter.note(f"{plan_title(plan)}: budget {budgets}, since {why}")
        elif is_new and came:
            self._reporter.note(f"{plan_title(plan)} is made again, since {came}")
        if why or is_new:
            signature.told = _as_measured(before, now)


def _told(plan: Plan) -> Told:
    return Told(plan.budget_bytes, str(plan.budget), plan.resident_parts)


def _as_measured(before: Told, now: Told) -> Told:
    return replace(now, measured=before.measured, is_over=before.is_over)


def _why(before: Told, now: Told) -> str:
    """Return, in words or "", why the budget is clearly another one than was told last, if that stays.

    Batches come and go. So does what a step adds, where something frees gradients before some steps, a validation say.
    """
    (old_batch_bytes, old), (new_batch_bytes, new) = _without_batch(before), _without_batch(now)
    moved_bytes = (now.budget_bytes - new_batch_bytes) - (before.budget_bytes - old_batch_bytes)
    if abs(moved_bytes) <= CLEARLY * before.budget_bytes:
        return ""
    if format_bytes(before.budget_bytes) == format_bytes(now.budget_bytes):
        return ""
    if moved_bytes < 0:
        gone = _more("is gone", new, old)
        return f"{gone}, and a share is of what a step adds to the rest" if gone else ""
    came = _more("came", old, new)
    return f"{came}, and a share is of what a step adds to that" if came else "a share is of the largest step"


def _without_batch(told: Told) -> tuple[int, Parts]:
    """Return the bytes of the batch, and all other parts."""
    parts = dict(told.parts)
    return parts.pop(BATCH, 0), tuple(parts.items())


def _more(verb: str, before: Parts, now: Parts) -> str:
    """Return, in words or "", of which part most more exists before a step now."""
    sizes = dict(before)
    size, name = max(((size - sizes.get(name, 0), name) for name, size in now), default=(0, ""))
    return f"{format_bytes(size)} of {name} {verb}" if size > 0 else ""
