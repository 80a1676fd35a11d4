"""Segments: keep what crosses a few narrow cuts of the forward, recompute the rest; the sqrt(n) idea on any graph.

Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174, which cuts chains into
    equal segments.
Changed: cuts of any graph, each placed where the fewest bytes cross, for a range of segment counts; the least peak is
told by replay. Neither optimal in memory nor in time; fast and never far off.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from ...records.graph import Graph

SEGMENT_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96)


def keep_sets(graph: Graph) -> Iterator[frozenset[int]]:
    """Give, for each number of segments, the storages that cross the cuts between them."""
    made, last = _lives(graph)
    length = len(graph.forward)
    crossing = _crossing_bytes(graph, made, last)
    for count in SEGMENT_COUNTS:
        if count > max(1, length):
            break
        cuts = [_narrowest(crossing, length * k // count, length // count // 3) for k in range(1, count)]
        yield frozenset(s for s in made if any(made[s] < cut <= last.get(s, -1) for cut in cuts))


def _lives(graph: Graph) -> tuple[dict[int, int], dict[int, int]]:
    """Return the forward position that makes each storage, and the last one that reads it."""
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, index in enumerate(graph.forward):
        for storage in graph.allocates[index]:
            made[storage] = position
        for tensor in graph.nodes[index].inputs:
            storage_read = graph.tensors[tensor].storage
            if storage_read is not None:
                last[storage_read] = position
    return made, last


def _crossing_bytes(graph: Graph, made: dict[int, int], last: dict[int, int]) -> list[int]:
    """Give, for each forward position, the bytes made before it that it or a later one reads."""
    change = [0] * (len(graph.forward) + 2)
    for storage, position in made.items():
        end = last.get(storage, position)
        if end > position:
            change[position + 1] += graph.sizes[storage]
            change[end + 1] -= graph.sizes[storage]
    return list(accumulate(change[: len(graph.forward)]))


def _narrowest(crossing: list[int], middle: int, reach: int) -> int:
    first, end = max(0, middle - reach), min(len(crossing), middle + reach + 1)
    return min(range(first, end), key=lambda position: (crossing[position], abs(position - middle)))
