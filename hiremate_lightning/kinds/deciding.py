"""What becomes of the plan of a kind of step, by what a step has shown: it stays, is made anew, or is not made.

`PlannedKinds` makes plans anew for other reasons too, without a decision from here:

- `set_budget`: the user has named another budget.
- `leave`: code without a plan needs room, so all plans are dropped.
- `see_backwards`: a step ran more backwards than the recorded one.
- `check_plans`, `learn`: graphs that wait come to hold more, or less.
- `must_return`: gradients stay that the plan counts as freed; this arrives as `LESS_ROOM`.
- `meet`: what needed more than the budget has gone.
"""

from __future__ import annotations

from enum import Enum

CORRECTIONS = 3  # of a plan whose peak is measured above the budget: where code outside varies, none may be enough


class Decision(Enum):
    """What becomes of a plan, and why."""

    KEEP = "it stays, or there is none as before"
    FIRST = "it is made, since the kind of step has none"
    FULL = "it is not made, since there are as many plans as allowed"
    LESS_ROOM = "it is made anew, since it no longer fits: more exists before the step, or gradients stay"
    MORE_ROOM = "it is made anew, since its budget has clearly risen"
    ABOVE_BUDGET = "it is made anew, since its measured peak is above its budget"
    HOPELESS = "it stays, though its measured peak is above its budget, since making it anew did not help"


def decide_first(is_worth_it: bool, has_place: bool) -> Decision:
    """Decide about a kind of step that has no plan.

    Args:
        is_worth_it: Whether it has come again, or some of it had to run at the least memory.
        has_place: Whether another plan may be made, or the same step has one at the same sizes.
    """
    if not is_worth_it:
        return Decision.KEEP
    return Decision.FIRST if has_place else Decision.FULL


def decide_beside(stays: bool, is_risen: bool, recomputes: bool) -> Decision:
    """Decide about a plan that meets what exists before a step.

    Args:
        stays: Whether it fits beside that, or no other would.
        is_risen: Whether the budget is clearly more than the plan was made for.
        recomputes: Whether the plan recomputes anything.
    """
    if not stays:
        return Decision.LESS_ROOM
    return Decision.MORE_ROOM if is_risen and recomputes else Decision.KEEP


def decide_measured(excess_bytes: int, is_least: bool, corrections: int) -> Decision:
    """Decide about a plan whose peak was measured.

    Args:
        excess_bytes: The peak beyond the budget.
        is_least: Whether not even the least memory fits the budget.
        corrections: How often the plan was made anew for such a peak.
    """
    if excess_bytes <= 0 or is_least:
        return Decision.KEEP
    return Decision.HOPELESS if corrections >= CORRECTIONS else Decision.ABOVE_BUDGET
