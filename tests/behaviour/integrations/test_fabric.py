"""Fabric: what is set up with a plan saves and loads as what is set up without; see test_loops for training."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from hiremate_lightning import ConfigurationError, get_plan, hiremate, remove_hiremate
from tests.loops import Script, make_batch, make_model, prepared


def set_up(place: str) -> tuple[Fabric, nn.Module, nn.Module, torch.optim.Optimizer]:
    """Give a Fabric, the model as made and as set up, and its optimizer."""
    fabric = Fabric(accelerator="cpu", devices=1)
    return fabric, *prepared(Script("fabric", place=place), fabric.setup, {"budget": "70%", "verbose": False})


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_planned_model_is_saved_loaded_and_left_as_it_was(place, tmp_path):
    fabric, made, model, optimizer = set_up(place)
    for index in range(3):
        fabric.backward(model(make_batch(index)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    fabric.save(tmp_path / "all.ckpt", {"model": model, "optimizer": optimizer})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    fabric.load(tmp_path / "all.ckpt", {"model": model, "optimizer": optimizer})

    assert list(weights) == list(make_model().state_dict())
    assert all(torch.equal(value, weights[name]) for name, value in made.state_dict().items())
    assert get_plan(model) is get_plan(made) is not None
    remove_hiremate(model)
    assert all(m._compiled_call_impl is None for m in model.modules())


def test_a_second_call_changes_the_budget_of_a_wrapped_model():
    fabric, made, model, _ = set_up("before")
    for index in range(2):
        fabric.backward(model(make_batch(index)).square().mean())

    hiremate(model, "80%")

    assert str(get_plan(made).budget) == "80%"


def test_a_model_that_fabric_compiled_is_refused():
    fabric = Fabric(accelerator="cpu", devices=1)

    with pytest.raises(ConfigurationError, match="compiled already"):
        hiremate(fabric.setup(torch.compile(make_model(), backend="eager")), "70%")
