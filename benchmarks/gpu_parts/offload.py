"""Values in the host's memory: copies beside what is computed, and plans with them beside plans without.

At the same budgets: ours, ours with `offload`, all that autograd saves on the host (`save_on_cpu`, as tools do that
offload by rule), and checkpointing. For plans, what was predicted stands beside what was measured.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from .others import named, task_of
from .runner import Context, Send

NAMES = ("stable_diffusion_unet", "resnet50_224", "gpt2_medium")
METHODS = ("ours-50-offload", "ours-50")
TOY_NAMES, TOY_METHODS = NAMES[2:], METHODS[:1]
LIMIT_S = 30.0
SHARE = 0.5  # of what eager adds: the budget


def run(context: Context) -> None:
    """Measure the link, then each model by each method, eager first: the others are told its peak."""
    if not context.has_device:
        context.no_device("link", *NAMES)
        return
    context.isolated("link", measure_copies, is_toy=context.is_toy)
    for model in TOY_NAMES if context.is_toy else NAMES:
        given: dict[str, Any] = {"model": model, "device": context.device, "is_toy": context.is_toy}
        given["scratch"] = context.scratch
        records = context.isolated(f"{model}, by rule", measure_by_rule, LIMIT_S, **given)
        eager = next((r for r in records if r["name"] == f"{model}, eager" and "added_mib" in r), None)
        for method in (TOY_METHODS if context.is_toy else METHODS) if eager else ():
            ours = {"method": method, "eager": eager, "folder": context.folder}
            context.isolated(f"{model}, {method}", measure_ours, LIMIT_S, **ours, **given)


def measure_copies(send: Send, is_toy: bool) -> None:
    """Measure the link as plans do, and how much copies slow down what is computed beside them."""
    import torch

    from hiremate_lightning.measuring.profiling import measure_link

    from .trials import event_ms

    device = torch.device("cuda")
    link = measure_link(device)
    speeds = {"out_gb_per_s": link.out_bytes_per_ms / 1e6, "in_gb_per_s": link.in_bytes_per_ms / 1e6}
    send("link, both ways at once", **speeds, latency_us=1e3 * link.latency_ms)
    side, size = (256, 2**18) if is_toy else (8192, 2**28)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    wide = torch.randn(2**20 if is_toy else 2**28, device=device)
    on_device = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    on_host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def copy() -> None:
        for stream, target, source in zip(streams, (on_host[0], on_device[1]), (on_device[0], on_host[1]), strict=True):
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    def beside(compute: Any) -> None:
        copy()
        compute()

    for name, compute in {
        "matrix product": partial(torch.mm, a, b),
        "memory traffic": partial(torch.mul, wide, 2),
    }.items():
        alone_ms, beside_ms = event_ms(compute), event_ms(partial(beside, compute))
        send(f"{name} beside copies", ms=alone_ms, beside_ms=beside_ms, slower=beside_ms / alone_ms - 1)


def measure_by_rule(send: Send, model: str, **given: Any) -> None:
    """Measure eager, checkpointing, and eager with all that is saved on the host."""
    import torch
    from rival_worker import Trainer

    from .trials import measure, run_method, settle

    found: dict[str, Any] = {}

    def keep(name: str, status: str = "ok", **values: Any) -> None:
        found[name] = values
        named(send, model)(name, status, **values)

    run_method(keep, task_of(model, "eager", batch=1, eager=None, **given))
    run_method(keep, task_of(model, "checkpoint", batch=1, eager=found["eager"], **given))
    task = task_of(model, "eager", batch=1, eager=found["eager"], **given)

    class OnHost(Trainer):
        def step(self) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                return super().step()

    trainer = OnHost(task.setup)
    settle(trainer.device)
    keep("all on the host", **measure(trainer, task))


def measure_ours(send: Send, model: str, method: str, eager: Any, folder: Path, **given: Any) -> None:
    """Measure ours at the budget, with values on the host or without."""
    from .trials import Budget, run_ours

    task = task_of(model, method, batch=1, eager=eager, **given)
    budget = Budget(method, int(SHARE * eager["added_mib"] * 2**20))
    run_ours(named(send, model), task, [budget], folder)
