"""Steps that pass a plan by, between those that are measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.torch_private import hooks


@pytest.mark.filterwarnings("ignore:.*trains without its plan")
def test_plain_steps_in_between_do_not_raise_the_measured_peak():
    """Each plain step leaves gradients that nobody saw allocated, and the next planned step frees them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(512, 64)
    hiremate(model, "70%", optimizer=optimizer, verbose=False)

    for index in range(40):
        slots = {module: hooks.get_call(module) for module in model.modules()}
        for module in slots if index > 3 and index % 2 else ():
            hooks.set_call(module, None)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for module, slot in slots.items():
            hooks.set_call(module, slot)

    plan = get_plan(model)
    assert plan is not None
    assert plan.measured.peak_bytes is not None
    assert plan.measured.peak_bytes <= plan.planned_peak_bytes
