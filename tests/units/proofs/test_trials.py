"""Runs of code on inputs that stay as they were, with drawn gradients of the results."""

from __future__ import annotations

from typing import ClassVar

import torch

from hiremate_lightning.proofs.trials import Trial
from hiremate_lightning.torch_private import tensor_state


class Watching(torch.autograd.Function):
    """Notes the memory of the gradient that comes."""

    watched: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        Watching.watched.append(tensor_state.watch_storage(gradient))
        return gradient * 2


class Asking(torch.autograd.Function):
    """Asks whether the gradient that came first still lives."""

    lived: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x):
        return x + 1

    @staticmethod
    def backward(ctx, gradient):
        Asking.lived += [lives() for lives in Watching.watched]
        return gradient * 1


def test_drawn_gradients_are_freed_as_they_are_read():
    x = torch.randn(64, requires_grad=True)
    outcome = Trial([x], ["x"], with_gradients=True).run(lambda x: Watching.apply(Asking.apply(x)))
    assert Asking.lived == [False]
    assert outcome.gradients["the gradient of x"].shape == (64,)


def test_each_run_draws_the_same_gradients():
    x, y = torch.randn(8, 3, requires_grad=True), torch.randn(3, dtype=torch.complex64, requires_grad=True)
    trial = Trial([x, y], ["x", "y"], with_gradients=True)
    one, other = (trial.run(lambda x, y: (x.exp(), x.half(), y * x, x.detach(), None)) for _ in range(2))
    assert all(torch.equal(one.gradients[name], other.gradients[name]) for name in one.gradients)
    assert one.gradients["the gradient of y"].dtype is torch.complex64


def test_code_may_change_in_place_what_other_code_has_computed():
    """It gets the same memory with the same strides; after the trial the memory is as before."""
    x = torch.randn(1, 3, 4, 4, requires_grad=True).to(memory_format=torch.channels_last)
    before, strides = x.detach().clone(), x.stride()

    def change(x: torch.Tensor) -> torch.Tensor:
        assert x.stride() == strides
        return x.mul_(2) * 3

    outcome = Trial([x], ["x"], with_gradients=True).run(change)
    assert torch.equal(x, before)
    assert torch.equal(outcome.values["output 0"], before * 6)
    assert outcome.gradients["the gradient of x"] is not None
