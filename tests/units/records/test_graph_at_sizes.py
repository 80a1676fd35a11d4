"""A graph and its costs at sizes that were never traced follow from those at a few."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hiremate_lightning.records.costs import Profile
from hiremate_lightning.records.expressions import SizesDifferError, on_line
from hiremate_lightning.records.graph import Direction, Graph, Node, Storage, StorageKind, Tensor
from hiremate_lightning.records.graph_at_sizes import GraphAtSizes
from hiremate_lightning.records.schedule import keep_all, lower
from hiremate_lightning.records.simulation import simulate
from tests.tiny import Builder, chain, shaped, transformer

SIZES = [(5,), (9,), (13,)]


def step_at(length: int, workspace_bytes: int | None = None) -> tuple[Graph, Profile]:
    """A layer of width 4 on a sequence, and its backward, each with a workspace."""
    shapes = [(length, 4), (length, length), (length, length), (length, 4)]
    kinds = [StorageKind.INPUT, StorageKind.ACTIVATION, StorageKind.TANGENT, StorageKind.GRADIENT]
    tensors = [Tensor(f"t{i}", i, shape, "float32", {1: 0, 3: 1}.get(i)) for i, shape in enumerate(shapes)]
    storages = [Storage(4 * a * b, kind) for (a, b), kind in zip(shapes, kinds, strict=True)]
    nodes = (
        Node("square", "mm", Direction.FORWARD, (0,), (1,), f"mm {length}", flops=8 * length * length),
        Node("back", "mm", Direction.BACKWARD, (2, 0), (3,), f"back {length}"),
    )
    graph = Graph(nodes, tuple(tensors), tuple(storages), (0,), (1,), (0,), (2,), (1,), (3,))
    work = 64 * length if workspace_bytes is None else workspace_bytes
    return graph, Profile((0.5 * length * length, 2.0), (0, work), "cpu")


def test_shapes_and_bytes_are_exact_at_sizes_never_traced():
    at_sizes = GraphAtSizes([step_at(length) for (length,) in SIZES], SIZES)
    graph, profile = at_sizes.at((101,))
    expected, costs = step_at(101)
    assert [tensor.shape for tensor in graph.tensors] == [tensor.shape for tensor in expected.tensors]
    assert graph.storages == expected.storages
    assert [node.flops for node in graph.nodes] == [node.flops for node in expected.nodes]
    assert profile.workspace_bytes == costs.workspace_bytes
    assert profile.time_ms[0] == pytest.approx(costs.time_ms[0])
    graph, profile = at_sizes.at((9,))
    expected, costs = step_at(9)
    assert (graph.tensors, graph.storages, profile) == (expected.tensors, expected.storages, costs)


def test_a_workspace_without_expression_is_bounded_from_above():
    """No larger than the most of the samples where the operation is not, and else by the largest ratio to its work."""
    samples = [step_at(5, 100), step_at(9, 700), step_at(13, 300)]
    at_sizes = GraphAtSizes(samples, SIZES)
    elements = [2 * 4 * length + length * length for length in (9, 101)]
    assert at_sizes.at((7,))[1].workspace_bytes[1] == 700
    assert at_sizes.at((101,))[1].workspace_bytes[1] == -(-700 * elements[1] // elements[0])


def test_other_code_and_inexpressible_shapes_are_refused():
    first, (graph, profile), last = (step_at(length) for (length,) in SIZES)
    odd = replace(graph, tensors=(replace(graph.tensors[0], shape=(9, 5)), *graph.tensors[1:]))
    other = replace(graph, nodes=(replace(graph.nodes[0], op="bmm"), graph.nodes[1]))
    for changed, words in ((odd, "no expression"), (other, "not the same graph")):
        with pytest.raises(SizesDifferError, match=words):
            GraphAtSizes([first, (changed, profile), last], SIZES)


# ---------------------------------------------------------------- near, along one size, by lines


def on_lines(samples: dict[int, tuple[Graph, Profile]], block_bytes: int = 1) -> GraphAtSizes:
    return GraphAtSizes(list(samples.values()), [(size,) for size in samples], on_line, block_bytes)


@pytest.mark.parametrize("build", [lambda n: chain(4, 100 * n), lambda n: transformer(2, size=64 * n)])
@pytest.mark.parametrize("size", [1, 3, 7, 40, 1000])
def test_predicted_bytes_equal_those_of_a_capture_at_that_size(build, size):
    graph, profile = on_lines({n: build(n) for n in (2, 5)}).at((size,))

    expected, costs = build(size)
    assert graph.storages == expected.storages
    assert [tensor.shape for tensor in graph.tensors] == [tensor.shape for tensor in expected.tensors]
    assert profile.workspace_bytes == costs.workspace_bytes
    kept = lower(expected, keep_all(expected))
    assert simulate(graph, profile, kept).peak_bytes == simulate(expected, costs, kept).peak_bytes


def test_times_and_workspaces_lie_between_those_of_samples():
    """Where a bound would be the most of all samples."""
    (graph, profile), (wider, _) = chain(3, 200), chain(3, 600)
    smaller = replace(profile, workspace_bytes=(0,) * len(graph.nodes))
    larger = replace(profile, time_ms=tuple(5 * t for t in profile.time_ms), workspace_bytes=(1001,) * len(graph.nodes))
    _, costs = on_lines({2: (graph, smaller), 6: (wider, larger)}).at((4,))

    assert costs.time_ms == pytest.approx([3 * t for t in profile.time_ms])
    assert set(costs.workspace_bytes) == {501}


def test_bytes_that_grow_with_the_square_of_a_length_are_exact():
    """What does not grow stays."""
    graph, profile = chain(3)

    squares, _ = on_lines({n: (shaped(graph, (6, n, n)), profile) for n in (16, 32)}).at((100,))

    assert {s.size_bytes for s in squares.storages} == {6 * 100 * 100 * 4}
    same = chain(3, 100)
    assert on_lines({2: same, 4: same}).at((64,)) == same


def test_sizes_come_from_a_tensor_before_its_flattened_view():
    def build(n: int) -> tuple[Graph, Profile]:
        b = Builder()
        x = b.input("x", n * n, StorageKind.INPUT)
        flat = b.op("square", (x,), n * n)
        b.op("view", (flat,), view_of=flat)
        graph, profile = b.graph(outputs=(flat,))
        tensors = list(graph.tensors)
        tensors[2] = replace(tensors[2], shape=(n, n))
        return replace(graph, tensors=tuple(tensors)), profile

    graph, _ = on_lines({n: build(n) for n in (4, 8)}).at((20,))

    assert graph.storages[1].size_bytes == 400


def test_rounded_blocks_are_scaled_before_rounding():
    graph, profile = chain(3)
    samples = {n: (shaped(graph, (n,), rounding=512), profile) for n in (2, 4)}
    assert {s.size_bytes for graph, _ in samples.values() for s in graph.storages} == {512}

    larger, _ = on_lines(samples, block_bytes=512).at((1000,))

    assert {s.size_bytes for s in larger.storages} == {4096}


def test_bytes_that_no_tensor_explains_follow_their_line():
    def padded(n: int) -> tuple[Graph, Profile]:
        graph, profile = chain(2, 100 * n)
        storages = tuple(replace(s, size_bytes=s.size_bytes + 64) for s in graph.storages)
        return replace(graph, storages=storages), profile

    graph, _ = on_lines({n: padded(n) for n in (2, 4)}).at((10,))

    assert {s.size_bytes for s in graph.storages} == {1064}


def test_graphs_of_another_operation_are_refused_by_its_name():
    graph, profile = chain(3)
    nodes = list(graph.nodes)
    nodes[1] = replace(nodes[1], op="tiny.other", module="net.1")
    other = replace(graph, nodes=tuple(nodes))

    assert graph.difference(graph) is None
    with pytest.raises(SizesDifferError, match=r"sizes 2 and 4 .* node a1 \(tiny.a1\) is a1 \(tiny.other\) there"):
        on_lines({2: (graph, profile), 4: (other, profile)})
