"""The graph record: who allocates, who can recompute, what the backward needs, and its way through JSON."""

from __future__ import annotations

import json

import pytest

from hiremate_lightning.records.graph import FORMAT_VERSION, Direction, Node, StorageKind, graph_from_json
from tests.tiny import Builder, chain, transformer


def test_a_node_allocates_its_outputs():
    graph, _ = chain(2)
    assert [graph.tensors[graph.nodes[0].outputs[0]].storage] == list(graph.allocates[0])


def test_a_view_allocates_nothing_and_adds_no_bytes():
    b = Builder()
    a = b.op("a", (), 100)
    b.op("view", (a,), view_of=a)
    graph, _ = b.graph()
    assert graph.allocates[1] == ()
    assert sum(graph.sizes) == 100


def test_two_outputs_on_one_storage_are_allocated_once():
    b = Builder()
    b.op("a", (), 100)
    both = b.nodes[0].outputs[0], b.tensor("alias", b.tensors[0].storage, 0)
    b.nodes[0] = Node("a", "tiny.a", Direction.FORWARD, (), both)
    graph, _ = b.graph()
    assert len(graph.allocates[0]) == 1


def test_an_update_of_a_resident_buffer_allocates_nothing():
    b = Builder()
    buffer = b.input("running_mean", 100, StorageKind.INPUT)
    b.op("update", (), view_of=buffer)
    graph, _ = b.graph()
    assert graph.allocates[0] == ()


@pytest.mark.parametrize(
    ("kind", "is_resident"),
    [
        (StorageKind.PARAMETER, True),
        (StorageKind.INPUT, True),
        (StorageKind.ACTIVATION, False),
        (StorageKind.GRADIENT, False),
        (StorageKind.TANGENT, False),
    ],
)
def test_parameters_and_inputs_are_resident_and_cost_the_step_nothing(kind: StorageKind, is_resident: bool):
    b = Builder()
    b.storage(100, kind)
    graph, _ = b.graph()
    assert kind.is_resident is is_resident
    assert graph.sizes == ((0,) if is_resident else (100,))


@pytest.mark.parametrize("reason", ["random", "mutating", "reads_mutated"])
def test_a_node_that_must_run_once_recomputes_nothing(reason: str):
    b = Builder()
    b.op("a", (), 100, **{reason: True})
    graph, _ = b.graph()
    assert not graph.nodes[0].is_repeatable
    assert graph.recomputers == (None,)


def test_a_backward_node_is_not_repeatable():
    b = Builder()
    b.op("g", (), 100, backward=True)
    graph, _ = b.graph()
    assert graph.recomputers == (None,)


def test_outside_code_is_never_recomputed():
    b = Builder()
    held = b.outside((), 100)
    b.nodes[0] = Node("outside", "outside", Direction.FORWARD, (), (held,))  # even if nobody marked it as random
    graph, _ = b.graph()
    assert graph.recomputers == (None,)


def test_a_dropout_is_rebuilt_by_its_replay_but_its_mask_is_not():
    b = Builder()
    x = b.op("x", (), 100)
    dropped = b.op("dropout", (x,), 100, 25, random=True)
    replay = b.replay(1, (x, dropped + 1), dropped)
    graph, _ = b.graph()
    assert graph.recomputers[dropped] == replay
    assert graph.recomputers[dropped + 1] is None


def test_what_has_a_replay_does_not_run_again_itself():
    b = Builder()
    x = b.op("x", (), 100)
    norm = b.op("norm", (x,), 100, 2)
    replay = b.replay(1, (x, norm + 1), norm)
    graph, _ = b.graph()
    assert graph.nodes[1].is_repeatable
    assert graph.recomputers[norm] == replay
    assert graph.recomputers[norm + 1] is None


def test_needed_is_what_the_backward_reads_or_returns_of_what_was_there_before_it():
    graph, _ = chain(3)
    assert [graph.tensors[t].name for t in graph.needed] == ["x", "a0", "a1"]


def test_needed_counts_a_forward_value_that_is_returned_as_gradient():
    b = Builder()
    a = b.op("a", (), 100)
    unread = b.op("unread", (), 100)
    graph, _ = b.graph(gradients=(a,))
    assert graph.needed == (a,)
    assert unread not in graph.needed


def test_json_gives_an_equal_graph_back():
    for graph, _ in (chain(3), transformer(2)):
        assert graph_from_json(graph.to_json()) == graph


def test_json_keeps_what_was_derived():
    graph, _ = transformer(2)
    again = graph_from_json(graph.to_json())
    assert (again.recomputers, again.allocates, again.needed) == (graph.recomputers, graph.allocates, graph.needed)
    assert hash(again) == hash(graph)


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, None])
def test_json_of_another_format_is_refused(version: int | None):
    data = json.loads(chain(1)[0].to_json())
    data["format"] = version
    with pytest.raises(
        ValueError, match=rf"^Not a graph of format {FORMAT_VERSION}: write it again with this version$"
    ):
        graph_from_json(json.dumps(data))
