"""A step refitted from two sizes is the step captured at a third, byte for byte; what can't be scaled is named."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiremate_lightning.records.costs import Profile
from hiremate_lightning.records.graph import Graph, Storage, StorageKind
from hiremate_lightning.records.scaling import Line, Scaling, are_same, at_size, difference
from hiremate_lightning.records.schedule import keep_all, lower
from hiremate_lightning.records.simulation import simulate
from hiremate_lightning.records.step import Call, Gap, GapPart, Step
from tests.tiny import Builder, chain, transformer

whole = st.integers(0, 10**9)


def step(graph: Graph, profile: Profile) -> Step:
    return Step(graph, profile, owners=(), spans=())


def shaped(graph: Graph, shape: tuple[int, ...], item: str = "float32", rounding: int = 1) -> Graph:
    """Give every tensor that has bytes a shape, and its storage the bytes of it."""
    size = -(-math.prod(shape) * 4 // rounding) * rounding
    tensors = tuple(replace(tensor, shape=shape, dtype=item) for tensor in graph.tensors)
    return replace(graph, tensors=tensors, storages=tuple(Storage(size, s.kind) for s in graph.storages))


@pytest.mark.parametrize("build", [lambda n: chain(4, 100 * n), lambda n: transformer(2, size=64 * n)])
@pytest.mark.parametrize("size", [1, 3, 7, 40, 1000])
def test_bytes_at_another_size_are_those_of_the_step_captured_there(build, size):
    found = Scaling({n: step(*build(n)) for n in (2, 5)}).at(size)

    graph, profile = build(size)
    assert found.graph.storages == graph.storages
    assert [t.shape for t in found.graph.tensors] == [t.shape for t in graph.tensors]
    assert found.profile.workspace_bytes == profile.workspace_bytes
    kept = lower(graph, keep_all(graph))
    assert simulate(found.graph, found.profile, kept).peak_bytes == simulate(graph, profile, kept).peak_bytes


def test_the_step_at_a_sampled_size_is_the_sample():
    samples = {n: step(*chain(3, 10 * n)) for n in (2, 9, 4)}

    scaling = Scaling(samples)

    assert scaling.sizes == (2, 4, 9)
    assert {n: scaling.at(n) for n in (2, 9, 4)} == samples


def test_a_step_is_foreseen_at_another_size_with_the_outside_as_it_grows():
    graph, profile = chain(3)
    gap, stage = Gap(10, 101), GapPart((), 7)
    call = Call(shaped(graph, (6, 10)), profile, before_deaths=(stage,), after_forward=gap, before_backward=gap)

    larger = at_size(call, shaped(graph, (6, 15)), profile)
    assert larger.graph == shaped(graph, (6, 15))
    assert (larger.after_forward, larger.before_backward, larger.before_forward) == (Gap(15, 152), Gap(15, 152), Gap())
    assert larger.before_deaths == (GapPart((), 11),)

    smaller = at_size(call, shaped(graph, (6, 5)), profile)
    assert (smaller.after_forward, smaller.before_deaths) == (gap, (stage,))

    assert at_size(call, *chain(4)) is None


def test_code_is_the_same_where_operations_and_sizes_are():
    graph, _ = chain(3)
    assert are_same([shaped(graph, (6, 10))], [shaped(graph, (6, 10))])
    assert not are_same([shaped(graph, (6, 10))], [shaped(graph, (6, 11))])
    assert not are_same([graph], [graph, graph])
    assert not are_same([graph], [chain(4)[0]])


def test_bytes_that_grow_with_the_square_of_a_length_are_exact():
    graph, profile = chain(3)

    found = Scaling({n: step(shaped(graph, (6, n, n)), profile) for n in (16, 32)}).at(100)

    assert {s.size_bytes for s in found.graph.storages} == {6 * 100 * 100 * 4}


def test_a_tensor_of_more_dimensions_is_asked_before_a_flattened_view_of_it():
    def build(n: int) -> tuple[Graph, Profile]:
        b = Builder()
        x = b.input("x", n * n, StorageKind.INPUT)
        flat = b.op("square", (x,), n * n)
        b.op("view", (flat,), view_of=flat)
        graph, profile = b.graph(outputs=(flat,))
        tensors = list(graph.tensors)
        tensors[2] = replace(tensors[2], shape=(n, n))
        return replace(graph, tensors=tuple(tensors)), profile

    found = Scaling({n: step(*build(n)) for n in (4, 8)}).at(20)

    assert found.graph.storages[1].size_bytes == 400


def test_blocks_that_the_allocator_rounds_are_scaled_before_rounding():
    graph, profile = chain(3)
    samples = {n: step(shaped(graph, (n,), rounding=512), profile) for n in (2, 4)}
    assert {s.size_bytes for sample in samples.values() for s in sample.graph.storages} == {512}

    found = Scaling(samples, block_bytes=512).at(1000)

    assert {s.size_bytes for s in found.graph.storages} == {4096}


def test_bytes_that_no_tensor_explains_follow_their_line():
    def padded(n: int) -> Graph:
        graph, _ = chain(2, 100 * n)
        return replace(graph, storages=tuple(replace(s, size_bytes=s.size_bytes + 64) for s in graph.storages))

    found = Scaling({n: step(padded(n), chain(2)[1]) for n in (2, 4)}).at(10)

    assert {s.size_bytes for s in found.graph.storages} == {1064}


def test_what_does_not_grow_stays():
    same = chain(3, 100)

    assert Scaling({2: step(*same), 4: step(*same)}).at(64).graph == same[0]


def test_graphs_of_another_operation_are_refused_by_its_name():
    graph, profile = chain(3)
    nodes = list(graph.nodes)
    nodes[1] = replace(nodes[1], op="tiny.other", module="net.1")
    other = replace(graph, nodes=tuple(nodes))

    assert difference(graph, graph) is None
    with pytest.raises(ValueError, match=r"sizes 2 and 4 .* node a1 \(tiny.a1\) is a1 \(tiny.other\) there"):
        Scaling({2: step(graph, profile), 4: step(other, profile)})


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

    assert difference(graph, other) is not None


def test_names_do_not_count_as_a_difference():
    graph, _ = chain(3)
    renamed = replace(graph, nodes=tuple(replace(n, name=f"{n.name}_7") for n in graph.nodes))

    assert difference(graph, renamed) is None


@given(a=whole, b=st.integers(0, 10**6), first=st.integers(1, 99), more=st.integers(1, 99), size=st.integers(1, 10**5))
def test_a_line_through_whole_numbers_is_exact(a, b, first, more, size):
    sizes = (first, first + more)

    assert Line(sizes, [a + b * n for n in sizes]).whole(size) == a + b * size


@given(values=st.lists(st.floats(0, 1e6), min_size=2, max_size=4), size=st.integers(1, 500))
def test_what_was_measured_stays_between_its_neighbours_and_never_falls_beyond(values, size):
    sizes = [3**i for i in range(len(values))]

    found = Line(sizes, values).measured(size)

    beside = sum(s <= size for s in sizes)
    if size > sizes[-1]:
        assert found >= values[-1]
    else:
        low, high = sorted((values[beside - 1], values[min(beside, len(values) - 1)]))
        assert low * (1 - 1e-9) - 1e-9 <= found <= high * (1 + 1e-9) + 1e-9


def test_what_grew_faster_than_the_size_goes_on_to_do_so():
    line = Line((2, 4), (4.0, 16.0))

    assert line.measured(8) == pytest.approx(64.0)
    assert Line((2, 4), (1.0, 100.0)).measured(8) == pytest.approx(400.0)  # no faster than the square
