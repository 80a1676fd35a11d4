"""A graph and its costs at sizes that were never traced follow from those at a few."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hiremate_lightning.records.costs import Profile
from hiremate_lightning.records.expressions import NoTemplateError
from hiremate_lightning.records.graph import Direction, Graph, Node, Storage, StorageKind, Tensor
from hiremate_lightning.records.graph_template import GraphTemplate

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
    graph, profile = GraphTemplate([step_at(length) for (length,) in SIZES], SIZES).at((101,))
    expected, costs = step_at(101)
    assert [tensor.shape for tensor in graph.tensors] == [tensor.shape for tensor in expected.tensors]
    assert graph.storages == expected.storages
    assert [node.flops for node in graph.nodes] == [node.flops for node in expected.nodes]
    assert profile.workspace_bytes == costs.workspace_bytes
    assert profile.time_ms[0] == pytest.approx(costs.time_ms[0])


def test_traced_sizes_are_as_they_were_traced():
    graph, profile = GraphTemplate([step_at(length) for (length,) in SIZES], SIZES).at((9,))
    expected, costs = step_at(9)
    assert (graph.tensors, graph.storages, profile) == (expected.tensors, expected.storages, costs)


def test_a_workspace_without_expression_is_bounded_from_above():
    """No larger than the most of the samples where the operation is not, and else by the largest ratio to its work."""
    samples = [step_at(5, 100), step_at(9, 700), step_at(13, 300)]
    template = GraphTemplate(samples, SIZES)
    elements = [2 * 4 * length + length * length for length in (9, 101)]
    assert template.at((7,))[1].workspace_bytes[1] == 700
    assert template.at((101,))[1].workspace_bytes[1] == -(-700 * elements[1] // elements[0])


def test_a_shape_without_expression_means_no_template():
    samples = [step_at(length) for length in (5, 9, 13)]
    graph, profile = samples[1]
    odd = replace(graph, tensors=(replace(graph.tensors[0], shape=(9, 5)), *graph.tensors[1:]))
    with pytest.raises(NoTemplateError, match="no expression"):
        GraphTemplate([samples[0], (odd, profile), samples[2]], SIZES)


def test_other_code_at_another_size_means_no_template():
    samples = [step_at(length) for length in (5, 9, 13)]
    graph, profile = samples[2]
    other = replace(graph, nodes=(replace(graph.nodes[0], op="bmm"), graph.nodes[1]))
    with pytest.raises(NoTemplateError, match="is not that"):
        GraphTemplate([*samples[:2], (other, profile)], SIZES)
