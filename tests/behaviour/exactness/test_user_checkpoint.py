"""Where a model calls torch.utils.checkpoint by itself, shares are of the step that it has with it."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from hiremate_lightning import HiRemateWarning, get_plan, hiremate, remove_hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.torch_private import autocasting, captured_code
from hiremate_lightning.units import parse_budget
from tests.exact import proved, simple_loop, square_error, take_steps, train_both

ROWS, SIZE, BLOCKS = 256, 32, 4
SAID = "calls torch.utils.checkpoint, in whose place the plan decides what runs again. A step adds"


class _Block(nn.Module):
    options = {"use_reentrant": False}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE), nn.LayerNorm(SIZE)

    def inner(self, x):
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), 0.1)

    def forward(self, x):
        return checkpoint(self.inner, x, **self.options)


class _Reentrant(_Block):
    options = {"use_reentrant": True}  # noqa: RUF012


def _keep_products():
    kept = [torch.ops.aten.addmm.default]

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class _Selective(_Block):
    options = {"use_reentrant": False, "context_fn": _keep_products}  # noqa: RUF012


class _Segments(nn.Module):
    """Three layers in two segments, of which the first one is checkpointed."""

    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.LayerNorm(SIZE)) for _ in range(3)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=True)


class _Unequal(_Block):
    """Only some blocks are checkpointed, and one of them within another."""

    def forward(self, x):
        return checkpoint(lambda y: self.inner(checkpoint(self.inner, y, use_reentrant=False)), x, use_reentrant=False)


class _Counting(_Block):
    """Plain PyTorch updates its buffer twice in a step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def inner(self, x):
        self.count.add_(1)
        return super().inner(x)


KINDS = {block.__name__: block for block in (_Block, _Reentrant, _Selective, _Segments)}


def _net(block, dtype=torch.float32):
    return nn.Sequential(nn.Linear(SIZE, SIZE), *(block() for _ in range(BLOCKS))).to(dtype)


def _train(model, x):
    take_steps(model, lambda _: x, 4, clears="never")


@pytest.mark.parametrize("name", KINDS)
def test_the_whole_is_what_the_step_takes_with_checkpoint(name):
    model, x = _net(KINDS[name]), torch.randn(ROWS, SIZE)
    square_error(model(x)).backward()
    eager_bytes = measure_peak(lambda: square_error(model(x)).backward())
    hiremate(model, "100%", verbose=False)
    with pytest.warns(HiRemateWarning, match=SAID):
        _train(model, x)
    plan = get_plan(model)
    remove_hiremate(model)
    assert 0.9 * eager_bytes <= plan.unplanned.peak_bytes <= 1.01 * eager_bytes
    assert plan.measured.peak_bytes - plan.resident_bytes <= 1.01 * eager_bytes


@pytest.mark.parametrize(
    ("block", "dtype"), [(_Block, torch.float64), (_Block, torch.bfloat16), (_Segments, torch.float32)]
)
def test_a_step_with_checkpoint_is_exact_within_its_share(block, dtype):
    loop = simple_loop(lambda step: torch.randn(ROWS, SIZE, dtype=dtype), steps=4)
    plan = train_both(lambda: _net(block, dtype), loop, "95%")
    assert plan.planned_peak_bytes <= plan.budget_bytes
    assert plan.schedule.recomputed(plan.graph)


def test_the_warning_names_both_numbers():
    model, x = _net(_Unequal), torch.randn(ROWS, SIZE)
    hiremate(model, "100%", verbose=False)
    with pytest.warns(HiRemateWarning, match=SAID) as warned:
        _train(model, x)
    (text,) = (str(warning.message) for warning in warned if SAID in str(warning.message))
    own, without = (parse_budget(size).size_bytes for size in re.findall(r"add[s ]*([\d.]+ [KM]iB)", text))
    assert own < 0.7 * without


@pytest.mark.filterwarnings("ignore:Sequential calls torch.utils.checkpoint around code that updates buffers")
@pytest.mark.parametrize("block", [_Block, _Unequal, _Counting])
def test_gradients_behind_a_dropout_are_proved(block):
    model, x = _net(block), torch.randn(ROWS, SIZE)
    hiremate(model, "1 GiB", verbose=False)
    square_error(model(x)).backward()
    assert proved(model) == "forward 1 of 1 graph, gradients 1 of 1"


class _Entering(_Block):
    def inner(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.norm(self.down(functional.gelu(self.up(x)))).float()


def test_autocast_ends_with_a_second_run_that_stops_early():
    """Checkpoint ends a second run by an error as soon as all is computed, inside of the block of autocast."""
    model, x = _net(_Entering), torch.randn(ROWS, SIZE)
    code = torch.compile(model, backend=lambda module, _: captured_code.eager_module(module))
    square_error(code(x)).backward()
    assert autocasting.open_blocks() == 0


@pytest.mark.parametrize("block", [*KINDS.values(), _Unequal, _Counting])
def test_captured_code_checkpoints_as_the_code_itself_does(block):
    def train(compiled):
        torch.manual_seed(0)
        model, x = _net(block), torch.randn(ROWS, SIZE)
        square_error((torch.compile(model, backend=backend) if compiled else model)(x)).backward()
        return [*(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]

    def backend(module, inputs):
        return captured_code.eager_module(module)

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))
