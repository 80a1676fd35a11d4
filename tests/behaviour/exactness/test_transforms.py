"""Transforms of torch.func inside of planned models and around them: the numbers of plain training."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from hiremate_lightning import HiRemateWarning, hiremate
from tests.exact import differing, loop_of, network, simple_loop, train_eager

ROWS, SIZE = 4, 8

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own forward derivatives


@network(lambda: {"first": nn.Linear(SIZE, 32), "norm": nn.LayerNorm(32), "last": nn.Linear(32, SIZE)})
def flow(self, x):
    """A network with a norm, whose derivative torch.compile can't take forward."""
    return self.last(torch.tanh(self.norm(self.first(x))))


def _of_weights(net, x):
    return grad(lambda weights: functional_call(net, weights, (x,)).square().sum())(dict(net.named_parameters()))


def _per_sample(net, x):
    weights = {name: p.detach() for name, p in net.named_parameters()}
    return vmap(grad(lambda w, row: functional_call(net, w, (row,)).square().sum()), in_dims=(None, 0))(weights, x)


TRANSFORMS = {
    "jvp": lambda net, x: jvp(net, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda net, x: vmap(net)(torch.stack([x, 2 * x])),
    "grad": lambda net, x: grad(lambda y: net(y).square().sum())(x),
    "vjp": lambda net, x: vjp(net, x)[1](torch.ones_like(x))[0],
    "jacrev": lambda net, x: jacrev(net)(x[0]),
    "weights": lambda net, x: _of_weights(net, x)["first.weight"],
    "samples": lambda net, x: _per_sample(net, x)["first.weight"],
}


@network(lambda transform: {"net": flow(), "before": nn.Linear(SIZE, SIZE), "transform": transform})
def mean_flow(self, x):
    """Transforms its network in its forward."""
    x = torch.tanh(self.before(x))
    with torch.no_grad():
        target = self.transform(self.net, x)
    return self.net(x) + torch.tanh(target.detach().sum())


def compare(make, loss_of) -> None:
    """Train plainly and planned; fail where anything differs."""
    logs = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HiRemateWarning)
            if is_planned:
                hiremate(model, "100%", verbose=False, on_infeasible="warn")
            loop = loop_of(lambda model, _: loss_of(model, torch.randn(ROWS, SIZE)), 3, torch.optim.SGD)
            logs.append(loop(model))
    assert not differing(logs[1], logs[0])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_inside_of_a_forward_is_exact(name):
    compare(lambda: mean_flow(TRANSFORMS[name]), lambda model, x: model(x).square().mean())


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_transform_around_a_planned_model_is_exact(name, has_gradients):
    def loss_of(model, x):
        with torch.set_grad_enabled(has_gradients):
            target = TRANSFORMS[name](model, x)
        return model(x).square().mean() + 1e-3 * torch.tanh(target).sum()

    compare(flow, loss_of)


def test_a_transform_that_can_not_be_captured_leaves_no_trace():
    """An error's frames hold a guard of PyTorch's dispatcher, which sets old keys when it is collected."""
    before = str(torch._C._dispatch_tls_local_exclude_set())
    model = hiremate(mean_flow(TRANSFORMS["jvp"]), "100%", verbose=False)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", HiRemateWarning)
        model(torch.randn(ROWS, SIZE)).sum().backward()
    assert any("could not capture a part of MeanFlow, which runs without a plan" in str(w.message) for w in warned)
    gc.collect()
    assert str(torch._C._dispatch_tls_local_exclude_set()) == before


@network(lambda: {"net": flow()})
def velocity(self, x):
    """Trains on a derivative of its network alone, as mean flows do."""
    value, slope = jvp(self.net, (x,), (torch.ones_like(x),))
    return value - slope.detach()


@network(lambda: {"weight": nn.Parameter(torch.randn(SIZE, SIZE)), "scale": nn.Parameter(torch.ones(SIZE))})
def bare_velocity(self, x):
    """The same, with weights of its own instead of parts."""

    def normed(y):
        return nn.functional.layer_norm(y @ self.weight, (SIZE,), self.scale)

    value, slope = jvp(normed, (x,), (torch.ones_like(x),))
    return value - slope.detach()


@pytest.mark.parametrize("make", [velocity, bare_velocity])
def test_a_forward_that_is_all_such_a_transform_is_eager(make):
    warned = train_eager(make, simple_loop(lambda _: torch.randn(ROWS, SIZE), steps=4))
    assert len(warned) == 1
    assert f"could not capture a part of {make.__name__}, which runs without a plan" in warned[0]
