"""Steps that ran unmeasured and are to be planned: when they may come again.

What kind a step is of shows when it has ended, so whatever may be an awaited one is measured, which takes time.
"""

from __future__ import annotations

ALWAYS = 4  # steps after a missed one, of its size; then in 4, 8, 16, ... steps, and after as many as the last time
REMEMBERED = 64  # sizes


class MissedSteps:
    """Steps that were missed, by the bytes that they were called with."""

    def __init__(self) -> None:
        self._waits: dict[int, tuple[int, int]] = {}  # steps of a size since the latest was missed, and before that

    def miss(self, size_bytes: int) -> None:
        """Learn that a step has ended that was to be measured, and was not."""
        since, _ = self._waits.pop(size_bytes, (0, 0))
        self._waits[size_bytes] = (0, since)
        if len(self._waits) > REMEMBERED:
            del self._waits[next(iter(self._waits))]

    def found(self, size_bytes: int) -> None:
        """Learn that a step was measured that has no plan."""
        self._waits.pop(size_bytes, None)

    def may_come(self, size_bytes: int) -> bool:
        """Say whether the step that begins may be an awaited one; to be asked once for each step."""
        if size_bytes not in self._waits:
            return False
        since, before = self._waits[size_bytes]
        since += 1
        self._waits[size_bytes] = (since, before)
        return since < ALWAYS or since.bit_count() == 1 or since == before
