"""Peaks and times of steps under FSDP2: plain, planned, and with torch.utils.checkpoint around each block.

torchrun --nproc_per_node 2 -m benchmarks.sharding

Collectives go through shared memory, so that a measurement of the calling thread sees all buffers. Times are those of
the processor in this process: other load on the machine counts less in them.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hiremate_lightning import hiremate
from hiremate_lightning.memory.metering import measure_peak
from tests.sharding import Case, Language, make_model, shard, tokens
from tests.shared_memory import SharedMemory

STEPS, FIRST = 12, 5  # steps of each run, and the first one that is timed
SIZES = {"blocks": 4, "width": 128}
CASES = [
    Case(f"{name}, {kind}", partial(Language, gated=gated, **SIZES), rows=8, length=64, bf16=kind == "bf16")
    for name, gated in (("GPT", False), ("Llama", True))
    for kind in ("fp32", "bf16")
]
WAYS = ("plain", "planned", "checkpoint")


def train(case: Case, way: str, memory: SharedMemory) -> tuple[int, float, list[Tensor]]:
    """Return the peak of the last step above its start, the median time of a step in ms, and the losses."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (memory.world,))
    model = make_model(case)
    if way == "checkpoint":
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    shard(model, case, mesh, memory)
    if way == "planned":
        hiremate(model, "60%", verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, times, peak_bytes = list[Tensor](), list[float](), 0
    for index in range(STEPS):
        x = tokens(memory.rank, index, case)
        torch.manual_seed(index)
        start = time.process_time()
        run = partial(_step, model, x, losses)
        if index + 1 == STEPS:
            peak_bytes = measure_peak(run)
        else:
            run()
            times.append(1000 * (time.process_time() - start))
        optimizer.step()
        optimizer.zero_grad()
    return peak_bytes, statistics.median(times[FIRST:]), losses


def _step(model: nn.Module, x: Tensor, losses: list[Tensor]) -> None:
    loss = F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())
    loss.backward()
    losses.append(loss.detach())


def main() -> None:
    """Print a row for each model."""
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    torch.distributed.broadcast_object_list(folder)
    memory = SharedMemory(Path(folder[0]), rank, world)
    if rank == 0:
        print("| model | plain | planned at 60 % | checkpoint | time planned | time checkpoint | equal |")
    for case in CASES:
        found = {way: train(case, way, memory) for way in WAYS}
        peaks = " | ".join(f"{found[way][0] / 2**20:.2f} MiB" for way in WAYS)
        times = " | ".join(f"{found[way][1] / found['plain'][1] - 1:+.0%}" for way in WAYS[1:])
        is_equal = all(map(torch.equal, found["planned"][2], found["plain"][2]))
        if rank == 0:
            print(f"| {case} | {peaks} | {times} | {'yes' if is_equal else 'NO'} |", flush=True)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
