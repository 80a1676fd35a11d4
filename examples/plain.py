"""Train a plain PyTorch model inside a budget: one line before the loop, and the loop stays as it is.

python examples/plain.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

from hiremate_lightning import get_plan, hiremate, remove_hiremate
from hiremate_lightning.units import format_bytes, format_ratio


class Layer(nn.Module):
    """A residual step: normalise, widen, narrow, drop some."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))))


class Classifier(nn.Module):
    """Tell which of ten classes a vector belongs to."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main() -> None:
    """Train, print the loss of each step, and say what the plan did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="50%", help="bytes, or a share of what a step adds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4096)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Classifier(layers=8, width=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(args.batch, 128)
    targets = inputs[:, :10].argmax(dim=1)

    hiremate(model, budget=args.budget, optimizer=optimizer)  # the one line

    for step in range(args.steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        print(f"step {step}  loss {loss.item():.4f}")

    plan = get_plan(model)
    print(f"peak without a plan  {format_bytes(plan.unplanned_peak_bytes)}")
    print(f"budget               {format_bytes(plan.budget_bytes)}")
    print(f"planned peak         {format_bytes(plan.planned_peak_bytes)}")
    print(f"predicted overhead   {format_ratio(plan.predicted_overhead)}")

    remove_hiremate(model)  # the model is as it was


if __name__ == "__main__":
    main()
