"""Raw numbers for whoever mends what a GPU showed: times of operations, and what the allocator did around a peak."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from hiremate_lightning import Plan
from hiremate_lightning.measuring.profiling import TimedRun
from hiremate_lightning.sessions.current_step import CurrentStep
from hiremate_lightning.sessions.step_watch import StepWatch
from hiremate_lightning.targets.modules import targets_of

MOST_OPERATIONS = 30
EVENTS_AROUND = 300  # on each side of the peak
OPERATIONS, EVENTS = "operations.jsonl", "allocator-events.json.gz"
SIGNS = {"alloc": 1, "free_completed": -1}


def write_operations(folder: Path, model: str, module: nn.Module, step: Callable[[], Any]) -> dict[str, Any]:
    """Time each operation of one more step; append those that take longest, predicted and measured, to a file."""
    found = operations(module, step)
    with (folder / OPERATIONS).open("a") as lines:
        for values in found[:MOST_OPERATIONS]:
            lines.write(json.dumps({"model": model, **values}) + "\n")
    ratios = [v["measured_ms"] / v["predicted_ms"] for v in found[:MOST_OPERATIONS] if v["predicted_ms"]]
    return {
        "operations": len(found),
        "measured_of_predicted": median(ratios) if ratios else None,
        "lowest": min(ratios, default=None),
        "highest": max(ratios, default=None),
        "file": OPERATIONS,
    }


@contextmanager
def _timing_steps(watch: StepWatch) -> Iterator[None]:
    """Time the operations of each step that begins, whatever else is watched in it."""
    begin = watch.begin

    def begin_timed(step: CurrentStep, arguments: list[torch.Tensor]) -> None:
        begin(step, arguments)
        step.timed = step.timed or TimedRun(arguments[0].device)

    watch.begin = begin_timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        del watch.begin


def operations(module: nn.Module, step: Callable[[], Any]) -> list[dict[str, Any]]:
    """Time each kind of operation in one more step of a planned module, the longest first."""
    known = targets_of(module)
    assert known is not None, "the module is planned"
    session = known.session
    session.steps.end()
    with _timing_steps(session.steps.watch):
        step()
    plan, timed_step = session.plan, session.steps.current or session.steps.ended
    assert plan is not None
    assert timed_step is not None, "it has just run"
    timed = timed_step.timed
    assert timed is not None, "it was asked for"
    rows: dict[str, dict[str, Any]] = {}
    for node, predicted_ms in zip(plan.graph.nodes, plan.profile.time_ms, strict=True):
        samples = timed.samples.get(node.key, [])
        again = timed.samples_again.get(node.key, [])
        if samples or again:
            row = rows.setdefault(node.key, {"op": node.op, "key": node.key[:200], "count": 0})
            row["count"] += 1
            row |= {"predicted_ms": predicted_ms, "measured_ms": median(samples or again)}
            row |= {"recomputed": len(again), "recomputed_ms": median(again) if again else None}
    return sorted(rows.values(), key=lambda row: -row["count"] * row["measured_ms"])


# -------------------------------------------------------------------- the allocator


class Worst:
    """Keeps the allocator's events of the plan whose peak was predicted worst.

    Attributes:
        found: What is known of that plan; empty as long as there is none.
    """

    def __init__(self, folder: Path, model: str) -> None:
        self._folder, self._model = folder, model
        self.found: dict[str, Any] = {}

    def see(self, plan: Plan, peak_bytes: float, step: Callable[[], Any]) -> None:
        """Take a step with the allocator watched, if this plan was predicted worse than all before."""
        error = peak_bytes / plan.planned_peak_bytes - 1
        if not torch.cuda.is_available() or (self.found and abs(error) <= abs(self.found["error"])):
            return
        kept = around_peak(events_of(step))
        self.found = {"budget": str(plan.budget), "error": error, "events": len(kept), "file": EVENTS}
        add_events(self._folder / EVENTS, {"model": self._model, **self.found, "around_peak": kept})


def add_events(path: Path, entry: Mapping[str, Any]) -> None:
    """Replace a model's events in the file."""
    entries = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else {}
    entries[entry["model"]] = entry
    path.write_bytes(gzip.compress(json.dumps(entries).encode()))


def events_of(step: Callable[[], Any]) -> list[Mapping[str, Any]]:
    """Record what the caching allocator does in a step."""
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=500_000)
    try:
        step()
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(None)
    return [event for trace in snapshot["device_traces"] for event in trace]


def around_peak(events: Sequence[Mapping[str, Any]], count: int = EVENTS_AROUND) -> list[dict[str, Any]]:
    """Keep the events around the moment when most was allocated, with what lives since the first event."""
    changes = [SIGNS.get(event["action"], 0) * event["size"] for event in events]
    live = list(accumulate(changes))
    if not live:
        return []
    peak = live.index(max(live))
    first = max(0, peak - count)
    return [
        {"action": events[i]["action"], "size": events[i]["size"], "addr": events[i].get("addr", 0), "live": live[i]}
        for i in range(first, min(len(events), peak + count))
    ]
