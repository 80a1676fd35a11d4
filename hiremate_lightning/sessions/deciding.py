"""What becomes of the plan of a kind of step, by what a step has shown: it stays, is made anew, or is refused."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

CORRECTIONS = 3  # of a plan whose peak is measured above the budget: where code outside varies, none may be enough


class Action(Enum):
    """What becomes of a plan."""

    KEEP = "it stays, or there is none as before"
    REPLAN = "it is made, or made anew"
    REFUSE = "another one is called for, and is not made"


class Reason(Enum):
    """Why another plan is called for."""

    FIRST = "the kind of step has no plan"
    LESS_ROOM = "more exists before the step than its plan leaves room for"
    MORE_ROOM = "its budget has clearly risen"
    ABOVE_BUDGET = "its measured peak is above its budget"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a kind of step, when one has ended or is about to begin.

    Attributes:
        has_plan: Whether the kind has a plan.
        is_worth_a_plan: Whether it has come again, or some of it had to run at the least memory.
        has_place: Whether another plan may be made, or the same step has one at the same sizes.
        stays: Whether the plan fits with what exists, or no other would.
        is_risen: Whether the budget is clearly more than the plan was made for.
        recomputes: Whether the plan recomputes anything.
        is_least: Whether not even the least memory fits the budget.
        excess_bytes: The measured peak beyond the budget.
        corrections: How often the plan was made anew for such a peak.
    """

    has_plan: bool = True
    is_worth_a_plan: bool = False
    has_place: bool = True
    stays: bool = True
    is_risen: bool = False
    recomputes: bool = False
    is_least: bool = False
    excess_bytes: int = 0
    corrections: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a plan, and why; no reason where it stays."""

    action: Action
    reason: Reason | None = None


def decide(evidence: Evidence) -> Decision:
    """Decide what becomes of the plan of a kind of step."""
    if not evidence.has_plan:
        if not evidence.is_worth_a_plan:
            return Decision(Action.KEEP)
        return Decision(Action.REPLAN if evidence.has_place else Action.REFUSE, Reason.FIRST)
    if not evidence.stays:
        return Decision(Action.REPLAN, Reason.LESS_ROOM)
    if evidence.is_risen and evidence.recomputes:
        return Decision(Action.REPLAN, Reason.MORE_ROOM)
    if evidence.excess_bytes > 0 and not evidence.is_least:
        is_hopeless = evidence.corrections >= CORRECTIONS
        return Decision(Action.REFUSE if is_hopeless else Action.REPLAN, Reason.ABOVE_BUDGET)
    return Decision(Action.KEEP)
