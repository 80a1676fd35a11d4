"""Clusters of the forward, each with its backward: where to cut a step, and which of the pieces are equal.

A `Cluster` is a set of forward nodes; the backward nodes that read what they made belong to it too. Clusters nest: a
leaf has at most `max_nodes` nodes, and so many children has any other one; the top has at most `max_top`. H-Partition
of HiRemate makes them, see `grouping`. Two clusters are equal if their `key` is: the same operations on the same
shapes, wired the same, in the same order.

`cut_runs` cuts the forward into runs, in its order, where least lives across the cut in both passes, by dynamic
programming. A cut between two modules counts for less the higher it is in the tree of modules, so that repeated blocks
are cut alike. Runs are a chain with skips, whatever the network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..records.graph import Graph
from .grouping import group

MODULE_WEIGHT = 0.8  # factor on the bytes of a cut for each level of modules that it separates


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


def cut_runs(graph: Graph, count: int) -> list[tuple[int, ...]]:
    """Cut the forward into at most so many runs, where least lives across."""
    works = sum(map(bool, (graph.allocates[n] for n in graph.forward)))
    size = max(1, -(-works // max(1, count)) * 5 // 4)
    weights = cut_weights(graph)
    while len(runs := _runs(graph, weights, size)) > count:
        size = size * 5 // 4 + 1
    return [tuple(run) for run in runs]


def crossing_bytes(graph: Graph) -> list[int]:
    """Give, for each forward position, the bytes that live across the cut before it in both passes.

    In the forward these are the storages made before the cut and read after it; in the backward, what backward nodes
    made and still read when the last of them that reads something from beyond the cut has run.
    """
    length, forward = len(graph.forward), bytes_across(graph, graph.forward)
    backward = bytes_across(graph, graph.backward)
    turn = backward_starts(graph, range(length))
    return [forward[cut] + backward[turn[cut]] for cut in range(length)]


def backward_starts(graph: Graph, cuts: Iterable[int]) -> list[int]:
    """Give, for each cut of the forward, the backward position from which on nothing made after the cut is read."""
    made = {s: p for p, n in enumerate(graph.forward) for s in graph.allocates[n]}
    last_read = [0] * (
        len(graph.forward) + 1
    )  # by forward position: one past the last backward position that reads from it
    for position, node in enumerate(graph.backward):
        for storage in _read(graph, node):
            if storage in made:
                last_read[made[storage]] = position + 1
    starts = last_read[:]
    for position in reversed(range(len(graph.forward))):
        starts[position] = max(last_read[position], starts[position + 1])
    return [min(starts[cut], max(0, len(graph.backward) - 1)) for cut in cuts]


def lives_in(graph: Graph, order: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return, for each storage that an order of nodes makes, the positions at which it is made and read last."""
    lives = {storage: (position, position) for position, node in enumerate(order) for storage in graph.allocates[node]}
    for position, node in enumerate(order):
        for storage in _read(graph, node):
            if storage in lives:
                made, last = lives[storage]
                lives[storage] = made, max(last, position)
    return lives


def bytes_across(graph: Graph, order: Sequence[int]) -> list[int]:
    """Return, for each position of an order of nodes, the bytes made before it that it or a later one reads."""
    change = [0] * (len(order) + 2)
    for storage, (made, last) in lives_in(graph, order).items():
        change[made + 1] += graph.sizes[storage]
        change[last + 1] -= graph.sizes[storage]
    return list(accumulate(change))


def _read(graph: Graph, node: int) -> list[int]:
    found = dict.fromkeys(graph.tensors[t].storage for t in graph.nodes[node].inputs)
    return [s for s in found if s is not None]


def cut_weights(graph: Graph) -> list[float]:
    """Return the cost of a cut before each forward position: bytes across, less where modules end."""
    modules = [tuple(graph.nodes[n].module.split(".")) for n in graph.forward]
    weights = []
    for position, crossing in enumerate(crossing_bytes(graph)):
        same = 0
        if position:
            pairs = zip(modules[position - 1], modules[position], strict=False)
            same = next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, modules[position - 1 : position + 1]))
            )
        levels = max(len(modules[position]), len(modules[position - 1])) - same if position else 0
        weights.append((1 + crossing) * MODULE_WEIGHT**levels)
    return weights


def _runs(graph: Graph, weights: Sequence[float], max_nodes: int) -> list[list[int]]:
    """Cut the forward into runs of at most `max_nodes` nodes that allocate, at the least total weight of cuts."""
    works = list(accumulate(int(bool(graph.allocates[n])) for n in graph.forward))
    cuts = _cheapest_cuts(works, weights, max_nodes)
    edges = [0, *cuts, len(graph.forward)]
    return [list(graph.forward[a:b]) for a, b in pairwise(edges) if b > a]


def _cheapest_cuts(works: Sequence[int], weights: Sequence[float], most: int) -> list[int]:
    """Choose positions to cut before, so that no run has more than `most` works, at the least total weight."""
    length = len(weights)
    best: list[tuple[float, int]] = [
        (0.0, -1)
    ]  # by end of the run: cost of the cuts up to it, and where the run begins
    window: list[int] = [0]  # begins in reach, costs ascending
    for end in range(1, length + 1):
        while window and works[end - 1] - (works[window[0] - 1] if window[0] else 0) > most and window[0] < end - 1:
            window.pop(0)
        begin = window[0] if window else end - 1
        cost = best[begin][0] + (weights[end] if end < length else 0.0)
        best.append((cost, begin))
        while window and best[window[-1]][0] >= cost:
            window.pop()
        window.append(end)
    cuts, end = [], length
    while end > 0:
        end = best[end][1]
        if end > 0:
            cuts.append(end)
    return cuts[::-1]


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
