"""What `hiremate compare` and `hiremate curve` show: tables, words and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ..planning.comparing import Comparison, Curve, Outcome
from ..reporting.terminal import plain_table
from ..units import format_bytes, format_ratio, format_time

DRAWN = 4  # budgets that a picture adds to a single one, up to plain training


def spread(least: int, most: int) -> list[int]:
    """Return budgets between one that is known and that of plain training, the largest first."""
    return [least + (most - least) * i // (DRAWN + 1) for i in reversed(range(1, DRAWN + 1))]


def comparison_table(comparison: Comparison, budget_bytes: int, resident_bytes: int) -> Table:
    """Draw a row for each method: the fastest first, those that found nothing last."""
    headers = "method", "extra time", "above bound", "peak", "solved in", "ended by"
    rows = (_cells(comparison, outcome, resident_bytes) for outcome in comparison.under(budget_bytes))
    return plain_table(headers, rows, words=("method", "ended by"))


def _cells(comparison: Comparison, outcome: Outcome, resident_bytes: int) -> tuple[str, ...]:
    return (
        outcome.method,
        format_ratio(comparison.overhead(outcome)) if outcome.fits else "no plan",
        format_ratio(comparison.distance(outcome)) if outcome.fits else "",
        format_bytes(resident_bytes + outcome.peak_bytes) if outcome.peak_bytes else "",
        format_time(1000 * outcome.solve_s),
        "itself" if outcome.stopped_by == "end of the search" else outcome.stopped_by,
    )


def budget_line(comparison: Comparison, budget_bytes: int, words: str, resident_bytes: int) -> str:
    """Describe a budget, and what is proven of it."""
    if comparison.is_impossible(budget_bytes):
        proven = "proven: nothing fits"
    else:
        proven = f"proven: no plan is below {format_ratio(comparison.bound_overhead(budget_bytes))}"
    size = format_bytes(resident_bytes + budget_bytes)
    return f"budget {words}, {proven}" if words == size else f"budget {words} ({size}), {proven}"


def comparison_numbers(
    comparison: Comparison, budgets: dict[int, str], resident_bytes: int, plain_bytes: int
) -> dict[str, Any]:
    """Write a comparison as plain data, resident bytes included; budgets come in words, by what the step may add."""
    return {
        "resident_bytes": resident_bytes,
        "unplanned_peak_bytes": resident_bytes + plain_bytes,
        "step_ms": comparison.step_ms,
        "budgets": [
            {
                "budget": budgets[budget],
                "budget_bytes": resident_bytes + budget,
                "bound_overhead": comparison.bound_overhead(budget),
                "is_impossible": comparison.is_impossible(budget),
                "methods": [_numbers(comparison, o, resident_bytes) for o in comparison.under(budget)],
            }
            for budget in comparison.budgets
        ],
    }


def _numbers(comparison: Comparison, outcome: Outcome, resident_bytes: int) -> dict[str, Any]:
    return {
        "method": outcome.method,
        "fits": outcome.fits,
        "overhead": comparison.overhead(outcome) if outcome.fits else None,
        "distance": comparison.distance(outcome) if outcome.fits else None,
        "peak_bytes": resident_bytes + outcome.peak_bytes if outcome.peak_bytes else None,
        "own_overhead": outcome.proposed_ms / comparison.step_ms if outcome.proposed_bytes else None,
        "own_peak_bytes": resident_bytes + outcome.proposed_bytes if outcome.proposed_bytes else None,
        "note": outcome.note,
        "solve_s": outcome.solve_s,
        "status": outcome.status.value,
        "stopped_by": outcome.stopped_by,
    }


# ---------------------------------------------------------------- the curve from budget to time


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of the curve: bytes with what is resident, milliseconds, ratios of the time without recomputation."""

    peak_bytes: int
    step_ms: float
    overhead: float
    bound_overhead: float
    strategy: str


def points_of(curve: Curve, resident_bytes: int) -> list[CurvePoint]:
    """List the points of a curve."""
    step_ms = curve.problem.step_ms
    return [
        CurvePoint(
            resident_bytes + point.peak_bytes,
            step_ms + point.recompute_ms,
            point.recompute_ms / step_ms if step_ms else 0.0,
            curve.solution(point.peak_bytes).bound_ms / step_ms if step_ms else 0.0,
            point.strategy,
        )
        for point in curve.points
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
