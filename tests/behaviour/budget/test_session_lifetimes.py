"""What lives on after a step, and what a step leaves to the next one."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from hiremate_lightning import hiremate, remove_hiremate
from hiremate_lightning.measuring.recording import MOST_BACKWARDS
from hiremate_lightning.reporting.plan_summary import advice_lines
from hiremate_lightning.torch_private import runtime
from hiremate_lightning.units import format_bytes
from tests.exact import assert_foreseen, network, take_steps
from tests.life import WIDTH, assert_exact, batch, make, planned, warm_up


@network(lambda: {"layers": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), "head": nn.Linear(WIDTH, WIDTH)})
def caching(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns what the next call could reuse, as language models return keys and values: callers drop it."""
    cache = []
    for layer in self.layers:
        cache.append(torch.tanh(layer(x)))
        x = x + cache[-1].exp()
    return self.head(x), cache


@pytest.mark.parametrize("budget", ["100%", "75%"])
def test_a_dropped_output_that_the_plan_keeps_is_counted(budget):
    """The loss takes more than the backward of the model."""
    model = hiremate(caching(), budget, verbose=False)
    take_steps(model, batch, 4, loss_of=lambda outputs: (4 * outputs[0]).exp().sin().square().mean())
    assert_foreseen(model, rel=0.01)


@pytest.mark.parametrize("drops_first", [False, True])
def test_outputs_are_counted_until_callers_drop_them(drops_first):
    model = hiremate(caching(), "100%", verbose=False)
    for seed in range(4):
        model.zero_grad()
        output, cache = model(batch(seed))
        if drops_first:
            del cache
        loss = (4 * output).exp().sin().square().mean()
        del output
        cache = None
        loss.backward()
    assert_foreseen(model, abs=64)


def test_gradients_freed_before_the_backward_are_not_counted():
    """The backward takes more than the forward."""
    torch.manual_seed(0)
    model = hiremate(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)), "100%", verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_of = lambda y: y.exp().sin().square().mean()  # noqa: E731
    take_steps(model, partial(batch, width=512), 6, loss_of=loss_of, optimizer=optimizer, clears="middle")
    assert_foreseen(model, abs=1024)


@pytest.mark.usefixtures("_captures_all")
@pytest.mark.parametrize("share", ["100%", "95%"])
@pytest.mark.parametrize("rows", [(64,), (64, 48)], ids=["one size", "two sizes"])
def test_outputs_replaced_by_the_next_ones_are_not_counted(rows, share):
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = hiremate(nn.Sequential(*layers, nn.Linear(256, 1000)), share, verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    for index in range(10):
        size = rows[index % len(rows)]
        output = model(batch(index, rows=size, width=256))  # those of the last step live until here
        loss = nn.functional.cross_entropy(output, torch.arange(size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert_foreseen(model, abs=1024)


@pytest.mark.parametrize("share", ["100%", "75%"])
@pytest.mark.parametrize("held", ["a loss on large storage", "a copy of the outputs"])
def test_what_the_step_before_frees_is_not_given_back_by_this(held, share):
    """PyTorch's mean squared error has its mean on the storage of all squares."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))]
    model = hiremate(nn.Sequential(*layers), share, verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    for index in range(8):
        optimizer.zero_grad()
        x = batch(index, rows=256, width=64)
        output = model(x)
        if held == "a copy of the outputs":
            output = output * 2
        loss = nn.functional.mse_loss(output, x) if held == "a loss on large storage" else (output - x).square().mean()
        loss.backward()
        optimizer.step()
    assert_foreseen(model, abs=1024)


@pytest.mark.parametrize("end", [lambda model: model, remove_hiremate], ids=["planned", "removed"])
def test_a_model_that_is_dropped_is_freed(end):
    model = end(warm_up(planned(), steps=3))
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


def test_outputs_that_users_keep_stay_as_they_were():
    def act(model):
        kept = []
        for index in range(4):
            model.zero_grad()
            output = model(batch(index))
            kept.append(output)
            output.square().mean().backward()
        return [output.detach().clone() for output in kept]

    assert_exact(act)


def test_a_batch_is_given_back_when_its_step_has_ended():
    model = planned()
    optimizer = torch.optim.AdamW(model.parameters())
    x = batch()
    model(x).square().mean().backward()
    optimizer.step()
    watched = weakref.ref(x)
    del x
    gc.collect()
    assert watched() is None


def test_the_advice_on_an_early_zero_grad_is_true():
    """The advice names the difference between the peaks of the two orders."""

    def train(clears: str):
        model = hiremate(make(width=64), "100%", verbose=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        return take_steps(model, partial(batch, rows=64, width=64), 4, optimizer=optimizer, clears=clears)

    late, early = train("middle"), train("before")
    saved = late.planned_peak_bytes - early.planned_peak_bytes
    (advice,) = advice_lines(late)
    assert f"{format_bytes(saved)} less are needed where a zero_grad() before the forward frees them" in advice
    assert not advice_lines(early)


def test_a_model_is_trained_after_another_one_that_is_gone():
    """The step of each that came last is still measured."""
    first, second = warm_up(planned(), 2), warm_up(planned(seed=2), 2)
    del second
    gc.collect()
    warm_up(first, 3)
    assert_foreseen(first, abs=64)


def test_a_step_that_no_other_follows_is_not_measured_for_ever():
    """Each event of the recording takes memory of the host."""
    model, weight = warm_up(planned(), 2), torch.ones(1, requires_grad=True)
    assert runtime.profiler_is_running()
    for _ in range(MOST_BACKWARDS + 1):
        weight.sum().backward()
    assert not runtime.profiler_is_running()
    warm_up(model, 4)
    assert_foreseen(model, abs=64)


def test_a_model_is_trained_in_one_thread_after_another():
    model, errors = planned(), []

    def train() -> None:
        try:
            warm_up(model, 2)
        except Exception as error:
            errors.append(error)

    for _ in range(4):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert not errors
    warm_up(model, 3)
    assert_foreseen(model, abs=64)
