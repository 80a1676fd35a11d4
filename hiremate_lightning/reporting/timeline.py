"""The memory of a step over time, for the terminal, the SVG pictures and the page.

The simulator returns the blocks of memory; `lifetimes` gives each block its band. A `DrawnStep` adds the blocks up for
each operation of the eager or of the planned step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate

from ..planning.plan import Plan
from ..records.costs import in_eager
from ..records.graph import OUTSIDE, Direction, Graph, StorageKind
from ..records.schedule import Compute, CopyIn, Schedule, eager_decisions, lower
from ..records.simulation import Simulation, blocks
from ..records.step import STALE_GRADIENTS


class Band(str, Enum):
    """The purpose of a block, in the order in which bands are stacked, the longest-lived at the bottom."""

    SAVED = "saved activations"
    OFFLOADED = "activations that go to the host"
    PASSING = "activations, not saved"
    RECOMPUTED = "recomputed activations"
    OUTSIDE = "outside the plan"
    GRADIENT = "gradients"
    WORKSPACE = "workspace"


TINY = 1e-9  # of a column: the rounding error of an end
RESIDENT = "resident before the step"
OTHER = "other, resident"
# Distinct without red and green too; resident bytes are grey.
COLOURS = {
    Band.SAVED: "#4477aa",
    Band.OFFLOADED: "#117a8b",
    Band.PASSING: "#a6c8e4",
    Band.RECOMPUTED: "#ee7733",
    Band.OUTSIDE: "#aa6fb0",
    Band.GRADIENT: "#3f9b62",
    Band.WORKSPACE: "#e3c53d",
}
GREYS = ("#7d828b", "#959aa2", "#abafb6", "#c0c4ca", "#d3d6db", "#e2e4e8")
INK, FAINT, BUDGET = "#22262d", "#6b7280", "#c2185b"


# ---------------------------------------------------------------- who occupies memory, and when


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The life of one block, from the first to the last operation, as positions in the simulated timeline."""

    storage: int  # a recomputed storage has one block per computation
    node: int | None  # the node that allocates the block, None for incoming gradients
    band: Band
    size_bytes: int
    first: int
    last: int  # the block is freed at the end of this operation


def lifetimes(graph: Graph, schedule: Schedule) -> tuple[Lifetime, ...]:
    """Return every non-empty block that a step allocates under a valid schedule, in order of allocation."""
    run = [op.node for op in (*schedule.forward, *schedule.backward) if isinstance(op, Compute)]
    turn = sum(isinstance(op, Compute) for op in schedule.forward)
    stale = {tensor.storage for tensor in graph.tensors if tensor.name == STALE_GRADIENTS}
    offloaded = {op.storage for op in schedule.backward if isinstance(op, CopyIn)}
    makers = dict[int, int | None]()  # of the storages offloaded so far
    lives = []
    for storage, first, last in blocks(graph, schedule):
        if not graph.sizes[storage]:
            continue
        node = None if graph.storages[storage].kind is StorageKind.TANGENT else run[first]
        band = Band.GRADIENT if storage in stale else _band(graph, storage, node, first >= turn, last >= turn)
        if storage in offloaded - stale:  # two blocks: before the copy to the host, and after the copy back
            if storage in makers:
                offloaded.remove(storage)  # later blocks are recomputed
            band, node = Band.OFFLOADED, makers.setdefault(storage, node)
        lives.append(Lifetime(storage, node, band, graph.sizes[storage], first, last))
    return tuple(lives)


def band_bytes(lives: Iterable[Lifetime], length: int) -> dict[Band, list[int]]:
    """Return, for each band that occurs, in stacking order, its bytes while each operation runs."""
    changes = {band: [0] * (length + 1) for band in Band}
    for life in lives:
        if life.first <= life.last:
            changes[life.band][life.first] += life.size_bytes
            changes[life.band][life.last + 1] -= life.size_bytes
    sizes_by_band = {band: list(accumulate(steps[:length])) for band, steps in changes.items()}
    return {band: sizes for band, sizes in sizes_by_band.items() if any(sizes)}


def _band(graph: Graph, storage: int, node: int | None, is_of_backward: bool, is_saved: bool) -> Band:
    """Return the band of a block."""
    if node is not None and graph.nodes[node].op == OUTSIDE:
        return Band.OUTSIDE
    if node is None or graph.storages[storage].kind is StorageKind.GRADIENT:
        return Band.GRADIENT
    if is_of_backward:
        return Band.RECOMPUTED
    return Band.SAVED if is_saved else Band.PASSING


# ---------------------------------------------------------------- the two steps that are drawn


@dataclass(frozen=True)
class DrawnStep:
    """One of the two steps of a drawing: eager or planned."""

    plan: Plan
    graph: Graph  # of the plan, or of the eager step
    name: str  # "plain" or "planned"
    schedule: Schedule
    simulation: Simulation
    workspace_bytes: tuple[int, ...]  # workspace of each node

    @cached_property
    def lives(self) -> tuple[Lifetime, ...]:
        """The blocks that the step allocates."""
        return lifetimes(self.graph, self.schedule)

    @cached_property
    def bands(self) -> dict[Band, list[int]]:
        """Bytes by band and operation, workspace included."""
        nodes = [moment.node for moment in self.simulation.timeline]
        needed = [self.workspace_bytes[node] for node in nodes]
        bands, workspace = band_bytes(self.lives, len(nodes)), [max(0, size) for size in needed]
        if Band.GRADIENT in bands:  # a gradient in the memory of its source counts once
            bands[Band.GRADIENT] = [g + min(0, size) for g, size in zip(bands[Band.GRADIENT], needed, strict=True)]
        return {**bands, Band.WORKSPACE: workspace} if any(workspace) else bands

    @cached_property
    def starts_ms(self) -> list[float]:
        """The start of each operation, and the end of the last one, in ms."""
        times_ms = (self.plan.profile.time_ms[moment.node] for moment in self.simulation.timeline)
        return list(accumulate(times_ms, initial=0.0))

    def spans(self, columns: int, end_ms: float) -> Iterator[tuple[int, float, float]]:
        """Yield each position with the columns of its start and end; all equally wide if no operation takes time."""
        count = len(self.simulation.timeline)
        starts, end = (self.starts_ms, end_ms) if end_ms else (range(count + 1), max(1, count))
        places = [start / end * columns for start in starts]
        yield from zip(range(count), places, places[1:], strict=False)

    def by_column(self, columns: int, end_ms: float) -> list[int]:
        """Return, for each column up to the end of the step, the operation in it with the most memory."""
        spans, timeline = list(self.spans(columns, end_ms)), self.simulation.timeline
        last = max(1, min(columns, math.ceil(spans[-1][2] - TINY))) if spans else 0
        highest = [-1] * last
        for position, start, end in spans:
            first = int(start + TINY)
            for column in range(min(first, last - 1), min(max(first + 1, math.ceil(end - TINY)), last)):
                if highest[column] < 0 or timeline[position].peak_bytes > timeline[highest[column]].peak_bytes:
                    highest[column] = position
        return highest

    @property
    def peak_position(self) -> int:
        """The position of the operation with the most memory."""
        return self.simulation.timeline.index(self.simulation.peak_moment)

    @property
    def live_at_peak(self) -> list[Lifetime]:
        """The blocks in memory at the peak."""
        return [life for life in self.lives if life.first <= self.peak_position <= life.last]

    def is_again(self, position: int) -> bool:
        """Whether the operation at a position recomputes something."""
        node = self.plan.graph.nodes[self.simulation.timeline[position].node]
        return position >= self.simulation.turn and node.direction is Direction.FORWARD


def eager_run(plan: Plan) -> DrawnStep:
    """Return the eager step of a plan."""
    graph, profile = in_eager(plan.graph, plan.profile)
    schedule = lower(graph, eager_decisions(graph))
    return DrawnStep(plan, graph, "plain", schedule, plan.unplanned, profile.workspace_bytes)


def planned_run(plan: Plan) -> DrawnStep:
    """Return the planned step of a plan."""
    return DrawnStep(plan, plan.graph, "planned", plan.schedule, plan.planned, plan.profile.workspace_bytes)


def resident_bands(plan: Plan) -> tuple[tuple[str, str, int], ...]:
    """Return (name, colour, bytes) of each part of the resident bytes that was counted; the parts add up to all."""
    counted = [(f"{name}, resident", size_bytes) for name, size_bytes in plan.resident_parts if size_bytes]
    rest = plan.resident_bytes - sum(size_bytes for _, size_bytes in counted)
    if rest < 0 or not counted:
        counted, rest = [], plan.resident_bytes
    parts = [*counted, *([(OTHER if counted else RESIDENT, rest)] if rest else [])]
    return tuple((name, GREYS[min(i, len(GREYS) - 1)], size_bytes) for i, (name, size_bytes) in enumerate(parts))


def short_source(source: str) -> str:
    """Shorten a source line's path to its last three parts."""
    return "/".join(source.replace("\\", "/").split("/")[-3:])
