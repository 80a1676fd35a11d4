"""Where outputs stay unused, their gradients are left out as in plain training: not made, not added, not summed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.memory.metering import measure_peak
from tests.exact import assert_foreseen, assert_same, network

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


def train(model, loss_of, steps=5):
    """Take AdamW steps with weight decay, and give all parameters at the end."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    gradients = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model(torch.randn(ROWS, WIDTH)), step).backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return gradients, [p.detach().clone() for p in model.parameters()]


def two(model_class, budget="100%"):
    """Make a plain model and a planned one with the same weights."""
    torch.manual_seed(1)
    plain = model_class()
    planned = model_class()
    planned.load_state_dict(plain.state_dict())
    return plain, hiremate(planned, budget, on_infeasible="warn", verbose=False)


def train_alike(model_class, loss_of, budget="100%"):
    """Train a plain model and a planned one; fail where gradients or parameters differ."""
    plain, planned = two(model_class, budget)
    assert_same(train(planned, loss_of), train(plain, loss_of))


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
    train_alike(make, loss_of, budget)


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

    train_alike(split, lambda out, step: out[0][used].square().mean())


def test_no_memory_is_taken_for_gradients_that_never_come():
    plain, planned = two(with_logits)
    train(planned, lambda out, step: out[0], steps=4)
    x = torch.randn(ROWS, WIDTH)
    peaks = []
    for model in (plain, planned):
        model.zero_grad()
        peaks.append(measure_peak(lambda model=model: model(x)[0].backward()))
    assert peaks[1] <= peaks[0]


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
    torch.manual_seed(1)
    model = hiremate(make(), "1 GiB", verbose=False)
    train(model, loss_of, steps=4)
    assert_foreseen(model, **tolerance)


@network(lambda: {"first": nn.Linear(WIDTH, WIDTH), "attention": nn.MultiheadAttention(WIDTH, 4, batch_first=True)})
def attends(self, x):
    """Gives the result of an attention too, whose backward reads forward values through views of them."""
    x = self.first(x).tanh()
    rows = x.view(-1, 8, WIDTH)
    return x.square(), self.attention(rows, rows, rows)[0]


def test_views_in_an_absent_backward_make_no_values():
    torch.manual_seed(1)
    model = hiremate(attends(), "1 GiB", verbose=False)
    train(model, lambda out, step: out[0].mean(), steps=4)
    plan = get_plan(model)
    made = [storage for allocated in plan.graph.allocates for storage in allocated]
    assert len(made) == len(set(made))
    assert plan.measured.peak_bytes == pytest.approx(plan.planned_peak_bytes, rel=0.005)


@network(lambda: {"keys": nn.Linear(64, 64)})
def with_cache(self, x, cache):
    """Keeps keys from piece to piece. Nobody reads those of the last piece, so their gradient is missing."""
    keys = self.keys(x).unflatten(-1, (4, -1)).transpose(1, 2)
    if cache is not None:
        keys = torch.cat([cache, keys], 2)
    return keys.tanh().transpose(1, 2).flatten(-2)[:, -16:], keys


def test_reshapes_are_those_of_eager_where_a_gradient_is_missing():
    """To reshape the sum of both gradients takes a copy. The one that comes has strides that allow a view."""

    def gradients(model):
        found = []
        for seed in range(3):
            cache, loss = None, 0
            for piece in torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(seed)).split(16, 1):
                result, cache = model(piece, cache)
                loss = loss + result.square().mean()
            loss.backward()
            found += [parameter.grad for parameter in model.parameters()]
            model.zero_grad()
        return found

    plain, planned = two(with_cache)
    assert all(map(torch.equal, gradients(planned), gradients(plain)))
