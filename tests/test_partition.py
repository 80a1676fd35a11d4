"""Partitions: every forward node in exactly one leaf, no cycles between clusters, limits kept, equal blocks found."""

from __future__ import annotations

import pytest

from hiremate_lightning.planning.partition import Cluster, partition

from .helpers import random_graph
from .tiny import chain, transformer

STEPS = {
    "chain": chain(60),
    "transformer": transformer(12),
    "wide": random_graph(3, 60),
    "one node": chain(1),
}


@pytest.mark.parametrize("step", STEPS)
def test_every_node_is_in_exactly_one_leaf(step):
    graph = STEPS[step][0]
    top = partition(graph, max_nodes=6, max_top=8)
    assert sorted(n for leaf in top.leaves for n in leaf.nodes) == sorted(graph.forward)
    assert sorted(top.nodes) == sorted(graph.forward)


@pytest.mark.parametrize("step", STEPS)
def test_clusters_close_no_cycle(step):
    graph = STEPS[step][0]
    leaves = partition(graph, max_nodes=6, max_top=8).leaves
    cluster_of = {n: i for i, leaf in enumerate(leaves) for n in leaf.nodes}
    maker = {t: n for n in graph.forward for t in graph.nodes[n].outputs}
    reads = {(cluster_of[n], cluster_of[maker[t]]) for n in graph.forward for t in graph.nodes[n].inputs if t in maker}
    waiting = {i: {b for a, b in reads if a == i and b != i} for i in range(len(leaves))}
    while waiting:
        ready = [i for i, before in waiting.items() if not before & waiting.keys()]
        assert ready, f"a cycle through clusters {sorted(waiting)}"
        for i in ready:
            del waiting[i]


def working(graph, leaf):
    return sum(bool(graph.allocates[n]) for n in leaf.nodes)


def test_leaves_keep_the_limit():
    for graph, _ in STEPS.values():
        for leaf in partition(graph, max_nodes=6, max_top=8).leaves:
            assert working(graph, leaf) <= 6


def depth(cluster: Cluster) -> int:
    return 1 + max((depth(child) for child in cluster.children), default=0)


def test_levels_nest():
    assert depth(partition(STEPS["chain"][0], max_nodes=3, max_top=4)) >= 3


def test_equal_blocks_have_equal_keys():
    few = partition(transformer(6)[0]).leaves
    many = partition(transformer(24)[0]).leaves
    assert len(many) > len(few)
    assert len({leaf.key for leaf in many}) <= len({leaf.key for leaf in few}) + 4


def test_the_same_graph_gives_the_same_partition():
    first, second = (partition(transformer(8)[0]) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("step", STEPS)
def test_the_top_has_at_most_max_top_children(step):
    assert len(partition(STEPS[step][0], max_nodes=6, max_top=8).children) <= 8
