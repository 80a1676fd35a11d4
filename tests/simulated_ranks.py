"""What each of two processes does for test_simulated_ranks.py: training with values offloaded, on a simulated GPU each.

Each case trains plain, and planned with `offload="auto"`, from the same random states. What is right is decided by the
tests.
"""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.simulated_gpu import build, torch_cuda

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch_cuda.install(build.load())

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.measuring import profiling
from hiremate_lightning.planning import shared_solving
from hiremate_lightning.records.costs import Link
from hiremate_lightning.testing import changed_thresholds
from tests.processes import leave
from tests.sharding import STEPS, Case, Left, gpt, llama, train
from tests.shared_memory import SharedGroup, SharedMemory

CASES = (
    Case("whole parameters sharded", gpt, rows=32, budget="60%"),
    Case("parts of blocks, collectives inside of graphs", llama, rows=32, budget="60%", parts=True),
)
PARALLEL = "data parallel"


def train_parallel(rank: int, memory: SharedMemory, planned: bool) -> Left:
    """Train a model of which each process has a copy."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    model = DistributedDataParallel(
        nn.Sequential(*layers).cuda(), process_group=SharedGroup(memory), bucket_cap_mb=0.02
    )
    if planned:
        hiremate(model, "60%", verbose=False, offload="auto")
    optimizer, left = torch.optim.AdamW(model.parameters(), lr=1e-3), Left()
    torch.manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        loss = model(torch.randn(2048, 64).cuda()).square().mean()
        loss.backward()
        left.peak_bytes = torch.cuda.max_memory_allocated()
        left.losses.append(loss.detach())
        left.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        del loss
        optimizer.step()
    return left.close(model, None, get_plan(model))


def on_host(left: Left) -> Left:
    """Move what a training left to the host, whose process has no simulated GPU."""

    def moved(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.cpu() for name, value in values.items()}

    left.losses = [loss.cpu() for loss in left.losses]
    left.gradients, left.weights = [moved(values) for values in left.gradients], moved(left.weights)
    return left


def main(folder: Path, rank: int) -> None:
    """Train each case both ways, and save what that left."""
    store = f"file://{folder}/store"
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    torch.distributed.Logger.set_runtime_stats_and_log = lambda self: None  # whose timers are CUDA's own
    profiling.measure_link = lambda device: Link(1e9, 1e9)
    shared_solving.PATIENCE_S = 60.0  # a machine that is busy must not decide on the outcome
    memory, found = SharedMemory(folder, rank, 2), dict[str, Any]()
    with changed_thresholds(measures_times=False):
        for case in CASES:
            ways = ({}, {"offload": "auto"})
            found[case.name] = [on_host(train(case, rank, memory, bool(way), **way)) for way in ways]
        found[PARALLEL] = [on_host(train_parallel(rank, memory, planned)) for planned in (False, True)]
    torch.save(found, folder / f"{rank}.pt")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
