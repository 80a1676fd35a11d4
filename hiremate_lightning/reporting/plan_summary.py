"""Read the numbers of a plan back from files: JSON, or an HTML report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..planning.plan import Numbers, budget_words, peak_words, planning_words, solver_words
from ..units import format_bytes, format_ratio, format_time

_IN_PAGE = re.compile(r'<script type="application/json" id="plan">(.*?)</script>', re.DOTALL)


def read_summary(path: Path) -> dict[str, Any]:
    """Read the numbers of a plan.

    Args:
        path: What `Plan.to_json`, `write_html` or `hiremate plan --json` wrote.

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
    if isinstance(data, dict) and "planned_step_ms" in data:
        return data
    raise ConfigurationError(f"{str(path)!r} is no plan. {expected}")


def summary_rows(numbers: Numbers, most_rounded: int | None = None) -> list[tuple[str, str]]:
    """Describe the numbers of a plan, by name and in words; what is empty is left out.

    Args:
        numbers: As `read_summary` and `Plan.to_dict` return them.
        most_rounded: Differences by rounding to list; None for all.
    """
    resident, rounded = format_bytes(numbers["resident_bytes"]), numbers["rounded"]
    hidden = len(rounded[most_rounded:]) if most_rounded is not None else 0
    rows = [
        ("model", numbers["target"] or "the root module"),
        ("peak", _peak(numbers)),
        ("budget", f"{budget_words(numbers)}, {resident} of it resident before the step"),
        ("time", _time(numbers)),
        ("solver", solver_words(numbers)),
        ("planning", planning_words(numbers)),
        ("proved", numbers["proved"]),
        *(("rounding", words) for words in rounded[:most_rounded]),
        ("", f"and {hidden} more, which the page lists" if hidden else ""),
        ("kept compiled", ", ".join(numbers["kept_compiled"])),
        *(("note", note) for note in numbers.get("notes", ())),
    ]
    return [row for row in rows if row[1]]


def _peak(numbers: Numbers) -> str:
    words = (
        f"{format_bytes(numbers['unplanned_peak_bytes'])} -> {peak_words(numbers, 'planned_peak_bytes', ' planned')}"
    )
    if numbers["measured_peak_bytes"] is None:
        return words
    return f"{words}, {peak_words(numbers, 'measured_peak_bytes', ' measured')}"


def _time(numbers: Numbers) -> str:
    words = f"{format_time(numbers['step_ms'])} -> {format_time(numbers['planned_step_ms'])}, "
    words += f"{format_ratio(numbers['predicted_overhead'])} planned"
    if numbers["measured_overhead"] is not None:
        words += f", {format_ratio(numbers['measured_overhead'])} measured"
    return f"{words}; times are estimates" if numbers["costs"] == "estimate" else words
