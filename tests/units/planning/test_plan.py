"""The plan: predictions are simulations of its own decisions, measurements stand beside them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hiremate_lightning.planning.plan import Measurement, Plan, PlanningTime
from hiremate_lightning.planning.solvers.base import Solution, Status
from hiremate_lightning.records.schedule import keep_all, lower
from hiremate_lightning.records.simulation import simulate
from hiremate_lightning.units import Budget
from tests.tiny import KB, Builder, chain, plan_keeping, transformer


@pytest.fixture
def plan() -> Plan:
    graph, profile = transformer(3)
    return plan_keeping(graph, profile, ["residual0", "residual1"])


def test_predictions_are_simulated_from_the_decisions(plan: Plan):
    """Peaks include what is resident."""
    known = plan.planned
    assert plan.schedule == lower(plan.graph, plan.solution.recompute)
    assert known == simulate(plan.graph, plan.profile, plan.schedule)
    assert plan.predicted_overhead == known.overhead > 0
    plain = simulate(plan.graph, plan.profile, lower(plan.graph, keep_all(plan.graph)))
    assert plan.unplanned_peak_bytes == 2_000 * KB + plain.peak_bytes
    assert plan.planned_peak_bytes == 2_000 * KB + known.peak_bytes
    assert plan.planned_peak_bytes <= plan.budget_bytes < plan.unplanned_peak_bytes
    dearer = replace(plan.profile, workspace_bytes=tuple(size + KB for size in plan.profile.workspace_bytes))
    assert replace(plan, profile=dearer).planned.peak_bytes > known.peak_bytes


def test_the_bound_is_a_share_of_eager_time_the_gap_of_planned():
    graph, profile = transformer(1)
    step_ms = sum(profile.time_ms[n] for n in (*graph.forward, *graph.backward))
    solution = Solution("hilp", Status.FEASIBLE, keep_all(graph), recompute_ms=step_ms, bound_ms=step_ms / 2)
    plan = Plan("", graph, profile, solution, Budget(), 0, 0)
    assert plan.bound_overhead == pytest.approx(0.5)
    assert plan.gap == pytest.approx(0.25)


def test_a_step_that_takes_no_time_has_no_bound_and_no_gap():
    graph, profile = Builder().graph()
    plan = Plan("", graph, profile, Solution("hilp", Status.OPTIMAL, keep_all(graph), bound_ms=1.0), Budget(), 0, 0)
    assert (plan.bound_overhead, plan.gap, plan.predicted_overhead) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("measured", "overhead"),
    [
        ({"step_ms": 120.0, "recompute_ms": 20.0}, 0.2),  # of the time without recomputation
        ({}, None),
        ({"step_ms": 1.0}, None),
        ({"recompute_ms": 1.0}, None),
        ({"step_ms": 1.0, "recompute_ms": 1.0}, None),
    ],
)
def test_half_a_measurement_gives_no_overhead(measured: dict[str, float], overhead: float | None):
    assert Measurement(**measured).overhead == (overhead and pytest.approx(overhead))


def test_measurements_add_up_and_leave_the_plan_as_it_was(plan: Plan):
    later = plan.with_measured(peak_bytes=7).with_measured(step_ms=3.0, recompute_ms=1.0)
    assert later.measured == Measurement(7, 3.0, 1.0)
    assert plan.measured == Measurement()


def test_the_numbers_are_written_by_name(plan: Plan):
    numbers = plan.with_measured(peak_bytes=7).to_dict()
    assert numbers == {
        "target": "GPT",
        "budget": str(plan.budget),
        "budget_bytes": plan.budget_bytes,
        "resident_bytes": 2_000 * KB,
        "unplanned_peak_bytes": plan.unplanned_peak_bytes,
        "planned_peak_bytes": plan.planned_peak_bytes,
        "measured_peak_bytes": 7,
        "predicted_overhead": plan.predicted_overhead,
        "measured_overhead": None,
        "bound_overhead": plan.bound_overhead,
        "gap": 0.0,
        "strategy": "hilp",
        "status": "optimal",
        "stopped_by": "",
        "note": "",
        "planning": {"capture_s": 0.5, "profile_s": 0.25, "solve_s": 1.2, "compile_s": 0.0, "prove_s": 0.0},
        "proved": "",
        "rounded": [],
        "kept_compiled": [],
        "costs": plan.profile.device,
        "step_ms": plan.planned.time_ms - plan.planned.recompute_ms,
        "planned_step_ms": plan.planned.time_ms,
        "offloaded_bytes": 0,
        "offload_wait_ms": 0.0,
    }
    assert json.loads(plan.to_json()) == plan.to_dict()
    assert PlanningTime() == PlanningTime(capture_s=0.0, profile_s=0.0, solve_s=0.0, compile_s=0.0)


def test_the_summary_says_what_was_planned_and_what_was_measured():
    """A printed plan is its summary, and no list of operations."""
    plan = plan_keeping(*chain(), ())
    assert "measured" not in plan.summary()
    assert "measured: nothing yet; " in replace(plan, proved="forward 1 of 1 graph").summary()
    assert plan.summary().startswith("HiRemate plan")
    measured = plan.with_measured(peak_bytes=plan.planned_peak_bytes)
    assert "measured: peak" in measured.summary()
    assert str(plan) == plan.summary()
    assert repr(plan).startswith("Plan(target=")
    assert len(repr(plan)) < 1000
