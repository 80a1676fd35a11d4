"""Decisions that recompute each value just before its first use: the simplest that there are."""

from collections.abc import Iterable

from hiremate_lightning.records.graph import Graph
from hiremate_lightning.records.schedule import ensure


def recompute_lazily(graph: Graph, kept: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Keep some storages through the turn, and recompute all else just before its first use.

    A recomputed tensor is held to its last use; storages whose tensors can't be recomputed are kept in any case, and so
    are those that the caller holds.

    Args:
        graph: The step.
        kept: Storages to keep.

    Returns:
        For each position of `graph.backward`, and once more for what only the gradients need, the nodes to run before
        it.
    """
    stays: set[int | None] = {*kept, *(graph.tensors[t].storage for t in graph.held)}
    available = set(graph.inputs) | set(graph.tangents)
    for index in graph.forward:
        for tensor in graph.nodes[index].outputs:
            storage = graph.tensors[tensor].storage
            if (
                storage is None
                or storage in stays
                or graph.recomputers[tensor] is None
                or graph.storages[storage].kind.is_resident
            ):
                available.add(tensor)
    decisions = []
    for index in graph.backward:
        before: list[int] = []
        for tensor in graph.nodes[index].inputs:
            ensure(graph, tensor, available, before)
        available.update(graph.nodes[index].outputs)
        decisions.append(tuple(before))
    last: list[int] = []
    for tensor in graph.gradients:
        ensure(graph, tensor, available, last)
    return (*decisions, tuple(last))
