"""What a step takes beside the tensors of a size is simulated, unless parameters may have that size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hiremate_lightning import hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.sessions.plain_peaks import PlainPeaks
from hiremate_lightning.sessions.targets import targets_of

WIDTH, ROWS = 48, 100


def step(model: nn.Module, rows: int) -> None:
    model.zero_grad()
    model(torch.randn(rows, WIDTH)).square().mean().backward()


@pytest.fixture
def model() -> nn.Module:
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = hiremate(nn.Sequential(*layers), "100%", verbose=False)
    for _ in range(3):
        step(model, ROWS)
    return model


def test_without_its_rows_a_step_adds_gradients_of_weights(model):
    peaks = PlainPeaks(targets_of(model).session._planned).as_written()
    (peak,) = peaks.values()
    without = peak.without(frozenset({ROWS}))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights <= without < 0.6 * peak.added_bytes  # with what kernels need beside
    for rows in (1, 30, 99):
        added = measure_peak(lambda rows=rows: step(model, rows))
        assert added <= without + (peak.added_bytes - without) * rows / ROWS + 2**12


@pytest.mark.parametrize("size", [WIDTH, WIDTH // 2, 8])
def test_a_size_that_parameters_have_tells_nothing(model, size):
    (peak,) = PlainPeaks(targets_of(model).session._planned).as_written().values()
    assert peak.without(frozenset({size})) is None
