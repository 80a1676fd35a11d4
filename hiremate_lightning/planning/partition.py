"""Clusters of the forward, each with its backward: where to cut a step, and which of the pieces are equal.

A `Cluster` is a set of forward nodes; the backward nodes that read what they made belong to it too. H-Partition of
HiRemate makes them, see `grouping`. Two clusters are equal if their `key` is: the same operations on the same shapes,
wired the same, in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ..records.graph import Graph
from .grouping import group

MAX_NODES = 20  # of a cluster; HiRemate's M_l


@dataclass(frozen=True, slots=True)
class Cluster:
    """A part of the forward.

    Attributes:
        nodes: Forward nodes, in their order; views included.
        key: Equal for clusters that do the same work.
    """

    nodes: tuple[int, ...]
    key: str


def partition(graph: Graph, max_nodes: int = MAX_NODES) -> list[Cluster]:
    """Partition the forward of a step into clusters of at most so many nodes that allocate."""
    return [Cluster(nodes, structural_key(graph, nodes)) for nodes in group(graph, max_nodes)]


def structural_key(graph: Graph, nodes: Sequence[int]) -> str:
    """Hash what a set of nodes does: operations, scalar arguments, shapes and wiring; names and places don't count."""
    local: dict[int, int] = {}
    read_back = set(graph.needed)
    digest = hashlib.sha256()
    for index in nodes:
        node = graph.nodes[index]
        for tensor in (*node.inputs, *node.outputs):
            local.setdefault(tensor, len(local))
        sizes = [_size(graph, t) for t in node.outputs]
        saved = [t in read_back for t in node.outputs]
        wiring = [local[t] for t in node.inputs], [local[t] for t in node.outputs]
        digest.update(repr((node.key or node.op, wiring, sizes, saved)).encode())
    return digest.hexdigest()


def _size(graph: Graph, tensor: int) -> int:
    storage = graph.tensors[tensor].storage
    return 0 if storage is None else graph.storages[storage].size_bytes
