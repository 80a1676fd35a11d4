"""Find the largest batch that trains within a budget, then train with it; nothing runs out of memory on the way.

python examples/largest_batch.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

from hiremate_lightning import find_max_batch_size, get_plan, hiremate
from hiremate_lightning.units import format_bytes


class Block(nn.Module):
    """One layer of a small transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.dense(self.norm_2(x))


def main() -> None:
    """Search, then train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="100 MiB", help="bytes, or auto (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--max-overhead", type=float, default=0.3, help="most extra time, a ratio")
    parser.add_argument("--objective", default="largest", choices=("largest", "throughput"))
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, args.width), *(Block(args.width) for _ in range(args.blocks)), nn.Linear(args.width, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def make_batch(size: int) -> torch.Tensor:
        return torch.randint(256, (size, 128))

    def step(model: nn.Module, batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    result = find_max_batch_size(
        model, make_batch, step, budget=args.budget, max_overhead=args.max_overhead, objective=args.objective
    )

    hiremate(model, budget=args.budget, optimizer=optimizer)
    for index in range(args.steps):
        print(f"step {index}  loss {step(model, make_batch(int(result))):.4f}")
    plan = get_plan(model)
    print(f"batch size     {int(result)}, {result.unplanned_size} without a plan")
    print(f"measured peak  {format_bytes(plan.measured.peak_bytes)} of {format_bytes(plan.budget_bytes)}")


if __name__ == "__main__":
    main()
