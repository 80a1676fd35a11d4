"""Activation checkpointing and torch.compile that others switched on: a plan replaces them, and puts them back."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from hiremate_lightning import get_plan, hiremate, remove_hiremate
from hiremate_lightning.calls.replaced import checkpointed_modules
from hiremate_lightning.torch_private import compiled_by_torch
from tests.exact import differing, drawn, quiet, simple_loop, take_steps, train_both

ROWS, SIZE, BLOCKS = 128, 32, 4
make_batch = drawn(ROWS, SIZE)


class Block(nn.Module):
    """As the layers of transformers and diffusers are: a flag, and beside it the function that checkpoints."""

    gradient_checkpointing = False

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def inner(self, x):
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.1)

    def forward(self, x):
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(self.inner, x)
        return self.inner(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, x):
        return self.blocks(self.first(x))


def switch_on(model, **options):
    for module in model.modules():
        if isinstance(module, Block):
            module._gradient_checkpointing_func = partial(checkpoint, **{"use_reentrant": False, **options})
            module.gradient_checkpointing = True
    return model


def wrapped():
    return nn.Sequential(nn.Linear(SIZE, SIZE), *(checkpoint_wrapper(Block()) for _ in range(BLOCKS)))


def functions_of(model):
    names = ("_gradient_checkpointing_func", "checkpoint_fn")
    return [module.__dict__[name] for module in model.modules() for name in names if name in module.__dict__]


MADE = {
    "by a flag": lambda: switch_on(Net()),
    "by a flag, reentrant": lambda: switch_on(Net(), use_reentrant=True),
    "by wrappers": wrapped,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_training_is_the_same_in_place_of_checkpointing(make):
    plan = train_both(make, simple_loop(make_batch), "70%", time_limit_s=2)
    assert all(node.checkpoint is None for node in plan.graph.nodes)
    assert plan.planned_peak_bytes < plan.unplanned_peak_bytes


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_it_is_put_back_when_the_plan_goes(make, capsys):
    model = make()
    before = functions_of(model)
    assert checkpointed_modules(model) == BLOCKS
    assert checkpointed_modules(Net()) == 0
    hiremate(model, "70%", time_limit_s=2)
    take_steps(model, make_batch, 2, clears="never")
    assert not any(function in before for function in functions_of(model))
    printed = capsys.readouterr().err
    assert printed.count(f"in place of activation checkpointing ({BLOCKS} modules): peak about") == 1
    remove_hiremate(model)
    assert functions_of(model) == before
    assert len(before) == BLOCKS


def test_the_peak_with_checkpointing_is_below_that_without(capsys):
    model = hiremate(switch_on(Net()), "70%", time_limit_s=2)
    take_steps(model, make_batch, 2, clears="never")
    words = capsys.readouterr().err.partition("peak about ")[2]
    with_it, without = (float(words.partition(" with it, ")[i].split()[0]) for i in (0, 2))
    assert 0 < with_it < without


def test_checkpointing_that_is_switched_on_later_is_replaced_too():
    model = hiremate(Net(), "70%", time_limit_s=2, verbose=False)
    model(make_batch(0)).square().mean().backward()
    switch_on(model)
    before = functions_of(model)
    for seed in range(1, 3):
        model(make_batch(seed)).square().mean().backward()
    assert not any(function in before for function in functions_of(model))
    plan = get_plan(model)
    assert plan is not None
    assert all(node.checkpoint is None for node in plan.graph.nodes)
    remove_hiremate(model)
    assert functions_of(model) == before


def test_copies_and_pickles_of_a_model_checkpoint_by_themselves():
    model = switch_on(Net())
    before = functions_of(model)
    with quiet():
        hiremate(model, "70%", time_limit_s=2, verbose=False)(make_batch(0)).square().mean().backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [function.func for function in functions_of(twin)] == [function.func for function in before]
    remove_hiremate(model)


def test_what_reentrant_checkpoint_gives_no_gradient_gets_none():
    """A tensor without gradients is all that the first block is given."""
    logs = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = switch_on(nn.Sequential(Block(), Block()), use_reentrant=True)
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad") if not is_planned else quiet():
            if is_planned:
                hiremate(model, "100%", time_limit_s=2, verbose=False, on_infeasible="warn")
            model.append(nn.Linear(SIZE, SIZE))
            model(make_batch(0)).square().mean().backward()
        logs.append([p.grad for p in model.parameters()])
    assert logs[0][0] is None
    assert not differing(logs[1], logs[0])


def test_what_torch_compile_returned_runs_as_written_for_a_while():
    """Whether the module or what is wrapped around it was compiled; our own backend for it is known."""
    model = Net()
    compiled = torch.compile(model, backend="eager")
    ours = torch.compile(nn.Sequential(model), backend="hiremate", options={"budget": "50%"})
    assert {*compiled_by_torch.compiled_around(model)} == {compiled, ours}
    assert compiled_by_torch.original(compiled) is model
    assert compiled_by_torch.original(model) is model
    from hiremate_lightning.integrations.compile_backend import hiremate as backend

    assert [compiled_by_torch.is_compiled_by(module, backend) for module in (compiled, ours)] == [False, True]
    before = compiled.forward
    undo = compiled_by_torch.run_eager(compiled)
    model.forward = lambda x: "eager"
    assert compiled(1) == "eager"
    undo()
    assert compiled.forward is before
