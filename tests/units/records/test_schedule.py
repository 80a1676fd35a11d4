"""Lowering: decisions become a straight-line program in which every value is freed after its last use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hiremate_lightning.records.graph import Graph, StorageKind
from hiremate_lightning.records.schedule import Compute, Operation, keep_all, lower
from hiremate_lightning.records.simulation import simulate
from hiremate_lightning.records.step import Decisions
from tests.tiny import Builder, chain, recompute_lazily, storages_of, transformer


def spell(graph: Graph, operations: tuple[Operation, ...]) -> str:
    """Write operations as words: "a" runs a, "-a" frees it."""
    return " ".join(
        graph.nodes[op.node].name if isinstance(op, Compute) else f"-{graph.tensors[op.tensor].name}"
        for op in operations
    )


def names(graph: Graph, tensors: tuple[int, ...]) -> list[str]:
    return [graph.tensors[t].name for t in tensors]


def lowered(graph: Graph, recompute: Decisions | None = None) -> tuple[str, str, str]:
    """Lower decisions, those that keep everything if there are none; write the forward, what is saved, the backward."""
    schedule = lower(graph, keep_all(graph) if recompute is None else recompute)
    saved = " ".join(names(graph, schedule.saved))
    return spell(graph, schedule.forward), saved, spell(graph, schedule.backward)


def test_keeping_all_frees_saved_tensors_during_the_backward():
    graph, _ = chain(3)
    assert lowered(graph) == ("a0 a1 a2 -a2", "x a0 a1", "g2 -dy -a1 g1 -g2 -a0 g0 -g1")
    assert lower(graph, keep_all(graph)) == lower(graph, ((), (), (), ())), "the same operations make equal schedules"


def test_recomputed_values_live_from_first_use_to_last():
    """In the forward it is freed after its last use."""
    graph, _ = chain(3)
    recompute = recompute_lazily(graph, ())
    assert lowered(graph, recompute) == ("a0 a1 -a0 a2 -a1 -a2", "x", "a0 a1 g2 -dy -a1 g1 -g2 -a0 g0 -g1")
    assert [graph.nodes[n].name for n in lower(graph, recompute).recomputed(graph)] == ["a0", "a1"]


def test_a_value_computed_twice_is_freed_between_its_definitions():
    graph, _ = chain(3)
    a0, a1 = 0, 1
    schedule = lower(graph, ((a0, a1), (a0,), (), ()))
    assert spell(graph, schedule.backward) == "a0 a1 -a0 g2 -dy -a1 a0 g1 -g2 -a0 g0 -g1"
    assert schedule.recomputed(graph) == (a0, a1, a0)


def test_a_kept_or_held_storage_is_not_recomputed():
    graph, _ = chain(3)
    recompute = recompute_lazily(graph, storages_of(graph, ["a1"]))
    held = replace(graph, held=graph.nodes[1].outputs)
    assert recompute == recompute_lazily(held, ()) == ((), (0,), (), ())
    assert names(graph, lower(graph, recompute).saved) == ["x", "a1"]


def test_a_view_of_a_kept_storage_is_saved_too():
    b = Builder()
    a = b.op("a", (), 100)
    view = b.op("view", (a,), view_of=a)
    b.op("g", (view,), 100, backward=True)
    graph, _ = b.graph()
    assert names(graph, lower(graph, recompute_lazily(graph, storages_of(graph, ["a"]))).saved) == ["view"]
    b = Builder()
    weight = b.input("weight", 100, StorageKind.PARAMETER)
    transposed = b.op("transpose", (weight,), view_of=weight)
    b.op("g", (transposed,), 100, backward=True)
    assert recompute_lazily(b.graph()[0], ()) == ((), ())


def test_unread_outputs_and_tangents_are_freed_at_once():
    b = Builder()
    a = b.op("pair", (), 100, 200)
    b.tangent("unread", 100)
    b.op("g", (a,), 100, backward=True)
    assert lowered(b.graph()[0]) == ("pair -pair_1", "pair", "-unread g -g -pair")


def test_outputs_leave_at_the_turn_unless_saved_or_held():
    """What the caller holds is never freed, and not saved unless the backward reads it."""
    b = Builder()
    left, saved, held = (b.op(name, (), 100) for name in ("left", "saved", "held"))
    after = b.op("after", (held,), 100)
    b.op("g", (saved, after), 100, backward=True)
    graph, _ = b.graph(outputs=(left, saved, held, left), held=(held,))
    assert lowered(graph) == ("left saved held after -left", "saved after", "g -g -saved -after")


def test_held_gradients_of_outside_code_in_the_backward_stay():
    b = Builder()
    dy = b.tangent("dy", 100)
    g = b.op("g", (dy,), 100, backward=True)
    held = b.outside((g,), 50, backward=True)
    graph, profile = b.graph(held=(held,))
    assert lowered(graph) == ("", "", "g -dy outside -g")
    assert simulate(graph, profile, lower(graph, keep_all(graph))).timeline[-1].live_bytes == 50


def test_inputs_the_backward_reads_are_saved_and_never_freed():
    b = Builder()
    weight = b.input("weight", 100)
    b.op("g", (weight,), 100, backward=True)
    assert lowered(b.graph()[0]) == ("", "weight", "g -g")


def test_a_forward_value_returned_as_gradient_is_computed_last():
    b = Builder()
    a = b.op("a", (), 100)
    b.op("g", (), 100, backward=True)
    graph, _ = b.graph(gradients=(a,))
    recompute = recompute_lazily(graph, ())
    assert recompute == ((), (0,))
    assert lowered(graph, recompute) == ("a -a", "", "g -g a")


def test_random_values_are_kept_whatever_is_asked_for():
    graph, _ = transformer(2)
    schedule = lower(graph, recompute_lazily(graph, ()))
    assert {"dropout0_1", "dropout1_1"} <= set(names(graph, schedule.saved))
    assert not {"dropout0", "dropout1"} & {graph.nodes[n].name for n in schedule.recomputed(graph)}
    assert {"dropout0_replay"} <= {graph.nodes[n].name for n in schedule.recomputed(graph)}


def test_a_chain_of_thousands_is_recomputed_without_recursion():
    graph, profile = chain(3000)
    recompute = recompute_lazily(graph, ())
    assert recompute[0] == tuple(range(2999))
    assert simulate(graph, profile, lower(graph, recompute)).recompute_ms == 2999


def test_reading_a_tensor_before_its_computation_names_it():
    b = Builder()
    later = b.op("later", (), 100, backward=True)
    b.op("earlier", (later,), 100, backward=True)
    graph, _ = b.graph()
    backwards = replace(graph, backward=(1, 0))
    with pytest.raises(AssertionError, match=r"^backward tensor later is read before it is computed"):
        recompute_lazily(backwards, ())
