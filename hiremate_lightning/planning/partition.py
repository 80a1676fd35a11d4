"""Clusters of the forward, each with its backward: where to cut a step, and which of the pieces are equal.

A `Cluster` is a set of forward nodes; the backward nodes that read what they made belong to it too. Clusters nest: a
leaf has at most `max_nodes` nodes, and so many children has any other one; the top has at most `max_top`. H-Partition
of HiRemate makes them, see `grouping`. Two clusters are equal if their `key` is: the same operations on the same
shapes, wired the same, in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ..records.graph import Graph
from .grouping import group


@dataclass(frozen=True, slots=True)
class Cluster:
    """A part of the forward.

    Attributes:
        nodes: Forward nodes, in their order; views included.
        key: Equal for clusters that do the same work.
        children: Clusters that it consists of; none for a leaf.
    """

    nodes: tuple[int, ...]
    key: str
    children: tuple[Cluster, ...] = ()

    @property
    def leaves(self) -> tuple[Cluster, ...]:
        """The smallest clusters within, in order."""
        if not self.children:
            return (self,)
        return tuple(leaf for child in self.children for leaf in child.leaves)


def partition(graph: Graph, max_nodes: int = 20, max_top: int = 30) -> Cluster:
    """Partition the forward of a step; by default into clusters of HiRemate's sizes.

    Args:
        graph: The step.
        max_nodes: M_l, the most nodes of a leaf and children of a cluster.
        max_top: M_t, the most children of the top.

    Returns:
        The top cluster.
    """
    bottom, *levels = group(graph, max_nodes, max_top)
    clusters = [Cluster(nodes, structural_key(graph, nodes)) for nodes in bottom]
    for level in levels:
        clusters = [_merge(graph, [clusters[i] for i in members]) for members in level]
    return _merge(graph, clusters)


def _merge(graph: Graph, clusters: Sequence[Cluster]) -> Cluster:
    nodes = tuple(n for cluster in clusters for n in cluster.nodes)
    return clusters[0] if len(clusters) == 1 else Cluster(nodes, structural_key(graph, nodes), tuple(clusters))


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
