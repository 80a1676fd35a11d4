"""Functions that their author compiled stay compiled inside of a plan: the same kernels, and the same numbers."""

from __future__ import annotations

import html
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hiremate_lightning import get_plan, hiremate, remove_hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.reporting.html_report import write_html
from hiremate_lightning.torch_private import compiled_by_torch, dynamo
from tests.exact import network, recorded, simple_loop, square_error, table_of, take_steps, train_both

ROWS, SIZE = 128, 32
OPERATORS = {"hiremate.run_compiled.default", "hiremate.run_compiled_backward.default"}

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor has no compiler here"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's own compiler
]


@torch.compile
def activation(x, bias):
    return functional.gelu(x + bias) * torch.sigmoid(x).exp().log1p()


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)
        self.bias = nn.Parameter(torch.randn(4 * SIZE))

    def activate(self, x):
        return activation(x, self.bias)

    def forward(self, x):
        return x + self.down(self.activate(self.up(x)))


class _Method(_Block):
    @torch.compile
    def activate(self, x):
        return functional.silu(x) * self.bias.sin()


class _Normalized(nn.Module):
    @torch.compile
    def forward(self, x):
        return functional.layer_norm(x, x.shape[-1:]).exp().tanh()


class _Forward(_Block):
    """Its submodule's forward is compiled in the class."""

    def __init__(self):
        super().__init__()
        self.normalize = _Normalized()

    def activate(self, x):
        return self.normalize(x + self.bias)


class _Attribute(_Block):
    """The function is an attribute, multiplies, and gives two results of which one has no gradient."""

    def __init__(self):
        super().__init__()
        self.function = torch.compile(lambda x, w: ((x @ w.t()).relu() @ w, (x > 0).sum(0)))

    def activate(self, x):
        y, count = self.function(x, self.down.weight)
        return y * count


class _Calling(_Block):
    """Calls a function that is its attribute."""

    make: Callable[[], Callable[[Tensor], Tensor]]

    def __init__(self):
        super().__init__()
        self.function = type(self).make()

    def activate(self, x):
        return self.function(x + self.bias)


class _Drawing(_Calling):
    make = lambda: torch.compile(lambda x: functional.dropout(x.tanh(), 0.5))  # noqa: E731


NAMES = {
    "_Block": "activation",
    "_Method": "_Method.activate",
    "_Forward": "_Normalized.forward",
    "_Attribute": "<lambda>",
    "_Drawing": "<lambda>",
}
BLOCKS = {block.__name__: block for block in (_Block, _Method, _Forward, _Attribute, _Drawing)}


def _loop(dtype=torch.float32, steps=4, loss_of=square_error):
    return simple_loop(lambda step: torch.randn(ROWS, SIZE, dtype=dtype), steps=steps, loss_of=loss_of)


def _compiled_of(plan):
    return [node for node in plan.graph.nodes if node.op in OPERATORS]


@pytest.mark.parametrize("name", BLOCKS)
def test_each_call_is_one_operation_with_its_own_kernels(name, tmp_path):
    dtype = {"_Method": torch.bfloat16, "_Forward": torch.float64}.get(name, torch.float32)
    count, budget = (3, "70%") if name == "_Block" else (2, "90%")
    plan = train_both(lambda: nn.Sequential(*(BLOCKS[name]() for _ in range(count))).to(dtype), _loop(dtype), budget)

    assert len(_compiled_of(plan)) == 2 * count
    assert plan.planned_peak_bytes <= plan.budget_bytes
    assert 0.98 <= plan.planned_peak_bytes / plan.measured.peak_bytes <= 1.02
    forward = {node.is_repeatable for node in _compiled_of(plan) if not node.op.endswith("backward.default")}
    assert forward == {name != "_Drawing"}
    again = {plan.graph.nodes[n].op for n in plan.schedule.recomputed(plan.graph)}
    assert name != "_Block" or "hiremate.run_compiled.default" in again
    assert len(plan.kept_compiled) == 1
    assert plan.kept_compiled[0].startswith(f"{count} calls of {NAMES[name]} (test_user_compiled.py:")
    assert plan.kept_compiled[0] in html.unescape(write_html(plan, tmp_path / "plan.html", curve_limit_s=0).read_text())
    assert plan.kept_compiled[0] in table_of(plan)


def test_a_share_is_of_the_step_that_the_author_has():
    model, x = nn.Sequential(*(_Block() for _ in range(3))), torch.randn(ROWS, SIZE)
    square_error(model(x)).backward()
    eager_bytes = measure_peak(lambda: square_error(model(x)).backward())
    hiremate(model, "100%", verbose=False)
    plan = take_steps(model, lambda _: x, 3, clears="never")
    remove_hiremate(model)
    assert plan.unplanned_peak_bytes - plan.resident_bytes == pytest.approx(eager_bytes, abs=64)


def test_a_compiled_loss_and_autocast_are_exact():
    @torch.compile
    def loss_of(output, target):
        return functional.smooth_l1_loss(output.log_softmax(-1), target)

    @network(lambda: {"inner": _Block()})
    def losing(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(self.inner(x), x)

    plan = train_both(losing, _loop(loss_of=lambda loss: loss))
    assert len(_compiled_of(plan)) == 4


def test_calls_without_gradients_run_the_kernels_too():
    model, x = _Block(), torch.randn(ROWS, SIZE)
    with torch.no_grad():
        expected = model.train()(x)
    square_error(hiremate(model, "100%", verbose=False)(x)).backward()
    with torch.no_grad():
        assert torch.equal(model(x), expected)


class _Whole(_Block):
    """Its own forward is compiled in the class, with the layers that it calls."""

    @torch.compile
    def forward(self, x):
        return x + self.down(self.activate(self.up(x)))


@pytest.mark.parametrize("make", [_Whole, lambda: nn.Sequential(_Whole(), _Whole())], ids=["root", "blocks"])
def test_a_whole_forward_is_one_operation_with_one_warning(make):
    with recorded() as warned:
        model = hiremate(make(), "100%", verbose=False)
        _loop()(model)
    assert [text.startswith("Nothing inside of _Whole.forward is planned") for text in warned] == [True]
    count = len(model) if isinstance(model, nn.Sequential) else 1
    assert get_plan(model).kept_compiled[0].startswith(f"{count} call{'s' * (count > 1)} of _Whole.forward (")


class _Writing(_Calling):
    make = lambda: torch.compile(lambda x: x.mul_(2).sin())  # noqa: E731


class _Viewing(_Calling):
    make = lambda: torch.compile(lambda x: (x.t(), x.sin()))  # noqa: E731

    def activate(self, x):
        turned, y = super().activate(x)
        return turned.t() * y


class _Otherwise(_Calling):
    make = lambda: torch.compile(lambda x: x.sin().exp(), backend="aot_eager")  # noqa: E731


class _Dynamic(_Calling):
    make = lambda: torch.compile(lambda x: x.sin().exp(), dynamic=True)  # noqa: E731


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (_Writing, "writes to its arguments"),
        pytest.param(_Viewing, "returns views", marks=pytest.mark.slow),
        (_Otherwise, "another backend"),
        pytest.param(_Dynamic, "dynamic=True", marks=pytest.mark.slow),
    ],
)
def test_what_is_no_single_operation_runs_by_itself(block, reason):
    before = dynamo.graph_breaks()
    plan = train_both(lambda: nn.Sequential(block(), block()), _loop(), "100%")
    assert not _compiled_of(plan)
    assert any(reason in found for found in dynamo.graph_breaks() - before)


def test_what_the_eager_backend_compiles_is_read_through():
    class Plain(_Calling):
        make = lambda: torch.compile(lambda x: x.sin().exp(), backend="eager")  # noqa: E731

    plan = train_both(Plain, _loop(), "100%")
    assert not _compiled_of(plan)
    assert "aten.sin.default" in {node.op for node in plan.graph.nodes}


@pytest.mark.slow
def test_kernels_for_another_size_are_made_when_it_comes():
    def make_batch(step: int) -> Tensor:
        return torch.randn((64, 128, 96)[step % 3], SIZE)

    model, plain = _Block(), _Block()
    plain.load_state_dict(model.state_dict())
    hiremate(model, "100%", verbose=False)
    for step in range(6):
        batch = make_batch(step)
        for module in (model, plain):
            module.zero_grad()
            square_error(module(batch)).backward()
        for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, expected.grad)
    assert len(_compiled_of(get_plan(model))) == 2


def test_wrappers_around_compiled_functions_are_told_apart():
    assert compiled_by_torch._is_compiled(activation)
    assert not compiled_by_torch._is_compiled(functional.gelu)
    assert not compiled_by_torch._is_compiled(torch.compiler.disable(lambda x: x))
