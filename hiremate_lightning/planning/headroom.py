"""Budgets in bytes, and how many of them a step has."""

from __future__ import annotations

from dataclasses import dataclass

from ..units import Budget
from .solvers.base import UNLIMITED

AUTO_MARGIN = 0.08  # share of the free bytes that "auto" leaves for fragmentation and for code outside
GUARD_BYTES = 2**16  # left free for scalars that come and go outside of the planned modules,
GUARD_PARTS = 200  # and at most this part of the budget


def resolve(budget: Budget, resident_bytes: int, unplanned_bytes: int, free_bytes: int) -> int:
    """Turn a budget into bytes. In training `PlanMaker.room` calls this with the largest step that is known.

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


def guard_bytes(budget_bytes: int) -> int:
    """Return the bytes of a budget that are left free for scalars outside of the planned modules."""
    return min(GUARD_BYTES, budget_bytes // GUARD_PARTS)


@dataclass(frozen=True, slots=True)
class Room:
    """How many bytes a step has.

    Attributes:
        budget: The budget as asked for.
        budget_bytes: The same in bytes, resident bytes included.
        resident_bytes: Bytes that exist before the step.
        margin_bytes: Bytes of the budget to leave free, because an earlier plan was measured that much above it.
    """

    budget: Budget
    budget_bytes: int
    resident_bytes: int = 0
    margin_bytes: int = 0

    @classmethod
    def unlimited(cls, budget: Budget) -> Room:
        """Return the room of a step whose budget in bytes is not known from what was seen so far."""
        return cls(budget, UNLIMITED)

    @property
    def step_bytes(self) -> int:
        """The bytes that the step may add: those that neither exist already nor are left as a margin."""
        return max(0, self.budget_bytes - self.resident_bytes - self.margin_bytes)

    @property
    def solved_bytes(self) -> int:
        """The same without the bytes that are left free for scalars outside of the planned modules."""
        return self.step_bytes - guard_bytes(self.step_bytes)
