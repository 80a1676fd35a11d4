"""Models that people train, in bfloat16, with batches of at least 100 ms a step: ours beside checkpointing.

The part "three" has the first three, each in 30 s, the part "others" the rest.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from .runner import LEAST_S, Context, Send

NAMES = {
    "three": ("gpt2_medium", "stable_diffusion_unet", "vit_large"),
    "others": ("resnet50_224", "bert_large", "t5_large"),
}
LEAST_STEP_S = 0.1
MOST_OF_MEMORY = 0.7
LIMIT_S = 30.0  # for one model
TOY_NAMES = {"three": NAMES["three"][1:], "others": ()}  # the part "offload" has GPT-2


def run(context: Context) -> None:
    """Measure each model: eager, whose peak the others are told, then ours, then checkpointing."""
    for name in (TOY_NAMES if context.is_toy else NAMES)[context.part.name]:
        measure_model(context, name)


def measure_model(context: Context, name: str) -> None:
    """Measure a model within its limit."""
    given: dict[str, Any] = {"model": name, "device": context.device, "is_toy": context.is_toy}
    given["scratch"] = context.scratch
    end = time.time() + LIMIT_S
    records = context.isolated(f"{name}, eager", measure_eager, LIMIT_S, **given)
    eager = next((r for r in records if "added_mib" in r), None)
    if eager is None:
        return
    given |= {"eager": eager, "batch": eager["batch"]}
    budgets = [("ours-50", int(eager["added_mib"] * 2**20) // 2)]
    ours = {"budgets": budgets, "folder": context.folder}
    context.isolated(f"{name}, ours", measure_ours, end - time.time(), **ours, **given)
    context.isolated(f"{name}, checkpoint", measure_checkpoint, max(LEAST_S, end - time.time()), **given)


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


def measure_eager(send: Send, model: str, **given: Any) -> None:
    """Find the batch, then measure eager."""
    from .trials import run_method

    batch = 1 if given["is_toy"] else find_batch(task_of(model, "eager", batch=1, eager=None, **given))
    run_method(named(send, model, batch=batch), task_of(model, "eager", batch=batch, eager=None, **given))


def measure_checkpoint(send: Send, model: str, batch: int, **given: Any) -> None:
    """Measure checkpointing of each block."""
    from .trials import run_method

    run_method(named(send, model, batch=batch), task_of(model, "checkpoint", batch=batch, **given))


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
