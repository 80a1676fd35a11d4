"""Views that undo one another are left out, and what a model returns stays what it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hiremate_lightning import hiremate
from tests.exact import captured_by, drawn, network, simple_loop, train_both

ROWS, WIDTH = 32, 16
rows = drawn(ROWS, WIDTH)


@network(lambda function: {"function": function, "first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)})
def computes(self, x: Tensor) -> Any:
    """Runs a function of two layers and its input."""
    return self.function(self, x)


def ops(function: Callable[..., Any]) -> Counter[str]:
    return Counter(node.op.split(".")[1] for node in captured_by(computes(function), rows(0)).graph.nodes)


def pooled(module: Any, x: Tensor) -> Tensor:
    """The view that `einsum` takes of one row gives it other strides, unlike in the trace; products are rounded so."""
    rows, shares = (
        module.first(x).repeat(1, 8).view(4, 8, 8 * WIDTH),
        module.second(x).view(4, 8, WIDTH).mean(2).softmax(1),
    )
    return torch.einsum("nr,nrw->nw", shares, rows)


UNDONE: dict[str, tuple[Callable[..., Tensor], str]] = {
    "t": (lambda m, x: m.second(m.first(x).tanh()).t().t(), ""),
    "transpose": (lambda m, x: m.first(x).view(4, 8, WIDTH).transpose(1, -1).cos().transpose(2, 1).sin(), "transpose"),
    "permute": (lambda m, x: m.first(x).view(4, 8, WIDTH).permute(2, 0, 1).permute(1, 2, 0).tanh(), "permute"),
    "squeeze": (lambda m, x: m.first(x).unsqueeze(1).squeeze(1).tanh(), "squeeze"),
    "slice": (lambda m, x: m.first(x)[:, :].tanh(), "slice"),
    "view": (lambda m, x: m.first(x).view(4, 8, WIDTH).view(8, 4, WIDTH).view(ROWS, WIDTH).tanh(), "view"),
    "detach": (lambda m, x: m.second(m.first(x).tanh().sigmoid()), "detach"),
    "one row": (pooled, ""),
}


@pytest.mark.parametrize(("function", "gone"), UNDONE.values(), ids=UNDONE)
def test_training_is_exact_without_what_is_undone(function, gone):
    train_both(lambda: computes(function), simple_loop(rows), "100%")
    if gone == "transpose":
        assert ops(function)["transpose"] == 2 * 2  # an elementwise operation lies between
    elif gone == "view":
        assert ops(function)["view"] == 1  # of the gradient of the bias
    elif gone:
        assert not ops(function)[gone]


def test_a_linear_layer_s_gradient_is_transposed_once():
    found = ops(lambda m, x: m.second(m.first(x).tanh()))
    assert found["t"] == 2 + 2  # its weight in the forward, what came in the backward; the weight itself there


KEPT: dict[str, Callable[..., Any]] = {
    "input": lambda m, x: (m.first(x), x.t().t(), x.detach(), x[:, :]),
    "result twice": lambda m, x: (lambda y: (y, y.t().t(), y.detach(), y.view(ROWS, WIDTH)))(m.first(x)),
    "parameter": lambda m, x: (m.first(x), m.second.weight.t().t(), m.second.weight.detach()),
    "detached": lambda m, x: (m.first(x), m.second(x).detach(), m.second(x).tanh().detach().t().t()),
}


@pytest.mark.parametrize("function", KEPT.values(), ids=KEPT)
def test_what_is_returned_is_what_it_was(function):
    torch.manual_seed(0)
    plain = computes(function)
    planned = hiremate(computes(function), "100%", verbose=False)
    planned.load_state_dict(plain.state_dict())
    for step in range(4):
        x = rows(step)
        expected, found = plain(x), planned(x)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
            assert one.requires_grad == other.requires_grad
        shares = [[a.data_ptr() == b.data_ptr() for b in outputs] for outputs in (found, expected) for a in outputs]
        assert shares[: len(found)] == shares[len(found) :]
        found[0].sum().backward()
        expected[0].sum().backward()
        pairs = zip(planned.parameters(), plain.parameters(), strict=True)
        assert all((a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad) for a, b in pairs)
