"""What each of two processes does for test_two_processes.py, which starts this file with torchrun.

It saves what the scripts left to a folder, a file for each rank; what is right is decided by the tests.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hiremate_lightning import hiremate
from hiremate_lightning.planning import shared_solving
from hiremate_lightning.sessions import graph_runtimes
from tests.loops import BUDGET, Outcome, Script, make_batch, make_model, run
from tests.processes import leave

SCRIPTS = [
    Script("accelerate", "no", 1, "before"),
    Script("accelerate", "bf16", 3, "after"),
    Script("fabric", "no", 3, "before"),
    Script("fabric", "bf16", 1, "after"),
    Script("plain", "no", 3, "before"),
]
ACROSS = "statistics across ranks"
WAYS = {
    "as it is": {},
    "static graph, gradients in buckets": {"static_graph": True, "gradient_as_bucket_view": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    ACROSS: {},
}
SLOW_S = 3.0


class TwoHeads(nn.Module):
    """A body and two heads of which each step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()[:-1]
        self.heads = nn.ModuleList(nn.Linear(self.body[0][0].out_features, 1) for _ in range(2))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.body(x))


class _SumOverRanks(torch.autograd.Function):
    """Adds up over ranks in both directions, as SyncBatchNorm does with its statistics."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        torch.distributed.all_reduce(total)
        return total


class NormAcrossRanks(nn.Module):
    """Normalizes by the statistics of both ranks; were a collective recomputed on one of them, both would hang."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, square = _SumOverRanks.apply(torch.stack([x.mean(0), x.square().mean(0)])) / 2
        return (x - mean) * (square - mean.square() + 1e-5).rsqrt()


def gradients(rank: int, way: str, planned: bool) -> list[torch.Tensor | None]:
    """Take the gradients of a few steps under DistributedDataParallel, accumulated over three, some without a sum."""
    torch.manual_seed(1)
    made = TwoHeads()
    both = way == "find_unused_parameters"
    made.heads[1].requires_grad_(both)
    if way == ACROSS:
        made.body = nn.Sequential(*(layer for block in made.body for layer in (block, NormAcrossRanks())))
    model = DistributedDataParallel(made, **WAYS[way])
    if planned:
        hiremate(model, BUDGET, verbose=False)
    found: list[torch.Tensor | None] = []
    for index in range(7):
        with model.no_sync() if index == 3 else nullcontext():
            model(make_batch(index, rank), index % 2 if both else 0).square().mean().backward()
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        if index % 3 == 2:
            model.zero_grad()
    return found


def timed(run_it: Callable[[], Outcome]) -> tuple[Outcome, float]:
    start = time.perf_counter()
    return run_it(), time.perf_counter() - start


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))  # who hangs fails
    rank = torch.distributed.get_rank()
    shared_solving.PATIENCE_S = shared_solving.PATIENCE_AGAIN_S = 60.0  # a busy machine must not decide on the outcome
    found: dict[Any, Any] = {}
    for script in SCRIPTS:
        plain = replace(script, place=None)
        if plain not in found:
            found[plain] = timed(lambda s=plain: run(s, rank))
        found[script] = timed(lambda s=script: run(s, rank))
    for way, planned in product(WAYS, (False, True)):
        found[way, planned] = gradients(rank, way, planned)
    script = Script("plain", place="before")
    found["plain"] = timed(lambda: run(replace(script, place=None), rank))
    found["other budget"] = timed(lambda: run(script, rank, budget=("85%", BUDGET)[rank]))
    measure = graph_runtimes.measure
    if rank == 1:
        graph_runtimes.measure = lambda *args, **options: (time.sleep(SLOW_S), measure(*args, **options))[1]
    found["slow"] = timed(lambda: run(script, rank))
    graph_runtimes.measure = measure
    shared_solving.PATIENCE_S = shared_solving.PATIENCE_AGAIN_S = 1.0  # nobody will come
    found["one plan"] = timed(lambda: run(replace(script, place=("before", None)[rank]), rank))
    torch.save(found, folder / f"{rank}.pt")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
