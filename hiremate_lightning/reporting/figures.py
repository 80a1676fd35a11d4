"""What the pictures of a plan show, as plain data: two runs of the step, and time against budget.

A `DrawnStep` holds what occupies memory at each operation of the plain or of the planned step. `Frontier` holds
schedules that were found for other budgets, the bound below which none exists, and where the plan lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..planning.plan import Plan, proof_words
from ..planning.solvers.curve import Curve
from ..records.costs import as_plain, step_time_ms
from ..records.graph import Direction, Graph
from ..records.schedule import Schedule, as_written, lower
from ..records.simulation import Simulation
from ..units import format_ratio
from .lifetimes import Band, Lifetime, band_bytes, lifetimes

TINY = 1e-9  # of a column: what rounding may add to an end
RESIDENT = "resident before the step"
OTHER = "other, resident"
# Told apart also without red and green; resident bytes are grey.
COLOURS = {
    Band.SAVED: "#4477aa",
    Band.AWAY: "#117a8b",
    Band.PASSING: "#a6c8e4",
    Band.RECOMPUTED: "#ee7733",
    Band.OUTSIDE: "#aa6fb0",
    Band.GRADIENT: "#3f9b62",
    Band.WORKSPACE: "#e3c53d",
}
GREYS = ("#7d828b", "#959aa2", "#abafb6", "#c0c4ca", "#d3d6db", "#e2e4e8")
INK, FAINT, BUDGET = "#22262d", "#6b7280", "#c2185b"


@dataclass(frozen=True)
class DrawnStep:
    """One of the two steps that are drawn.

    Attributes:
        plan: The plan.
        graph: Its graph, or that of plain PyTorch.
        name: "plain" or "planned".
        schedule: What runs.
        simulation: Its timeline.
        workspace_bytes: By node.
    """

    plan: Plan
    graph: Graph
    name: str
    schedule: Schedule
    simulation: Simulation
    workspace_bytes: tuple[int, ...]

    @cached_property
    def lives(self) -> tuple[Lifetime, ...]:
        """Blocks that it allocates."""
        return lifetimes(self.graph, self.schedule)

    @cached_property
    def bands(self) -> dict[Band, list[int]]:
        """Bytes by band and operation, workspace included."""
        nodes = [moment.node for moment in self.simulation.timeline]
        needed = [self.workspace_bytes[node] for node in nodes]
        found, workspace = band_bytes(self.lives, len(nodes)), [max(0, size) for size in needed]
        if Band.GRADIENT in found:  # one that takes the memory of what it is made of is there once
            found[Band.GRADIENT] = [g + min(0, size) for g, size in zip(found[Band.GRADIENT], needed, strict=True)]
        return {**found, Band.WORKSPACE: workspace} if any(workspace) else found

    @cached_property
    def starts_ms(self) -> list[float]:
        """When each operation starts, and when the last one ends."""
        clock, found = 0.0, [0.0]
        for moment in self.simulation.timeline:
            clock += self.plan.profile.time_ms[moment.node]
            found.append(clock)
        return found

    def spans(self, columns: int, end_ms: float) -> Iterator[tuple[int, float, float]]:
        """Go through the operations; yield the position of each, and where it starts and ends.

        Args:
            columns: Columns of the drawing.
            end_ms: Time at its right edge; where that is 0, all operations are as wide.
        """
        count = len(self.simulation.timeline)
        starts = (
            [start / end_ms for start in self.starts_ms] if end_ms else [i / max(1, count) for i in range(count + 1)]
        )
        yield from ((i, starts[i] * columns, starts[i + 1] * columns) for i in range(count))

    def by_column(self, columns: int, end_ms: float) -> list[int]:
        """For each column up to the end of the step, find the operation in it that has the most memory."""
        spans, timeline = list(self.spans(columns, end_ms)), self.simulation.timeline
        last = max(1, min(columns, math.ceil(spans[-1][2] - TINY))) if spans else 0
        found = [-1] * last
        for position, start, end in spans:
            first = int(start + TINY)
            for column in range(min(first, last - 1), min(max(first + 1, math.ceil(end - TINY)), last)):
                if found[column] < 0 or timeline[position].peak_bytes > timeline[found[column]].peak_bytes:
                    found[column] = position
        return found

    def is_again(self, position: int) -> bool:
        """Whether the operation at a position recomputes something."""
        node = self.plan.graph.nodes[self.simulation.timeline[position].node]
        return position >= self.simulation.turn and node.direction is Direction.FORWARD


def plain_run(plan: Plan) -> DrawnStep:
    """Return the step with everything kept."""
    graph, profile = as_plain(plan.graph, plan.profile)
    return DrawnStep(plan, graph, "plain", lower(graph, as_written(graph)), plan.unplanned, profile.workspace_bytes)


def planned_run(plan: Plan) -> DrawnStep:
    """Return the step under the plan."""
    return DrawnStep(plan, plan.graph, "planned", plan.schedule, plan.planned, plan.profile.workspace_bytes)


def resident_bands(plan: Plan) -> tuple[tuple[str, str, int], ...]:
    """Name and colour the resident bytes, as far as they were counted apart; the parts add up to all of them."""
    known = [(f"{name}, resident", size_bytes) for name, size_bytes in plan.resident_parts if size_bytes]
    rest = plan.resident_bytes - sum(size_bytes for _, size_bytes in known)
    if rest < 0 or not known:
        known, rest = [], plan.resident_bytes
    parts = [*known, *([(OTHER if known else RESIDENT, rest)] if rest else [])]
    return tuple((name, GREYS[min(i, len(GREYS) - 1)], size_bytes) for i, (name, size_bytes) in enumerate(parts))


def binary_unit(size_bytes: int) -> tuple[int, str]:
    """Choose the binary unit in which a size is a handy number."""
    units = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next(((size, name) for size, name in units if size_bytes >= 2 * size), (1, "B"))


def short_source(source: str) -> str:
    """Shorten a source line's path to its last three parts."""
    return "/".join(source.replace("\\", "/").split("/")[-3:])


# ---------------------------------------------------------------- budget against time

Point = tuple[float, float]  # bytes with resident ones, and extra time over the step's, a ratio


@dataclass(frozen=True, slots=True)
class Frontier:
    """Extra time against budget.

    Attributes:
        found: Fastest schedules found, from the least memory to plain training.
        bounds: Budgets, and the extra time below which nothing exists within them.
        plain: Plain training.
        planned: The plan as predicted.
        measured: The plan as measured, None before that.
    """

    found: tuple[Point, ...]
    bounds: tuple[Point, ...]
    plain: Point
    planned: Point
    measured: Point | None


def frontier_of(plan: Plan, curve: Curve) -> Frontier:
    """Put a plan among the schedules that are known for other budgets of its step."""
    known = curve.with_solution(plan.planned.peak_bytes, plan.solution)  # its bound was proven for at least that much
    step_ms = step_time_ms(plan.graph, plan.profile) or 1.0

    def place(peak_bytes: int, extra_ms: float) -> Point:
        return plan.resident_bytes + peak_bytes, extra_ms / step_ms

    most = max([plan.unplanned.peak_bytes, *(point.peak_bytes for point in known.points)])
    found = [place(point.peak_bytes, point.extra_ms) for point in known.points]
    found.append((max(found[-1][0], place(most, 0)[0]), found[-1][1]) if found else place(most, 0))
    proven = () if plan.solution.aways else _falling(known.bounds)  # of plans in which all stays on the device
    bounds = [place(budget, bound_ms) for budget, bound_ms in proven if budget <= most]
    measured = plan.measured
    return Frontier(
        tuple(found),
        tuple(bounds),
        (plan.unplanned_peak_bytes, 0.0),
        place(plan.planned.peak_bytes, plan.planned.extra_ms),
        None if measured.peak_bytes is None or measured.overhead is None else (measured.peak_bytes, measured.overhead),
    )


def _falling(bounds: tuple[tuple[int, float], ...]) -> list[tuple[int, float]]:
    """Return the best bound for each budget: a bound holds for every smaller budget too."""
    found: list[tuple[int, float]] = []
    best = 0.0
    for budget, bound_ms in reversed(bounds):
        best = max(best, bound_ms)
        found.append((budget, best))
    return found[::-1]


def frontier_words(plan: Plan) -> str:
    """Describe how good the plan is proven to be."""
    if plan.solution.is_plain:
        return "Nothing is recomputed: no plan is faster."
    return f"This plan: {format_ratio(plan.predicted_overhead)}, {proof_words(plan.to_dict())}."
