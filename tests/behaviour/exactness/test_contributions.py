"""Gradients of values between captured parts are added up as in eager PyTorch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import logsigmoid, normalize

from hiremate_lightning import get_plan
from hiremate_lightning.capturing import backend
from hiremate_lightning.rewriting.contributions import Contributions
from hiremate_lightning.testing import captured_count
from tests.exact import drawn, network, planned_alike, simple_loop

ROWS, WIDTH = 64, 48


def layers(**members):
    return {**{name: nn.Linear(WIDTH, WIDTH) for name in ("enter", "leave")}, **members}


@network(lambda first, second: layers(first=first, second=second))
def read(self, x: torch.Tensor) -> torch.Tensor:
    """Reads a value in two captured parts other than the one that computes it."""
    h = torch.tanh(self.enter(x))
    torch._dynamo.graph_break()
    before = self.first(h)
    torch._dynamo.graph_break()
    return self.leave(before + self.second(h)).square().mean()


def once(h):
    return torch.sin(3.0 * h)


def many(h):
    return h.exp() * 0.1 + h.pow(3) - h.cos() * torch.sigmoid(h)


def twice_by_one_operator(h):
    return h * h + h.atan() * h


def inside_of_operators(h):
    return normalize(h, dim=1) + torch.cosine_similarity(h, h.flip(0), dim=1)[:, None] + h.softmax(1)


def by_a_sum(h):
    """The sum is read by several; of the value itself there are two readers, and the sum's gradient comes first."""
    gate = torch.sigmoid(h)
    y = h + 1.0
    return y.exp() * 0.1 + y.cos() + y.pow(3) + gate


def by_a_sum_before(h):
    y = h + 1.0
    return torch.sigmoid(h) + y.exp() * 0.1 + y.cos() + y.pow(3)


def in_views(h):
    left, right = h[:, : WIDTH // 2], h[:, WIDTH // 2 :]
    return torch.cat([right.exp(), left.cos()], 1) + h.t().contiguous().t().sin() + h.view(-1).pow(2).view_as(h)


def without_gradients(h):
    return h.pow(3) + (h > 0).float() * h.detach() + torch.zeros_like(h) + torch.sigmoid(h)


def changed_in_place(h):
    y = h * 1.0
    y.mul_(torch.sigmoid(h)).add_(h.cos())
    return y + h.pow(2)


READERS = (
    *(once, many, twice_by_one_operator, inside_of_operators, by_a_sum, by_a_sum_before, in_views),
    *(without_gradients, changed_in_place),
)


def trained_exactly(make: Callable[[], nn.Module]) -> nn.Module:
    """Train a model plainly and planned, compare all numbers, and give the planned one."""
    torch.manual_seed(0)
    return planned_alike(make(), simple_loop(drawn(ROWS, WIDTH), 4, lambda loss: loss), "100%")


@pytest.mark.parametrize("first", READERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("second", [once, many], ids=lambda f: f.__name__)
def test_gradients_of_a_value_that_several_parts_read_are_exact(first, second, planning_log):
    model = trained_exactly(lambda: read(first, second))
    assert captured_count(model) == 3
    assert get_plan(model) is not None
    assert planning_log.of("tracing")


@pytest.mark.parametrize("expected", [{}, {0: 2}, {0: 7, 1: 3}, {2: 2}], ids=["nothing", "two", "more", "another"])
def test_terms_that_were_expected_wrongly_are_exact(expected, monkeypatch):
    def expecting(inputs: Any, terms: Any, is_settled: bool = False) -> Contributions:
        return Contributions(inputs, terms if is_settled else expected, is_settled)

    monkeypatch.setattr(backend, "Contributions", expecting)
    trained_exactly(lambda: read(many, many))


@network(lambda: {"enter": nn.Linear(WIDTH, 2 * WIDTH)})
def gated(self, x: torch.Tensor) -> torch.Tensor:
    """Reads views of a value before and after a look at one of them, which ends a captured part."""
    value, gate = self.enter(x).view(len(x), 2, -1).unbind(1)
    level = logsigmoid(gate)
    if torch.all(value == 0.0):
        return value.sum()
    highest = torch.max(value, level)
    kept = torch.minimum(torch.exp(level - highest), torch.ones_like(value))
    return (kept * value + torch.exp(value - highest)).square().mean()


def test_views_read_in_several_parts_are_traced_with_their_sizes(recwarn):
    model = trained_exactly(gated)
    assert captured_count(model) == 2
    assert not [str(w.message) for w in recwarn]


@network(layers)
def read_and_overwritten(self, x: torch.Tensor) -> torch.Tensor:
    """Overwrites a value that it reads several times, in another captured part than the one that made it."""
    h = self.enter(x)
    torch._dynamo.graph_break()
    y = h.exp() * 0.1 + h.sigmoid()
    h.mul_(2.0)
    y = y + h.tanh() + h.exp() * 0.1
    torch._dynamo.graph_break()
    return self.leave(y + h.sigmoid()).square().mean()


@network(layers)
def read_and_returned(self, x: torch.Tensor) -> torch.Tensor:
    """Returns a view of a value that it reads several times, and overwrites it."""
    h = self.enter(x)
    torch._dynamo.graph_break()
    y, seen = h.exp() * 0.1 + h.sigmoid() + h.tanh(), h.view(WIDTH, ROWS)
    torch._dynamo.graph_break()
    seen.mul_(2.0)
    return self.leave(y).square().mean() + h.square().mean()


@pytest.mark.parametrize("kind", [read_and_overwritten, read_and_returned])
def test_values_that_are_overwritten_are_exact(kind):
    trained_exactly(kind)


@network(lambda: {"leave": nn.Linear(WIDTH, WIDTH)})
def block(self, h: torch.Tensor) -> torch.Tensor:
    """Reads what it gets several times."""
    return torch.tanh(self.leave(many(h)))


@network(lambda: {"blocks": nn.ModuleList(block() for _ in range(3))})
def residual(self, x: torch.Tensor) -> torch.Tensor:
    """Blocks that are captured once, for a leaf: the others get what code between them has computed.

    So are the norms of a model of transformers whose inputs require gradients (`enable_input_require_grads`, as peft
    calls it), where its layers can't be captured as a whole.
    """
    h = x.requires_grad_()
    for inner in self.blocks:
        torch._dynamo.graph_break()
        h = h + inner(h)
    return h.square().mean()


def test_a_part_captured_for_a_leaf_is_exact_for_computed_values():
    model = trained_exactly(residual)
    assert captured_count(model) < 6


def test_gradients_of_a_leaf_that_is_no_parameter_are_exact():
    """It is read in two captured parts, several times in each."""

    @network(layers)
    def leaf(self, x: torch.Tensor) -> torch.Tensor:
        h = x.requires_grad_()
        before = many(h)
        torch._dynamo.graph_break()
        loss = self.leave(before + by_a_sum(h)).square().mean()
        torch._dynamo.graph_break()
        (gradient,) = torch.autograd.grad(loss, h, retain_graph=True)
        return loss + 0.0 * self.enter(gradient).sum() + gradient.sum()

    grad = torch.autograd.grad
    trained_exactly(leaf)
    assert torch.autograd.grad is grad, "torch is left as it was"
