"""Code that is captured twice runs twice by what was made of it once, where nothing that counts has changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hiremate_lightning.capturing.same_captures import SameCaptures


class Captures:
    """Captures functions; lists what runs in the place of each graph."""

    def __init__(self) -> None:
        self.runs: list[Any] = []
        self._same = SameCaptures()

    def _backend(self, module: Any, inputs: Any) -> Any:
        def make(module: Any, inputs: Any) -> Any:
            return lambda *arguments: module.forward(*arguments)

        self.runs.append(self._same.run_of(make, module, inputs))
        return self.runs[-1]

    def call(self, function: Callable[..., Any], *arguments: Any, dynamic: bool | None = None) -> Any:
        torch._dynamo.reset()
        return torch.compile(function, backend=self._backend, dynamic=dynamic)(*arguments)

    @property
    def are_same(self) -> bool:
        first, *others = self.runs
        return bool(others) and all(run is first for run in others)


def added(number: Any) -> Callable[..., Tensor]:
    return lambda x, y: torch.add(x.sin(), y, alpha=number)


X, Y = torch.randn(4, 4), torch.randn(4, 4)


def test_the_same_graph_of_other_code_runs_by_what_was_made_once():
    captures = Captures()
    results = [captures.call(added(number), X, Y) for number in (2, 2)]
    assert captures.are_same
    assert torch.equal(*results)


def test_where_inputs_come_from_does_not_count():
    captures = Captures()
    results = [captures.call(one, X, Y) for one in (added(1), lambda a, b: torch.add(a.sin(), b, alpha=1))]
    assert captures.are_same
    assert torch.equal(*results)


def scaled(x: Tensor) -> Tensor:
    return x.view(x.shape[0] * x.shape[1]) * x.shape[0]


def scaled_again(y: Tensor) -> Tensor:
    return y.view(y.shape[0] * y.shape[1]) * y.shape[0]


def scaled_by_rows(y: Tensor) -> Tensor:
    return y.view(y.shape[0] * y.shape[1]) * y.shape[1]


@pytest.mark.parametrize(("other", "is_same"), [(scaled_again, True), (scaled_by_rows, False)], ids=["same", "other"])
def test_symbols_for_sizes_count_by_their_place(other, is_same):
    captures = Captures()
    captures.call(scaled, torch.randn(4, 6), dynamic=True)
    captures.call(other, torch.randn(4, 6), dynamic=True)
    assert captures.are_same is is_same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((added(1), X, Y), (added(2), X, Y)),
        ((added(1), X, Y), (added(1.0), X, Y)),
        ((lambda x: x * 1, X), (lambda x: x * True, X)),
        ((added(1), X, Y), (added(1), X.double(), Y)),
        ((added(1), X, Y), (added(1), X.t(), Y)),
        ((added(1), X, Y), (added(1), X, Y.clone().requires_grad_())),
        ((added(1), X, X[:]), (added(1), X, Y)),
        ((added(1), X, Y), (lambda x, y: torch.add(x.cos(), y, alpha=1), X, Y)),
    ],
    ids=["number", "int and float", "int and bool", "dtype", "strides", "gradient", "memory", "operation"],
)
def test_what_differs_is_made_anew(one, other):
    captures = Captures()
    captures.call(*one)
    captures.call(*other)
    assert not captures.are_same


@pytest.mark.parametrize(
    "setting", [lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad], ids=["autocast", "no gradients"]
)
def test_other_settings_make_other_code(setting):
    captures = Captures()
    captures.call(added(1), X, Y)
    with setting():
        captures.call(added(1), X, Y)
    assert len(captures.runs) == 2
    assert not captures.are_same


def test_what_was_made_is_not_kept_alive():
    captures = Captures()
    captures.call(added(1), X, Y)
    run = weakref.ref(captures.runs.pop())
    torch._dynamo.reset()
    gc.collect()
    assert run() is None
