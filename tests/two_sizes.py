"""What each of two processes does for test_batch_size.py, which starts this file with torchrun.

Each searches with a budget of its own, and saves what it found, and the weights of a step after it, for its rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hiremate_lightning import find_max_batch_size
from tests.processes import leave

BUDGETS = (2 * 2**20, 4 * 2**20)


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    sizes: list[int] = []

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        sizes.append(len(batch))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def make_batch(size: int) -> torch.Tensor:
        return torch.randn(size, 32)

    result = find_max_batch_size(
        model, make_batch, step, budget=BUDGETS[rank], max_overhead=9.0, time_limit_s=0.5, verbose=False
    )
    step(model, make_batch(int(result)))
    torch.save((result, sizes, model.module.state_dict()), folder / f"{rank}.pt")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
