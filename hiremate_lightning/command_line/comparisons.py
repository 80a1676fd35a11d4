"""What `hiremate compare` takes and shows: budgets, methods, tables, numbers. The table of `hiremate curve`, too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ..errors import ConfigurationError
from ..planning.comparing import Comparison, Outcome, methods_to_compare
from ..planning.solvers import Curve
from ..planning.solvers.worker import check_strategy
from ..reporting.terminal import plain_table
from ..units import Budget, format_bytes, format_ratio, format_time, parse_budget

BETWEEN = re.compile(r"(?<=[A-Za-z%])\s*,\s*")  # after a unit, or "auto"; other commas group digits
DRAWN = 4  # budgets that a picture adds to a single one, up to plain training


def parse_budgets(text: str) -> tuple[Budget, ...]:
    """Read one budget or several, such as "70%,50%,30%".

    Raises:
        BudgetError: If one can't be read.
    """
    return tuple(dict.fromkeys(parse_budget(part) for part in BETWEEN.split(text)))


def parse_methods(text: str | None) -> tuple[str, ...]:
    """Read names of methods, and check that each can run here.

    Raises:
        ConfigurationError: If there is no method of a name, or it needs a MIP solver and none works.
    """
    if text is None:
        return methods_to_compare()
    names = read_methods(text)
    for name in names:
        check_strategy(name)
    return names


def read_methods(text: str | None) -> tuple[str, ...]:
    """Read names of methods, such as "portfolio,rotor"; none where none were asked for.

    Raises:
        ConfigurationError: If the text has no name.
    """
    if text is None:
        return ()
    names = tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    if not names:
        raise ConfigurationError(f"--methods names none, found {text!r}. Name some, such as portfolio,hilp.")
    return names


def spread(least: int, most: int) -> list[int]:
    """Return budgets between one that is known and that of plain training, the largest first."""
    return [least + (most - least) * i // (DRAWN + 1) for i in reversed(range(1, DRAWN + 1))]


def comparison_table(comparison: Comparison, budget_bytes: int, resident_bytes: int) -> Table:
    """Draw a row for each method: the fastest first, those that found nothing last."""
    headers = "method", "extra time", "above bound", "peak", "solved in", "ended by"
    rows = ((o.method, *_cells(comparison, o, resident_bytes)) for o in comparison.under(budget_bytes))
    return plain_table(headers, rows, words=("method", "ended by"))


def _cells(comparison: Comparison, outcome: Outcome, resident_bytes: int) -> tuple[str, ...]:
    extra = format_ratio(comparison.overhead(outcome)) if outcome.fits else "no plan"
    distance = format_ratio(comparison.distance(outcome)) if outcome.fits else ""
    peak = format_bytes(resident_bytes + outcome.peak_bytes) if outcome.peak_bytes else ""
    ended = "itself" if outcome.stopped_by == "end of the search" else outcome.stopped_by
    return extra, distance, peak, format_time(1000 * outcome.solve_s), ended


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
    """Write what is done as plain data; bytes are with what is resident.

    Args:
        comparison: What is done.
        budgets: Budgets in words, by the bytes that the step may add.
        resident_bytes: Bytes that exist before the step.
        plain_bytes: Peak of plain training above these.
    """
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


def method_notes(comparison: Comparison, budget_bytes: int) -> list[str]:
    """List for each method what it could not serve under a budget, and what it took instead."""
    return [f"{o.method}: {o.note}" for o in comparison.under(budget_bytes) if o.note]


def finished_words(done: int, asked: int) -> Sequence[str]:
    """Describe how far an interrupted comparison came; nothing for a complete one."""
    return () if done >= asked else (f"Interrupted: {done} of {asked} solves are done. The rest is left out.",)


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
