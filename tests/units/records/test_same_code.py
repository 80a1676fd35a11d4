"""Two graphs are the same code, or what differs is named; a call of the same code is foreseen at another size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hiremate_lightning.records.graph import StorageKind
from hiremate_lightning.records.step import Call, Gap, GapPart
from tests.tiny import chain, shaped


def test_a_step_is_foreseen_at_another_size_with_the_outside_as_it_grows():
    graph, profile = chain(3)
    gap, stage = Gap(10, 101), GapPart((), 7)
    call = Call(shaped(graph, (6, 10)), profile, before_deaths=(stage,), after_forward=gap, before_backward=gap)

    larger = call.at_size(shaped(graph, (6, 15)), profile)
    assert larger.graph == shaped(graph, (6, 15))
    assert (larger.after_forward, larger.before_backward, larger.before_forward) == (Gap(15, 152), Gap(15, 152), Gap())
    assert larger.before_deaths == (GapPart((), 11),)

    smaller = call.at_size(shaped(graph, (6, 5)), profile)
    assert (smaller.after_forward, smaller.before_deaths) == (gap, (stage,))

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
