"""Six models that people train, in bfloat16, with batches of at least 100 ms a step: ours beside checkpointing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .runner import Context, Send

NAMES = ("gpt2_medium", "stable_diffusion_unet", "resnet50_224", "vit_large", "bert_large", "t5_large")
TOY_NAMES = NAMES[:1]
LEAST_STEP_S = 0.1
MOST_OF_MEMORY = 0.7
LIMIT_S = 45.0


def run(context: Context) -> None:
    """Measure each model, eager first: the others are told its peak."""
    for name in TOY_NAMES if context.is_toy else NAMES:
        given: dict[str, Any] = {"model": name, "device": context.device, "is_toy": context.is_toy}
        given["scratch"] = context.scratch
        records = context.isolated(f"{name}, rivals", measure_rivals, LIMIT_S, **given)
        found = {r["name"].partition(", ")[2]: r for r in records if "added_mib" in r}
        if "eager" not in found:
            continue
        eager, given["batch"] = found["eager"], found["eager"]["batch"]
        added = {method: int(r["added_mib"] * 2**20) for method, r in found.items()}
        budgets = [("ours-50", added["eager"] // 2)]
        if "checkpoint" in added and not context.is_toy:
            budgets.append(("ours-at-checkpoint", added["checkpoint"]))
        context.isolated(
            f"{name}, ours", measure_ours, LIMIT_S, eager=eager, budgets=budgets, folder=context.folder, **given
        )


def task_of(model: str, method: str, device: str, is_toy: bool, scratch: Path, batch: int, eager: Any) -> Any:
    """Register a model, and describe a method's run on it."""
    from rival_worker import Setup
    from zoo.large import build_other
    from zoo.models import MODELS

    from .trials import SOLVE_S, Task

    MODELS[model] = build_other(model, device, is_toy)
    setup = Setup(model, method, scratch, device, batch=batch, time_limit_s=0.5 if is_toy else SOLVE_S)
    return Task(setup, batch, eager, 0.1 if is_toy else 1.0)


def named(send: Send, model: str, **more: Any) -> Send:
    """Put a model's name before those of methods."""
    return lambda name, status="ok", **values: send(f"{model}, {name}", status, **more, **values)


def measure_rivals(send: Send, model: str, **given: Any) -> None:
    """Find the batch, then measure eager and checkpointing."""
    from .trials import run_method

    batch = 1 if given["is_toy"] else find_batch(task_of(model, "eager", batch=1, eager=None, **given))
    found: dict[str, Any] = {}

    def keep(name: str, status: str = "ok", **values: Any) -> None:
        found[name] = values
        named(send, model, batch=batch)(name, status, **values)

    run_method(keep, task_of(model, "eager", batch=batch, eager=None, **given))
    run_method(keep, task_of(model, "checkpoint", batch=batch, eager=found["eager"], **given))


def measure_ours(
    send: Send, model: str, eager: Any, budgets: list[tuple[str, int]], batch: int, folder: Path, **given: Any
) -> None:
    """Measure ours at several budgets."""
    from .trials import Budget, run_ours

    task = task_of(model, "ours", batch=batch, eager=eager, **given)
    run_ours(named(send, model, batch=batch), task, [Budget(*budget) for budget in budgets], folder, "ours-50")


def find_batch(task: Any) -> int:
    """Find how often to repeat the batch for a step of 100 ms, as far as memory allows."""
    import torch
    from rival_worker import Trainer

    trainer = Trainer(task.setup)
    trainer.step()
    torch.cuda.reset_peak_memory_stats()
    resident = trainer.resident_bytes()
    step_s = trainer.timed(3).device_s
    added = torch.cuda.max_memory_allocated() - resident
    room = MOST_OF_MEMORY * torch.cuda.get_device_properties(0).total_memory - resident
    del trainer
    torch.cuda.empty_cache()
    return max(1, min(math.ceil(LEAST_STEP_S / step_s), int(room / added)))
