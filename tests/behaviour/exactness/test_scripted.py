"""TorchScript inside of planned models runs as its author scripted it, beside captured graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hiremate_lightning import HiRemateWarning
from tests.exact import network, simple_loop, train_both, train_eager

ROWS, SIZE = 32, 16

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore", category=HiRemateWarning),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE)

    def forward(self, x):
        return torch.nn.functional.gelu(self.norm(self.inner(x)))


def _gate():
    """Make a function of its own: TorchScript runs the first calls of one otherwise than later ones."""

    def gate(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.7 * x)

    return gate


def _example() -> torch.Tensor:
    return torch.randn(2, SIZE)


SCRIPTED = {
    "module": lambda: torch.jit.script(Block()),
    "traced module": lambda: torch.jit.trace(Block(), _example()),
    "frozen module": lambda: torch.jit.freeze(torch.jit.script(Block().eval())),
    "inside of another": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), torch.jit.script(Block())),
    "function": lambda: torch.jit.script(_gate()),
    "traced function": lambda: torch.jit.trace(_gate(), _example()),
}


@network(lambda part: {"first": nn.Linear(SIZE, SIZE), "part": part, "last": nn.Linear(SIZE, SIZE)})
def mixed(self, x):
    return self.last(torch.tanh(self.part(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_scripted_part_runs_as_it_is_and_the_rest_is_planned(name):
    plan = train_both(lambda: mixed(SCRIPTED[name]()), simple_loop(lambda _: torch.randn(ROWS, SIZE)), "100%")
    assert len(plan.graph.forward) > 1


@network(lambda create_graph: {"model": mixed(torch.jit.script(Block())), "create_graph": create_graph})
def potential(self, x):
    """Energies and forces behind a scripted part, asked for as models of atoms do."""
    x = x.detach().requires_grad_(True)
    energy = self.model(x).sum(1)
    (slope,) = torch.autograd.grad(
        outputs=[energy],
        inputs=[x],
        grad_outputs=[torch.ones_like(energy)],
        retain_graph=True,
        create_graph=self.create_graph,
        allow_unused=True,
    )
    return energy.unsqueeze(1) - (torch.zeros_like(x) if slope is None else slope)


def test_forces_behind_a_scripted_part_are_those_of_eager_code():
    train_both(lambda: potential(create_graph=False), simple_loop(lambda _: torch.randn(ROWS, SIZE), steps=5), "100%")


@network(lambda: {"drop": nn.Dropout(0.2), "norm": nn.BatchNorm1d(SIZE), "model": potential(create_graph=True)})
def noisy(self, x):
    """Draws random numbers and updates statistics before the forces."""
    return self.model(self.norm(self.drop(x)))


@pytest.mark.parametrize("make", [lambda: potential(create_graph=True), noisy], ids=["alone", "with noise"])
def test_forces_trained_on_behind_a_scripted_part_are_eager(make):
    warned = train_eager(make, simple_loop(lambda _: torch.randn(ROWS, SIZE), steps=4))
    assert len(warned) == 1
    assert "runs without a plan: it trains on a gradient that it takes in its forward" in warned[0]
