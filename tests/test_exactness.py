"""Training under a plan gives what plain training gives, bit for bit, and its peak is what was predicted."""

from __future__ import annotations

import warnings

import pytest

from hiremate_lightning import HiRemateWarning, get_plan, hiremate, remove_hiremate
from hiremate_lightning.planning.solvers import Problem, SolveOptions, smallest_budget

from .models import EVERY_MODEL
from .training import assert_equal, build, train

STEPS = 5
MEASURED = (3, 4)  # the first steps capture, plan and measure


@pytest.fixture(scope="module")
def plain_runs():
    """Plain training of each model, once."""
    runs = {}

    def run(name):
        if name not in runs:
            runs[name] = train(build(name), STEPS)
        return runs[name]

    return run


def smallest_budget_of(name):
    """Find the budget, in bytes, that an error would name as the smallest."""
    model = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HiRemateWarning)
        hiremate(model.module, "0.1%", on_infeasible="warn", time_limit_s=1, verbose=False)
        train(model, steps=2)
    plan = get_plan(model.module)
    return (
        plan.resident_bytes
        + smallest_budget(Problem(plan.graph, plan.profile, 0, SolveOptions(time_limit_s=3))).peak_bytes
    )


@pytest.mark.parametrize("budget", ["50%", "smallest"])
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_training_under_a_plan_is_plain_training_within_the_budget(name, budget, plain_runs):
    expected = plain_runs(name)
    model = build(name)
    keys = list(model.module.state_dict())
    asked = smallest_budget_of(name) if budget == "smallest" else budget
    hiremate(model.module, asked, time_limit_s=3, verbose=False)

    found = train(model, STEPS, measured=MEASURED)

    plan = get_plan(model.module)
    assert_equal(found, expected)
    assert list(model.module.state_dict()) == keys
    for peak in (*found.peaks.values(), plan.measured.peak_bytes):
        assert peak <= plan.budget_bytes, f"peak {peak:,}, budget {plan.budget_bytes:,}"
        difference = abs(peak - plan.planned_peak_bytes) / peak
        assert difference <= 0.01, f"measured {peak:,}, predicted {plan.planned_peak_bytes:,}"
    assert plan.planned_peak_bytes < plan.unplanned_peak_bytes


def test_two_budgets_share_one_captured_step(plain_runs):
    expected = plain_runs("gpt")
    model = build("gpt")
    hiremate(model.module, "70%", verbose=False)
    peaks = []

    def change_budget(step):
        if step == 3:
            peaks.append(get_plan(model.module).planned_peak_bytes)
            hiremate(model.module, "50%", verbose=False)
            peaks.append(get_plan(model.module).planned_peak_bytes)

    found = train(model, STEPS, measured=(4,), before=change_budget)

    assert_equal(found, expected)
    assert peaks[1] < peaks[0]
    assert found.peaks[4] <= get_plan(model.module).budget_bytes
    from hiremate_lightning.sessions.targets import targets_of

    assert targets_of(model.module).session.captured_count == 1
    remove_hiremate(model.module)
