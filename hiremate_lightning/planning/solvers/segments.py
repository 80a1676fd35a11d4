"""Segments: keep what crosses a few narrow cuts of the forward, recompute the rest; the sqrt(n) idea on any graph.

Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174, which cuts chains into
    equal segments.
Changed: cuts of any graph, each placed where the fewest bytes cross, for a range of segment counts; the least peak is
told by replay. Neither optimal in memory nor in time; fast and never far off.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...records.graph import Graph
from ..partition import bytes_across, lives_in

SEGMENT_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96)


def keep_sets(graph: Graph) -> Iterator[frozenset[int]]:
    """Give, for each number of segments, the storages that cross the cuts between them."""
    lives, length = lives_in(graph, graph.forward), len(graph.forward)
    crossing = bytes_across(graph, graph.forward)[:length]
    for count in SEGMENT_COUNTS:
        if count > max(1, length):
            break
        cuts = [_narrowest(crossing, length * k // count, length // count // 3) for k in range(1, count)]
        yield frozenset(s for s, (made, last) in lives.items() if any(made < cut <= last for cut in cuts))


def _narrowest(crossing: list[int], middle: int, reach: int) -> int:
    first, end = max(0, middle - reach), min(len(crossing), middle + reach + 1)
    return min(range(first, end), key=lambda position: (crossing[position], abs(position - middle)))
