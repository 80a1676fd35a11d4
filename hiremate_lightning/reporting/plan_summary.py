"""Read the numbers of a plan back from files: JSON, an HTML report, a timeline, a plan of a cache."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..units import format_bytes, format_ratio, format_time

_IN_PAGE = re.compile(r'<script type="application/json" id="plan">(.*?)</script>', re.DOTALL)


def read_summary(path: Path) -> dict[str, Any]:
    """Read the numbers of a plan.

    Args:
        path: What `Plan.to_json`, `Plan.save_timeline`, `write_html`, `hiremate plan --json` or a `cache_dir` wrote.

    Raises:
        ConfigurationError: If the file can't be read, or is none of these.
    """
    expected = "Expected what `hiremate plan --json FILE`, Plan.to_json() or write_html() wrote."
    try:
        text = path.read_text(encoding="utf-8")
        in_page = _IN_PAGE.search(text)
        data = json.loads(in_page[1] if in_page else text)
    except OSError as error:
        raise ConfigurationError(f"Can't read {str(path)!r}: {error.strerror}. {expected}") from error
    except ValueError as error:  # no text, or no JSON
        raise ConfigurationError(f"{str(path)!r} is no plan: {error}. {expected}") from error
    if isinstance(data, dict):
        found = data.get("otherData", data)
        if isinstance(found, dict) and ("planned_peak_bytes" in found or "solution" in found):
            return found
    raise ConfigurationError(f"{str(path)!r} is no plan. {expected}")


def summary_rows(numbers: dict[str, Any]) -> list[tuple[str, str]]:
    """Describe what the numbers of a plan are, by name and in words."""
    if "solution" in numbers:
        return _cached_rows(numbers["solution"])
    resident = format_bytes(numbers["resident_bytes"])
    unplanned, planned = (format_bytes(numbers[f"{name}_peak_bytes"]) for name in ("unplanned", "planned"))
    rows = [
        ("model", numbers["target"] or "the root module"),
        ("budget", f"{format_bytes(numbers['budget_bytes'])} (asked: {numbers['budget']}), {resident} of it resident"),
        (
            "peak",
            f"{unplanned} -> {planned} planned, " + _measured(numbers["measured_peak_bytes"], format_bytes),
        ),
        (
            "extra time",
            f"{format_ratio(numbers['predicted_overhead'])} planned, "
            + _measured(numbers["measured_overhead"], format_ratio),
        ),
        (
            "solver",
            f"{numbers['strategy']}: {numbers['status']}; gap {100 * numbers['gap']:.1f}% "
            f"(no plan below {format_ratio(numbers['bound_overhead'])})",
        ),
        ("planning", f"{format_time(1000 * sum(numbers['planning'].values()))}"),
    ]
    if numbers.get("proved"):
        rows.append(("proved", numbers["proved"]))
    rows += [("rounding", words) for words in numbers.get("rounded", ())]
    if numbers.get("kept_compiled"):
        rows.append(("kept compiled", ", ".join(numbers["kept_compiled"])))
    rows += [("note", note) for note in numbers.get("notes", ())]
    return rows


def _measured(value: float | None, write: Any) -> str:
    return "not measured" if value is None else f"{write(value)} measured"


def _cached_rows(solution: dict[str, Any]) -> list[tuple[str, str]]:
    again = sum(len(row) for row in solution["recompute"])
    return [
        ("plan", "kept in a cache_dir; the model that it belongs to is not in the file"),
        ("peak", f"{format_bytes(solution['peak_bytes'])} above what is resident"),
        ("extra time", f"{format_time(solution['recompute_ms'])}, {again} operations run again"),
        (
            "solver",
            f"{solution['strategy']}: {solution['status']}; no plan below {format_time(solution['bound_ms'])}; "
            f"took {format_time(1000 * solution['solve_s'])}",
        ),
    ]
