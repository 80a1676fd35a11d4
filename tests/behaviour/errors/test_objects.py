"""Objects of users whose code must not run where they are looked at: given, returned, kept by modules, and modules."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.calls.module_call import tensors_inside
from hiremate_lightning.objects import attempt, attributes_of, held_by, is_of
from tests.exact import network, simple_loop, take_steps, train_both


class RefusalError(Exception):
    """What a hostile object raises."""


def refuse(*_: Any) -> Any:
    raise RefusalError


class Irreps(tuple):
    """A tuple without a length, as e3nn's are."""

    __len__ = refuse


class Lines(list):
    """A list that can't be gone through."""

    __iter__ = __len__ = __bool__ = refuse


class Table(dict):
    """A dict that does not say what it holds."""

    __iter__ = __len__ = values = keys = items = refuse


class Array:
    """Compares item by item, and is neither true nor false, as arrays are."""

    __hash__ = None

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> Any:
        return Array([self, other])

    __bool__ = __len__ = refuse


class Trap:
    """Has every attribute, as a mock has."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __getattr__(self, name: str) -> Any:
        return self


class Closed:
    """Shows no attributes, and does not say of which class it is."""

    def __init__(self, held: Any) -> None:
        object.__setattr__(self, "held", held)

    __getattribute__ = refuse


class Number(float):
    """A number that can't be compared."""

    __eq__ = __ne__ = __bool__ = refuse
    __hash__ = float.__hash__


def zoo(held: Any) -> list[Any]:
    """Make one of each, in which a value lies."""
    return [Irreps([held]), Lines([held]), Table(held=held), Array(held), Trap(held), Closed(held), Number(1.5)]


KINDS = [type(animal) for animal in zoo(None)]


@pytest.mark.parametrize("kind", KINDS[:-1], ids=lambda kind: kind.__name__)
def test_what_an_object_holds_is_found_without_its_code(kind: type):
    held = torch.ones(1)
    animal = next(animal for animal in zoo(held) if type(animal) is kind)

    assert [id(value) for value in held_by(animal)] == [id(held)]
    assert [id(value) for value in tensors_inside((animal, deque()))] == [id(held)]


def test_an_object_is_of_its_type_whatever_it_says():
    assert is_of(Closed(1), Closed)
    assert not is_of(Closed(1), (dict, Tensor))
    assert attributes_of(object()) == {}


def test_a_look_that_fails_is_logged_once_for_debugging(caplog):
    with caplog.at_level(logging.DEBUG, "hiremate_lightning"):
        found = [attempt(refuse, "nothing", "a thing that refuses") for _ in range(2)]

    assert found == ["nothing", "nothing"]
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.getMessage() == "a thing that refuses is left alone, since a look at it fails: RefusalError"


class Inner(nn.Module):
    """A layer that can't be read as others: its attributes, a property, its truth."""

    __len__ = __bool__ = refuse
    is_gradient_checkpointing = property(refuse)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.animals = zoo(None)

    def forward(self, x: Tensor, animals: Any = None) -> Tensor:
        return self.down(F.gelu(self.up(x)))


@network(lambda: {"layers": nn.ModuleList(Inner() for _ in range(3))})
def keeper(self, given: tuple[Tensor, list[Any]]) -> Any:
    """A model that is given such objects, hands them to its layers, and returns them; its graph breaks in between."""
    x, animals = given
    for layer in self.layers:
        x = x + layer(x, animals)
        torch._dynamo.graph_break()
    return x, animals


@pytest.mark.parametrize("sizes", [(48,), (48, 80, 64, 96, 56, 72, 40, 88)], ids=["one size", "many sizes"])
def test_models_train_with_objects_that_refuse_to_be_read(sizes: tuple[int, ...]):
    def given(index: int) -> tuple[Tensor, list[Any]]:
        rows = sizes[index % len(sizes)]
        generator = torch.Generator().manual_seed(index)
        animals = [animal for animal in zoo(None) if type(animal) not in (Lines, Table, Closed)]  # Dynamo reads those
        return torch.randn(rows, 32, generator=generator), animals

    train_both(
        keeper, simple_loop(given, steps=5 if len(sizes) == 1 else 12, loss_of=lambda out: out[0].square().mean())
    )


class AroundGenerated(nn.Module):
    """A model whose graph breaks between layers that were generated: their code is of no module."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
        self.layers = nn.ModuleList(fx.symbolic_trace(layer) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
            torch._dynamo.graph_break()
        return x


def test_generated_modules_train_inside_of_what_is_not_captured():
    assert type(AroundGenerated().layers[0]).forward.__module__ is None
    train_both(AroundGenerated, simple_loop(lambda i: torch.randn(64, 32, generator=torch.Generator().manual_seed(i))))


def test_a_forward_that_wraps_itself_is_looked_at_once():
    """A decorator may say so by mistake; to follow it would take forever."""

    class Wrapped(AroundGenerated):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    Wrapped.forward.__wrapped__ = Wrapped.forward
    model = hiremate(Wrapped(), "100%", verbose=False)
    take_steps(model, lambda _: torch.randn(64, 32), 3, clears="never")
    assert get_plan(model) is not None
