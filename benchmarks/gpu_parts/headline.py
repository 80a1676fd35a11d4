"""The headline: a Llama of the shapes of Llama 3 8B, ours beside all that people use to save memory.

The bar: selective checkpointing on a compiled graph is reported to save 43 % of the memory for 7.3 % of the throughput
(pytorch/torchtitan pull request 2570).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from .runner import Context, Send

MODEL = "llama-8b"
LAYERS, MOST_LAYERS = 8, 16  # planning takes as long as the layers are many
TIME_FOR_MOST_S = 200.0
MOST_BATCH = 2  # steps of half a second: each method takes a dozen
UNKNOWN_SIZE = (LAYERS, 1)  # layers and sequences where it was not found
LEFT_FREE = 0.12  # of the device, for what the allocator can't use
SHARES = (50, 30, 70)
RIVALS = ("checkpoint", "selective")
TOY_COMPILED = ("budget-0.5",)  # Inductor has no kernels for the simulated GPU
COMPILED = ("inductor-0.5", "fused", "blocks-0.5", "blocks", "inductor", "budget-0.5")
LIMITS_S = {"fused": 60.0, "inductor-0.5": 50.0, "inductor": 50.0}
FUSED_SHARES = (50, 100)
OURS_S, MORE_S = 90.0, 40.0


def run(context: Context) -> None:
    """Find what fits, then measure the methods in the order of what they tell."""
    most = MOST_LAYERS if context.left_s() > TIME_FOR_MOST_S else LAYERS
    records = context.isolated("size", find_size, 40.0, is_toy=context.is_toy, most_layers=most)
    layers, batch = next(((r["layers"], r["batch"]) for r in records if "layers" in r), UNKNOWN_SIZE)
    given: dict[str, Any] = {"device": context.device, "is_toy": context.is_toy, "layers": layers, "batch": batch}
    given["scratch"] = context.scratch
    found: dict[str, dict[str, Any]] = {}

    def measure(method: str, limit_s: float, function: Any = run_one, **more: Any) -> None:
        eager = found.get("eager")
        records = context.isolated(method, function, limit_s, method=method, eager=eager, **given, **more)
        found.update({r["name"]: r for r in records if "added_mib" in r})

    measure("eager", 40)
    while "eager" not in found and given["batch"] * given["layers"] > 1 and context.left_s() > 30:
        given |= {"batch": given["batch"] - 1} if given["batch"] > 1 else {"layers": given["layers"] - 1}
        measure("eager", 40)
    if "eager" not in found:
        return
    for method in RIVALS:
        measure(method, 30)
    added = {name: int(found[name]["added_mib"] * 2**20) for name in found}
    budgets = [(f"ours-{share}", share * added["eager"] // 100) for share in SHARES] + [("ours-least", 0)]
    measure("ours", OURS_S, run_planned, budgets=budgets, raw_of="ours-least", folder=context.folder)
    context.say("bar", verdict(found))
    for method in TOY_COMPILED if context.is_toy else COMPILED:
        if method == "fused":
            shares = [(f"fused-{s}", 0 if s == 100 else s * added["eager"] // 100) for s in FUSED_SHARES]
            measure(method, LIMITS_S[method], run_planned, budgets=shares, raw_of="", folder=context.folder)
        else:
            measure(method, LIMITS_S.get(method, 40.0))
    more = [(f"ours-at-{name}", added[name]) for name in RIVALS if name in added] + [("ours-100", 0)]
    measure("ours, more", MORE_S, run_planned, budgets=more, raw_of="", folder=context.folder)
    context.say("bar, all methods", verdict(found))


def verdict(found: dict[str, dict[str, Any]]) -> str:
    """Compare our best point with the bar."""
    words = [
        f"{name} takes {1 - r['peak_of_eager']:.1%} less memory for {1 - 1 / r['time_of_eager']:.1%} of the throughput"
        for name, r in found.items()
        if "peak_of_eager" in r
    ]
    return "Reported of a compiled graph with selective checkpointing: 43 % for 7.3 %. Here: " + "; ".join(words) + "."


# -------------------------------------------------------------------- in processes of their own


def builder(device: str, is_toy: bool, layers: int, batch: int) -> Any:
    """Make the builder of the model."""
    from zoo.large import TOY_LLAMA, LlamaSize, llama

    return partial(llama, replace(TOY_LLAMA if is_toy else LlamaSize(), layers=layers), device, batch)


def task_of(
    method: str, eager: dict[str, Any] | None, scratch: Path, device: str, is_toy: bool, layers: int, batch: int
) -> Any:
    """Register the model, and describe a method's run on it."""
    from rival_worker import Setup
    from zoo.models import MODELS

    from .trials import SOLVE_S, Task

    MODELS[MODEL] = builder(device, is_toy, layers, batch)
    setup = Setup(MODEL, method, scratch, device, time_limit_s=0.5 if is_toy else SOLVE_S)
    return Task(setup, batch * (128 if is_toy else 4096), eager, 0.2 if is_toy else 2.5)


def run_one(send: Send, **given: Any) -> None:
    """Measure eager or a rival."""
    from .trials import run_method

    run_method(send, task_of(**given))


def run_planned(send: Send, budgets: list[tuple[str, int]], raw_of: str, folder: Path, **given: Any) -> None:
    """Measure ours at several budgets."""
    from .trials import Budget, run_ours

    run_ours(send, task_of(**given), [Budget(*budget) for budget in budgets], folder, raw_of)


def find_size(send: Send, is_toy: bool, most_layers: int) -> None:
    """Find how many layers and sequences eager training has memory for, from steps of small models."""
    if is_toy:
        send("size", layers=2, batch=4)
        return
    import torch

    free, total = torch.cuda.mem_get_info()
    limit = free - LEFT_FREE * total
    two, four, two_of_two = (eager_peak(layers, batch) for layers, batch in ((2, 1), (4, 1), (2, 2)))
    of_layer, of_batch = (four - two) / 2, two_of_two - two
    layers = max(1, min(most_layers, math.floor(2 + (limit - two) / of_layer)))
    # Another sequence takes what it took with two layers, and with each layer more the activations of that layer.
    more_per_sequence = of_batch + (layers - 2) * (of_layer - layer_bytes())
    at_one = two + (layers - 2) * of_layer
    batch = max(1, min(MOST_BATCH, 1 + math.floor((limit - at_one) / more_per_sequence)))
    predicted = at_one + (batch - 1) * more_per_sequence
    send("size", layers=layers, batch=batch, predicted_gib=predicted / 2**30, free_gib=free / 2**30)


def eager_peak(layers: int, batch: int) -> int:
    """Measure the peak of an eager step."""
    import torch

    module, inputs = builder("cuda", False, layers, batch)()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        module.zero_grad(set_to_none=True)
        module(*inputs).backward()
    peak = torch.cuda.max_memory_allocated()
    del module, inputs
    torch.cuda.empty_cache()
    return peak


def layer_bytes() -> int:
    """Count the bytes of a layer's weights."""
    import torch
    from zoo.large import LlamaBlock, LlamaSize, built_on

    with built_on("meta", torch.bfloat16):
        block = LlamaBlock(LlamaSize())
    return sum(p.numel() * p.element_size() for p in block.parameters())
