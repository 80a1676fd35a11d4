"""Numbers and tables of `hiremate compare`, `hiremate curve`, and `hiremate plan` on several GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..planning.comparing import Comparison, Curve, Outcome
from ..planning.plan import Plan
from ..records.costs import step_time_ms
from ..reporting.terminal import plain_table
from ..reporting.timeline import Band, planned_run
from ..units import format_bytes, format_ratio, format_time
from .offline import ACCUMULATED, OfflineStep
from .without_device import Rates

DRAWN = 4  # how many budgets a picture adds if the user gave one

Columns = Mapping[str, Callable[[dict[str, Any]], str]]  # of a table: each header, and the cell for a row of numbers


def wrapped(notes: Iterable[str]) -> Group:
    """Return notes below each other, wrapped to the width of the terminal."""
    return Group(*(Text(note, "dim") for note in notes))


def _table(columns: Columns, rows: Iterable[dict[str, Any]], words: Sequence[str]) -> Table:
    """Return a table of rows of numbers; columns whose header is in `words` align left."""
    return plain_table(columns, ([cell(row) for cell in columns.values()] for row in rows), words)


# ---------------------------------------------------------------- methods under the same budgets


def spread(least: int, most: int) -> list[int]:
    """Return budgets between two, the largest first."""
    return [least + (most - least) * i // (DRAWN + 1) for i in reversed(range(1, DRAWN + 1))]


def method_numbers(
    comparison: Comparison, budgets: dict[int, str], resident_bytes: int, eager_bytes: int
) -> dict[str, Any]:
    """Return a comparison as plain data, resident bytes included; `budgets` maps added bytes to words."""

    def numbers_of(outcome: Outcome) -> dict[str, Any]:
        own_bytes = outcome.proposed_bytes
        return {
            "method": outcome.method,
            "fits": outcome.fits,
            "overhead": comparison.overhead(outcome) if outcome.fits else None,
            "distance": comparison.distance(outcome) if outcome.fits else None,
            "peak_bytes": resident_bytes + outcome.peak_bytes if outcome.peak_bytes else None,
            "own_overhead": outcome.proposed_ms / comparison.step_ms if own_bytes else None,
            "own_peak_bytes": resident_bytes + own_bytes if own_bytes else None,
            "note": outcome.note,
            "solve_s": outcome.solve_s,
            "status": outcome.status.value,
            "stopped_by": outcome.stopped_by,
        }

    return {
        "resident_bytes": resident_bytes,
        "unplanned_peak_bytes": resident_bytes + eager_bytes,
        "step_ms": comparison.step_ms,
        "budgets": [
            {
                "budget": budgets[budget],
                "budget_bytes": resident_bytes + budget,
                "bound_overhead": comparison.bound_overhead(budget),
                "is_impossible": comparison.is_impossible(budget),
                "methods": [numbers_of(outcome) for outcome in comparison.under(budget)],
            }
            for budget in comparison.budgets
        ],
    }


def method_tables(numbers: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield for each budget its proven bound, a table of methods, the fastest first, and the methods' notes."""
    columns: Columns = {
        "method": lambda row: row["method"],
        "extra time": lambda row: format_ratio(row["overhead"]) if row["fits"] else "no plan",
        "above bound": lambda row: format_ratio(row["distance"]) if row["fits"] else "",
        "peak": lambda row: format_bytes(row["peak_bytes"]) if row["peak_bytes"] else "",
        "solved in": lambda row: format_time(1000 * row["solve_s"]),
        "ended by": lambda row: "itself" if row["stopped_by"] == "end of the search" else row["stopped_by"],
    }
    for budget in numbers["budgets"]:
        words, size = budget["budget"], format_bytes(budget["budget_bytes"])
        bound = f"no plan is below {format_ratio(budget['bound_overhead'])}"
        proven = "nothing fits" if budget["is_impossible"] else bound
        yield Text(f"\nbudget {words if words == size else f'{words} ({size})'}, proven: {proven}")
        yield _table(columns, budget["methods"], words=("method", "ended by"))
        yield wrapped(f"{row['method']}: {row['note']}" for row in budget["methods"] if row["note"])


# ---------------------------------------------------------------- the curve from budget to time


def curve_points(curve: Curve, resident_bytes: int, eager_bytes: int) -> list[dict[str, Any]]:
    """List the points of a curve, resident bytes included; the last one is eager training."""
    step_ms = curve.problem.step_ms
    points = [(p.peak_bytes, p.recompute_ms, curve.solution(p.peak_bytes).bound_ms, p.strategy) for p in curve.points]
    return [
        {
            "peak_bytes": resident_bytes + peak_bytes,
            "step_ms": step_ms + recompute_ms,
            "overhead": recompute_ms / step_ms if step_ms else 0.0,
            "bound_overhead": bound_ms / step_ms if step_ms else 0.0,
            "strategy": strategy,
        }
        for peak_bytes, recompute_ms, bound_ms, strategy in [*points, (eager_bytes, 0.0, 0.0, "plain training")]
    ]


def curve_table(points: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the points of a curve."""
    columns: Columns = {
        "peak memory": lambda point: format_bytes(point["peak_bytes"], up=True),
        "step": lambda point: format_time(point["step_ms"]),
        "extra time": lambda point: format_ratio(point["overhead"]),
        "no plan below": lambda point: format_ratio(point["bound_overhead"]),
        "found by": lambda point: point["strategy"],
    }
    return _table(columns, points, words=("found by",))


# ---------------------------------------------------------------- numbers of GPUs

POWERS = tuple(2**power for power in range(11))  # the numbers of GPUs that "auto" tries, up to 1024
ENOUGH = 8  # from this number of GPUs on, "auto" ends if more of them don't help
FALLS = 0.98  # more GPUs help if the eager peak is at most this share of the peak on half as many
# The parts of a peak: the name, and the resident parts or bands that it sums up.
PARTS = {
    "parameters": ("parameters",),
    "optimizer state": ("optimizer state",),
    "gradients": (Band.GRADIENT, ACCUMULATED),
    "outside": (Band.OUTSIDE,),
    "activations": (Band.SAVED, Band.PASSING, Band.RECOMPUTED),
}
OTHERS = "others"


Count = dict[str, Any]  # a step on some number of GPUs, as `count_of` describes it


def count_of(plan: Plan, captured: OfflineStep, rates: Rates) -> Count:
    """Return a plan on some number of GPUs as plain data; bytes are per GPU."""
    layout = captured.options.layout
    return {
        "gpus": layout.count,
        "fsdp": layout.shards,  # number of GPUs that parameters are sharded over
        "tp": layout.parts,  # number of GPUs that each block is divided over
        "fits": not plan.exceeds_budget,
        "unplanned_peak_bytes": plan.unplanned_peak_bytes,
        "peak_bytes": plan.planned_peak_bytes,  # the smallest peak found if none fits
        "peak_parts": _peak_parts(plan, captured.gradients_bytes),
        "step_ms": step_time_ms(plan.graph, plan.profile),  # computation of the eager step
        "overhead": plan.predicted_overhead,
        "sent_bytes": captured.sent_bytes,  # to the other GPUs in a step
        "sending_ms": captured.sent_bytes / rates.link_bytes_per_ms,  # without overlap with computation
    }


def _peak_parts(plan: Plan, gradients_bytes: int) -> dict[str, int]:
    """Split the peak of a plan by what is in memory, including the gradients of all parameters of this process."""
    step = planned_run(plan)
    sizes, kept_bytes, end = Counter(dict(plan.resident_parts)), 0, len(plan.planned.timeline) - 1
    for life in step.live_at_peak:
        sizes[life.band] += life.size_bytes
        # FSDP2 keeps shards of gradients from the backward to the end of the step: no graph has them.
        if life.band is Band.OUTSIDE and plan.planned.turn <= life.first and life.last == end:
            kept_bytes += life.size_bytes
    shards_bytes = min(gradients_bytes, kept_bytes)
    parts_bytes = {name: sum(sizes[part] for part in parts) for name, parts in PARTS.items()}
    parts_bytes["gradients"] += shards_bytes
    parts_bytes["outside"] -= shards_bytes
    rest = plan.planned_peak_bytes - sum(parts_bytes.values())
    parts_bytes["outside"] += min(0, rest)  # outside code reuses memory that it frees
    return {**parts_bytes, OTHERS: max(0, rest)}


def ends_auto(counts: Sequence[Count]) -> bool:
    """Whether "auto" ends with the latest of some counts: a plan fits, or more GPUs don't help."""
    *before, last = counts
    if last["fits"] or last["fsdp"] <= ENOUGH:
        return bool(last["fits"])
    return bool(last["unplanned_peak_bytes"] > FALLS * before[-1]["unplanned_peak_bytes"])


def answer(counts: Sequence[Count]) -> str:
    """Answer how many GPUs are needed."""
    fitting = [count for count in counts if count["fits"]]
    if not fitting:
        least = min(counts, key=lambda count: count["peak_bytes"])
        peak, more = format_bytes(least["peak_bytes"], up=True), ", or divide activations too (--tp)"
        return (
            f"None of these is enough: the smallest peak found is {peak} on each GPU, with {least['gpus']}. "
            f"Raise the budget, or make the batch smaller{more if least['tp'] == 1 else ''}."
        )
    least = min(fitting, key=lambda count: count["gpus"])
    enough = "1 GPU is enough" if least["gpus"] == 1 else f"{least['gpus']} GPUs are enough"
    if not least["overhead"]:
        return f"{enough}; nothing is recomputed."
    text = f"{enough}, with {format_ratio(least['overhead'])} time for recomputation."
    plain = [count["gpus"] for count in fitting if not count["overhead"]]
    return f"{text} With {min(plain)} nothing is recomputed." if plain else text


def count_line(count: Count) -> str:
    """Describe the plan on a number of GPUs in one line."""
    gpus, peak = "1 GPU" if count["gpus"] == 1 else f"{count['gpus']} GPUs", format_bytes(count["peak_bytes"], up=True)
    if not count["fits"]:
        return f"{gpus}: does not fit, the smallest peak found is {peak}"
    extra = f"extra time {format_ratio(count['overhead'])}" if count["overhead"] else "nothing recomputed"
    return f"{gpus}: fits, peak {peak}, {extra}"


def counts_table(counts: Sequence[Count]) -> Table:
    """Return a table with a column for each number of GPUs."""
    gpus = (str(count["gpus"]) if count["tp"] == 1 else f"{count['fsdp']} x {count['tp']}" for count in counts)
    rows = {
        "fits": ["yes" if count["fits"] else "no" for count in counts],
        "peak of plain training": [format_bytes(count["unplanned_peak_bytes"], up=True) for count in counts],
        "peak of the plan": [format_bytes(count["peak_bytes"], up=True) for count in counts],
        **{f"  {part}": [format_bytes(count["peak_parts"][part]) for count in counts] for part in (*PARTS, OTHERS)},
        "extra time": [format_ratio(count["overhead"]) for count in counts],
        "computing": [format_time(count["step_ms"]) for count in counts],
        "sending": [format_time(count["sending_ms"]) for count in counts],
        "sent": [format_bytes(count["sent_bytes"]) for count in counts],
    }
    return plain_table(("GPUs", *gpus), ((name, *cells) for name, cells in rows.items()), words=("GPUs",))
