"""Softmaxes take the memory of the copies that they are computed from, and no number changes by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hiremate_lightning import hiremate, losses, softmaxes
from hiremate_lightning.metering import measure_peak
from hiremate_lightning.softmaxes import log_softmax_of_copy, softmax_of_copy
from hiremate_lightning.targets import targets_of

from .exact import added_peaks, simple_loop, train_both

ROWS, WIDTH, CLASSES = 16, 32, 301
LABELS = torch.arange(4 * ROWS) % CLASSES
KERNELS = [(softmax_of_copy, torch.softmax), (log_softmax_of_copy, torch.log_softmax)]


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(5)).mul(20)
    values.view(-1)[:3] = torch.tensor([float("-inf"), 0.0, -0.0])
    return values.to(dtype)


@pytest.mark.parametrize(("found", "expected"), KERNELS, ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize(
    ("dtype", "into"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_the_softmax_of_a_copy_is_that_of_eager(found, expected, dim, dtype, into):
    for source in (numbers(6, 5, CLASSES, dtype=dtype), numbers(CLASSES, 7, 5, dtype=dtype).transpose(0, 2)):
        wanted = expected(source.contiguous().to(into), dim)
        with torch.no_grad():
            assert torch.equal(found(source, source.shape, into, dim), wanted)


def test_a_copy_may_have_another_shape():
    source = numbers(6, 5, CLASSES, dtype=torch.bfloat16)
    with torch.no_grad():
        found = log_softmax_of_copy(source[:, 1:], (24, CLASSES), torch.float32, 1)
    assert torch.equal(found, source[:, 1:].reshape(24, CLASSES).float().log_softmax(1))


def test_where_autograd_records_it_does():
    source = torch.randn(4, 5, requires_grad=True)
    softmax_of_copy(source, (4, 5), torch.float64, 1)[:, 0].sum().backward()
    expected = source.detach().clone().requires_grad_()
    expected.double().softmax(1)[:, 0].sum().backward()
    assert torch.equal(source.grad, expected.grad)


@pytest.mark.parametrize(("found", "expected"), KERNELS, ids=["softmax", "log_softmax"])
def test_nothing_but_the_result_is_allocated(found, expected):
    source = numbers(ROWS, CLASSES, dtype=torch.bfloat16)
    with torch.no_grad():
        assert measure_peak(lambda: found(source, source.shape, torch.float32, 1)) == 4 * ROWS * CLASSES


# ---------------------------------------------------------------- choice


class Computes(nn.Module):
    """A linear layer in half precision, and a function of its result."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.head = nn.Linear(WIDTH, CLASSES).bfloat16()

    def forward(self, x: Tensor) -> Any:
        return self.function(self.head(x.bfloat16()))


def shifted(y: Tensor) -> Tensor:
    """The loss of a language model."""
    return F.cross_entropy(y.float()[:, :-1].contiguous().view(-1, CLASSES), LABELS[: 4 * (ROWS - 1)])


def both(y: Tensor) -> Tensor:
    """Reads the converted numbers twice."""
    y = y.float().flatten(0, 1)
    return F.cross_entropy(y, LABELS) + y.logsumexp(1).square().mean()


CHOICES: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "loss": (lambda y: F.cross_entropy(y.float().view(-1, CLASSES), LABELS), ["log_softmax_of_copy"]),
    "shifted": (shifted, ["log_softmax_of_copy"]),
    "attention": (lambda y: F.softmax(y, dim=-1, dtype=torch.float32).bfloat16(), ["softmax_of_copy"]),
    "over rows": (lambda y: y.float().softmax(1), ["softmax_of_copy"]),
    "read twice": (both, []),
    "returned": (lambda y: (lambda z: (z, z.softmax(-1)))(y.float()), []),
    "not copied": (lambda y: y.softmax(-1), []),
    "transposed": (lambda y: y.transpose(1, 2).float().softmax(1), []),
}


@pytest.mark.parametrize(("function", "expected"), CHOICES.values(), ids=CHOICES)
def test_only_copies_that_nothing_else_reads_are_joined(function, expected):
    module = hiremate(Computes(function), "100%", verbose=False)
    module(torch.randn(4, ROWS, WIDTH))
    (part,) = targets_of(module).session.parts.all
    ops = [node.op.removeprefix("hiremate.") for node in part.captured.graph.nodes]
    assert [op for op in ops if op.endswith("of_copy")] == expected


# ---------------------------------------------------------------- training


class Heads(nn.Module):
    """Attention in half precision with softmaxes in single precision, then the loss of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = x.bfloat16()
        for layer in self.layers:
            queries, keys, values = layer(x).chunk(3, -1)
            weights = F.softmax(queries @ keys.transpose(1, 2), dim=-1, dtype=torch.float32).to(x.dtype)
            x = x + F.dropout(weights, 0.1) @ values
        return shifted(self.head(x))


@pytest.mark.parametrize("budget", ["100%", "90%"])
def test_training_is_exact(budget):
    plan = train_both(Heads, simple_loop(lambda index: torch.randn(4, ROWS, WIDTH), loss_of=lambda y: y), budget)
    assert plan.planned_peak_bytes <= plan.budget_bytes


class Scaled(nn.Module):
    """A loss of scaled numbers: no product, whose kernel needs memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CLASSES, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy((x * self.scale).float(), LABELS)


def test_the_peak_falls_and_is_what_was_planned(monkeypatch):
    monkeypatch.setattr(losses, "PART_BYTES", 1)  # the backward takes less than the forward then
    x = numbers(len(LABELS), CLASSES, dtype=torch.bfloat16)
    converted = 4 * x.numel()
    plainly, planned = added_peaks(Scaled(), x)
    assert planned <= plainly - converted
    monkeypatch.setattr(softmaxes, "join_copies", lambda joint: None)
    assert planned <= added_peaks(Scaled(), x)[1] - 0.3 * converted
