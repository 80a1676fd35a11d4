"""A small network with dropout and batch norm, and what the tests of sessions do with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hiremate_lightning import hiremate
from hiremate_lightning.testing import session_of
from tests.exact import assert_same

WIDTH, ROWS, MANY = 16, 256, 4096


class Net(nn.Module):
    """A chain in which activations outweigh weights, with dropout and batch norm."""

    def __init__(self, depth: int = 3, width: int = WIDTH, out: int | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential()
        for _ in range(depth):
            self.body.extend([nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1)])
        self.head = nn.Linear(width, out or width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def batch(seed: int = 0, rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def make(seed: int = 1, **options) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def planned(budget="75%", seed: int = 1, **options) -> Net:
    return hiremate(make(seed), budget, **{"verbose": False, **options})


def step(model: nn.Module, seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    model.zero_grad()
    loss = model(batch(seed, rows)).square().mean()
    loss.backward()
    return loss.detach()


def warm_up(model: nn.Module, steps: int = 2, rows: int = ROWS) -> nn.Module:
    """Do the steps after which a plan runs."""
    for index in range(steps):
        step(model, index, rows)
    return model


def only_plan(model: nn.Module):
    """Return what keeps the plans of a model, its only step signature, and the plan of that."""
    session = session_of(model)
    ((graphs, plan),) = session.plans.items()
    return session.planned, session.model.history.get_or_make(graphs), plan


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_exact(act: Callable[[nn.Module], list[torch.Tensor]], budget="75%", warm: int = 3, **options) -> None:
    """Do the same with a planned and with a plain model, from the same random state; fail where numbers differ."""
    results = []
    for is_planned in (True, False):
        model = planned(budget, **options) if is_planned else make()
        torch.manual_seed(2)
        warm_up(model, warm)
        results.append(act(model))
    assert_same(*results)
