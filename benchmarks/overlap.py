"""Measure how early DistributedDataParallel can send gradients: plain, planned whole, and planned block by block.

    torchrun --nproc_per_node 2 benchmarks/overlap.py [--blocks 8] [--width 256] [--steps 12] [--budget 80%]

A communication hook notes when each bucket of gradients is complete, as a share of the backward's time: 0 % is its
start, 100 % its end. What is complete early is sent while the backward goes on; what is complete at the end is waited
for. (Under DistributedDataParallel torch.compile's front end splits graphs at the borders of buckets.) Prints, on rank
0, the mean over the bytes, and the share of the bytes that is complete in the first 90 %.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from typing import Any

import page_tables
import torch
from provenance import provenance
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hiremate_lightning import get_plan, hiremate, remove_hiremate
from hiremate_lightning.targets.modules import targets_of

ROWS = 2048


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 4 * width), nn.GELU())
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the layers make."""
        return x + self.back(self.dense(self.norm(x)))


def measure(
    model: nn.Module, options: argparse.Namespace, plan: dict[str, Any] | None
) -> tuple[float, float, float, int]:
    """Train some steps; give mean and early share of the buckets, median seconds of a step, and captured graphs."""
    parallel = DistributedDataParallel(model, bucket_cap_mb=options.bucket_mb)
    ready: list[tuple[float, int]] = []

    def note(_: Any, bucket: Any) -> Any:
        ready.append((time.perf_counter(), bucket.buffer().nbytes))
        work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
        return work.then(lambda done: done.value()[0])

    note.__annotations__ = {"bucket": torch.distributed.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    parallel.register_comm_hook(None, note)
    if plan is not None:
        hiremate(model, options.budget, verbose=False, **plan)
    means, early, seconds = [], [], []
    for index in range(options.steps):
        start = time.perf_counter()
        parallel.zero_grad()
        loss = parallel(torch.randn(ROWS, options.width)).square().mean()
        ready.clear()
        before = time.perf_counter()
        loss.backward()
        end = ready[-1][0]  # what follows is waiting for the other rank
        if index < options.steps // 2:
            continue  # captured, planned and measured
        total = sum(size for _, size in ready)
        shares = [((at - before) / (end - before), size / total) for at, size in ready]
        means.append(sum(at * size for at, size in shares))
        early.append(sum(size for at, size in shares if at < 0.9))
        seconds.append(time.perf_counter() - start)
    graphs = 0
    if plan is not None:
        targets = targets_of(model)
        assert targets is not None, "it was planned"
        assert get_plan(model) is not None, "it was planned"
        graphs = targets.session.captured_count
        remove_hiremate(model)
    return statistics.median(means), statistics.median(early), statistics.median(seconds), graphs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--bucket-mb", type=float, default=1.0)
    parser.add_argument("--budget", default="80%")
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = nn.Sequential(*(Block(options.width) for _ in range(options.blocks)))
    plans: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "planned": {},
        "planned, each block a target": {"target": [str(i) for i in range(options.blocks)]},
    }
    rows = []
    for name, plan in plans.items():
        mean, early, seconds, graphs = measure(copy.deepcopy(made), options, plan)
        rows.append((name, f"{mean:.0%}", f"{early:.0%}", f"{1000 * seconds:.0f} ms", graphs))
    if torch.distributed.get_rank() == 0:
        sys.stdout.write(
            f"{provenance()}; 2 processes with gloo, one thread each; "
            f"{options.blocks} blocks of width {options.width}, buckets of {options.bucket_mb:g} MiB\n\n"
        )
        columns = "complete after, mean over bytes", "complete in the first 90 % of the backward", "step", "graphs"
        sys.stdout.write(page_tables.table(("", *columns), rows))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
