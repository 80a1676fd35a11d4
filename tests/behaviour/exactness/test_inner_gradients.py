"""Models that take gradients in their forward: forces of a potential, penalties on gradients, an inner optimizer."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

from hiremate_lightning import CaptureError, hiremate, remove_hiremate
from tests.exact import drawn, loop_of, network, simple_loop, square_error, take_steps, train_both, train_eager

WIDTH, ROWS = 64, 256
positions = drawn(ROWS, 3)


def layers_of(inputs: int, outputs: int = 1, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    sizes = (inputs, WIDTH, WIDTH, WIDTH)
    hidden = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), activation())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, outputs))


@network(lambda: {"network": layers_of(2)}, shape=(ROWS, 2))
def equation(self, x: Tensor) -> Tensor:
    """A physics-informed network: what is left of Burgers' equation, of second order."""
    x = x.requires_grad_(True)
    u = self.network(x)
    (first,) = grad(u.sum(), x, create_graph=True)
    (second,) = grad(first[:, 0].sum(), x, create_graph=True)
    return first[:, 1] + u[:, 0] * first[:, 0] - 0.01 * second[:, 0]


@network(
    lambda: {"network": nn.Sequential(layers_of(3, WIDTH, nn.SiLU), nn.Dropout(0.2), nn.Linear(WIDTH, 1))},
    shape=(ROWS, 3),
)
def potential(self, x: Tensor) -> Tensor:
    """Energies and forces, with dropout."""
    x = x.detach().requires_grad_(True)
    energy = self.network(x)
    return torch.cat([energy, -grad(energy.sum(), x, create_graph=True)[0]], 1)


@network(
    lambda: {
        "critic": nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.1),
            nn.Flatten(),
            nn.Linear(32 * 64, 1),
        )
    },
    shape=(8, 3, 16, 16),
)
def penalty(self, x: Tensor) -> Tensor:
    """A critic of pictures whose slope is to be one, with normalization over batches and channels."""
    between = (x + torch.rand(len(x), 1, 1, 1)).detach().requires_grad_(True)
    (slope,) = grad(self.critic(between).sum(), between, create_graph=True)
    return self.critic(x) + 10 * (slope.flatten(1).norm(2, 1, keepdim=True) - 1)


@network(lambda: {"network": layers_of(8)}, shape=(ROWS, 8))
def inner_optimizer(self, x: Tensor) -> Tensor:
    """Learns to learn: two steps of gradient descent, differentiated (MAML)."""
    weights = dict(self.network.named_parameters())
    for _ in range(2):
        loss = torch.func.functional_call(self.network, weights, (x,)).square().mean()
        slopes = grad(loss, list(weights.values()), create_graph=True)
        weights = {name: w - 0.1 * s for (name, w), s in zip(weights.items(), slopes, strict=True)}
    return torch.func.functional_call(self.network, weights, (x,))


@network(lambda: {"network": layers_of(4, 4)}, shape=(ROWS, 4))
def flow(self, x: Tensor) -> Tensor:
    """A continuous normalizing flow: traces of Jacobians, all rows of one at once."""
    x, traces = x.requires_grad_(True), torch.zeros(())
    rows = torch.eye(4).unsqueeze(1).expand(4, len(x), 4)
    for _ in range(2):
        speed = self.network(x)
        (jacobian,) = grad(speed, x, rows, create_graph=True, is_grads_batched=True)
        traces = traces + jacobian.diagonal(dim1=0, dim2=2).sum(1)
        x = x + 0.1 * speed
    return x.square().sum(1) - traces


@network(
    lambda: {"first": layers_of(WIDTH, WIDTH, nn.GELU), "second": layers_of(WIDTH, WIDTH, nn.GELU)}, shape=(ROWS, WIDTH)
)
def auxiliary(self, x: Tensor) -> Tensor:
    """Trains a part of itself on a loss of its own, in the middle of the forward."""
    self.first(x).square().mean().backward()
    return self.second(self.first(x))


MODELS = [equation, potential, penalty, inner_optimizer, flow, auxiliary]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("budget", ["60%", "80%"])
def test_gradients_in_the_forward_are_planned_bit_for_bit(make, budget):
    """They are captured with the forward, as one graph."""
    plan = train_both(make, simple_loop(drawn(*make.shape), steps=4), budget)
    assert " of 1 graph, " in plan.proved
    assert plan.solution.recompute_ms > 0
    assert plan.planned_peak_bytes < plan.unplanned_peak_bytes


def test_gradients_of_the_forward_are_added_to_those_that_exist():
    train_both(auxiliary, loop_of(lambda module, i: square_error(module(drawn(*auxiliary.shape)(i))), 5, accumulate=5))


@network(lambda: {"first": layers_of(WIDTH, WIDTH), "second": layers_of(WIDTH, WIDTH)})
def broken(self, x: Tensor) -> Tensor:
    """Takes a gradient of what one captured graph gave, in code that was to be the next one."""
    h = self.first(x)
    torch._dynamo.graph_break()
    (slope,) = grad(h.sum(), self.first[0].bias, retain_graph=True)
    return self.second(h + slope)


def test_a_gradient_between_captured_graphs_is_not_captured(recwarn):
    plan = train_both(broken, simple_loop(lambda index: torch.randn(ROWS, WIDTH), steps=4), "80%")
    assert plan is not None
    assert not any("get_ident" in str(w.message) for w in recwarn)


def two_parts(**members) -> dict[str, nn.Module]:
    return {"first": layers_of(3, WIDTH), "second": layers_of(WIDTH), **members}


@network(lambda ask, create_graph=False: two_parts(ask=ask, create_graph=create_graph))
def interrupted(self, x: Tensor) -> Tensor:
    """Energies and forces of a potential whose code ends a graph before it takes them."""
    x = x.detach().requires_grad_(True)
    h = self.first(x)
    torch._dynamo.graph_break()
    energy = self.second(h).sum() + x.square().sum()
    return energy - self.ask(energy, x, h, retain_graph=True, create_graph=self.create_graph)


ASKS = {
    "by position": lambda e, x, h, **how: grad(e, x, **how)[0],
    "by keyword": lambda e, x, h, **how: grad(outputs=e, inputs=x, **how)[0],
    "by both": lambda e, x, h, **how: grad(e, inputs=[x], **how)[0],
    "where unused": lambda e, x, h, **how: grad(outputs=[e], inputs=[x], allow_unused=True, **how)[0],
    "of two": lambda e, x, h, **how: sum(g.sum() for g in grad(e, [x, h], **how)),
    "of a dict": lambda e, x, h, **how: grad(e, {"x": x, "h": h}, **how)["x"],
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_gradient_goes_through_what_an_earlier_graph_gave(ask):
    """Dynamo would leave that part of it out, in silence, where it does not see that the graph began before."""
    train_both(lambda: interrupted(ask), simple_loop(positions, steps=5), "100%")


@network(two_parts)
def hooked(self, x: Tensor) -> Tensor:
    """Changes the gradient by a hook."""
    x = x.detach().requires_grad_(True)
    x.register_hook(lambda gradient: 2 * gradient)
    torch._dynamo.graph_break()
    energy = self.second(self.first(x)).sum()
    return energy - grad(energy, x, retain_graph=True)[0]


def test_a_gradient_of_what_has_hooks_runs_them():
    train_both(hooked, simple_loop(positions, steps=5), "100%")


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_one_trained_on_through_an_earlier_graph_is_eager(ask):
    warned = train_eager(lambda: interrupted(ask, create_graph=True), simple_loop(positions, steps=3))
    assert len(warned) == 1
    assert warned[0].startswith("Interrupted runs without a plan: it trains on a gradient that it takes in its forward")


@network(lambda inner: {"inner": inner})
def overwriting(self, x: Tensor) -> Tensor:
    x.mul_(2)
    return self.inner(x)


def test_a_forward_that_overwrites_its_input_is_not_run_again():
    model = hiremate(overwriting(interrupted(ASKS["by position"], create_graph=True)), "100%", verbose=False)
    with pytest.raises(CaptureError, match="with create_graph=True: they can't be differentiated once more"):
        model(positions(0))


def penalized(model: nn.Module, x: Tensor) -> Tensor:
    (slope,) = grad(model(x).sum(), x, create_graph=True)
    return model(x).mean() + slope.square().mean()


SECOND_ORDER = {
    "backward": lambda model, x: penalized(model, x).backward(),
    "of some": lambda model, x: grad(penalized(model, x), list(model.parameters()), allow_unused=True),
    "hessian": lambda model, x: torch.autograd.functional.hessian(lambda x: model(x).sum(), x.detach()),
}


@pytest.mark.parametrize("train", SECOND_ORDER.values(), ids=SECOND_ORDER)
def test_a_gradient_of_what_a_planned_model_returned_is_an_error(train):
    """Autograd would leave its part of second derivatives out, in silence where not all gradients are asked for."""
    model = hiremate(layers_of(3), "100%", verbose=False)
    take_steps(model, lambda _: torch.randn(ROWS, 3), 3)
    with pytest.raises(CaptureError, match="with create_graph=True: they can't be differentiated once more"):
        train(model, torch.randn(ROWS, 3, requires_grad=True))
    remove_hiremate(model)
    train(model, torch.randn(ROWS, 3, requires_grad=True))


class Squash(torch.autograd.Function):
    """A function with a derivative of its own, as potentials have for what they cut off."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return (1 - x.tanh().square()) * gradient


class SwitchedSquash(Squash):
    """The same, whose backward switches gradients on itself."""

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            slope = 1 - x.tanh().square()
        return slope * gradient


class Forces(nn.Module):
    """Energies and forces of a potential that ends in an autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.network = layers_of(3, 3, nn.SiLU)

    def squash(self, x: Tensor) -> Tensor:
        return Squash.apply(x)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        energy = self.squash(self.network(x) + x).sum(1, keepdim=True)
        return torch.cat([energy, -grad(energy.sum(), x, create_graph=True)[0]], 1)


class SwitchedForces(Forces):
    def squash(self, x: Tensor) -> Tensor:
        return SwitchedSquash.apply(x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_function_s_backward_is_differentiated_once_more():
    """Dynamo reads it without gradients, and would leave a part of the second derivative out in silence."""
    train_both(Forces, simple_loop(positions), "70%")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_backward_that_switches_gradients_is_eager():
    warned = train_eager(SwitchedForces, simple_loop(positions, steps=3))
    assert "whose backward switches gradients on or off" in warned[0]
    assert warned[1].startswith("SwitchedForces runs without a plan: it trains on a gradient")
