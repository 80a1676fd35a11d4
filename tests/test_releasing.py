"""Plans that gain nothing and cost time are given back to eager PyTorch."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from hiremate_lightning import hiremate
from hiremate_lightning.sessions.releasing import SAMPLES, SETTLED_STEPS, Releases
from hiremate_lightning.sessions.targets import targets_of

from .exact import differing, leave_behind, quiet

KIND = (0,)
DECIDED = SETTLED_STEPS + 2 * SAMPLES - 1  # steps until it is decided


class Clock:
    """Tells the seconds that a test has let pass."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def run(releases: Releases, clock: Clock, planned_s: float, steps: int) -> list[bool]:
    """Run steps that take a second plainly; list which ones ran plain."""
    found, timing = [], None
    for _ in range(steps):
        if timing is not None:
            releases.next_begins(timing)
        is_plain = releases.runs_plain(KIND)
        timing = releases.step_begins(KIND, is_plain, is_watched=False)
        clock.now_s += 1.0 if is_plain else planned_s
        found.append(is_plain)
    return found


@pytest.mark.parametrize(("planned_s", "is_released"), [(1.5, True), (1.1, False), (0.9, False)])
def test_a_kind_with_a_slower_plan_is_given_back_once(planned_s, is_released):
    clock = Clock()
    found = run(Releases(clock), clock, planned_s, DECIDED + 20)
    assert not any(found[:SETTLED_STEPS])
    assert sum(found[:DECIDED]) == SAMPLES, "both ways in turns"
    assert found[DECIDED:] == [is_released] * 20


def test_a_kind_that_does_not_fit_without_its_plan_keeps_it():
    clock = Clock()
    releases = Releases(clock)
    run(releases, clock, 2.0, SETTLED_STEPS + 2)
    releases.keep(KIND)
    assert not any(run(releases, clock, 2.0, 30))


def test_watched_steps_are_not_timed():
    clock = Clock()
    releases = Releases(clock)
    for _ in range(50):
        assert releases.step_begins(KIND, is_plain=False, is_watched=True) is None
    assert not releases.runs_plain(KIND)


def make() -> nn.Module:
    """Return a network that is captured in parts: a cumulative average ends torch.compile's graphs."""
    torch.manual_seed(1)
    layers = [layer for _ in range(2) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=None), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(16, 16))


@pytest.mark.parametrize(("budget", "planned_s", "is_released"), [("100%", 2.0, True), ("1 GiB", 0.9, False)])
def test_a_step_whose_plan_is_slower_than_eager_runs_unplanned(budget, planned_s, is_released, caplog):
    caplog.set_level(logging.INFO, "hiremate_lightning")
    logs = []
    for is_planned in (False, True):
        model, log, clock = make(), [], Clock()
        if is_planned:
            hiremate(model, budget, verbose=False)
            session = targets_of(model).session
            session.unplanned.releases = Releases(clock)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with quiet():
            for index in range(DECIDED + 16):
                optimizer.zero_grad()
                loss = model(torch.randn(32, 16, generator=torch.Generator().manual_seed(index))).square().mean()
                loss.backward()
                optimizer.step()
                log += [loss.detach(), *leave_behind(model)]
                clock.now_s += 1.0 if is_planned and session.is_plain else planned_s
        logs.append(log)
    assert not differing(logs[1], logs[0])
    assert session.is_plain == is_released
    assert ("2.00 times as long as the code without it" in caplog.text) == is_released
