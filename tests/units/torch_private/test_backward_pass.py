"""What is known of a running backward: each test fails loudly where a private torch API has moved."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import Mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hiremate_lightning.torch_private import backward_pass


class Calling(torch.autograd.Function):
    """Multiplies by a tensor or by one, and calls a function in its backward, for what that tells of the tensor."""

    @staticmethod
    def forward(ctx, x, function, leaf=None):
        ctx.function = function
        return x.clone() if leaf is None else x * leaf.detach()

    @staticmethod
    def backward(ctx, g):
        ctx.function()
        return g, None, g if any(ctx.needs_input_grad[2:]) else None


def test_a_backward_knows_whether_it_will_run_again():
    heard = []
    y = Calling.apply(torch.ones(1, requires_grad=True), lambda: heard.append(backward_pass.will_run_again()))
    y.backward(retain_graph=True)
    y.backward()
    assert heard == [True, False]


def test_a_backward_knows_whether_it_can_be_differentiated():
    backward_pass.watch()
    heard = []
    x = torch.ones(1, requires_grad=True)
    y = Calling.apply(x * 1, lambda: heard.append(backward_pass.creates_graph()))
    torch.autograd.grad(y, x, create_graph=True)
    torch.autograd.grad(y, x, retain_graph=True)
    y.backward()
    assert heard == [True, False, False]
    assert not backward_pass.creates_graph()


def test_the_end_of_a_backward_is_reported():
    heard = []

    def tell():
        backward_pass.at_end(lambda: heard.append("end"))
        heard.append("here")

    weight = torch.ones(1, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda p: heard.append("accumulated"))
    Calling.apply(weight * 1, tell).backward()
    assert heard == ["here", "accumulated", "end"]


@pytest.fixture
def leaf():
    backward_pass.watch()
    return torch.ones(3, requires_grad=True)


def ask(leaf, run=lambda y, leaf: y.sum().backward()):
    """Ask in a backward what will be done with the gradient of a leaf."""
    heard = []

    def hear():
        heard.append(bool(backward_pass.taking_one({0: leaf})))

    run(Calling.apply(torch.ones(3, requires_grad=True) * 2, hear, leaf), leaf)
    return heard[0]


def test_a_gradient_that_is_only_added_is_known(leaf):
    assert ask(leaf)
    assert ask(leaf, lambda y, leaf: (y.exp() + y).sum().backward())
    assert ask(leaf, lambda y, leaf: torch.autograd.backward([y.sum(), y.exp().sum()]))
    assert not backward_pass.taking_one({0: leaf}), "outside of a backward nothing is known"
    assert not ask(leaf, lambda y, leaf: (leaf.requires_grad_(False), y.sum().backward())), "it was frozen since"


def test_a_gradient_of_two_terms_is_known(leaf):
    assert not ask(leaf, lambda y, leaf: (y.sum() + leaf.square().sum()).backward())
    assert not ask(leaf, lambda y, leaf: torch.autograd.backward([y.sum(), leaf.sum()]))
    assert not ask(leaf, lambda y, leaf: torch.autograd.backward([y, leaf], [y, leaf]))


def test_a_gradient_that_a_hook_sees_is_known(leaf):
    handle = leaf.register_hook(lambda g: 2 * g)
    assert not ask(leaf)
    handle.remove()
    assert ask(leaf)
    leaf.register_post_accumulate_grad_hook(lambda p: None)
    assert not ask(leaf)


def test_a_gradient_that_is_asked_for_or_left_out_is_known(leaf):
    other = torch.ones(3, requires_grad=True)
    assert not ask(leaf, lambda y, leaf: torch.autograd.grad(y.sum(), [leaf]))
    assert not ask(leaf, lambda y, leaf: (y * other).sum().backward(inputs=[other, y]))
    assert ask(leaf, lambda y, leaf: (y * other).sum().backward(inputs=[leaf]))


def test_a_backward_that_has_ended_is_let_go(leaf):
    y = (leaf * 2).sum()
    lives = weakref.ref(y)
    y.backward()
    del y
    gc.collect()
    assert lives() is None


def test_backwards_are_watched_once(leaf):
    run = torch.autograd._engine_run_backward
    backward_pass.watch()
    assert torch.autograd._engine_run_backward is run


def test_a_listener_hears_each_real_backward_and_no_traced_one(leaf):
    backward_pass.add_listener(listener := Mock(spec=["backward_called"]))
    (leaf * 2).sum().backward()
    torch.autograd.grad((leaf * 2).sum(), leaf)
    assert listener.backward_called.call_count == 2
    with FlopCounterMode(display=False):
        (leaf * 2).sum().backward()
    assert listener.backward_called.call_count == 2
