"""Train in as many processes as torchrun starts, with DistributedDataParallel and a distributed sampler."""

import atexit
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.processes import leave


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*blocks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(1280, 32))
    sampler = DistributedSampler(data)
    for epoch in range(1):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=128, sampler=sampler):
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                print(f"loss {loss.item():.10f}")
    if rank == 0:
        torch.save(model.module.state_dict(), sys.argv[1])
    atexit.register(leave)


if __name__ == "__main__":
    assert "LOCAL_RANK" in os.environ, "start it with torchrun"
    main()
