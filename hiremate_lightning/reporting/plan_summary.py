"""A plan in numbers and words: in files of JSON or in an HTML report, read back from these, and as metrics."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..planning.plan import Numbers, Plan, budget_words, offload_words, peak_words, planning_words, solver_words
from ..records.graph import StorageKind
from ..units import format_bytes, format_ratio, format_time
from .breakdown import ModuleRow, ModuleUse, advice_lines, module_rows, place_words, total_row

PREFIX = "hiremate/"  # of the metrics that experiment trackers get
METRICS = (
    "budget_bytes",
    "resident_bytes",
    "unplanned_peak_bytes",
    "planned_peak_bytes",
    "measured_peak_bytes",
    "predicted_overhead",
    "measured_overhead",
    "gap",
)
_MOST_INPUTS = 3  # of a step that are described
_IN_PAGE = re.compile(r'<script type="application/json" id="plan">(.*?)</script>', re.DOTALL)


def all_numbers(plan: Plan) -> dict[str, Any]:
    """Return the numbers of a plan with what a reader of the file sees: peak, batch, advice, and what modules keep."""
    rows = module_rows(plan)
    return {
        **plan.to_dict(),
        "at": place_words(plan),
        "batch": batch_words(plan),
        "advice": advice_lines(plan),
        "modules": [asdict(row) for row in (*rows, total_row(rows))],
    }


def plan_metrics(plan: Plan, plans: int = 1) -> dict[str, float]:
    """Name the numbers of a plan.

    Args:
        plan: A plan.
        plans: How many plans there are, one for each step signature.

    Returns:
        Bytes, ratios and seconds by name; what was not measured yet is left out.
    """
    numbers = plan.to_dict()
    metrics = {name: numbers[name] for name in METRICS}
    metrics |= {"planning_s": sum(numbers["planning"].values()), "plans": plans}
    return {f"{PREFIX}{name}": float(value) for name, value in metrics.items() if value is not None}


def rows_of(numbers: Numbers) -> tuple[list[ModuleRow], ModuleRow] | None:
    """Read the table of modules, and its sum, back from numbers; None where they have none."""
    rows = [
        ModuleRow(**{**row, "use": ModuleUse(**row["use"]), "shares": tuple(row["shares"])})
        for row in numbers.get("modules", ())
    ]
    return (rows[:-1], rows[-1]) if rows else None


def batch_words(plan: Plan) -> str:
    """Describe what a step is given, as sizes and type; "" where the graph has no such input."""
    graph = plan.graph
    inputs = (graph.tensors[tensor] for tensor in graph.inputs)
    described = [
        f"{' x '.join(map(str, tensor.shape))} {tensor.dtype}"
        for tensor in inputs
        if tensor.storage is not None and tensor.shape and graph.storages[tensor.storage].kind is StorageKind.INPUT
    ]
    return ", ".join(dict.fromkeys(described[:_MOST_INPUTS])) + (", ..." if len(described) > _MOST_INPUTS else "")


def verdict(numbers: Numbers) -> str:
    """Describe in one sentence whether a plan keeps its budget, what it saves, and what that costs."""
    name, budget = numbers["target"] or "The model", budget_words(numbers)
    measured_bytes, measured_time = numbers["measured_peak_bytes"], numbers["measured_overhead"]
    peak_bytes = numbers["planned_peak_bytes"] if measured_bytes is None else measured_bytes
    peak = f"{format_bytes(peak_bytes)} ({'predicted' if measured_bytes is None else 'measured'})"
    plain = format_bytes(numbers["unplanned_peak_bytes"])
    if peak_bytes > numbers["budget_bytes"]:
        over = format_bytes(peak_bytes - numbers["budget_bytes"])
        return f"{name} takes {peak}, {over} MORE than its budget of {budget}."
    if not numbers["predicted_overhead"]:
        return f"{name} takes {peak} and needs no plan: that is within its budget of {budget}, at no extra time."
    time = f"{format_ratio(numbers['predicted_overhead'])} time predicted"
    if measured_time is not None:
        time = f"{format_ratio(measured_time)} time measured, {format_ratio(numbers['predicted_overhead'])} predicted"
    return f"{name} trains in {peak} instead of {plain}, within its budget of {budget}, for {time}."


def read_summary(path: Path) -> dict[str, Any]:
    """Read the numbers of a plan from what `Plan.to_json`, `write_html` or `hiremate plan --json` wrote."""
    expected = "Expected what `hiremate plan --json FILE`, Plan.to_json() or write_html() wrote."
    try:
        text = path.read_text(encoding="utf-8")
        in_page = _IN_PAGE.search(text)
        data = json.loads(in_page[1] if in_page else text)
    except OSError as error:
        raise ConfigurationError(f"Can't read {str(path)!r}: {error.strerror}. {expected}") from error
    except ValueError:  # no text, or no JSON
        data = None
    if isinstance(data, dict) and "planned_step_ms" in data:
        return data
    raise ConfigurationError(f"{str(path)!r} is no plan. {expected}")


def summary_rows(numbers: Numbers, most_rounded: int | None = None) -> list[tuple[str, str]]:
    """Describe the numbers of a plan, by name and in words; of differences by rounding all, or so many at most."""
    resident, rounded = format_bytes(numbers["resident_bytes"]), numbers["rounded"]
    hidden = len(rounded[most_rounded:]) if most_rounded is not None else 0
    peak = f"{format_bytes(numbers['unplanned_peak_bytes'])} -> {peak_words(numbers, 'planned_peak_bytes', ' planned')}"
    if numbers["measured_peak_bytes"] is not None:
        peak += f", {peak_words(numbers, 'measured_peak_bytes', ' measured')}"
    time = f"{format_time(numbers['step_ms'])} -> {format_time(numbers['planned_step_ms'])}, "
    time += f"{format_ratio(numbers['predicted_overhead'])} planned"
    if numbers["measured_overhead"] is not None:
        time += f", {format_ratio(numbers['measured_overhead'])} measured"
    if numbers["costs"] == "estimate":
        time += "; times are estimates"
    rows = [
        ("model", numbers["target"] or "the root module"),
        ("peak", peak),
        ("at", numbers.get("at", "")),
        ("budget", f"{budget_words(numbers)}, {resident} of it resident before the step"),
        ("time", time),
        ("offloaded", offload_words(numbers)),
        ("solver", solver_words(numbers)),
        ("planning", planning_words(numbers)),
        ("proved", numbers["proved"]),
        *(("rounding", words) for words in rounded[:most_rounded]),
        ("", f"and {hidden} more, which the page lists" if hidden else ""),
        ("kept compiled", ", ".join(numbers["kept_compiled"])),
        *(("advice", line) for line in numbers.get("advice", ())),
        *(("note", note) for note in numbers.get("notes", ())),
    ]
    return [row for row in rows if row[1]]
