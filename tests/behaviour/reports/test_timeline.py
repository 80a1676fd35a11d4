"""What pictures show: the bytes are the simulator's, the curve is the solvers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from hiremate_lightning.planning.comparing import Curve
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.planning.solvers.base import Problem, Solution, Status
from hiremate_lightning.reporting.svg_report import PROVEN, Point, frontier_of, panel_svg
from hiremate_lightning.reporting.timeline import (
    BUDGET,
    OTHER,
    RESIDENT,
    Band,
    DrawnStep,
    eager_run,
    planned_run,
    resident_bands,
    short_source,
)
from tests.tiny import KB, blocks_plan, mixed_plan

MIB = 2**20


@pytest.mark.parametrize("run_of", [eager_run, planned_run])
def test_drawn_bands_add_up_to_the_simulated_bytes(run_of: Callable[[Plan], DrawnStep]):
    """The run ends when the simulated step does."""
    run = run_of(mixed_plan(3))
    drawn = [sum(sizes) for sizes in zip(*run.bands.values(), strict=True)]
    assert drawn == [moment.peak_bytes for moment in run.simulation.timeline]
    assert run.starts_ms[0] == 0
    assert run.starts_ms[-1] == pytest.approx(run.simulation.time_ms)


@pytest.mark.parametrize(
    ("parts", "bands"),
    [
        (
            (("parameters", 900 * KB), ("buffers", 0), ("batch", 100 * KB)),
            [("parameters, resident", 900 * KB), ("batch, resident", 100 * KB), (OTHER, 1_000 * KB)],
        ),
        ((), [(RESIDENT, 2_000 * KB)]),
        ((("parameters", 9_000 * KB),), [(RESIDENT, 2_000 * KB)]),
    ],
    ids=["some", "none", "too many"],
)
def test_resident_bytes_are_split_as_far_as_they_were_counted(parts, bands):
    plan = replace(mixed_plan(2), resident_parts=parts)
    assert [(name, size) for name, _, size in resident_bands(plan)] == bands


def test_runs_know_what_they_recompute():
    plan = mixed_plan(2)
    planned, plain = planned_run(plan), eager_run(plan)
    again = [i for i in range(len(planned.simulation.timeline)) if planned.is_again(i)]
    nodes = tuple(planned.simulation.timeline[i].node for i in again)
    assert nodes == plan.schedule.recomputed(plan.graph)
    assert not any(plain.is_again(i) for i in range(len(plain.simulation.timeline)))


@pytest.mark.parametrize(
    ("source", "short"),
    [("/a/b/c/d.py:3", "b/c/d.py:3"), ("d.py:3", "d.py:3"), ("", ""), ("C:\\a\\b\\c.py:1", "a/b/c.py:1")],
)
def test_a_source_line_keeps_the_end_of_its_path(source: str, short: str):
    assert short_source(source) == short


# ---------------------------------------------------------------- budget against time


def solution(peak_bytes: int, recompute_ms: float, bound_ms: float = 0.0) -> Solution:
    return Solution("hilp", Status.FEASIBLE, ((),), recompute_ms, peak_bytes, bound_ms)


def curve_of(plan: Plan) -> Curve:
    """Two schedules beside the plan's, and bounds for two budgets."""
    least, most = plan.planned.peak_bytes // 2, plan.unplanned.peak_bytes
    points = (solution(least, 30.0), solution(most, 0.0))
    return Curve(Problem(plan.graph, plan.profile, 0), points, ((least, 5.0), (most, 0.0)))


def points_of(plan: Plan) -> dict[str, tuple[Point, ...]]:
    return {series.name: series.points for series in frontier_of(plan, curve_of(plan)).series}


def test_the_frontier_falls_from_the_least_memory_to_eager():
    """The plan is on it, and bounds are below it; what was not measured is left out."""
    plan = blocks_plan(4).with_measured(peak_bytes=3 * MIB)
    points = points_of(plan)
    found, (planned,) = points["fastest schedule found"], points["this plan, predicted"]
    assert [size for size, _ in found] == sorted(size for size, _ in found)
    assert [extra for _, extra in found] == sorted((extra for _, extra in found), reverse=True)
    assert found[-1] == (plan.unplanned_peak_bytes, 0)
    assert planned == pytest.approx((plan.planned_peak_bytes, plan.predicted_overhead))
    assert planned in found
    for budget, bound in points[PROVEN]:
        fitting = [extra for size, extra in found if size <= budget]
        assert not fitting or bound <= min(fitting) + 1e-9
    assert "this plan, measured" not in points


def test_a_bound_holds_for_every_smaller_budget():
    plan = blocks_plan(4)
    step_ms = plan.unplanned.time_ms
    proven = plan.solution.bound_ms / step_ms
    assert proven > 5.0 / step_ms  # the plan's bound is better than the one known for less memory
    assert [extra for _, extra in points_of(plan)[PROVEN]] == pytest.approx([proven, proven, 0.0])


def test_the_picture_of_the_frontier_marks_the_plan_at_its_place():
    plan = blocks_plan(4).with_measured(peak_bytes=3 * MIB, step_ms=110.0, recompute_ms=10.0)
    assert points_of(plan)["this plan, measured"] == ((3 * MIB, 0.1),)
    picture = ElementTree.fromstring(panel_svg(frontier_of(plan, curve_of(plan)), "Budgets", 800))
    words = ["".join(text.itertext()) for text in picture.iterfind("{*}text")]
    circles = [c.attrib for c in picture.iterfind("{*}circle") if c.attrib.get("fill") == BUDGET]
    others = [c.attrib for c in picture.iterfind("{*}circle") if c.attrib["r"] == "3"]
    assert len(circles) == 2, "the plan, and its key in the legend"
    assert (circles[0]["cx"], circles[0]["cy"]) in [(c["cx"], c["cy"]) for c in others]
    assert [float(c["cx"]) for c in others] == sorted(float(c["cx"]) for c in others)
    assert {"extra time, %", "budget, MiB", "this plan, measured"} <= set(words)


def test_a_gradient_in_the_memory_of_a_value_is_drawn_once():
    plan = mixed_plan(2)
    run = planned_run(plan)
    node = next(m.node for m in run.simulation.timeline if m.node in plan.graph.backward)
    workspaces = [-1000 if i == node else 0 for i in range(len(plan.graph.nodes))]
    taking = replace(plan, profile=replace(plan.profile, workspace_bytes=tuple(workspaces)))
    run = planned_run(taking)
    assert Band.WORKSPACE not in run.bands
    drawn = [sum(sizes[i] for sizes in run.bands.values()) for i in range(len(run.simulation.timeline))]
    assert drawn == [moment.peak_bytes for moment in run.simulation.timeline]
