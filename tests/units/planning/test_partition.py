"""Partitions: every forward node in exactly one cluster, no cycles between them, limits kept, equal blocks found."""

from __future__ import annotations

import pytest

from hiremate_lightning.planning.solvers.methods.hilp import partition, structural_key
from tests.helpers import random_graph
from tests.tiny import chain, transformer

STEPS = {
    "chain": chain(60),
    "transformer": transformer(12),
    "wide": random_graph(3, 60),
    "one node": chain(1),
}


@pytest.mark.parametrize("step", STEPS)
def test_every_node_is_in_exactly_one_cluster(step):
    graph = STEPS[step][0]
    clusters = partition(graph, max_nodes=6)
    assert sorted(n for cluster in clusters for n in cluster) == sorted(graph.forward)


@pytest.mark.parametrize("step", STEPS)
def test_clusters_close_no_cycle(step):
    graph = STEPS[step][0]
    clusters = partition(graph, max_nodes=6)
    cluster_of = {n: i for i, cluster in enumerate(clusters) for n in cluster}
    maker = {t: n for n in graph.forward for t in graph.nodes[n].outputs}
    reads = {(cluster_of[n], cluster_of[maker[t]]) for n in graph.forward for t in graph.nodes[n].inputs if t in maker}
    waiting = {i: {b for a, b in reads if a == i and b != i} for i in range(len(clusters))}
    while waiting:
        ready = [i for i, before in waiting.items() if not before & waiting.keys()]
        assert ready, f"a cycle through clusters {sorted(waiting)}"
        for i in ready:
            del waiting[i]


def working(graph, cluster):
    return sum(bool(graph.allocates[n]) for n in cluster)


def test_clusters_keep_the_limit():
    for graph, _ in STEPS.values():
        for cluster in partition(graph, max_nodes=6):
            assert working(graph, cluster) <= 6


def test_equal_blocks_have_equal_keys():
    graphs = [transformer(blocks)[0] for blocks in (6, 24)]
    few, many = ([structural_key(graph, cluster) for cluster in partition(graph)] for graph in graphs)
    assert len(many) > len(few)
    assert len(set(many)) <= len(set(few)) + 4
