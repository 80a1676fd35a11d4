"""Models that are planned apart and train in the same step: they get one plan, with one budget."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hiremate_lightning import get_plan, hiremate, remove_hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.targets.modules import targets_of
from hiremate_lightning.testing import session_of
from tests.behaviour.budget.test_waiting_graphs import train_adversaries
from tests.exact import differing, drawn, leave_behind

ROWS, WIDTH, ITERATIONS = 512, 32, 7

Iteration = Callable[[nn.ModuleList, int], None]
draw = drawn(ROWS, WIDTH)


class Net(nn.Sequential):
    """A chain in which activations outweigh weights."""

    def __init__(self, width: int = 4 * WIDTH) -> None:
        super().__init__(
            nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, WIDTH)
        )


class Other(Net):
    """Another one."""


def one_after_another(models: nn.ModuleList, index: int) -> None:
    """Train an encoder and a decoder, or more: each is given what the one before returned."""
    x = draw(index)
    for model in models:
        x = model(x)
    x.square().mean().backward()


def side_by_side(models: nn.ModuleList, index: int) -> None:
    """Train two towers, or an actor and its critics: all losses have one backward."""
    sum(model(draw(index + place)).square().mean() for place, model in enumerate(models)).backward()


def train(models: nn.ModuleList, iterate: Iteration) -> tuple[list, list[int]]:
    """Train; return what was computed, and the peaks of the iterations."""
    optimizers, log, peaks = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models], [], []
    weights_bytes = sum(p.nbytes for p in models.parameters())
    for index in range(ITERATIONS):
        gc.collect()
        peaks.append(weights_bytes + measure_peak(lambda i=index: iterate(models, i)))
        for optimizer in optimizers:
            optimizer.step()
        log += leave_behind(models)
        models.zero_grad()
    return log, peaks


@pytest.mark.parametrize("is_share", [False, True], ids=["bytes", "share"])
@pytest.mark.parametrize(
    ("iterate", "count"),
    [(one_after_another, 2), (side_by_side, 3), (lambda models, index: train_adversaries(*models, index), 2)],
    ids=["encoder and decoder", "actor and critics", "GAN"],
)
def test_models_of_one_step_share_a_plan_and_a_budget(iterate, count, is_share):
    logs, peaks = [], []
    for is_planned in (False, True):
        torch.manual_seed(1)
        models = nn.ModuleList([Net(), *(Other() for _ in range(count - 1))])
        budget = "85%" if is_share else int(0.9 * max(peaks[0])) if is_planned else 0
        for model in models if is_planned else ():
            hiremate(model, budget, verbose=False)
        log, found = train(models, iterate)
        logs.append(log)
        peaks.append(found)
    assert not differing(logs[1], logs[0])
    (planned,) = {targets_of(model) for model in models}
    budgets = {plan.budget_bytes for plan in planned.session.plans.values()}
    assert get_plan(models[0]) is get_plan(models[1])
    assert get_plan(models[0]).target.startswith("NetAndOther")
    assert max(peaks[1][count:]) <= max(budgets) < max(peaks[0])
    remove_hiremate(models[0])
    assert all(targets_of(model) is None for model in models)


def test_models_that_train_in_turns_stay_apart():
    models = nn.ModuleList([Net(), Other()])
    for model in models:
        hiremate(model, "90%", verbose=False)
    for index in range(4):
        models[index % 2](draw(index)).square().mean().backward()
    assert targets_of(models[0]) is not targets_of(models[1])


def test_the_smaller_budget_counts_and_options_keep_models_apart():
    for options, are_one in (({"budget": "80%"}, True), ({"budget": "1 GiB"}, False), ({"max_plans": 2}, False)):
        models = nn.ModuleList([Net(), Other()])
        hiremate(models[0], "90%", verbose=False)
        hiremate(models[1], **{"budget": "90%", "verbose": False, **options})
        for index in range(2):
            one_after_another(models, index)
        assert (targets_of(models[0]) is targets_of(models[1])) == are_one
        if are_one:
            assert session_of(models[0]).options.budget.share == 0.8
