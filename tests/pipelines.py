"""Training scripts of pipeline stages, with and without a plan, as each of two processes runs them.

python -m tests.pipelines RANK STORE is one of two processes of which the last one has too small a budget.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn import functional as F

from hiremate_lightning import hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.testing import plans
from tests.exact import recorded
from tests.sharding import Block, Left

WIDTH, WORDS, ROWS, LENGTH = 32, 64, 16, 32
MICRO = 4  # batches in each iteration
ITERATIONS = 5
WORLD = 2
BUFFERS_BYTES = ROWS * LENGTH * WIDTH * 4  # of what one stage sends to the next in an iteration


@dataclass(frozen=True)
class Pipeline:
    name: str  # what is special about it
    schedule: Callable[..., Any]  # in which order the micro-batches run
    budgets: tuple[str, str]  # of the two processes
    stages: int = 1  # how many stages each of them has

    def __str__(self) -> str:
        return self.name


PIPELINES = [
    Pipeline("one forward, one backward", Schedule1F1B, ("600 KiB", "70%")),
    Pipeline("all forwards first", ScheduleGPipe, ("60%", "1100 KiB")),
    # What is on its way between processes differs from run to run: with 60% a later iteration now and then needs 66%.
    Pipeline("two stages in each process", ScheduleInterleaved1F1B, ("70%", "70%"), stages=2),
]

TOO_SMALL = Pipeline("a budget too small for the last stage", Schedule1F1B, ("4 MiB", "100 KiB"))
LIMIT_S = 120  # of their process group


class Stage(nn.Module):
    """A part of a language model: a block, with the embeddings before the first or the head after the last."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH) if index == 0 else nn.Identity()
        self.block = Block(WIDTH, False, 0.1, 4)
        self.head = nn.Linear(WIDTH, WORDS) if index + 1 == count else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.words(x)))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def run(schedule: Any, rank: int, index: int, left: Left) -> None:
    """Run an iteration: the first process gets the batch, the last one the target."""
    x = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(index))
    losses: list[Tensor] = []
    last = {"target": x.roll(-1, 1), "losses": losses} if rank + 1 == WORLD else {}
    schedule.step(*([x] if rank == 0 else []), return_outputs=False, **last)
    left.losses += [loss.detach() for loss in losses]


def train(case: Pipeline, rank: int, planned: bool) -> Left:
    """Train the stages of this process."""
    left, indices, count = Left(), range(rank, WORLD * case.stages, WORLD), WORLD * case.stages
    torch.manual_seed(rank)
    modules = nn.ModuleList(Stage(index, count) for index in indices)
    with recorded() as left.warned:
        if planned:
            hiremate(modules, case.budgets[rank], target=[*map(str, range(case.stages))], verbose=False)
        stages = [PipelineStage(*pair, count, torch.device("cpu")) for pair in zip(modules, indices, strict=True)]
        schedule = case.schedule(stages if case.stages > 1 else stages[0], MICRO, loss_fn=loss_of)
        optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-2)
        for index in range(ITERATIONS):
            torch.manual_seed(1000 + 10 * index + rank)
            iterate = partial(run, schedule, rank, index, left)
            left.peak_bytes = measure_peak(iterate) if index + 1 == ITERATIONS else iterate() or 0
            left.gradients.append({name: p.grad.clone() for name, p in modules.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    return left.close(modules, optimizer, *(plans(modules) if planned else ()))


if __name__ == "__main__":
    group = {"rank": int(sys.argv[1]), "world_size": WORLD, "init_method": f"file://{sys.argv[2]}"}
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S), **group)
    try:
        train(TOO_SMALL, int(sys.argv[1]), planned=True)
    finally:
        print(f"ended at {time.time():.1f} s", flush=True)
