"""Fused kernels: a plan changes no number, peaks are as predicted, and what can't be compiled runs all the same."""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hiremate_lightning import ConfigurationError, HiRemateWarning, get_plan, hiremate
from hiremate_lightning.callbacks import HiRemateCallback
from hiremate_lightning.testing import session_of
from hiremate_lightning.torch_private import inductor
from tests.exact import assert_foreseen, loop_of, network, take_steps
from tests.trainers import Squared, quiet_trainer


def linears(inputs: int, outputs: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(inputs, outputs) for _ in range(2))


@network(
    lambda: {
        "norms": nn.ModuleList(nn.LayerNorm(32) for _ in range(2)),
        "wide": linears(32, 128),
        "narrow": linears(128, 32),
        "dropout": nn.Dropout(0.2),
    }
)
def tanh_gelu(self, x):
    """Blocks with an activation written out, as many language models have it."""
    for norm, wide, narrow in zip(self.norms, self.wide, self.narrow, strict=True):
        h = wide(norm(x))
        h = 0.5 * h * (1 + torch.tanh(0.79788 * (h + 0.044715 * h**3)))
        x = x + self.dropout(narrow(h))
    return x.square().mean()


@network(
    lambda: {
        "first": nn.Conv2d(3, 8, 3, padding=1),
        "convolutions": nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2)),
        "norms": nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2)),
        "last": nn.GroupNorm(4, 8),
    }
)
def convolutions(self, x):
    """Residual convolutions with batch norm, then group norm."""
    x = self.first(x)
    for convolution, norm in zip(self.convolutions, self.norms, strict=True):
        x = torch.relu(norm(convolution(x)) + x)
    return F.silu(self.last(x)).square().mean()


@network(
    lambda: {
        "scale": nn.Parameter(torch.ones(32)),
        "gate": nn.Linear(32, 64),
        "value": nn.Linear(32, 64),
        "out": nn.Linear(64, 32),
    }
)
def gated(self, x):
    """A root-mean-square norm and a gated product, under autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = x.float()
        h = self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        x = x + self.out(F.silu(self.gate(h)) * self.value(h))
    return x.float().square().mean()


CASES = {
    "layer norm, written-out gelu, dropout": (tanh_gelu, (8, 16, 32), "60%"),
    "batch norm, group norm, residuals": (convolutions, (4, 3, 16, 16), "85%"),
    "rms norm, gates, autocast": (gated, (16, 16, 32), "85%"),
}


def train(model, shape):
    torch.manual_seed(3)
    return loop_of(lambda model, _: model(torch.randn(shape)), 4, partial(torch.optim.SGD, lr=0.1))(model)


def planned(model, budget, **options):
    return hiremate(copy.deepcopy(model), budget, compile="inductor", verbose=False, **options)


def kernels_of(model):
    kernels = session_of(model).model.kernels
    return list(kernels._known.values())


@pytest.mark.parametrize(("make", "shape", "budget"), CASES.values(), ids=CASES)
def test_a_plan_changes_no_bit_of_what_the_same_kernels_give(make, shape, budget):
    """Operations are fused, equal layers share a kernel, and numbers are those of eager PyTorch up to rounding."""
    torch.manual_seed(0)
    model = make()
    whole, part = planned(model, "100%"), planned(model, budget)
    left = train(whole, shape)
    assert all(torch.equal(a, b) for a, b in zip(left, train(part, shape), strict=True))
    assert get_plan(part).planned.recompute_ms > 0
    for plan in map(get_plan, (whole, part)):
        assert plan.measured.peak_bytes <= plan.budget_bytes
        assert plan.measured.peak_bytes == pytest.approx(plan.planned_peak_bytes, rel=0.005)

    fused = [node.op for node in get_plan(whole).graph.nodes if node.op.startswith("hiremate.fused")]
    assert len(set(fused)) == len(kernels_of(whole))
    assert (len(fused) > len(set(fused))) == (make is not gated)

    expected = train(copy.deepcopy(model), shape)
    largest = max(float(t.abs().max()) for t in expected if t.is_floating_point())
    tolerance = 2e-2 if make is gated else 2e-5  # bfloat16 rounds elsewhere in a fused kernel
    for found, wanted in zip(left, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * largest if found.is_floating_point() else 0)


def test_values_inside_of_kernels_take_no_memory():
    torch.manual_seed(0)
    model = tanh_gelu()
    alone = hiremate(copy.deepcopy(model), "100%", verbose=False)
    fused = planned(model, "100%")
    train(alone, (8, 16, 32)), train(fused, (8, 16, 32))
    assert get_plan(fused).unplanned_peak_bytes < 0.7 * get_plan(alone).unplanned_peak_bytes


def test_dropout_draws_the_masks_of_eager():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)), torch.randn(8, 16)
    fused = planned(model, "100%")
    torch.manual_seed(5)
    expected = model(x)
    torch.manual_seed(5)
    assert torch.equal(fused(x), expected)


def test_a_gradient_that_never_comes_takes_no_memory():
    @network(lambda: {"linear": nn.Linear(32, 256)})
    def with_logits(self, x):
        logits = self.linear(x)
        return (torch.tanh(logits) * 2 + 1).square().mean(), logits.float()

    model = planned(with_logits(), "100%")
    for _ in range(5):
        loss, logits = model(torch.randn(64, 32))
        del logits
        loss.backward()
    assert_foreseen(model, abs=64)


def test_gradients_with_other_strides_than_traced_are_taken():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Sigmoid()), torch.randn(8, 16)
    fused = planned(model, "100%")
    for loss in (torch.sum, lambda y: y.t().contiguous().sum(), lambda y: y[:, ::2].sum()):
        model.zero_grad(), fused.zero_grad()
        loss(model(x)).backward()
        loss(fused(x)).backward()
        for found, expected in zip(fused.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)


def test_a_second_backward_gives_the_same_gradients():
    fused, x = planned(tanh_gelu(), "80%"), torch.randn(8, 16, 32)
    take_steps(fused, lambda _: x, 2, loss_of=lambda loss: loss, clears="never")
    fused.zero_grad()
    loss = fused(x)
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in fused.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(fused.parameters(), once, strict=True))


def test_what_cannot_be_compiled_runs_one_by_one(compile_kernels_by):
    def fail(module, inputs):
        raise RuntimeError("no compiler found")

    compile_kernels_by(fail)
    model = convolutions()
    fused = planned(model, "100%")
    with pytest.warns(HiRemateWarning, match=re.escape("which run one by one: RuntimeError: no compiler found")):
        left = train(fused, (4, 3, 16, 16))
    expected = train(model, (4, 3, 16, 16))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(left, expected, strict=True))


@pytest.mark.parametrize(
    ("fault", "words"), [("strides", "its results are laid out as"), ("memory", "its results share memory")]
)
def test_a_kernel_that_gives_other_layouts_is_not_used(compile_kernels_by, fault, words):
    compile_graph = inductor.compile_graph

    def compile_otherwise(module, inputs):
        run = compile_graph(module, inputs)
        if fault == "memory":
            return lambda arguments: arguments[:1]
        return lambda arguments: [t.t().contiguous().t() for t in run(arguments)]

    compile_kernels_by(compile_otherwise)
    fused = planned(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Sigmoid()), "100%")
    with pytest.warns(HiRemateWarning, match=words):
        fused(torch.randn(8, 16)).sum().backward()


def test_another_compiler_is_refused():
    with pytest.raises(ConfigurationError, match=r"compile must be 'inductor' or None, found 'nvfuser'"):
        hiremate(nn.Linear(2, 2), compile="nvfuser")


@network(
    lambda: {
        "linear": nn.Linear(16, 16),
        "scale": torch.linspace(0.5, 1.5, 16),
        "short": torch.linspace(0.5, 1.5, 16).bfloat16(),
    }
)
def overwriting_buffers(self, x):
    y = torch.tanh(self.linear(x) * torch.exp(self.scale)) * (self.short.float() + 1)
    with torch.no_grad():
        self.scale.mul_(0.5)
        self.short.mul_(0.5)
    return (y * y * 2).mean()


@network(lambda: {"linear": nn.Linear(16, 64)})
def reducing_between(self, x):
    """Reduces between elementwise operations, whose order the backward keeps."""
    y = self.linear(x)
    weights = (y - y.amax(-1, keepdim=True)).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    y = y * weights + weights.mean(-1, keepdim=True) * y.square().sum(-1, keepdim=True).sqrt()
    return y.square().mean()


@pytest.mark.parametrize("make", [overwriting_buffers, reducing_between])
def test_fused_operations_keep_their_order(make):
    torch.manual_seed(0)
    model = make()
    fused = planned(model, "100%")
    for found, expected in zip(train(fused, (8, 16)), train(model, (8, 16)), strict=True):
        torch.testing.assert_close(found, expected)


def test_the_callback_and_the_backend_of_torch_compile_fuse_too():
    def make():
        return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Sigmoid(), nn.Linear(64, 16))

    callback = HiRemateCallback(budget="100%", compile="inductor", verbose=False)
    quiet_trainer(callback).fit(Squared(make()), torch.utils.data.DataLoader(torch.randn(64, 16), batch_size=16))
    torch.compiler.reset()
    net = make()
    model = torch.compile(net, backend="hiremate", options={"budget": "100%", "compile": "inductor", "verbose": False})
    take_steps(model, lambda _: torch.randn(16, 16), 3, clears="never")
    torch.compiler.reset()
    for plan in (callback.plan, get_plan(net)):
        assert any(node.op.startswith("hiremate.fused") for node in plan.graph.nodes)
