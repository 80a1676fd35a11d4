"""The curve from budget to time as a table: one point a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from ..planning.solvers import Curve
from ..reporting.terminal import plain_table
from ..units import format_bytes, format_ratio, format_time


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of the curve: bytes with what is resident, milliseconds, ratios of the time without recomputation."""

    peak_bytes: int
    step_ms: float
    overhead: float
    bound_overhead: float
    strategy: str


def points_of(found: Curve, resident_bytes: int) -> list[CurvePoint]:
    """List the points of a curve."""
    step_ms = found.problem.step_ms
    return [
        CurvePoint(
            resident_bytes + point.peak_bytes,
            step_ms + point.recompute_ms,
            point.recompute_ms / step_ms if step_ms else 0.0,
            found.solution(point.peak_bytes).bound_ms / step_ms if step_ms else 0.0,
            point.strategy,
        )
        for point in found.points
    ]


def curve_table(points: Sequence[CurvePoint]) -> Table:
    """Put points into a table."""
    rows = (
        (
            format_bytes(point.peak_bytes, up=True),
            format_time(point.step_ms),
            format_ratio(point.overhead),
            format_ratio(point.bound_overhead),
            point.strategy,
        )
        for point in points
    )
    return plain_table(("peak memory", "step", "extra time", "no plan below", "found by"), rows, words=("found by",))
