"""Each change to what torch does has a switch: without any of them training is slower, and as right."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from hiremate_lightning import HiRemateWarning, get_plan, hiremate
from hiremate_lightning.torch_private import hacks
from hiremate_lightning.torch_private.hacks import HACKS, Stage
from tests.exact import differing, planned_alike
from tests.training import build, train

NAMES = [hack.name for hack in HACKS]
ON_HERE = [hack for hack in HACKS if hacks.is_on(hack.name)]


def as_on(release: str) -> AbstractContextManager[None]:
    """Take torch for another release for a while."""
    return hacks.replaced((hacks, "RELEASE", release), (hacks, "_missing", {}))


def trains_within(name: str, budget: float) -> None:
    """Train a model with and without a plan: equal bit for bit, and each planned step within the budget."""
    plain, model = build(name), build(name)
    expected, plain_peaks = train(plain, measured=(4,))
    allowed = int(budget * plain_peaks[4])
    hiremate(model.module, allowed, verbose=False)
    found, peaks = train(model, measured=(4,))
    assert not differing(found, expected)
    assert get_plan(model.module) is not None
    assert peaks[4] <= allowed


@pytest.mark.parametrize("name", ["gpt", "resnet", pytest.param("bert", marks=pytest.mark.models)])
def test_without_any_hack_training_is_right_and_in_budget(name):
    with hacks.without():
        assert hacks.off() == list(HACKS)
        trains_within(name, 0.8)


def test_on_a_release_that_nobody_tried_it_is_right_too():
    with as_on("9.9"):
        assert {hack.name for hack in hacks.off()} == {hack.name for hack in HACKS if not hack.mends}
        trains_within("gpt", 0.8)


@pytest.mark.parametrize("name", NAMES)
def test_each_hack_can_be_off_alone(name):
    def gradients(module: nn.Module) -> list[torch.Tensor]:
        assert not hacks.is_on(name)
        for seed in range(3):
            torch.manual_seed(seed)
            module(torch.randn(64, 16)).square().mean().backward()
        return [p.grad for p in module.parameters()]

    blocks = [nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)]
    with hacks.without(name):
        planned_alike(nn.Sequential(*blocks), gradients, "70%")
    assert hacks.is_on(name) == (name in [hack.name for hack in ON_HERE])


def test_hacks_have_their_names_in_this_release():
    for stage in (Stage.CALLING, Stage.CAPTURING, Stage.TRACING):
        with hacks.applied(stage):
            pass


def test_a_name_that_an_untried_release_lacks_is_off(monkeypatch):
    """What replaces it does not fail a capture."""
    monkeypatch.delattr(torch._dynamo.output_graph.OutputGraph, "remove_tensorify_specialized_graphargs")
    with as_on("9.9"):
        with hacks.applied(Stage.CAPTURING):
            assert "unread numbers" in {hack.name for hack in hacks.off()}
        assert hacks.is_on("own generators")
    with pytest.raises(AttributeError), hacks.applied(Stage.CAPTURING):
        pass


@pytest.mark.filterwarnings("default::hiremate_lightning.HiRemateWarning")
def test_no_warning_tells_of_a_hack_that_is_off(recwarn):
    with as_on("9.9"):
        module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
        hiremate(module, "100%", verbose=False)
        module(torch.ones(4, 8)).sum().backward()
    assert not [warning for warning in recwarn if issubclass(warning.category, HiRemateWarning)]
