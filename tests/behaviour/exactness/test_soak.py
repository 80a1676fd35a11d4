"""Many steps with changing shapes: memory and plans stop growing."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from hiremate_lightning import hiremate
from hiremate_lightning.testing import session_of
from tests.exact import quiet

SIZES = (96, 128, 160, 192)
MAX_PLANS = 3


def make() -> nn.Sequential:
    torch.manual_seed(0)
    block = (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1))
    return nn.Sequential(*block, nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))


def live_bytes() -> int:
    """Add up all tensors that are alive, each storage once."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if type(value) in (torch.Tensor, nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def soak(model: nn.Module, steps: int, checked: tuple[int, ...]) -> list[int]:
    """Train on batches of changing sizes; give the bytes alive after some of the steps, without gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    alive = []
    for index in range(steps):
        size = SIZES[torch.randint(len(SIZES), ()).item()]
        optimizer.zero_grad()
        model(torch.randn(size, 16)).square().mean().backward()
        optimizer.step()
        if index in checked:
            optimizer.zero_grad()
            alive.append(live_bytes())
    return alive


@pytest.mark.parametrize("steps", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_changing_shapes_fill_no_memory_and_keep_to_max_plans(steps):
    plain = make()
    soak(plain, steps, ())
    model = make()
    with quiet():
        hiremate(model, "90%", max_plans=MAX_PLANS, on_infeasible="warn", verbose=False)
        half, end = soak(model, steps, (steps // 2, steps - 1))
    session = session_of(model)
    assert 1 <= len(session.plans) <= min(MAX_PLANS, session.captured_count)
    assert session.captured_count <= len(SIZES) + 2, "two sizes are captured before Dynamo takes them for symbols"
    assert end <= half, f"{end - half:,} bytes more after {steps} steps than after half of them"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
