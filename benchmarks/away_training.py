"""Train small models with values away in the host's memory and without, on a GPU, and compare bits and peaks.

    python benchmarks/away_training.py [--simulated] [transformers/gpt2 transformers/resnet ...]

Models are those of zoo/architectures.py: nobody chose their sizes. Each is trained for five steps within the same share
of what a plain step adds, with `offload="off"` and with `"auto"`. Times of operations are estimated, and the link is
told to be fast, so that plans put away all that they can. The simulated GPU has streams that run as late as they may.
Prints a table.
"""

# ruff: noqa: E402  (the simulated GPU is loaded before torch)
from __future__ import annotations

import gc
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIMULATED = "--simulated"
if SIMULATED in sys.argv:  # before torch looks for a device
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.simulated_gpu import build, torch_cuda

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_cuda.install(build.load())

import page_tables
import torch
from provenance import provenance
from torch.utils._pytree import tree_map
from zoo.architectures import entries

from hiremate_lightning import Plan, get_plan, hiremate, remove_hiremate
from hiremate_lightning.measuring import profiling
from hiremate_lightning.records.costs import Link
from hiremate_lightning.testing import fixed_costs
from hiremate_lightning.units import format_bytes

FAST = Link(1e9, 1e9)
BUDGET, STEPS, LIMIT_S = "55%", 5, 2.0
NAMES = (
    *("gpt2", "llama", "bert", "t5", "resnet", "vit", "swin", "mistral", "gemma2", "mamba", "wav2vec2", "clip", "opt"),
    *("bloom", "regnet", "efficientnet", "deberta", "albert", "segformer", "falcon", "distilbert"),
)


@dataclass(frozen=True)
class Trained:
    """What a training left.

    Attributes:
        values: Losses, gradients and buffers.
        peak_bytes: Of the last step.
        plan: Its plan.
    """

    values: list[torch.Tensor]
    peak_bytes: int
    plan: Plan


def on_device(value: Any) -> Any:
    """Move a tensor of a batch to the GPU."""
    return value.cuda() if isinstance(value, torch.Tensor) else value


def train(name: str, offload: str) -> Trained:
    """Train a model from the same numbers each time."""
    torch.manual_seed(0)
    torch.compiler.reset()
    case = entries()[name].build()
    module = case.module.train().cuda()
    torch.manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    hiremate(module, BUDGET, verbose=False, offload=offload, time_limit_s=LIMIT_S)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    torch.manual_seed(2)
    values, peak_bytes = list[torch.Tensor](), 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        batch: Any = tree_map(on_device, case.make_batch(0))
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        loss = case.loss_of(module(**batch), batch)
        loss.backward()
        peak_bytes = torch.cuda.max_memory_allocated()
        values += [loss.detach().cpu(), *(p.grad.cpu().clone() for p in module.parameters() if p.grad is not None)]
        del loss
        optimizer.step()
    plan = get_plan(module)
    assert plan is not None, "a plan is there after the second step"
    values += [buffer.cpu() for buffer in module.buffers()]
    remove_hiremate(module)
    return Trained(values, peak_bytes, plan)


def row(name: str) -> str:
    """Train a model both ways, and write what came out."""
    without, found = train(name, "off"), train(name, "auto")
    pairs = list(zip(without.values, found.values, strict=False))
    same = sum(torch.equal(a, b) for a, b in pairs)
    plan = found.plan
    return page_tables.row(
        name,
        f"{same} of {max(len(without.values), len(found.values))}",
        str(len(plan.solution.aways)),
        format_bytes(plan.planned.host_bytes),
        f"{plan.planned_peak_bytes:,}",
        f"{found.peak_bytes:,}",
        f"{plan.budget_bytes:,}",
        f"{100 * without.plan.predicted_overhead:.1f}",
        f"{100 * plan.predicted_overhead:.1f}",
    )


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    profiling.measure_link = lambda device: FAST
    columns = ("model", "equal values", "storages away", "on the host", "predicted peak", "measured peak", "budget")
    print(f"{provenance('transformers', 'timm')}\n")
    print(page_tables.head(*columns, "extra % without", "extra % with"), end="")
    for name in [name for name in sys.argv[1:] if name != SIMULATED] or [f"transformers/{name}" for name in NAMES]:
        with fixed_costs():
            try:
                print(row(name), end="", flush=True)
            except Exception as error:  # whatever a model fails with is its result
                print(page_tables.row(name, f"{type(error).__name__}: {str(error)[:80]}"), end="", flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
