"""Budgets in bytes, and what of one is left for a step."""

from __future__ import annotations

from ..units import Budget

AUTO_MARGIN = 0.08  # share of the free bytes that "auto" leaves for fragmentation and for code outside
GUARD_BYTES = 2**16  # left free for scalars that come and go outside of the planned modules,
GUARD_PARTS = 200  # and at most this part of the budget


def resolve(budget: Budget, resident_bytes: int, unplanned_bytes: int, free_bytes: int) -> int:
    """Turn a budget into bytes. In training `PlanMaker.budget_bytes` calls this with the largest step that is known.

    Args:
        budget: The budget as asked for.
        resident_bytes: Bytes that exist before the step.
        unplanned_bytes: Bytes that the unplanned step adds at its peak.
        free_bytes: Bytes that the device could still hand out before the step.

    Returns:
        The most bytes that may be allocated at any moment of a step, resident bytes included.
    """
    if budget.size_bytes is not None:
        return budget.size_bytes
    if budget.share is not None:
        return resident_bytes + int(budget.share * unplanned_bytes)
    return resident_bytes + int(free_bytes * (1 - AUTO_MARGIN))


def headroom_bytes(budget_bytes: int, existing_bytes: int, margin_bytes: int = 0) -> int:
    """Return the bytes that a step may add within its budget: what neither exists already nor is left as a margin."""
    return max(0, budget_bytes - existing_bytes - margin_bytes)


def guard_bytes(budget_bytes: int) -> int:
    """Return the bytes of a budget that are left free for scalars outside of the planned modules."""
    return min(GUARD_BYTES, budget_bytes // GUARD_PARTS)
