"""The work of a search: counted in operations, not by the clock, so that the same step gets the same plan.

A second of work is about the work of an idle core of a server of 2024 in a second. Replays count by the operations that
they go through, programs by their size and by the iterations and nodes that a solver needs for them. None of that
depends on the machine or on its load: a busy machine does the same work, later, and finds the same.

The clock has the last word. Where a search takes several times as long as its work should, it is cut short, and its
answer says so: `Work.is_cut`. Only then does an answer depend on how fast the machine is.
"""

from __future__ import annotations

from time import monotonic

CLOCK_TIMES, CLOCK_MORE_S = 4.0, 10.0  # of the limit of work, and seconds more, that a search may take by the clock
OPERATION_S = 1.2e-6  # to go through an operation in a replay


class Work:
    """Counts the work of a search.

    Args:
        limit_s: Seconds of work that the search may do; the search asks for it, `Work` only ends it by the clock.

    Attributes:
        done_s: Seconds of work so far.
    """

    def __init__(self, limit_s: float) -> None:
        self.done_s = 0.0
        self._limit_s, self._start = limit_s, monotonic()
        self._is_cut = False

    def add(self, seconds: float) -> None:
        """Count seconds of work."""
        self.done_s += seconds

    def add_operations(self, count: int) -> None:
        """Count operations that were gone through."""
        self.done_s += OPERATION_S * count

    def is_past(self, deadline: float) -> bool:
        """Whether more work was done than up to a deadline, or the clock has ended the search."""
        return self.done_s > deadline or self.is_cut

    def left_s(self, deadline: float) -> float:
        """Return the seconds of work up to a deadline, 0 where the clock has ended the search."""
        return 0.0 if self.is_cut else max(0.0, deadline - self.done_s)

    @property
    def is_cut(self) -> bool:
        """Whether the clock has ended the search."""
        self._is_cut = self._is_cut or self.clock_left_s <= 0
        return self._is_cut

    @property
    def clock_left_s(self) -> float:
        """Seconds until the clock ends the search."""
        return self._start + clock_limit_s(self._limit_s) - monotonic()


def clock_limit_s(limit_s: float) -> float:
    """Return the seconds by the clock after which a search with this limit of work is cut short."""
    return CLOCK_MORE_S + CLOCK_TIMES * limit_s
