"""Copies that share a planned module's attributes run as they are, with their own weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hiremate_lightning import HiRemateWarning, get_plan, hiremate
from tests.exact import differing


def clone(module: nn.Module) -> nn.Module:
    """Copy a module as learn2learn does: `__dict__` as it is, weights as results of `clone`."""
    copied = module.__new__(type(module))
    copied.__dict__ = module.__dict__.copy()
    copied._modules = {name: clone(inner) for name, inner in module._modules.items()}
    copied._parameters = {name: p.clone() for name, p in module._parameters.items()}
    return copied


def adapt(module: nn.Module, gradients: list[torch.Tensor]) -> None:
    """Take a step of gradient descent on the weights of a clone."""
    left = iter(gradients)
    for inner in module.modules():
        inner._parameters = {name: p - 0.1 * next(left) for name, p in inner._parameters.items()}


def first_order_maml(model: nn.Module, x: torch.Tensor) -> None:
    learner = clone(model)
    adapt(learner, list(torch.autograd.grad(learner(x).square().mean(), list(learner.parameters()))))
    learner(x).square().mean().backward()


@pytest.mark.parametrize("hooked", [False, True])
def test_a_copy_runs_with_its_own_weights(hooked: bool):
    gradients, x = [], torch.ones(2, 8, requires_grad=True)
    for is_planned in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        if hooked:
            model.register_full_backward_pre_hook(lambda *_: None)
        if is_planned:
            hiremate(model, "1 GiB", verbose=False)
            model(x).sum().backward()
            model.zero_grad()
            with pytest.warns(HiRemateWarning, match="A copy of Sequential was called that shares its attributes"):
                first_order_maml(model, x)
        else:
            first_order_maml(model, x)
        gradients.append([p.grad for p in model.parameters()])
    assert all(gradient is not None for gradient in gradients[0])
    assert not differing(*gradients)


def test_a_copy_does_not_end_the_plan_of_its_model():
    model = hiremate(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), "1 GiB", verbose=False)
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
        with torch.no_grad():
            clone(model)(torch.ones(2, 8))
    assert get_plan(model) is not None
