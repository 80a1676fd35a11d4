"""Train small models with values offloaded in the host's memory and without, on a GPU, and compare bits and peaks.

    python benchmarks/offload_training.py [--simulated] [--lengths] [transformers/gpt2 timm/resnet unet_condition ...]

Models are those of zoo/architectures.py, whose sizes nobody chose, and those of zoo/packages.py by their names. Each is
trained for five steps within the same share of what a plain step adds, the first that fits, with `offload="off"` and
with `"auto"`. With `--lengths`, texts have another length in most steps, and the budget is the one of the longest.
Times of operations are estimated, and the link is told to be fast, so that plans put away all that they can. The
simulated GPU has streams that run as late as they may. Prints a table.
"""

# ruff: noqa: E402  (the simulated GPU is loaded before torch)
from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIMULATED, LENGTHS_VARY = "--simulated", "--lengths"
if SIMULATED in sys.argv:  # before torch looks for a device
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.simulated_gpu import build, torch_cuda

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_cuda.install(build.load())

import numpy
import page_tables
import torch
from provenance import provenance
from torch.utils._pytree import tree_map
from zoo.architectures import entries
from zoo.cases import Case
from zoo.packages import CASES

from hiremate_lightning import InfeasibleBudgetError, Plan, get_plan, hiremate, remove_hiremate
from hiremate_lightning.measuring import profiling
from hiremate_lightning.records.costs import Link
from hiremate_lightning.testing import changed_thresholds, plans
from hiremate_lightning.units import format_bytes

FAST = Link(1e9, 1e9)
BUDGETS, LIMIT_S = ("55%", "65%", "75%", "85%"), 2.0
FIRST = 5  # steps, in which code is captured and proved
SAME, LENGTHS = (None,) * 5, (None, 24, None, 40, None, 24, 40, None, 32, 40, 24, None)
NAMES = (
    *(f"transformers/{name}" for name in ("gpt2", "llama", "bert", "t5", "vit", "swin", "mistral", "gemma2", "mamba")),
    *(f"transformers/{name}" for name in ("clip", "opt", "bloom", "deberta", "albert", "falcon", "distilbert")),
    *(f"transformers/{name}" for name in ("roberta", "electra", "convnext")),
    *("mixer", "timm/resnet", "timm/efficientnet", "unet_condition"),
)


@dataclass(frozen=True)
class Trained:
    """What a training left.

    Attributes:
        values: Losses, gradients and buffers.
        peaks: Bytes of each step.
        plans: Its plans, that of the last step first.
    """

    values: list[torch.Tensor]
    peaks: list[int]
    plans: list[Plan]


def batch_of(case: Case, length: int | None) -> Any:
    """Make a batch on the GPU, with texts of a length where one is given."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_text = length is not None and value.dim() == 2 and not value.is_floating_point()
        return (value[:, :length].contiguous() if is_text else value).cuda()

    return tree_map(moved, case.make_batch(0))


def train(name: str, budget: str | int, offload: str, lengths: Sequence[int | None] = SAME) -> Trained:
    """Train a model from the same numbers each time."""
    torch.manual_seed(0)
    torch.compiler.reset()
    case = (CASES.get(name) or entries()[name]).build()
    module = case.module.train().cuda()
    torch.manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    hiremate(module, budget, verbose=False, offload=offload, time_limit_s=LIMIT_S)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    torch.manual_seed(2)
    numpy.random.seed(2)  # noqa: NPY002  models draw from this one
    values, peaks = list[torch.Tensor](), list[int]()
    for length in lengths:
        optimizer.zero_grad()
        batch = batch_of(case, length)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        loss = case.loss_of(module(**batch), batch)
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated())
        values += [loss.detach().cpu(), *(p.grad.cpu().clone() for p in module.parameters() if p.grad is not None)]
        del loss
        optimizer.step()
    plan = get_plan(module)
    assert plan is not None, "a plan is there after the second step"
    values += [buffer.cpu() for buffer in module.buffers()]
    made = [plan, *plans(module)]
    remove_hiremate(module)
    return Trained(values, peaks, made)


def compared(one: Trained, other: Trained) -> str:
    """Count the equal values."""
    same = sum(torch.equal(a, b) for a, b in zip(one.values, other.values, strict=False))
    return f"{same} of {max(len(one.values), len(other.values))}"


def first_that_fits(name: str) -> tuple[str, Trained]:
    """Train without values offloaded, within the least of the budgets in which that is possible."""
    for budget in BUDGETS[:-1]:
        try:
            return budget, train(name, budget, "off")
        except InfeasibleBudgetError:
            gc.collect()
    return BUDGETS[-1], train(name, BUDGETS[-1], "off")


def row(name: str) -> str:
    """Train a model both ways, and write what came out."""
    budget, without = first_that_fits(name)
    away = train(name, budget, "auto")
    plan = away.plans[0]
    return page_tables.row(
        name,
        budget,
        compared(without, away),
        len(plan.solution.offloads),
        format_bytes(plan.planned.host_bytes),
        f"{plan.planned_peak_bytes:,}",
        f"{away.peaks[-1]:,}",
        f"{plan.budget_bytes:,}",
        f"{100 * without.plans[0].predicted_overhead:.1f}",
        f"{100 * plan.predicted_overhead:.1f}",
    )


def row_of_lengths(name: str) -> str:
    """Train a model on texts of several lengths both ways, and write what came out."""
    size_bytes = first_that_fits(name)[1].plans[0].budget_bytes
    without, away = (train(name, size_bytes, offload, LENGTHS) for offload in ("off", "auto"))
    with_offloading = sum(bool(plan.solution.offloads) for plan in away.plans[1:])
    bytes_of = max(away.peaks[:FIRST]), max(away.peaks[FIRST:]), max(without.peaks[FIRST:]), size_bytes
    counts = compared(without, away), f"{with_offloading} of {len(away.plans) - 1}"
    return page_tables.row(name, *counts, *(f"{size:,}" for size in bytes_of))


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    profiling.measure_link = lambda device: FAST
    print(f"{provenance('transformers', 'timm', 'diffusers')}\n")
    if LENGTHS_VARY in sys.argv:
        make = row_of_lengths
        columns = (
            "model",
            "equal values",
            "plans with values offloaded",
            "peak of the first steps",
            "of later ones",
            "of these without",
            "budget in bytes",
        )
    else:
        make = row
        columns = (
            "model",
            "budget",
            "equal values",
            "storages offloaded",
            "on the host",
            "predicted peak",
            "measured peak",
        )
        columns = *columns, "budget in bytes", "extra % without", "extra % with"
    print(page_tables.head(*columns), end="", flush=True)
    for name in [name for name in sys.argv[1:] if not name.startswith("--")] or NAMES:
        with changed_thresholds(measures_times=False):
            try:
                print(make(name), end="", flush=True)
            except Exception as error:  # whatever a model fails with is its result
                print(page_tables.row(name, f"{type(error).__name__}: {str(error)[:200]}"), end="", flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
