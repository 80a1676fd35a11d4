"""Results on disk: one line of JSON for each measurement, and a report that is written anew after each of them.

Whatever kills the check loses the measurement under way and nothing else.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import page_tables

from . import PARTS

LINES, REPORT, CONSOLE, PLANS = "results.jsonl", "report.md", "console.log", "plans"
OK, FAILED, NO_DEVICE, KILLED, SKIPPED, NO_MEMORY = "ok", "failed", "no device", "killed", "skipped", "out of memory"
CHECK = "check"  # the part of what concerns the whole command
ENDED = "part ended"
TAIL = 1800  # characters of a traceback

Record = dict[str, Any]


class Results:
    """Appends records to a folder. Threads may share one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()

    def add(self, part: str, name: str, status: str = OK, **values: Any) -> Record:
        """Append a record and write the report anew."""
        record = {"part": part, "name": name, "status": status, "at": round(time.time(), 1), **values}
        with self._lock:
            with (self.folder / LINES).open("a") as lines:
                lines.write(json.dumps(record, default=str) + "\n")
                lines.flush()
                os.fsync(lines.fileno())
            partial = self.folder / f".{REPORT}"
            partial.write_text(report(load(self.folder)))
            partial.replace(self.folder / REPORT)
        return record


def load(folder: Path) -> list[Record]:
    """Read the records; a last line that was cut off is left out."""
    path, records = folder / LINES, []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


# -------------------------------------------------------------------- the report


def report(records: Sequence[Record]) -> str:
    """Write all records as one page of Markdown."""
    of_part = {part.name: [r for r in records if r["part"] == part.name] for part in PARTS}
    lines = ["# GPU check", ""]
    lines += [f"{r['name']}: {r['text']}" for r in records if r["part"] == CHECK and "text" in r]
    overview = [_overview(name, found) for name, found in of_part.items() if found]
    lines += ["", page_tables.table(("part", "measured", "not ok", "seconds", "how it ended"), overview).rstrip()]
    for part in PARTS:
        found = [r for r in of_part[part.name] if r["name"] != ENDED]
        if found:
            lines += ["", f"## {part.name}: {part.about}", "", *_section(found)]
    return "\n".join(lines) + "\n"


def _overview(name: str, found: Sequence[Record]) -> tuple[Any, ...]:
    measured = [r for r in found if r["name"] != ENDED]
    bad = sum(r["status"] in (FAILED, KILLED, NO_MEMORY) for r in measured)
    end = next((r for r in reversed(found) if r["name"] == ENDED), {"status": "under way"})
    return name, len(measured), bad, end.get("seconds"), f"{end['status']} {end.get('why', '')}"


def _section(found: Sequence[Record]) -> list[str]:
    """Write sentences, then tables of what has the same columns, then tracebacks."""
    passed = sum(r.get("kind") == "test" and r["status"] == OK for r in found)
    shown = [r for r in found if "text" not in r and not (r.get("kind") == "test" and r["status"] == OK)]
    lines = [f"- {r['name']}: {r['text']}" for r in found if "text" in r]
    lines += [f"- {passed} tests passed"] if passed else []
    tables: dict[tuple[str, ...], list[Record]] = {}
    for record in shown:
        tables.setdefault(_columns(record), []).append(record)
    for rows in tables.values():
        lines += ["", table(dict.fromkeys(key for row in rows for key in row if key not in HIDDEN), rows)]
    for record in found:
        if record.get("traceback"):
            lines += ["", f"{record['name']}, {record['status']}:", "", "```", record["traceback"], "```"]
    return lines


HIDDEN = ("part", "name", "status", "at", "kind", "traceback", "text")


def _columns(record: Record) -> tuple[str, ...]:
    """Find which table a record belongs to: one for all training methods, and one for each other set of columns."""
    return ("peak_mib",) if "peak_mib" in record else tuple(key for key in record if key not in HIDDEN)


def table(columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Write records as a table."""
    names = ("name", "status", *columns)
    cells = ([_short(row.get(name)) for name in names] for row in rows)
    return page_tables.table([name.replace("_", " ") for name in names], cells).rstrip()


def _short(value: Any) -> Any:
    """Write numbers as a reader wants them."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return value
