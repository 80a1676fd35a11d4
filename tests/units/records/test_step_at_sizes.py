"""Peaks of decisions at other sizes are those that the simulator counts, though it replays them at one size only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hiremate_lightning.housekeeping import Latest
from hiremate_lightning.planning.solvers.base import Problem, replay
from hiremate_lightning.planning.solvers.model import StepModel, decisions
from hiremate_lightning.records.graph import Graph
from hiremate_lightning.records.schedule import keep_all
from hiremate_lightning.records.simulation import simulate_plain
from hiremate_lightning.records.step import Call, Gap, Step, merge
from tests.helpers import lazy_rows, random_graph
from tests.units.records.test_step import two_calls


def at_other_size(call: Call, times: int) -> Call:
    """Return a call with other bytes, each storage with a growth of its own."""
    graph = call.graph
    storages = tuple(replace(s, size_bytes=s.size_bytes * (times + i % 3)) for i, s in enumerate(graph.storages))
    workspaces = tuple(size * times for size in call.profile.workspace_bytes)
    costs = replace(call.profile, workspace_bytes=workspaces, time_ms=tuple(t * times for t in call.profile.time_ms))
    return replace(
        call, graph=replace(graph, storages=storages), profile=costs, after_forward=Gap(7 * times, 9 * times)
    )


def check_peaks(replays: Latest, step: Step, candidates: list, code: str) -> None:
    problem = Problem(step.graph, step.profile, 0)
    sized = step.sharing([code], replays)
    for candidate in candidates:
        simulation = replay(problem, candidate)
        assert sized.peak_bytes(candidate) == simulation.peak_bytes
        assert sized.again_ms(candidate) == pytest.approx(simulation.recompute_ms)
    assert sized.plain_bytes == simulate_plain(step.graph, step.profile).peak_bytes


def some_decisions(graph: Graph, step: Step) -> list:
    """Return what keeps everything, and a few lazy recomputations."""
    model = StepModel(Problem(graph, step.profile, 0))
    rows = [row for row, _ in zip(lazy_rows(model), range(5), strict=False)]
    return [keep_all(graph), *(decisions(model, row) for row in rows)]


@pytest.mark.parametrize("seed", range(8))
def test_peaks_at_other_sizes_are_those_of_the_simulator(seed):
    call, replays = Call(*random_graph(seed)), Latest(16)
    steps = [merge([at_other_size(call, times)], [0]) for times in (1, 3, 2)]
    candidates = some_decisions(steps[0].graph, steps[0])
    for step in steps:
        check_peaks(replays, step, candidates, "code")


def test_calls_that_hand_on_gradients_have_exact_peaks_too():
    replays = Latest(16)
    for size in (100, 300):
        step = merge(two_calls(size=size, gap_between_backwards=Gap(size, 2 * size)), [1, 0])
        check_peaks(replays, step, [keep_all(step.graph)], "code")


def test_other_code_of_the_same_orders_has_replays_of_its_own():
    first, second, other = (merge([Call(*random_graph(0))], [0]) for _ in range(3))
    known = Latest(16)
    assert first.sharing(["one"], known).replays is second.sharing(["one"], known).replays
    assert first.sharing(["one"], known).replays is not other.sharing(["other"], known).replays
    assert first.sharing([None], known) is first


def test_what_is_held_outside_means_other_replays():
    """Gradients that exist before a step die in it at once: the same calls take other memory then."""
    graph, profile = random_graph(1)
    known = Latest(16)
    steps = [merge([Call(replace(graph, gradients=gradients), profile)], [0]) for gradients in (graph.gradients, ())]
    one, other = (step.sharing(["code"], known) for step in steps)
    assert one.replays is not other.replays
