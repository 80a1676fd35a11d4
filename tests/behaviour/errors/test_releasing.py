"""Plans that gain nothing and cost time are given back to eager PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hiremate_lightning import hiremate
from hiremate_lightning.sessions.session import Session
from hiremate_lightning.signatures.eager_trial import SAMPLES, SETTLED_STEPS, EagerTrial
from hiremate_lightning.targets.modules import targets_of
from tests.exact import differing, leave_behind, quiet

DECIDED = SETTLED_STEPS + 2 * SAMPLES - 1  # steps until it is decided


class Clock:
    """Tells the seconds that a test has let pass."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def run(trial: EagerTrial, clock: Clock, planned_s: float, steps: int) -> list[bool]:
    """Run steps that take a second plainly; list which ones ran plain."""
    found, is_timed = [], False
    for _ in range(steps):
        if is_timed:
            trial.next_begins(clock())
        is_eager = trial.runs_eager(saves_nothing=False)
        is_timed = trial.step_begins(is_eager, is_watched=False, now_s=clock())
        clock.now_s += 1.0 if is_eager else planned_s
        found.append(is_eager)
    return found


@pytest.mark.parametrize(("planned_s", "is_given_back"), [(1.5, True), (1.1, True), (1.04, False), (0.9, False)])
def test_a_signature_with_a_slower_plan_is_given_back_once(planned_s, is_given_back):
    found = run(EagerTrial(), Clock(), planned_s, DECIDED + 20)
    assert not any(found[:SETTLED_STEPS])
    assert sum(found[:DECIDED]) == SAMPLES, "both ways in turns"
    assert found[DECIDED:] == [is_given_back] * 20


def test_a_signature_that_does_not_fit_without_its_plan_keeps_it():
    clock, trial = Clock(), EagerTrial()
    run(trial, clock, 2.0, SETTLED_STEPS + 2)
    trial.is_given_back = False
    assert not any(run(trial, clock, 2.0, 30))


def test_watched_steps_are_not_timed():
    trial = EagerTrial()
    for _ in range(50):
        assert not trial.step_begins(is_eager=False, is_watched=True, now_s=0.0)
    assert not trial.runs_eager(saves_nothing=False)


def make() -> nn.Module:
    """Return a network that is captured in parts: a cumulative average ends torch.compile's graphs."""
    torch.manual_seed(1)
    layers = [layer for _ in range(2) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=None), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(16, 16))


@pytest.mark.parametrize(("peaks", "is_given_back"), [([None, 101], True), ([None, 102], False), ([None] * 4, False)])
def test_a_plan_without_gain_stays_where_a_plain_step_takes_more(peaks, is_given_back):
    """Until a plain step has shown its peak, each is measured; of one that never shows it nothing is known."""
    trial = EagerTrial()
    for peak_bytes in peaks:
        assert trial.is_given_back is None
        found = trial.measured(peak_bytes, 100)
    assert found is trial.is_given_back is is_given_back
    assert run(trial, Clock(), 0.5, DECIDED + 2) == [is_given_back] * (DECIDED + 2), "however fast each is"


@dataclass
class Settled:
    """A planned training: its session, and which of its steps ran as they were written."""

    session: Session
    ran_eager: list[bool]
    captured: list[int]


def settle(budget: str, sizes: Sequence[int], planned_s: float | None = None, is_compared: bool = True) -> Settled:
    """Train plainly and by plans, at these sizes, and fail where numbers differ.

    Args:
        budget: Of the planned training.
        sizes: Rows of each step.
        planned_s: Seconds that a planned step takes where a plain one takes one; None for the real clock.
        is_compared: Whether to train plainly too.
    """
    logs, ran_eager, captured = [], list[bool](), list[int]()
    for is_planned in (False, True) if is_compared else (True,):
        model, log, clock = make(), [], Clock()
        if is_planned:
            hiremate(model, budget, verbose=False, on_infeasible="warn")
            session = targets_of(model).session
            if planned_s is not None:
                session.eager_steps.clock = clock
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with quiet():
            for index, rows in enumerate(sizes):
                optimizer.zero_grad()
                x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(index))
                model(x).square().mean().backward()
                optimizer.step()
                log += leave_behind(model)
                if is_planned:
                    ran_eager.append(session.is_eager)
                    captured.append(session.captured_count)
                    clock.now_s += 1.0 if session.is_eager else planned_s or 0.0
        logs.append(log)
    assert not differing(logs[-1], logs[0])
    return Settled(session, ran_eager, captured)


@pytest.mark.parametrize(
    ("budget", "planned_s", "is_given_back"),
    [("100%", 2.0, True), ("1 GiB", 0.9, False)],
)
def test_a_step_whose_plan_is_slower_than_eager_runs_unplanned(budget, planned_s, is_given_back, caplog):
    caplog.set_level(logging.INFO, "hiremate_lightning")
    assert settle(budget, [32] * (DECIDED + 16), planned_s).ran_eager[-1] == is_given_back
    assert ("2.00 times as long as the code without it" in caplog.text) == is_given_back


@pytest.mark.parametrize("planned_s", [2.0, 0.9])
def test_a_plan_that_saves_no_memory_is_given_back_at_once(planned_s, caplog):
    """Nothing fits 20 %. Steps that are timed could mislead on a busy machine, and decided once and for all."""
    caplog.set_level(logging.INFO, "hiremate_lightning")
    ran_eager = settle("20%", [32] * 12, planned_s).ran_eager
    assert not any(ran_eager[:3]), "captured, measured and timed"
    assert all(ran_eager[6:])
    assert caplog.text.count("saves no memory: such steps run without it from now on") == 1


def test_a_step_that_takes_more_memory_without_its_plan_keeps_it(change_thresholds):
    """Nothing fits; here what is measured of the first plain step counts as more than what its plan takes."""
    change_thresholds(released_peak=0.5)
    ran_eager = settle("20%", [32] * (DECIDED + 8), 2.0, is_compared=False).ran_eager
    assert 1 <= sum(ran_eager) <= 2
    assert not ran_eager[-1]


SIZES = {
    # Nothing fits, and the plan of one size was given back: to capture other sizes would take seconds for nothing.
    "new ones after a plan that gains nothing": ("20%", [32] * (DECIDED + 8) + [40, 48, 24, 32, 40], 2.0, DECIDED + 8),
    # Nothing fits, and no size comes twice: no plan is ever measured, so none could be given back by its own steps.
    "that never repeat where no plan saves": ("20%", [32 + index * 7 % 12 for index in range(12)], None, 6),
    # Each step is larger than all before: 100 % of what such a step takes is more than the latest plan's budget.
    "any, where the budget is all it takes": ("100%", [32 + 9 * index for index in range(10)], None, 4),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_run_unplanned(name):
    budget, sizes, planned_s, captured = SIZES[name]
    settled = settle(budget, sizes, planned_s)
    assert settled.session.is_eager if budget == "100%" else settled.session.is_given_back
    assert settled.captured[-1] == settled.captured[captured - 1], "nothing is captured any more"
