"""How long the first plan takes is foreseen from the model, or known from the run before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.planning.plan import PlanningTime
from hiremate_lightning.sessions.first_wait import FirstWait, modules_without_parts
from tests.exact import take_steps

TOOK = PlanningTime(capture_s=20.0, profile_s=4.0, solve_s=7.0, prove_s=3.0)
FAST_MS, SLOW_MS = 1e-9, 1e9  # of a short loop on machines beside which this one is as slow or fast as counts


@pytest.mark.parametrize(("usual_loop_ms", "slower"), [(FAST_MS, 4.0), (SLOW_MS, 0.5)], ids=["slow", "fast"])
def test_more_modules_and_a_slower_machine_take_longer(
    usual_loop_ms: float, slower: float, change_thresholds: Callable[..., None]
):
    """What a machine is slower or faster counts up to a factor."""
    change_thresholds(usual_loop_ms=usual_loop_ms)
    wait = FirstWait(None, lambda: "model")
    assert wait.expected_s(10) == pytest.approx(2.0 * slower)
    assert wait.expected_s(100) == pytest.approx(11.0 * slower)


def test_the_next_run_knows_what_is_done_again(tmp_path: Path):
    """Costs and plans are in the folder then, so that neither measuring nor solving takes time.

    Later plans do not count for it, and a file that can't be read is no error.
    """
    folder = tmp_path / "plans"
    wait = FirstWait(folder, lambda: "model")
    wait.took(TOOK)
    wait.took(PlanningTime(capture_s=100.0))
    assert json.loads((folder / "wait-model.json").read_text()) == {"seconds": 23.0}
    assert FirstWait(folder, lambda: "model").expected_s(1) == 23.0
    assert FirstWait(folder, lambda: "another").expected_s(1) != 23.0
    (folder / "wait-model.json").write_text("[")
    assert FirstWait(folder, lambda: "model").expected_s(1) > 0


def test_only_modules_without_modules_are_counted():
    assert modules_without_parts(nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), nn.Linear(1, 1))) == 3


def test_the_wait_is_announced_before_the_first_step(
    change_thresholds: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    """And afterwards, with the line of the plan, where the time went."""
    change_thresholds(usual_loop_ms=FAST_MS, long_stage_s=1e-3)
    model = hiremate(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), "100%")

    def step() -> str:
        model.zero_grad()
        model(torch.randn(64, 8)).square().mean().backward()
        return capsys.readouterr().err

    first, second = step(), step()
    assert first.startswith("HiRemate: the first two steps of Sequential take about 5 s longer than later ones")
    assert "\n  planned in " in second
    assert get_plan(model).planning.all_s > 0


def test_planning_time_is_summed_over_all_plans_of_a_model():
    model = hiremate(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), "100%", verbose=False)
    take_steps(model, lambda _: torch.randn(64, 8), 2, clears="never")
    first = get_plan(model).planning

    hiremate(model, "1 GiB")
    again = get_plan(model).planning

    assert again.capture_s == first.capture_s > 0
    assert again.solve_s > first.solve_s
