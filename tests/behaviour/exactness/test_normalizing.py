"""The result of a batch norm comes back from its statistics, bit for bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from hiremate_lightning.rewriting import replays
from hiremate_lightning.rewriting.replays import NORMALIZE
from tests.behaviour.exactness.test_execution import compiled, exact_with_nothing_kept, keep_all, nothing_kept, results

ROWS, CHANNELS = 64, 6


class Normed(nn.Module):
    """Three times a product, a norm and an activation."""

    def __init__(self, norm, space: tuple[int, ...], prepare=lambda x: x) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.randn(CHANNELS, *[1] * len(space)) for _ in range(3))
        self.norms = nn.ModuleList(norm() for _ in range(3))
        self.space, self.prepare = space, prepare

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.prepare(x.view(-1, CHANNELS, *self.space))
        for factor, norm in zip(self.factors, self.norms, strict=True):
            x = torch.tanh(norm(x * factor))
        return x.float()


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


NORMS = {
    "rows": lambda: Normed(lambda: nn.BatchNorm1d(CHANNELS), ()),
    "signals": lambda: Normed(lambda: nn.BatchNorm1d(CHANNELS), (20,)),
    "pictures": lambda: Normed(lambda: nn.BatchNorm2d(CHANNELS), (5, 4)),
    "pictures, channels last": lambda: Normed(lambda: nn.BatchNorm2d(CHANNELS), (5, 4), channels_last),
    "volumes": lambda: Normed(lambda: nn.BatchNorm3d(CHANNELS), (5, 2, 2)),
    "volumes, channels last": lambda: Normed(lambda: nn.BatchNorm3d(CHANNELS), (5, 2, 2), channels_last),
    "no weights": lambda: Normed(lambda: nn.BatchNorm2d(CHANNELS, affine=False), (5, 4)),
    "no running statistics": lambda: Normed(lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False), (5, 4)),
    "large epsilon": lambda: Normed(lambda: nn.BatchNorm2d(CHANNELS, eps=0.5), (5, 4)),
    "instances": lambda: Normed(lambda: nn.InstanceNorm2d(CHANNELS), (5, 4)),
    "instances with weights": lambda: Normed(
        lambda: nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True), (5, 4)
    ),
    "double precision": lambda: Normed(lambda: nn.BatchNorm2d(CHANNELS), (5, 4), torch.Tensor.double).double(),
    "half precision": lambda: Normed(lambda: nn.BatchNorm2d(CHANNELS), (5, 4), torch.Tensor.bfloat16).bfloat16(),
    "half precision, whole weights": lambda: Normed(lambda: Bfloat16Norm(CHANNELS), (5, 4)),
}


class Bfloat16Norm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x.bfloat16()).float()


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    model = NORMS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5)
    return model, torch.randn(ROWS, CHANNELS * 20, requires_grad=True)


@pytest.mark.parametrize("name", NORMS)
def test_norms_come_back_from_their_statistics_bit_for_bit(name):
    graph = exact_with_nothing_kept(partial(make, name))
    again = [graph.nodes[n].op for before in nothing_kept(graph) for n in before]
    assert again.count(NORMALIZE) == 3
    assert not any("batch_norm" in op for op in again)


def replays_in(model: nn.Module, x: torch.Tensor) -> int:
    call, conductor = compiled(model, keep_all)
    results(model, x, call)
    return sum(node.op == NORMALIZE for node in conductor.parts[0].captured.graph.nodes)


@pytest.mark.parametrize("rows", [2, ROWS])
def test_norms_of_few_rows_come_back_as_those_of_many(rows):
    model, x = make("rows")
    assert replays_in(model, x[:rows].detach().requires_grad_()) == 3


def test_a_norm_of_evaluation_or_transposed_input_runs_again():
    model, x = make("pictures")
    assert replays_in(model.eval(), x) == 0
    model = Normed(lambda: nn.BatchNorm2d(CHANNELS), (5, 4), lambda x: x.transpose(2, 3))
    assert replays_in(model, x) == 2  # its own result is not transposed


@pytest.fixture
def _compared_anew():
    """Forget which kernels were found to agree, before and after."""
    replays._gives_the_same.cache_clear()
    yield
    replays._gives_the_same.cache_clear()


@pytest.mark.usefixtures("_compared_anew")
def test_kernels_that_round_otherwise_are_not_used(monkeypatch):
    def slightly_other(*arguments):
        return torch.nextafter(exact(*arguments), torch.tensor(torch.inf))

    exact = replays.normalize
    monkeypatch.setattr(replays, "normalize", slightly_other)
    model, x = make("pictures")
    assert replays_in(model, x) == 0
