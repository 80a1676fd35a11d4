"""Training under a plan gives what plain training gives, bit for bit, and its peak is what was predicted."""

from __future__ import annotations

import pytest

from hiremate_lightning import get_plan, hiremate, remove_hiremate
from hiremate_lightning.planning.solvers.base import Problem, SolveOptions
from hiremate_lightning.planning.solvers.least_memory import solve_least_memory
from hiremate_lightning.testing import captured_count
from tests.exact import differing
from tests.models import EVERY_MODEL
from tests.training import build, train

STEPS = 5
MEASURED = (3, 4)  # the first steps capture, plan and measure


@pytest.mark.parametrize("name", EVERY_MODEL)
def test_training_by_a_plan_equals_eager_within_the_budget(name):
    """So it is under half of what the step adds, and under the smallest budget that an error would name."""
    plain, _ = train(build(name), STEPS)

    plan = assert_exact_within(name, "50%", plain)

    problem = Problem(plan.graph, plan.profile, 0, SolveOptions(time_limit_s=1))
    assert_exact_within(name, plan.resident_bytes + solve_least_memory(problem).peak_bytes, plain)


def assert_exact_within(name, budget, plain):
    """Train a model as it was trained without a plan, within a budget; return the plan."""
    model = build(name)
    keys = list(model.module.state_dict())
    hiremate(model.module, budget, time_limit_s=1, verbose=False)

    found, peaks = train(model, STEPS, measured=MEASURED)

    plan = get_plan(model.module)
    assert not differing(found, plain)
    assert list(model.module.state_dict()) == keys
    for peak in (*peaks.values(), plan.measured.peak_bytes):
        assert peak <= plan.budget_bytes, f"peak {peak:,}, budget {plan.budget_bytes:,}"
        difference = abs(peak - plan.planned_peak_bytes) / peak
        assert difference <= 0.01, f"measured {peak:,}, predicted {plan.planned_peak_bytes:,}"
    assert plan.planned_peak_bytes < plan.unplanned_peak_bytes
    return plan


def test_two_budgets_share_one_captured_step():
    expected, _ = train(build("gpt"), STEPS)
    model = build("gpt")
    hiremate(model.module, "70%", verbose=False)
    planned_peaks = []

    def change_budget(step):
        if step == 3:
            planned_peaks.append(get_plan(model.module).planned_peak_bytes)
            hiremate(model.module, "50%", verbose=False)
            planned_peaks.append(get_plan(model.module).planned_peak_bytes)

    found, peaks = train(model, STEPS, measured=(4,), before=change_budget)

    assert not differing(found, expected)
    assert planned_peaks[1] < planned_peaks[0]
    assert peaks[4] <= get_plan(model.module).budget_bytes
    assert captured_count(model.module) == 1
    remove_hiremate(model.module)
