"""Small code whose sizes differ in each step: it runs as captured, without a plan, where plans leave room for it."""

from __future__ import annotations

import weakref

from ..planning.plan import Plan

SMALL = 0.02  # of what the budget leaves for a step: such code may take it without a plan


class SmallParts:
    """What small parts may take, and the step in which each first asked."""

    def __init__(self) -> None:
        self._left: weakref.WeakKeyDictionary[object, tuple[int, int]] = weakref.WeakKeyDictionary()

    @property
    def size_bytes(self) -> int:
        """Bytes that plans leave free for them."""
        return sum(left_bytes for _, left_bytes in self._left.values())

    def came_in(self, step: int) -> bool:
        """Whether one of them first asked in a step: from the next one on plans leave room for it."""
        return any(since == step for since, _ in self._left.values())

    def may_run(self, code: object, size_bytes: int, step: int) -> bool:
        """Whether code may run without a plan: from the step after the one in which it was let in."""
        since, left_bytes = self._left.get(code, (0, 0))
        return 2 * size_bytes <= left_bytes and since < step

    def let_in(self, code: object, size_bytes: int, step: int, plan: Plan | None) -> bool:
        """Let code in where it is small beside what a plan leaves for a step.

        Four times its bytes count: sizes may grow, and eager PyTorch holds copies that a graph does not show.

        Args:
            code: What asks.
            size_bytes: Bytes of all its values at the largest size so far.
            step: Number of the step under way.
            plan: The latest plan, None before there is one.

        Returns:
            Whether the code was let in now.
        """
        _, before_bytes = self._left.get(code, (0, 0))
        left_bytes = 4 * size_bytes
        if 2 * size_bytes <= before_bytes or plan is None:
            return False
        others_bytes = self.size_bytes - before_bytes
        if others_bytes + left_bytes > SMALL * (plan.budget_bytes - plan.resident_bytes):
            return False
        self._left[code] = step, left_bytes
        return True
