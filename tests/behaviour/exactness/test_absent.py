"""Where outputs stay unused, their gradients are left out as in plain training: not made, not added, not summed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.memory.metering import measure_peak
from tests.exact import assert_foreseen, drawn, loop_of, network, take_steps, train_both

ROWS, WIDTH = 256, 32
SIZE = ROWS * WIDTH * 4


@network(
    lambda: {
        "trunk": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()),
        "first": nn.Linear(WIDTH, WIDTH),
        "second": nn.Linear(WIDTH, WIDTH),
    }
)
def two_heads(self, x):
    """Gives two results, of which a loss may use one."""
    trunk = self.trunk(x)
    return torch.tanh(self.first(trunk)), torch.tanh(self.second(trunk))


@network(lambda: {"body": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), "head": nn.Linear(WIDTH, 16 * WIDTH)})
def with_logits(self, x):
    """Gives its loss, and what that was computed from."""
    logits = self.head(self.body(x))
    return logits.square().mean(), logits


batch = drawn(ROWS, WIDTH)


def trained(loss_of, steps=5):
    """Make a loop of AdamW steps with weight decay, which moves what has a gradient of zeros, and not what has none."""
    optimizer = partial(torch.optim.AdamW, weight_decay=0.5)
    return loop_of(lambda model, step: loss_of(model(batch(step)), step), steps, optimizer)


def by_a_second_backward(out, step):
    """Bring other gradients."""
    out[0].square().mean().backward(retain_graph=True)
    return out[1].square().mean()


@network(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def split(self, x):
    """Has an operation that needs all gradients, so that zeros fill in."""
    return [half.exp() for half in self.linear(x).tanh().split(WIDTH // 2, dim=1)]


ALIKE = {
    "one": (two_heads, lambda out, step: out[0].square().mean()),
    "in turn": (two_heads, lambda out, step: out[step % 2].square().mean()),
    "sometimes both": (two_heads, lambda out, step: sum(o.square().mean() for o in out[step % 2 :])),
    "a second backward": (two_heads, by_a_second_backward),
    "zeros fill in": (split, lambda out, step: out[0].square().mean()),
}


@pytest.mark.parametrize("budget", ["100%", "80%"])
@pytest.mark.parametrize(("make", "loss_of"), ALIKE.values(), ids=ALIKE)
def test_parameters_behind_an_unused_output_have_no_gradient(make, loss_of, budget):
    train_both(make, trained(loss_of), budget)


class Parted(torch.autograd.Function):
    """Has two results, and a gradient that is not zero where one of theirs is."""

    @staticmethod
    def forward(ctx, x):
        return x.chunk(2, 1)

    @staticmethod
    def backward(ctx, first, second):
        return torch.cat([torch.where(second == 0, first, first * 2), second + 1e-3], 1)


# Dynamo makes an instance of each torch.autograd.Function that it traces, which torch itself warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("used", [0, 1])
def test_a_function_with_a_backward_of_its_own_gets_zeros(used):
    @network(lambda: {"linear": nn.Linear(WIDTH, WIDTH), "other": nn.Linear(WIDTH, WIDTH)})
    def split(self, x):
        halves = Parted.apply(self.linear(x).tanh())
        return [half.exp() for half in halves], Parted.apply(self.other(x).tanh())

    train_both(split, trained(lambda out, step: out[0][used].square().mean()), "100%")


@network(lambda: {"small": nn.Linear(64, 64), "large": nn.Linear(64, 512)})
def in_halves(self, x):
    first, second = self.large(self.small(x).tanh()).chunk(2, dim=1)
    return first.exp(), second


@pytest.mark.parametrize("is_kept", [True, False], ids=["outputs kept until the next step", "outputs dropped"])
def test_zeros_filled_in_and_outputs_kept_are_in_the_prediction(is_kept):
    model, x = in_halves(), torch.randn(1024, 64)
    hiremate(model, "100%", verbose=False)

    def step():
        first, second = model(x)
        del second
        first.sum().backward()
        return first

    for _ in range(5):
        kept = step()
        if not is_kept:
            del kept
    plan = get_plan(model)
    peak = plan.resident_bytes + measure_peak(step)
    assert plan.measured.peak_bytes == plan.planned_peak_bytes == peak


@network(
    lambda: {
        "first": nn.Sequential(nn.Linear(WIDTH, 16 * WIDTH), nn.GELU(), nn.Linear(16 * WIDTH, WIDTH)),
        "second": nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)),
    }
)
def apart(self, x):
    """Gives two results of branches that share nothing; the backward of the first one needs most memory."""
    return self.first(x), self.second(x)


@network(lambda: {"first": nn.Linear(WIDTH, 8 * WIDTH), "second": nn.Linear(WIDTH, 32 * WIDTH)})
def gives_state(self, x):
    """Gives a state too, whose gradient alone reads a large value at the end of the backward."""
    state = self.first(x).sin().exp().sum()
    return self.second(x).tanh().square().mean(), state


@pytest.mark.parametrize(
    ("make", "loss_of", "tolerance"),
    [
        (apart, lambda out, step: out[0].square().mean(), {"abs": 64}),  # gone when the backward runs
        (gives_state, lambda out, step: out[0], {"rel": 0.005}),
        (with_logits, lambda out, step: out[0], {"rel": 0.01}),
    ],
)
def test_what_only_an_absent_gradient_reads_is_not_held(make, loss_of, tolerance):
    model = hiremate(make(), "1 GiB", verbose=False)
    trained(loss_of, steps=4)(model)
    assert_foreseen(model, **tolerance)


@network(lambda: {"first": nn.Linear(WIDTH, WIDTH), "attention": nn.MultiheadAttention(WIDTH, 4, batch_first=True)})
def attends(self, x):
    """Gives the result of an attention too, whose backward reads forward values through views of them."""
    x = self.first(x).tanh()
    rows = x.view(-1, 8, WIDTH)
    return x.square(), self.attention(rows, rows, rows)[0]


def test_views_in_an_absent_backward_make_no_values():
    model = hiremate(attends(), "1 GiB", verbose=False)
    take_steps(model, batch, 4, loss_of=lambda out: out[0].mean())
    made = [storage for allocated in assert_foreseen(model, rel=0.005).graph.allocates for storage in allocated]
    assert len(made) == len(set(made))


@network(lambda: {"keys": nn.Linear(64, 64)})
def with_cache(self, x, cache):
    """Keeps keys from piece to piece. Nobody reads those of the last piece, so their gradient is missing."""
    keys = self.keys(x).unflatten(-1, (4, -1)).transpose(1, 2)
    if cache is not None:
        keys = torch.cat([cache, keys], 2)
    return keys.tanh().transpose(1, 2).flatten(-2)[:, -16:], keys


def test_reshapes_are_those_of_eager_where_a_gradient_is_missing():
    """To reshape the sum of both gradients takes a copy. The one that comes has strides that allow a view."""

    def loss_of(model, step):
        cache, loss = None, 0
        for piece in drawn(4, 32, 64)(step).split(16, 1):
            result, cache = model(piece, cache)
            loss = loss + result.square().mean()
        return loss

    train_both(with_cache, loop_of(loss_of, 3), "100%")
