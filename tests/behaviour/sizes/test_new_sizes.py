"""Steps of sizes without a plan that fit only with less memory: what they cost is measured, and said once."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from hiremate_lightning import hiremate
from hiremate_lightning.kinds import new_sizes
from hiremate_lightning.kinds.new_sizes import BASE, STEPS, Line, NewSizes, TimedStep
from hiremate_lightning.targets.modules import targets_of
from tests.exact import quiet


def at(size_bytes: int, seconds: float) -> TimedStep:
    return TimedStep(size_bytes, seconds)


def test_a_line_follows_most_steps():
    line = Line([at(100, 2.0), at(200, 3.0), at(300, 4.0), at(400, 60.0), at(500, 6.0)])
    assert line.at(1000) == pytest.approx(11.0)
    assert Line([at(100, 2.0), at(100, 2.0)]).at(300) == pytest.approx(6.0), "in proportion, where one size was seen"
    assert Line([at(100, 4.0), at(200, 3.0)]).at(400) == pytest.approx(3.5), "larger steps take no less"


def ask(sizes: NewSizes, seconds: float, steps: int = STEPS) -> list[str | None]:
    return [sizes.saved_memory(at(300, seconds), 10 * 2**20 + index) for index in range(steps)]


def test_what_new_sizes_cost_is_said_once():
    sizes = NewSizes("Net")
    for size_bytes in (100, 200, 100, 200):
        sizes.ran_plain(at(size_bytes, 1.0 + size_bytes / 100))
    *before, said = ask(sizes, 8.0)
    assert not any(before)
    assert "take 2.0 times plain PyTorch's time" in said
    assert f"from {BASE} steps that ran without a plan" in said
    assert "A budget of 10.0 MiB would avoid it" in said
    assert not any(ask(sizes, 80.0))


def test_nothing_is_said_of_steps_that_cost_little():
    sizes = NewSizes("Net")
    for _ in range(BASE):
        sizes.ran_plain(at(300, 4.0))
    assert not any(ask(sizes, 4.8))


def test_planned_steps_show_the_time_where_few_ran_plain():
    sizes = NewSizes("Net")
    sizes.ran_plain(at(300, 1.0))
    for _ in range(BASE):
        sizes.ran_planned(at(300, 5.0), 1.0)
    said = ask(sizes, 8.0)[-1]
    assert "2.0 times" in said
    assert "by plans, without what these recompute" in said


@pytest.mark.usefixtures("without_templates")
def test_slow_steps_of_new_sizes_are_announced(monkeypatch, caplog):
    """Each length comes once, and most fit only with less memory; `CLEARLY_LONGER` is lowered, to be sure."""
    caplog.set_level(logging.INFO, "hiremate_lightning")
    monkeypatch.setattr(new_sizes, "CLEARLY_LONGER", 0.0)
    torch.manual_seed(1)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())]
    model = hiremate(nn.Sequential(*layers), "4 MiB", verbose=False, on_infeasible="warn")
    ran_plain = []
    with quiet():
        for index in range(72):
            model.zero_grad()
            length = 64 if index < 28 else 220 + 4 * index
            model(torch.randn(4, length, 32)).square().mean().backward()
            ran_plain.append(targets_of(model).session.is_plain)
    assert sum(ran_plain) > STEPS
    assert caplog.text.count("times plain PyTorch's time") == 1
