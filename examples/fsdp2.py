"""Train a byte-level GPT that FSDP2 shards over two processes, without a plan and with one, and compare the runs.

torchrun --nproc_per_node 2 examples/fsdp2.py
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from gpt import Block, StandardLibrary
from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.units import format_bytes


class GPT(nn.Module):
    """Predict the next byte."""

    def __init__(self, blocks: int, width: int, context: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, 4, 0.1) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(sizes: argparse.Namespace, budget: str | None) -> tuple[list[Tensor], list[Tensor], int, nn.Module]:
    """Train on this process's share of the text.

    Args:
        sizes: Of the model and its batches.
        budget: Of the plan, None for a run without one.

    Returns:
        The losses, the shards of the weights at the end, the bytes that the last step adds at its peak, and the model.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = GPT(sizes.blocks, sizes.width, sizes.context)
    for block in model.blocks:
        fully_shard(block)  # its parameters are gathered before it runs, and given back afterwards
    fully_shard(model)
    if budget is not None:
        hiremate(model, budget)  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    windows, losses = StandardLibrary(sizes.context + 1).windows, []
    torch.manual_seed(rank)  # each process drops other values

    def step(tokens: Tensor) -> None:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(loss.detach())

    for index in range(sizes.steps):
        first = (index * world + rank) * sizes.batch
        tokens = windows[first : first + sizes.batch].long()
        peak_bytes = measure_peak(lambda tokens=tokens: step(tokens))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [weight.to_local().detach() for weight in model.parameters()], peak_bytes, model


def main() -> bool:
    """Train twice, and let the first process print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="60%", help="bytes, or a share of what a step adds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps of each run (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    sizes = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    plain_losses, plain_weights, eager_bytes, _ = train(sizes, None)
    losses, weights, peak_bytes, model = train(sizes, sizes.budget)
    are_equal = all(map(torch.equal, [*losses, *weights], [*plain_losses, *plain_weights]))
    if torch.distributed.get_rank() == 0:
        plan = get_plan(model)
        print(f"losses           {plain_losses[0].item():.4f} to {losses[-1].item():.4f}")
        print(f"equal            {'yes, bit for bit' if are_equal else 'NO'}")
        print(f"before a step    {format_bytes(plan.resident_bytes)}, which the lines of HiRemate above include")
        print(f"added by a step  {format_bytes(eager_bytes)} without a plan, {format_bytes(peak_bytes)} with one")
        print(f"predicted        {format_bytes(plan.planned_peak_bytes - plan.resident_bytes)}")
    torch.distributed.barrier()
    return are_equal


if __name__ == "__main__":
    status = 0 if main() else 1
    sys.stdout.flush()
    os._exit(status)  # the destructors of gloo may wait for a thread that waits for them (pytorch/pytorch#56297)
