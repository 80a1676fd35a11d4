"""Two processes: each trains as without a plan, within its budget, by the plan of rank 0; nobody waits for long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.exact import differing
from tests.loops import Script, assert_same, assert_within_budget
from tests.processes import run_two
from tests.two_processes import SCRIPTS, SLOW_S, WAYS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """Run all that two processes do, once; give what each of them left."""
    return run_two("tests.two_processes", tmp_path_factory.mktemp("ranks"), timeout=500, ACCELERATE_USE_CPU="true")


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_script_trains_the_same_by_the_plan_of_rank_zero(ranks, script: Script):
    for left in ranks:
        (found, _), (expected, _) = left[script], left[replace(script, place=None)]
        assert_same(found, expected)
        assert_within_budget(found.plan)
    first, second = (left[script][0].plan for left in ranks)
    assert second.solution.recompute == first.solution.recompute
    assert second.solution.stopped_by == "rank 0 solved" != first.solution.stopped_by


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_plain_distributed_training(ranks, way: str):
    for left in ranks:
        assert differing(left[way, True], left[way, False]) == []
        assert left[way, False]


def test_gradients_are_shared(ranks):
    """What is compared above would be the same for two processes that know nothing of each other."""
    script = SCRIPTS[0]
    first, second = (left[script][0] for left in ranks)
    assert not torch.equal(first.losses[0], second.losses[0])
    assert all(torch.equal(first.state[name], second.state[name]) for name in first.state if "weight" in name)


@pytest.mark.parametrize("case", ["other budget", "one plan", "slow"])
def test_ranks_that_differ_train_on(ranks, case: str):
    for left in ranks:
        assert_same(left[case][0], left["plain"][0])


def test_both_ranks_keep_to_the_smaller_budget(ranks):
    first, second = (left["other budget"][0].plan for left in ranks)
    assert_within_budget(first)
    assert_within_budget(second)
    assert first.planned_peak_bytes <= second.budget_bytes < first.budget_bytes


def test_both_ranks_share_the_times_of_the_slower_and_the_plan(ranks):
    (first, seconds), (second, _) = (left["slow"] for left in ranks)
    assert seconds > SLOW_S
    assert first.plan.solution.recompute == second.plan.solution.recompute
