"""The graph record: who allocates, who can recompute, what the backward needs, and its way through JSON."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hiremate_lightning.records.graph import Direction, Node, StorageKind
from hiremate_lightning.records.step import Call, Gap, OutsideStage
from tests.tiny import Builder, chain, shaped


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
def test_parameters_and_inputs_are_resident_and_cost_nothing(kind: StorageKind, is_resident: bool):
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


def test_needed_tensors_are_read_or_returned_by_the_backward():
    graph, _ = chain(3)
    assert [graph.tensors[t].name for t in graph.needed] == ["x", "a0", "a1"]
    b = Builder()
    a = b.op("a", (), 100)
    b.op("unread", (), 100)
    assert b.graph(gradients=(a,))[0].needed == (a,)


# ---------------------------------------------------------------- the same code


def test_code_outside_grows_with_the_size_of_a_foreseen_step():
    graph, profile = chain(3)
    gap, stage = Gap(10, 101), OutsideStage(peak_bytes=7)
    call = Call(shaped(graph, (6, 10)), profile, stages=(stage,), after_forward=gap, before_backward=gap)

    larger = call.at_size(shaped(graph, (6, 15)), profile)
    assert larger.graph == shaped(graph, (6, 15))
    assert (larger.after_forward, larger.before_backward, larger.before_forward) == (Gap(15, 152), Gap(15, 152), Gap())
    assert larger.stages == (OutsideStage(peak_bytes=11),)

    smaller = call.at_size(shaped(graph, (6, 5)), profile)
    assert (smaller.after_forward, smaller.stages) == (gap, (stage,))

    assert call.at_size(*chain(4)) is None


def test_code_has_one_number_at_all_sizes():
    graph, _ = chain(3)
    assert shaped(graph, (6, 10)).code == shaped(graph, (6, 11)).code != chain(4)[0].code
    assert shaped(graph, (6, 10)).at_sizes != shaped(graph, (6, 11)).at_sizes


@pytest.mark.parametrize("change", ["longer", "kinds", "dtype", "dimensions", "order"])
def test_any_difference_but_of_sizes_is_found(change):
    graph, _ = chain(3)
    first = graph.tensors[0]
    other = {
        "longer": chain(4)[0],
        "kinds": replace(graph, storages=tuple(replace(s, kind=StorageKind.INPUT) for s in graph.storages)),
        "dtype": replace(graph, tensors=(replace(first, dtype="bfloat16"), *graph.tensors[1:])),
        "dimensions": replace(graph, tensors=(replace(first, shape=(1, 100)), *graph.tensors[1:])),
        "order": replace(graph, backward=tuple(reversed(graph.backward))),
    }[change]

    assert graph.difference(other) is not None
    assert graph.code != other.code


def test_names_do_not_count_as_a_difference():
    graph, _ = chain(3)
    renamed = replace(graph, nodes=tuple(replace(n, name=f"{n.name}_7") for n in graph.nodes))

    assert graph.difference(renamed) is None
    assert graph.code == renamed.code
