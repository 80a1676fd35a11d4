"""Memory that exists before a step begins.

On CUDA all allocated memory counts, and `kinds` names its known parts. On other devices only memory of known kinds
counts. `ResidentMemory` in `resident_memory` makes the count.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..records.graph import Graph, bytes_of
from ..records.schedule import Schedule, keep_all, lower
from ..running.execution import GraphRuntime

WAITING = "graphs that wait for their backward"  # a kind of resident bytes
RETAINED = "graphs retained for another backward"
LEFT = "outputs of the step before"
INPUTS = "inputs that these outputs hold"
BESIDE = "other values of the iteration"

GradientState = tuple[frozenset[int], bool]


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes that exist when a step begins."""

    size_bytes: int  # bytes that stay for the whole step
    # Bytes that are freed before the backward: gradients that the optimizer has used, which `zero_grad` frees, and
    # outputs of the previous step.
    stale_bytes: int
    left_bytes: int = 0  # bytes of the previous step's outputs that are freed as the last forward returns
    kept: frozenset[int] = frozenset()  # storages of the parameters whose gradients are part of `size_bytes`
    kinds: tuple[tuple[str, int], ...] = field(default=(), compare=False)  # the parts of `size_bytes`: names and bytes
    waiting: tuple[tuple[GraphRuntime, Schedule], ...] = ()  # the waiting graphs, each with the schedule of its run
    # Gradients that the optimizer has used, if they count as stale: their bytes, and their parameters' storages.
    used: tuple[int, frozenset[int]] = field(default=(0, frozenset()), compare=False)

    def with_more(self, kind: str, size_bytes: int) -> Resident:
        """Return a copy with more bytes of a kind, which stay for the whole step."""
        if not size_bytes:
            return self
        kinds = dict(self.kinds)
        kinds[kind] = kinds.get(kind, 0) + size_bytes
        return replace(self, size_bytes=self.size_bytes + size_bytes, kinds=tuple(kinds.items()))

    @property
    def waiting_bytes(self) -> int:
        """The part of `size_bytes` that waiting graphs, and other values that the iteration has made, hold."""
        return self.bytes_of(WAITING) + self.bytes_of(BESIDE)

    @property
    def eager_waiting_bytes(self) -> int:
        """What `waiting_bytes` would be in eager training, where the iteration makes the same other values."""
        return self.waiting_bytes + sum(more_kept_in_eager(runtime.captured.graph, s) for runtime, s in self.waiting)

    def bytes_of(self, kind: str) -> int:
        """Return the part of `size_bytes` that is of a kind."""
        return dict(self.kinds).get(kind, 0)

    @property
    def existing_bytes(self) -> int:
        """All bytes that exist when the step begins."""
        return self.size_bytes + self.stale_bytes + self.left_bytes

    @property
    def gradients(self) -> GradientState:
        """The state of the gradients before the step: which gradients stay, and whether the step frees stale bytes."""
        return self.kept, self.stale_bytes > 0

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizers' state."""
        return self.bytes_of("optimizer state")

    def with_state(self, size_bytes: int) -> Resident:
        """Return a copy in which the optimizers' state has at least `size_bytes`."""
        return self.with_more("optimizer state", max(0, size_bytes - self.state_bytes))

    @property
    def batch_bytes(self) -> int:
        """Bytes of the batch."""
        return self.bytes_of("batch")


def more_kept_in_eager(graph: Graph, schedule: Schedule) -> int:
    """Return the bytes that eager training saves for the backward beyond those that the schedule saves."""
    eager_saved = lower(graph, keep_all(graph)).saved
    saved = schedule.saved_on_device(graph)
    inputs = set(graph.inputs)
    eager_bytes, saved_bytes = (bytes_of(graph, [t for t in s if t not in inputs]) for s in (eager_saved, saved))
    return max(0, eager_bytes - saved_bytes)
