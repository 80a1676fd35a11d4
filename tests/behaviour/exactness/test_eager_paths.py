"""While a step is captured, models of other packages go the way of plain training."""

from __future__ import annotations

import sys
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.calls.eager_paths import OPAQUE, QUESTIONS, eager_paths
from hiremate_lightning.targets.modules import targets_of


@pytest.fixture
def asking(monkeypatch) -> types.ModuleType:
    """Stand in for a module of transformers that asks whether it is traced."""
    name, question = QUESTIONS[0]
    module = types.ModuleType(name)
    setattr(module, question, lambda *_: torch.compiler.is_compiling())
    monkeypatch.setitem(sys.modules, name, module)
    for other, _ in QUESTIONS[1:]:
        monkeypatch.delitem(sys.modules, other, raising=False)
    return module


def test_the_question_is_answered_with_no_inside_and_truly_outside(asking, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert asking.is_tracing()
    with eager_paths():
        assert not asking.is_tracing(torch.ones(1))
        with eager_paths():
            assert not asking.is_tracing()
        assert not asking.is_tracing()
    assert asking.is_tracing()


def test_the_question_is_given_back_after_an_error(asking):
    before = asking.is_tracing
    with pytest.raises(KeyError), eager_paths():
        raise KeyError
    assert asking.is_tracing is before


def test_a_planned_step_takes_the_path_that_plain_training_takes(asking):
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x) * (2.0 if asking.is_tracing(x) else 3.0)

    def losses(model):
        torch.manual_seed(0)
        found = []
        for _ in range(4):
            loss = model(torch.randn(16, 8)).square().mean()
            loss.backward()
            found.append(loss.item())
        return found

    torch.manual_seed(1)
    plain = Asking()
    planned = hiremate(Asking(), "100%", verbose=False)
    planned.load_state_dict(plain.state_dict())
    assert losses(planned) == losses(plain)
    assert get_plan(planned) is not None


@pytest.mark.parametrize(("name", "question"), QUESTIONS)
def test_the_installed_package_asks_where_it_is_expected_to(name, question):
    pytest.importorskip("transformers")
    module = pytest.importorskip(name)
    assert callable(getattr(module, question))


def test_an_opaque_function_is_captured_with_what_surrounds_it(monkeypatch):
    name, function = OPAQUE[0]
    module = types.ModuleType(name)

    def contract(equation, *operands):
        assert threading.get_ident()  # which Dynamo does not trace
        return torch.einsum(equation, *operands)

    setattr(module, function, contract)
    monkeypatch.setitem(sys.modules, name, module)

    class Contracting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return torch.tanh(module.einsum("bi,io->bo", torch.tanh(x), self.weight))

    planned = hiremate(Contracting(), "100%", verbose=False)
    x = torch.randn(16, 8)
    loss = planned(x).square().mean()
    loss.backward()
    assert targets_of(planned).session.captured_count == 1
    weight = planned.weight.detach().clone().requires_grad_()
    torch.tanh(torch.tanh(x) @ weight).square().mean().backward()
    assert torch.equal(planned.weight.grad, weight.grad)


def test_numpy_draws_from_its_own_generator():
    class Masking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x) * np.random.rand(1).item()  # noqa: NPY002  as models do

    def losses(model):
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        return [model(torch.randn(16, 8)).square().mean().item() for _ in range(3)]

    torch.manual_seed(1)
    plain = Masking()
    planned = hiremate(Masking(), "100%", verbose=False)
    planned.load_state_dict(plain.state_dict())
    assert losses(planned) == losses(plain)
