"""Plans that gain nothing are given back to eager PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hiremate_lightning import hiremate
from hiremate_lightning.sessions.session import Session
from hiremate_lightning.signatures.step_signature import StepSignature
from hiremate_lightning.testing import session_of
from tests.exact import differing, leave_behind, quiet

SETTLED = 6  # steps until one runs as its plan decides: captured, measured and timed ones come first


@pytest.fixture(autouse=True)
def _gives_back(change_thresholds):
    change_thresholds(gives_back=True)


def make() -> nn.Module:
    """Return a network that is captured in parts: a cumulative average ends torch.compile's graphs."""
    torch.manual_seed(1)
    layers = [layer for _ in range(2) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=None), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(16, 16))


@pytest.mark.parametrize(("peaks", "is_given_back"), [([None, 101], True), ([None, 102], False), ([None] * 4, False)])
def test_a_plan_without_gain_stays_where_a_plain_step_takes_more(peaks, is_given_back):
    """Until a plain step has shown its peak, each is measured; of one that never shows it nothing is known."""
    signature = StepSignature((0,))
    for peak_bytes in peaks:
        assert signature.eager_is_no_worse is None
        signature.ran_without_plan(peak_bytes, 100)
    assert signature.eager_is_no_worse is is_given_back


@dataclass
class Settled:
    """A planned training: its session, and which of its steps ran as they were written."""

    session: Session
    ran_eager: list[bool]
    captured: list[int]


def settle(budget: str, sizes: Sequence[int], is_compared: bool = True, eager_bytes: int = 0) -> Settled:
    """Train plainly and by plans, at these sizes, and fail where numbers differ.

    Args:
        budget: Of the planned training.
        sizes: Rows of each step.
        is_compared: Whether to train plainly too.
        eager_bytes: What the loop allocates beside the model in steps of the planned training that run eager.
    """
    logs, ran_eager, captured = [], list[bool](), list[int]()
    for is_planned in (False, True) if is_compared else (True,):
        model, log = make(), []
        if is_planned:
            hiremate(model, budget, verbose=False, on_infeasible="warn")
            session = session_of(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with quiet():
            for index, rows in enumerate(sizes):
                optimizer.zero_grad()
                x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(index))
                loss = model(x).square().mean()
                beside = torch.empty(eager_bytes if is_planned and session.is_eager else 0, dtype=torch.uint8)
                loss.backward()
                optimizer.step()
                del beside
                log += leave_behind(model)
                if is_planned:
                    ran_eager.append(session.is_eager)
                    captured.append(session.captured_count)
        logs.append(log)
    assert not differing(logs[-1], logs[0])
    return Settled(session, ran_eager, captured)


@pytest.mark.parametrize("budget", ["100%", "1 GiB"])
def test_a_step_whose_plan_recomputes_nothing_runs_as_written(budget, caplog):
    caplog.set_level(logging.INFO, "hiremate_lightning")
    settled = settle(budget, [32] * 12)
    assert not any(settled.ran_eager[:2]), "captured and measured"
    assert all(settled.ran_eager[SETTLED:])
    assert caplog.text.count("Steps whose plan recomputes nothing") == 1
    (plan,) = settled.session.plans.values()
    assert plan.measured.peak_bytes is not None is not plan.measured.step_ms, "the report shows both"


def test_a_step_that_may_fit_only_by_its_plan_keeps_it():
    """It recomputes nothing, and eager PyTorch may take more memory than captured code."""
    (plan,) = settle("100%", [32] * 4).session.plans.values()
    assert not any(settle(f"{plan.planned_peak_bytes * 5 // 4} B", [32] * 12, is_compared=False).ran_eager)


def test_a_plan_comes_back_where_a_step_without_it_exceeds():
    """Code beside the captured parts allocates more in steps without it, of which the first ones are measured."""
    (plan,) = settle("100%", [32] * 4).session.plans.values()
    settled = settle(f"{2 * plan.planned_peak_bytes} B", [32] * 14, is_compared=False, eager_bytes=2**20)
    assert 1 <= sum(settled.ran_eager) <= 4
    assert not any(settled.ran_eager[-4:])


def test_a_plan_that_saves_no_memory_is_given_back_at_once(caplog):
    caplog.set_level(logging.INFO, "hiremate_lightning")
    ran_eager = settle("20%", [32] * 12).ran_eager
    assert not any(ran_eager[:3]), "captured, measured and timed"
    assert all(ran_eager[SETTLED:])
    assert caplog.text.count("saves no memory: such steps run without it from now on") == 1


def test_a_step_that_takes_more_memory_without_its_plan_keeps_it(change_thresholds):
    """Nothing fits; here what is measured of the first plain step counts as more than what its plan takes."""
    change_thresholds(given_back_peak=0.5)
    ran_eager = settle("20%", [32] * 14, is_compared=False).ran_eager
    assert 1 <= sum(ran_eager) <= 2
    assert not ran_eager[-1]


SIZES = {
    # Nothing fits, and the plan of one size was given back: to capture other sizes would take seconds for nothing.
    "new ones after a plan that gains nothing": ("20%", [32] * 12 + [40, 48, 24, 32, 40], 12),
    # Nothing fits, and no size comes twice: no plan is ever measured, so none could be given back by its own steps.
    "that never repeat where no plan saves": ("20%", [32 + index * 7 % 12 for index in range(12)], 6),
    # Each step is larger than all before: 100 % of what such a step takes is more than the latest plan's budget.
    "any, where the budget is all it takes": ("100%", [32 + 9 * index for index in range(10)], 4),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_run_unplanned(name):
    budget, sizes, captured = SIZES[name]
    settled = settle(budget, sizes)
    assert settled.session.is_eager if budget == "100%" else settled.session.is_given_back
    assert settled.captured[-1] == settled.captured[captured - 1], "nothing is captured any more"
