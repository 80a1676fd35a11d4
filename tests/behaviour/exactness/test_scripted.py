"""TorchScript inside of planned models runs as its author scripted it, beside captured graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hiremate_lightning import HiRemateWarning
from tests.exact import simple_loop, train_both

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


class Mixed(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(SIZE, SIZE), part, nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return self.last(torch.tanh(self.part(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_scripted_part_runs_as_it_is_and_the_rest_is_planned(name):
    plan = train_both(lambda: Mixed(SCRIPTED[name]()), simple_loop(lambda _: torch.randn(ROWS, SIZE)), "100%")
    assert len(plan.graph.forward) > 1
