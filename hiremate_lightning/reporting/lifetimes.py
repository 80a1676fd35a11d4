"""Who occupies memory and when: the life of every block of a step, by what it is for.

The simulator counts bytes; this module names them. It follows the same schedule with a bookkeeping of its own, which
tests hold to the simulator's bytes at every operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate

from ..records.graph import OUTSIDE, Graph, StorageKind
from ..records.schedule import Compute, Operation, Schedule
from ..records.step import STALE_GRADIENTS


class Band(str, Enum):
    """What a block is for, in the order in which bands are stacked, the longest-lived below."""

    SAVED = "saved activations"
    PASSING = "activations, not saved"
    RECOMPUTED = "recomputed activations"
    OUTSIDE = "outside the plan"
    GRADIENT = "gradients"
    WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The life of one block.

    Attributes:
        storage: What it holds; a storage that is computed again has another block.
        node: Node that allocated it, None for the gradients that the step is handed.
        band: What it is for.
        size_bytes: Its bytes.
        first: First operation during which it is there, as a position in the simulated timeline.
        last: Last such operation; freed at its end.
    """

    storage: int
    node: int | None
    band: Band
    size_bytes: int
    first: int
    last: int


def lifetimes(graph: Graph, schedule: Schedule) -> tuple[Lifetime, ...]:
    """Follow a schedule, block by block.

    Args:
        graph: The step.
        schedule: A valid schedule of it.

    Returns:
        Every block that the step allocates, those of no bytes left out, in order of allocation.
    """
    ledger = _Ledger(graph)
    ledger.run(schedule.forward)
    turn = ledger.position
    ledger.leave_only({*schedule.saved, *graph.held})
    ledger.retain(set(graph.retained).intersection(schedule.saved))
    ledger.allocate(None, graph.tangents, ())
    ledger.run(schedule.backward)
    ledger.leave_only(())
    stale = {tensor.storage for tensor in graph.tensors if tensor.name == STALE_GRADIENTS}
    return tuple(_named(graph, life, turn, stale) for life in ledger.lives if life.size_bytes)


def band_bytes(lives: Iterable[Lifetime], length: int) -> dict[Band, list[int]]:
    """Add up blocks by band, for each operation while it runs.

    Args:
        lives: Blocks.
        length: Operations of the timeline.

    Returns:
        For each band that occurs, in stacking order, bytes by operation.
    """
    changes = {band: [0] * (length + 1) for band in Band}
    for life in lives:
        if life.first <= life.last:
            changes[life.band][life.first] += life.size_bytes
            changes[life.band][life.last + 1] -= life.size_bytes
    found = {band: list(accumulate(steps[:length])) for band, steps in changes.items()}
    return {band: sizes for band, sizes in found.items() if any(sizes)}


def _named(graph: Graph, life: Lifetime, turn: int, stale: set[int | None]) -> Lifetime:
    """Describe what a block is for, once it is known how long it lived."""
    kind = graph.storages[life.storage].kind
    node = None if life.node is None else graph.nodes[life.node]
    if kind is StorageKind.TANGENT or life.storage in stale:
        band = Band.GRADIENT
    elif node is not None and node.op == OUTSIDE:
        band = Band.OUTSIDE
    elif kind is StorageKind.GRADIENT:
        band = Band.GRADIENT
    elif life.first >= turn:
        band = Band.RECOMPUTED
    else:
        band = Band.SAVED if life.last >= turn else Band.PASSING
    return replace(life, band=band)


class _Ledger:
    """Live blocks while a schedule is followed; a block ends with the last tensor on it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.position = 0  # of the next operation
        self.lives: list[Lifetime] = []
        self.on: dict[int, int | None] = dict.fromkeys(graph.inputs)  # live tensor -> its block, None for none
        self.users: list[int] = []  # block -> live tensors on it
        self.held = set(graph.held)

    def run(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, Compute):
                node = self.graph.nodes[operation.node]
                self.allocate(operation.node, node.outputs, node.inputs)
                self.position += 1
            else:
                self.drop(operation.tensor)

    def allocate(self, node: int | None, outputs: Sequence[int], inputs: Sequence[int]) -> None:
        """Put outputs on their inputs' blocks where they share storages, else on new blocks."""
        tensors = self.graph.tensors
        block_of = {tensors[t].storage: self.on[t] for t in inputs}
        for tensor in outputs:
            storage = tensors[tensor].storage
            if storage is None or self.graph.storages[storage].kind.is_resident:
                block_of[storage] = None
            elif storage not in block_of:
                block_of[storage] = len(self.lives)
                size = self.graph.sizes[storage]
                self.lives.append(Lifetime(storage, node, Band.PASSING, size, self.position, -1))
                self.users.append(0)
            self._put(tensor, block_of[storage])

    def retain(self, tensors: Iterable[int]) -> None:
        """Let someone hold tensors to the end."""
        for block in (self.on[t] for t in tensors):
            if block is not None:
                self.users[block] += 1

    def _put(self, tensor: int, block: int | None) -> None:
        if block is not None:  # before the old one is dropped, which may be on the same block
            self.users[block] += 1 + (tensor in self.held)
            self.held.discard(tensor)
        if tensor in self.on:
            self.drop(tensor)
        self.on[tensor] = block

    def drop(self, tensor: int) -> None:
        block = self.on.pop(tensor)
        if block is not None:
            self.users[block] -= 1
            if not self.users[block]:
                self._end(block)

    def _end(self, block: int) -> None:
        self.lives[block] = replace(self.lives[block], last=self.position - 1)

    def leave_only(self, survivors: Iterable[int]) -> None:
        """Drop all tensors but some; at the end of the step, what the caller holds ends too."""
        stay = {*survivors, *self.graph.inputs}
        for tensor in [t for t in self.on if t not in stay]:
            self.drop(tensor)
        if not survivors:
            for block, users in enumerate(self.users):
                if users:
                    self._end(block)
