"""The simulator: what lives, how much that is, how long it takes, and which schedules it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hiremate_lightning.records.costs import Profile
from hiremate_lightning.records.graph import Graph, StorageKind
from hiremate_lightning.records.schedule import Compute, Free, Schedule, keep_all, lower
from hiremate_lightning.records.simulation import Moment, Simulation, allocations, simulate
from tests.helpers import moments, refused
from tests.tiny import Builder, chain, plan_keeping, recompute_lazily, storages_of, transformer


def keep(graph: Graph, profile: Profile) -> Simulation:
    return simulate(graph, profile, lower(graph, keep_all(graph)))


def test_the_timeline_of_a_chain_is_as_counted_by_hand():
    graph, profile = chain(3, size=100)
    simulation = keep(graph, profile)
    # a0, a1, a2 add up; a2 leaves at the turn and dy takes its place; each backward node frees what it read.
    assert moments(simulation) == [(100, 100), (200, 200), (300, 200), (400, 200), (300, 100), (200, 100)]
    assert (simulation.peak_bytes, simulation.saved_bytes, simulation.turn) == (400, 200, 3)
    assert (simulation.time_ms, simulation.recompute_ms, simulation.overhead) == (6.0, 0.0, 0.0)


def test_recomputation_trades_time_for_what_is_saved():
    """A longer chain peaks lower with one value kept."""
    graph, profile = chain(3, size=100)
    simulation = simulate(graph, profile, lower(graph, recompute_lazily(graph, ())))
    assert simulation.saved_bytes == 0
    assert (simulation.time_ms, simulation.recompute_ms) == (8.0, 2.0)
    assert simulation.overhead == pytest.approx(2 / 6)
    graph, profile = chain(8, size=100)
    plan = lower(graph, recompute_lazily(graph, storages_of(graph, ["a3"])))
    assert simulate(graph, profile, plan).peak_bytes < keep(graph, profile).peak_bytes


def test_the_peak_counts_the_workspace_of_the_running_node_only():
    """The moment of the peak is the first of equals."""
    b = Builder()
    a = b.op("a", (), 100, workspace=1000)
    b.op("b", (a,), 10)
    graph, profile = b.graph()
    simulation = keep(graph, profile)
    assert moments(simulation) == [(1100, 100), (110, 0)]
    assert simulation.peak_moment == Moment(0, 1100, 100)
    b = Builder()
    for name in "ab":
        b.op(name, (), 100)
    assert keep(*b.graph()).peak_moment.node == 0


def test_a_view_shares_its_storage_and_keeps_it_alive():
    b = Builder()
    a = b.op("a", (), 100)
    view = b.op("view", (a,), view_of=a)
    c = b.op("c", (), 10)
    b.op("d", (view, c), 1)
    graph, profile = b.graph()
    # `a` is freed after the view, but the block lives on under it until `d` has read it.
    assert moments(keep(graph, profile)) == [(100, 100), (100, 100), (110, 110), (111, 0)]


def test_a_recomputed_view_lies_on_the_block_of_its_new_base():
    b = Builder()
    a = b.op("a", (), 100)
    view = b.op("view", (a,), view_of=a)
    b.op("g", (view,), 10, backward=True)
    graph, profile = b.graph()
    simulation = simulate(graph, profile, lower(graph, recompute_lazily(graph, ())))
    assert simulation.saved_bytes == 0
    assert [moment.live_bytes for moment in simulation.timeline[simulation.turn :]] == [100, 100, 0]


def test_recomputing_a_live_value_frees_its_old_block():
    b = Builder()
    a = b.op("a", (), 100)
    view = b.op("view", (a,), view_of=a)
    b.op("g", (a, view), 10, backward=True)
    times = []
    for graph, profile in (chain(2, size=100), b.graph()):
        schedule = lower(graph, keep_all(graph))
        twice = replace(schedule, backward=(Compute(0), *schedule.backward))
        simulation = simulate(graph, profile, twice)
        assert simulation.timeline[2].live_bytes == 200  # one block for a0 and one for dy, or two of a
        times.append(simulation.recompute_ms)
    assert times[0] == 1.0


def test_resident_bytes_and_values_that_are_no_tensors_cost_none():
    for kind in (StorageKind.PARAMETER, StorageKind.INPUT):
        b = Builder()
        b.op("a", (b.input("weight", 10**6, kind),), 100)
        assert keep(*b.graph()).peak_bytes == 100
    b = Builder()
    size = b.op("size", ())
    b.tensors[size:] = []
    b.nodes[0] = replace(b.nodes[0], outputs=(b.tensor("size", None, 0),))
    assert keep(*b.graph()).peak_bytes == 0
    simulation = keep(*Builder().graph())
    assert (simulation.peak_bytes, simulation.overhead, simulation.timeline) == (0, 0.0, ())


def test_what_the_caller_holds_counts_to_the_end_of_the_step():
    """Gradients count as they appear."""
    graph, profile = transformer(2, size=100)
    bare = keep(replace(graph, held=()), profile)
    held = keep(graph, profile)
    assert held.saved_bytes - bare.saved_bytes == 50
    assert held.timeline[-1].live_bytes - bare.timeline[-1].live_bytes == 50
    assert held.timeline[-1].live_bytes == 2 * 100 + 50  # one per block, and what the loss holds


@pytest.mark.parametrize("key", ["held", "retained"])
def test_neither_a_free_nor_recomputing_gives_back_what_is_held(key: str):
    graph, profile = chain(2, size=100)
    a0, x, dy = graph.nodes[0].outputs[0], graph.inputs[0], graph.tangents[0]
    frees = (Free(a0),) if key == "retained" else ()
    schedule = Schedule(
        forward=(Compute(0), Compute(1), Free(graph.nodes[1].outputs[0])),
        saved=(x, a0),
        backward=(*frees, Compute(0), Compute(2), Free(dy), Free(a0), Compute(3), Free(graph.nodes[2].outputs[0])),
    )
    simulation = simulate(replace(graph, **{key: (a0,)}), profile, schedule)
    # After the turn: the old block and dy; then a0 once more, g1, ... and the old block outlives all of it.
    assert [moment.live_bytes for moment in simulation.timeline[2:]] == [300, 200, 200]


def test_what_is_retained_lives_to_the_end_where_it_is_saved():
    graph, profile = chain(3, size=100)
    retaining = replace(graph, retained=tuple(range(len(graph.tensors))))
    kept = keep(retaining, profile)
    assert moments(kept)[:3] == moments(keep(graph, profile))[:3]
    # a0 and a1 stay beside dy; then each gradient takes the place of the one before it.
    assert moments(kept)[3:] == [(400, 300), (400, 300), (400, 300)]
    recomputing = lower(graph, recompute_lazily(graph, ()))
    assert simulate(retaining, profile, recomputing) == simulate(graph, profile, recomputing)


NOT_IN_MEMORY: dict[str, tuple[Callable[[Graph, Schedule], dict[str, Any]], str]] = {
    "read": (lambda g, s: {"forward": (Compute(0), Free(g.nodes[0].outputs[0]), *s.forward[1:])}, "'a1' reads 'a0'"),
    "freed": (lambda g, s: {"forward": (*s.forward, s.forward[-1])}, "The schedule frees 'a2'"),
    "saved": (lambda g, s: {"saved": (*s.saved, *g.nodes[2].outputs)}, "The schedule saves 'a2'"),
    "not saved": (lambda g, s: {"saved": s.saved[:-1]}, "'g2' reads 'a1'"),
    "returned": (lambda g, s: {"backward": (*s.backward, Free(g.gradients[0]))}, "The step returns 'g0'"),
}


@pytest.mark.parametrize(("change", "words"), NOT_IN_MEMORY.values(), ids=NOT_IN_MEMORY)
def test_use_of_what_is_gone_is_named(change: Callable[[Graph, Schedule], dict[str, Any]], words: str):
    graph, profile = chain(3)
    schedule = lower(graph, keep_all(graph))
    broken = replace(schedule, **change(graph, schedule))
    assert refused(graph, profile, broken) == f"{words}, which is not in memory"


def test_a_node_that_never_runs_is_named():
    b = Builder()
    b.op("a", (), 100)
    b.op("forgotten", (), 100)
    graph, profile = b.graph()
    assert refused(graph, profile, Schedule((Compute(0),), (), ())) == "The schedule never runs 'forgotten'"


@pytest.mark.parametrize("reason", ["random", "mutating", "reads_mutated", "backward"])
def test_a_node_that_must_run_once_is_not_run_twice(reason: str):
    b = Builder()
    b.op("noise", (), 100, **{reason: True})
    graph, profile = b.graph()
    words = "The schedule runs 'noise' twice, but it must run once"
    first = () if reason == "backward" else (Compute(0),)
    assert refused(graph, profile, Schedule(first, (), (Compute(0),) * (2 - len(first)))) == words


def test_replays_stand_in_for_random_nodes():
    graph, profile = transformer(2)
    simulation = plan_keeping(graph, profile, ["residual0"]).planned
    ran = [graph.nodes[moment.node].name for moment in simulation.timeline[simulation.turn :]]
    assert "dropout0" not in ran
    assert simulation.recompute_ms > 0


def test_what_is_offloaded_takes_memory_where_it_is_used_only():
    """The forward makes a, b and c; the backward reads b, then a, and makes a gradient each time."""
    b = Builder()
    x, w = b.input("x", 1, StorageKind.INPUT), b.input("w", 1)
    first = b.op("a", (x, w), 100)
    second = b.op("b", (first, w), 50)
    out, tangent = b.op("c", (second,), 10), b.tangent("t", 1)
    inner = b.op("gb", (tangent, second), 1, backward=True)
    gradient = b.op("ga", (inner, first), 1, backward=True)
    graph, _ = b.graph(outputs=(out,), gradients=(gradient,))
    schedule, sizes, none = lower(graph, keep_all(graph)), np.array(graph.sizes), np.zeros(len(graph.nodes), dtype=int)
    aside = {graph.tensors[tensor].storage for tensor in (first, second)}

    def peak(*which: object) -> int:
        return allocations(graph, schedule, *which).peak_bytes(sizes, none)

    assert (peak(), peak(aside), peak(aside, aside)) == (160, 150, 150)
    sizes[graph.tensors[inner].storage] = 100
    assert (peak(), peak(aside), peak(aside, aside)) == (251, 150, 201)
