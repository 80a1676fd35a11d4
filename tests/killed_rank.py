"""Train on two processes, of which one is killed: python -m tests.killed_rank RANK KILLED STEP STORE.

The other one prints how long it took to end with an error.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hiremate_lightning import hiremate

LIMIT_S = 20  # of the process group
ROWS, WIDTH = 64, 32


def main(rank: int, killed: int, step: int, store: str) -> None:
    """Train until one process is killed, before it begins a step."""
    torch.manual_seed(0)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S)
    )
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))
    for block in model:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    hiremate(model, "70%", optimizer=optimizer, verbose=False)
    start = time.perf_counter()
    try:
        for index in range(step + 3):
            start = time.perf_counter()
            if rank == killed and index == step:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        sys.stdout.write(f"{type(error).__name__} in step {index} after {time.perf_counter() - start:.1f} s\n")
        sys.stdout.flush()
        os._exit(3)
    os._exit(0)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:4]), sys.argv[4])
