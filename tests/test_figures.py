"""The figures' data: the bytes are the simulator's, the curve is the solvers', without a browser."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.planning.solvers.base import Problem, Solution, Status
from hiremate_lightning.planning.solvers.curve import Curve
from hiremate_lightning.reporting.figures import (
    OTHER,
    RESIDENT,
    Figure,
    frontier_figure,
    plain_run,
    planned_run,
    resident_bands,
    short_source,
    timeline_figure,
)
from hiremate_lightning.reporting.lifetimes import Band

from .tiny import KB, Builder, blocks_plan, mixed_plan, plan_keeping

MIB = 2**20


def stacked(figure: Figure, row: int) -> list[float]:
    """The height of a step's stack at each of its points."""
    layers = [t["y"] for t in figure["data"] if "stackgroup" in t and t["yaxis"] == ("y" if row == 1 else f"y{row}")]
    return [sum(values) for values in zip(*layers, strict=True)]


def named(figure: Figure, name: str) -> dict[str, Any]:
    return next(trace for trace in figure["data"] if trace["name"] == name)


@pytest.mark.parametrize("row", [1, 2])
def test_the_stack_is_as_high_as_the_simulated_memory(row: int):
    plan = mixed_plan(3)
    timeline = (plan.unplanned, plan.planned)[row - 1].timeline
    expected = [(plan.resident_bytes + moment.peak_bytes) / MIB for moment in timeline]
    assert stacked(timeline_figure(plan), row)[:-1] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", ["plain step", "planned step"])
def test_the_outline_is_the_simulated_memory_over_time(name: str):
    plan = mixed_plan(3)
    run = plan.planned if name == "planned step" else plan.unplanned
    outline = named(timeline_figure(plan), name)
    assert outline["y"][:-1] == pytest.approx([(2_000 * KB + m.peak_bytes) / MIB for m in run.timeline], abs=1e-3)
    assert outline["x"][0] == 0
    assert outline["x"][-1] == pytest.approx(run.time_ms, abs=1e-3)


def test_the_outline_says_what_runs_in_which_module_and_what_it_needs():
    plan = mixed_plan(2)
    source = replace(plan.graph.nodes[1], source="/home/me/project/model/gpt.py:12")
    graph = replace(plan.graph, nodes=(plan.graph.nodes[0], source, *plan.graph.nodes[2:]))
    texts = named(timeline_figure(replace(plan, graph=graph)), "planned step")["text"]
    assert texts[1].split("<br>") == [
        "<b>tiny.qkv0</b>, forward, 1 ms",
        "net.blocks.0.attn",
        "project/model/gpt.py:12",
        "2.15 MiB in all",
        "1.91 MiB resident before the step",
        "188 KiB saved activations",
        "62.5 KiB activations, not saved",
    ]


def test_only_the_planned_step_recomputes():
    plan = mixed_plan(2)
    texts = {run: named(timeline_figure(plan), f"{run} step")["text"] for run in ("plain", "planned")}
    assert sum(", recomputed, " in text for text in texts["planned"]) == len(plan.schedule.recomputed(plan.graph))
    assert not any(", recomputed, " in text for text in texts["plain"])


def test_the_peak_is_marked_where_the_simulator_finds_it():
    plan = mixed_plan(3)
    marks = [trace for trace in timeline_figure(plan)["data"] if trace["name"] == "peak"]
    peaks = [plan.unplanned_peak_bytes / MIB, plan.planned_peak_bytes / MIB]
    assert [mark["y"][0] for mark in marks] == pytest.approx(peaks, abs=1e-3)


def test_the_budget_is_a_line_across_both_steps():
    plan = mixed_plan(3)
    lines = [trace for trace in timeline_figure(plan)["data"] if trace["name"].startswith("budget")]
    assert [line["y"] for line in lines] == [[plan.budget_bytes / MIB] * 2] * 2
    assert [line["showlegend"] for line in lines] == [True, False]


def test_a_budget_far_above_all_memory_does_not_flatten_the_drawing():
    figure = timeline_figure(replace(mixed_plan(3), budget_bytes=10**10))
    assert not [trace for trace in figure["data"] if trace["name"].startswith("budget")]
    assert figure["layout"]["yaxis"]["range"][1] < 10


def test_each_band_is_in_the_legend_once():
    shown = [trace["name"] for trace in timeline_figure(mixed_plan(3))["data"] if trace.get("showlegend")]
    assert len(shown) == len(set(shown))
    assert {RESIDENT, Band.SAVED.value, Band.RECOMPUTED.value, Band.GRADIENT.value, "peak"} <= set(shown)


def test_resident_bytes_are_split_as_far_as_they_were_counted():
    plan = replace(mixed_plan(2), resident_parts=(("parameters", 900 * KB), ("buffers", 0), ("batch", 100 * KB)))
    assert [(name, size) for name, _, size in resident_bands(plan)] == [
        ("parameters, resident", 900 * KB),
        ("batch, resident", 100 * KB),
        (OTHER, 1_000 * KB),
    ]


@pytest.mark.parametrize("parts", [(), (("parameters", 9_000 * KB),)])
def test_parts_that_do_not_add_up_are_not_shown(parts: tuple[tuple[str, int], ...]):
    found = [(name, size) for name, _, size in resident_bands(replace(mixed_plan(2), resident_parts=parts))]
    assert found == [(RESIDENT, 2_000 * KB)]


def test_names_can_not_be_markup():
    b = Builder(module="<script>alert(1)</script>")
    b.op("g", (b.op("a", (), 10),), 1, backward=True, op="<b>")
    graph, profile = b.graph()
    text = named(timeline_figure(plan_keeping(graph, profile, ["a"])), "planned step")["text"][1]
    assert "<script>" not in text
    assert "&lt;b&gt;" in text


def test_runs_know_what_they_recompute():
    plan = mixed_plan(2)
    planned, plain = planned_run(plan), plain_run(plan)
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


def test_the_frontier_falls_from_the_least_memory_to_plain_training():
    plan = blocks_plan(4)
    found = named(frontier_figure(plan, curve_of(plan)), "fastest schedule found")
    assert found["x"] == sorted(found["x"])
    assert found["y"] == sorted(found["y"], reverse=True)
    assert found["x"][-1] == pytest.approx(plan.unplanned_peak_bytes / MIB, abs=1e-3)
    assert found["y"][-1] == 0


def test_the_plan_is_on_the_frontier_as_predicted():
    plan = blocks_plan(4)
    figure = frontier_figure(plan, curve_of(plan))
    star, found = named(figure, "this plan, predicted"), named(figure, "fastest schedule found")
    at = (star["x"][0], star["y"][0])
    expected = (plan.planned_peak_bytes / MIB, 100 * plan.predicted_overhead)
    assert at == pytest.approx(expected, abs=1e-3)
    assert at in list(zip(found["x"], found["y"], strict=True))


def test_a_bound_holds_for_every_smaller_budget():
    plan = blocks_plan(4)
    bound = named(frontier_figure(plan, curve_of(plan)), "proven: nothing is faster")
    step_ms = plan.unplanned.time_ms
    proven = 100 * plan.solution.bound_ms / step_ms
    assert proven > 100 * 5.0 / step_ms  # the plan's bound is better than the one known for less memory
    assert bound["y"] == pytest.approx([proven, proven, 0.0], abs=1e-3)


def test_no_bound_is_drawn_above_a_schedule():
    plan = blocks_plan(4)
    figure = frontier_figure(plan, curve_of(plan))
    found, bound = named(figure, "fastest schedule found"), named(figure, "proven: nothing is faster")
    for x, y in zip(bound["x"], bound["y"], strict=True):
        fitting = [fy for fx, fy in zip(found["x"], found["y"], strict=True) if fx <= x]
        assert not fitting or y <= min(fitting) + 1e-6


def test_what_was_measured_is_marked_where_it_was_measured():
    plan = blocks_plan(4).with_measured(peak_bytes=3 * MIB, step_ms=110.0, recompute_ms=10.0)
    cross = named(frontier_figure(plan, curve_of(plan)), "this plan, measured")
    assert (cross["x"], cross["y"]) == ([3.0], [10.0])


def test_what_was_not_measured_is_not_marked():
    plan = blocks_plan(4).with_measured(peak_bytes=3 * MIB)
    names = [trace["name"] for trace in frontier_figure(plan, curve_of(plan))["data"]]
    assert "this plan, measured" not in names


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
