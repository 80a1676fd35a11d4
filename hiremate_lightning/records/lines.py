"""Three lines of work: a device computes, copies to the host, and copies from the host, all at once.

Each line does one thing after the other. A copy begins when all operations before it are done, and all copies before it
in its direction. Computing goes on meanwhile, and stops only where the program waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ScheduleError
from .costs import Profile
from .graph import Graph
from .schedule import CopyIn, Copying, CopyOut, WaitOut


@dataclass(frozen=True, slots=True)
class Copied:
    """One copy between the device and the host.

    Attributes:
        storage: The storage.
        is_out: Whether it goes to the host.
        start_ms: When it begins, from the start of the step.
        end_ms: When it is done.
        moment: Number of nodes that were run before it was asked for.
    """

    storage: int
    is_out: bool
    start_ms: float
    end_ms: float
    moment: int


class Lines:
    """Clocks of the three lines.

    Attributes:
        profile: Times of nodes, and the link.
        copies: Copies so far.
        wait_ms: Time that computing has stood still.
    """

    def __init__(self, graph: Graph, profile: Profile) -> None:
        self.profile = profile
        self.copies: list[Copied] = []
        self.wait_ms = 0.0
        self._graph = graph
        self._moment = 0
        self._now_ms = self._out_ms = self._in_ms = 0.0  # the time up to which each line is busy
        self._done_ms: dict[tuple[int, bool], float] = {}

    def compute(self, node: int) -> None:
        """Run a node."""
        self._now_ms += self.profile.time_ms[node]
        self._moment += 1

    def copy(self, operation: Copying) -> None:
        """Begin a copy, or wait for it."""
        link, size_bytes = self.profile.link, self._graph.sizes[operation.storage]
        if link is None:
            raise ScheduleError("The schedule copies to the host, but its costs do not say how fast (Profile.link)")
        if isinstance(operation, CopyOut):
            start_ms = max(self._now_ms, self._out_ms)
            self._out_ms = start_ms + link.out_ms(size_bytes)
            self._begin(operation.storage, True, start_ms, self._out_ms)
        elif isinstance(operation, CopyIn):
            start_ms = max(self._now_ms, self._in_ms)
            self._in_ms = start_ms + link.in_ms(size_bytes)
            self._begin(operation.storage, False, start_ms, self._in_ms)
        else:
            wait_ms = max(0.0, self._done_ms[operation.storage, isinstance(operation, WaitOut)] - self._now_ms)
            self._now_ms += wait_ms
            self.wait_ms += wait_ms

    def _begin(self, storage: int, is_out: bool, start_ms: float, end_ms: float) -> None:
        self._done_ms[storage, is_out] = end_ms
        self.copies.append(Copied(storage, is_out, start_ms, end_ms, self._moment))
