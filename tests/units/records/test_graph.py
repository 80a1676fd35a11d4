"""The graph record: who allocates, who can recompute, what the backward needs, and its way through JSON."""

from __future__ import annotations

import json

import pytest

from hiremate_lightning.records.graph import FORMAT_VERSION, Direction, Node, StorageKind, graph_from_json
from tests.tiny import Builder, chain, transformer


def test_a_node_allocates_its_outputs_once_and_no_views():
    """Neither does it allocate a resident buffer that it updates."""
    b = Builder()
    a = b.op("a", (), 100)
    b.op("view", (a,), view_of=a)
    b.op("update", (), view_of=b.input("running_mean", 100, StorageKind.INPUT))
    both = a, b.tensor("alias", b.tensors[a].storage, 0)
    b.nodes[0] = Node("a", "tiny.a", Direction.FORWARD, (), both)
    graph, _ = b.graph()
    assert [list(storages) for storages in graph.allocates] == [[graph.tensors[a].storage], [], []]
    assert sum(graph.sizes) == 100


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


@pytest.mark.parametrize("reason", ["random", "mutating", "reads_mutated", "backward"])
def test_a_node_that_must_run_once_recomputes_nothing(reason: str):
    b = Builder()
    b.op("a", (), 100, **{reason: True})
    graph, _ = b.graph()
    assert not graph.nodes[0].is_repeatable or reason == "backward"
    assert graph.recomputers == (None,)


def test_outside_code_is_never_recomputed():
    b = Builder()
    held = b.outside((), 100)
    b.nodes[0] = Node("outside", "outside", Direction.FORWARD, (), (held,))  # even if nobody marked it as random
    graph, _ = b.graph()
    assert graph.recomputers == (None,)


@pytest.mark.parametrize("is_random", [True, False])
def test_what_has_a_replay_is_rebuilt_by_it_alone(is_random: bool):
    """A dropout, whose mask is not rebuilt, and a norm, which might run again."""
    b = Builder()
    x = b.op("x", (), 100)
    made = b.op("made", (x,), 100, 25, random=is_random)
    replay = b.replay(1, (x, made + 1), made)
    graph, _ = b.graph()
    assert graph.nodes[1].is_repeatable is not is_random
    assert graph.recomputers[made] == replay
    assert graph.recomputers[made + 1] is None


def test_needed_is_what_the_backward_reads_or_returns_of_what_was_there_before_it():
    graph, _ = chain(3)
    assert [graph.tensors[t].name for t in graph.needed] == ["x", "a0", "a1"]
    b = Builder()
    a = b.op("a", (), 100)
    b.op("unread", (), 100)
    assert b.graph(gradients=(a,))[0].needed == (a,)


def test_json_gives_an_equal_graph_back_with_what_was_derived():
    for graph, _ in (chain(3), transformer(2)):
        again = graph_from_json(graph.to_json())
        assert again == graph
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
