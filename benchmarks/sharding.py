"""Peaks and times of steps under FSDP2: plain, planned, and with torch.utils.checkpoint around each block.

torchrun --nproc_per_node 2 -m benchmarks.sharding [--width 256] [--length 128] [--only "GPT, bf16"]

Collectives go through shared memory, so that a measurement of the calling thread sees all buffers. Times are those of
the processor in this process: other load on the machine counts less in them. Steps of all ways are taken in turns, and
a time is the median over the turns of its ratio to plain FSDP2's in the same turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import page_tables
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.memory.metering import measure_peak
from tests.sharding import Case, Language, loss_of, make_model, shard, tokens
from tests.shared_memory import SharedMemory

WARM_UP, TURNS = 12, 24  # steps of each way before the timed ones, and those
BLOCKS, ROWS = 4, 8
PLAIN, CHECKPOINT, PLANNED, AT_ITS_PEAK = "plain", "checkpoint", "planned at 60 %", "planned at checkpoint's peak"


class Training:
    """A model that trains in one of the ways.

    Args:
        case: The model and its batches.
        way: One of the ways.
        memory: What processes communicate through.
        budget: Of what is planned.

    Attributes:
        peak_bytes: Of the latest measured step, above its start.
        losses: Of all steps.
        ratios: Times over those of plain training, by turns.
    """

    def __init__(self, case: Case, way: str, memory: SharedMemory, budget: str | int = "60%") -> None:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (memory.world,))
        self._case, self._memory, self._index = case, memory, 0
        self.model = make_model(case)
        if way == CHECKPOINT:
            for block in self.model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        shard(self.model, case, mesh, memory)
        if way in (PLANNED, AT_ITS_PEAK):
            hiremate(self.model, budget, verbose=False, on_infeasible="warn")
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.peak_bytes = 0
        self.losses, self.ratios = list[Tensor](), list[float]()
        for _ in range(WARM_UP):
            self.step()
        self.step(is_measured=True)

    def step(self, is_measured: bool = False) -> float:
        """Train one step; return the time in ms of its forward and backward.

        Args:
            is_measured: Whether to measure their peak too, which takes time.
        """
        x = tokens(self._memory.rank, self._index, self._case)
        torch.manual_seed(self._index)
        start = time.process_time()
        if is_measured:
            self.peak_bytes = measure_peak(partial(self._run, x))
        else:
            self._run(x)
        taken_ms = 1000 * (time.process_time() - start)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._index += 1
        return taken_ms

    def _run(self, x: Tensor) -> None:
        loss = loss_of(self.model(x), x)
        loss.backward()
        self.losses.append(loss.detach())


def compare(case: Case, memory: SharedMemory) -> dict[str, Training]:
    """Train in all ways, in turns."""
    found = {way: Training(case, way, memory) for way in (PLAIN, CHECKPOINT, PLANNED)}
    plan = get_plan(found[PLANNED].model)
    assert plan is not None, "it has trained"
    budget_bytes = plan.resident_bytes + found[CHECKPOINT].peak_bytes
    found[AT_ITS_PEAK] = Training(case, AT_ITS_PEAK, memory, budget_bytes)
    for _ in range(TURNS):
        times = {way: training.step() for way, training in found.items()}
        for way, training in found.items():
            training.ratios.append(times[way] / times[PLAIN] - 1)
    return found


def cases(width: int, length: int) -> list[Case]:
    """List the models, in both precisions.

    Args:
        width: Of their blocks.
        length: Of each row of a batch, in tokens.
    """
    return [
        Case(
            f"{name}, {kind}",
            partial(Language, gated=gated, blocks=BLOCKS, width=width),
            rows=ROWS,
            length=length,
            bf16=kind == "bf16",
        )
        for name, gated in (("GPT", False), ("Llama", True))
        for kind in ("fp32", "bf16")
    ]


def main() -> None:
    """Print a row for each model and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128, help="of the blocks")
    parser.add_argument("--length", type=int, default=64, help="of a row, in tokens")
    parser.add_argument("--only", default="", help="part of a model's name")
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    torch.distributed.broadcast_object_list(folder)
    memory = SharedMemory(Path(folder[0]), rank, world)
    if rank == 0:
        sys.stdout.write(page_tables.head("model", "way", "peak", "extra time, median", "quartiles", "equal"))
    for case in cases(options.width, options.length):
        if options.only not in case.name:
            continue
        found = compare(case, memory)
        for way, training in found.items():
            low, median, high = statistics.quantiles(training.ratios, n=4)
            is_equal = all(map(torch.equal, training.losses, found[PLAIN].losses))
            if rank == 0:
                peak = f"{training.peak_bytes / 2**20:.2f} MiB"
                spread = f"{low:+.0%} to {high:+.0%}"
                cells = (case, way, peak, f"{median:+.0%}", spread, "yes" if is_equal else "NO")
                print(page_tables.row(*cells), end="", flush=True)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
