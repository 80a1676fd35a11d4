"""Small models, whose steps wait for the host: planned beside eager, by the process's time and by events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .runner import Context, Send

NAMES = ("gpt", "resnet50")
METHODS = (("ours-100", 1.0), ("ours-50", 0.5))


def run(context: Context) -> None:
    """Measure each model in a process of its own."""
    for name in NAMES[:1] if context.is_toy else NAMES:
        given = {
            "device": context.device,
            "folder": context.folder,
            "scratch": context.scratch,
            "is_toy": context.is_toy,
        }
        context.isolated(name, measure_model, 20.0, model=name, **given)


def measure_model(send: Send, model: str, device: str, folder: Path, scratch: Path, is_toy: bool) -> None:
    """Measure eager, then ours with nothing and with half recomputed."""
    from rival_worker import Setup
    from zoo.large import TOYS
    from zoo.models import MODELS

    from .others import named
    from .trials import Budget, Task, run_method, run_ours

    if is_toy:
        MODELS.update(TOYS)
    found: dict[str, Any] = {}

    def keep(name: str, status: str = "ok", **values: Any) -> None:
        found.update(values)
        named(send, model)(name, status, **values)

    timed_s = 0.1 if is_toy else 0.5
    run_method(keep, Task(Setup(model, "eager", scratch, device), timed_s=timed_s))
    added = int(found["added_mib"] * 2**20)
    budgets = [Budget(name, 0 if share == 1 else int(share * added)) for name, share in METHODS]
    setup = Setup(model, "ours", scratch, device, time_limit_s=0.5 if is_toy else 3.0)
    run_ours(named(send, model), Task(setup, eager=dict(found), timed_s=timed_s), budgets, folder)
