"""Segments: keep the values that cross a few narrow cuts of the forward, recompute the rest; sqrt(n) on any graph.

Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174, which cuts chains into
    equal segments.
Changed: cuts of any graph, each placed where the fewest bytes cross, for a range of segment counts. A replay finds the
peak of each; those that fit keep more until the budget is full, the others evict at their peak until they fit. Neither
optimal in memory nor in time; fast and never far off.
"""

from __future__ import annotations

from bisect import bisect_right

from ...records.graph import Graph
from .choices import Policy, alive_bytes
from .greedy import ReplayedPolicy, keep_more
from .incumbent import Search, searching
from .model import StepModel

SEGMENT_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96)


def segment_policies(model: StepModel) -> list[Policy]:
    """Return a policy for each number of segments, which keeps the values between them, and one that keeps all."""
    graph, choices, kept = model.graph, frozenset(model.choices), list[frozenset[int]]()
    lives, length, crossing = lives_of(graph), len(graph.forward), crossing_bytes(graph)
    for count in SEGMENT_COUNTS:
        if count > max(1, length):
            break
        cuts, reach = list[int](), length // count // 3
        for middle in (length * k // count for k in range(1, count)):
            near = range(max(0, middle - reach), min(length, middle + reach + 1))
            cuts.append(min(near, key=lambda position: (crossing[position], abs(position - middle))))
        between = (s for s, (made, last) in lives.items() if bisect_right(cuts, made) < bisect_right(cuts, last))
        kept.append(frozenset(between) & choices)
    return [Policy(values) for values in dict.fromkeys([*kept, choices])]


def lives_of(graph: Graph) -> dict[int, tuple[int, int]]:
    """Return, for each storage that the forward makes, the positions at which it is made and read last."""
    lives = {storage: (made, made) for made, node in enumerate(graph.forward) for storage in graph.allocates[node]}
    for position, node in enumerate(graph.forward):
        for tensor in graph.nodes[node].inputs:
            storage = graph.tensors[tensor].storage
            if storage in lives:
                lives[storage] = lives[storage][0], max(lives[storage][1], position)
    return lives


def crossing_bytes(graph: Graph) -> list[int]:
    """Return, for each forward position, the bytes made before it that it or a later one reads."""
    lives = ((made + 1, last, graph.sizes[storage]) for storage, (made, last) in lives_of(graph).items())
    return alive_bytes(lives, len(graph.forward))


def try_segments(search: Search, deadline: float) -> None:
    """Fill up the fastest segmentations that fit, or evict from the smallest one."""
    replayed = [ReplayedPolicy(policy, search.model.replay(policy)) for policy in segment_policies(search.model)]
    replayed.sort(key=lambda r: r.rank)
    fitting = [r for r in replayed if r.replay.peak_bytes <= search.limit]
    if not fitting:
        search.repair(min(replayed, key=lambda r: r.replay.peak_bytes).policy, deadline)
    for start in fitting[:2]:
        search.offer(keep_more(search.model, start, search.limit, deadline))


def try_evictions(search: Search, deadline: float) -> None:
    """Evict from all segmentations; the way to a small peak is not the same for each."""
    for policy in segment_policies(search.model):
        if search.model.work.is_past(deadline) or search.is_done:
            return
        search.repair(policy, deadline)


@searching("segments")
def segments(search: Search) -> None:
    """Fill up segmentations, then evict from each; needs no mixed-integer programs."""
    try_segments(search, search.within(0.5))
    try_evictions(search, search.within(1.0))
