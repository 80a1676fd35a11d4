"""Who occupies memory and when: the life of every block of a step, by what it is for.

The simulator finds the blocks; this module names them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from ..records.graph import OUTSIDE, Graph, StorageKind
from ..records.schedule import Compute, CopyIn, Schedule
from ..records.simulation import blocks
from ..records.step import STALE_GRADIENTS


class Band(str, Enum):
    """What a block is for, in the order in which bands are stacked, the longest-lived below."""

    SAVED = "saved activations"
    AWAY = "activations that go to the host"
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
    run = [op.node for op in (*schedule.forward, *schedule.backward) if isinstance(op, Compute)]
    turn = sum(isinstance(op, Compute) for op in schedule.forward)
    stale = {tensor.storage for tensor in graph.tensors if tensor.name == STALE_GRADIENTS}
    away: dict[int, int | None] = {op.storage: None for op in schedule.backward if isinstance(op, CopyIn)}
    found = []
    for storage, first, last in blocks(graph, schedule):
        if not graph.sizes[storage]:
            continue
        node = None if graph.storages[storage].kind is StorageKind.TANGENT else run[first]
        if storage in stale:
            band = Band.GRADIENT
        elif storage in away:  # two blocks, before it goes away and when it is back; later ones are computed again
            band, maker = Band.AWAY, away.pop(storage)
            if maker is None:
                away[storage] = node
            else:
                node = maker
        else:
            band = _band(graph, storage, node, first >= turn, last >= turn)
        found.append(Lifetime(storage, node, band, graph.sizes[storage], first, last))
    return tuple(found)


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


def _band(graph: Graph, storage: int, node: int | None, is_of_backward: bool, is_saved: bool) -> Band:
    """Find what a block is for."""
    if node is None:
        return Band.GRADIENT
    if graph.nodes[node].op == OUTSIDE:
        return Band.OUTSIDE
    if graph.storages[storage].kind is StorageKind.GRADIENT:
        return Band.GRADIENT
    if is_of_backward:
        return Band.RECOMPUTED
    return Band.SAVED if is_saved else Band.PASSING
