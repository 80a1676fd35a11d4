"""Chen: segments of equal length; only the values that cross from one segment to the next are kept.

Source: T. Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174: sqrt(n)
segments of n layers; and Algorithm 3, which ends a segment once it has made b bytes, for b near sqrt(x y) with x the
kept bytes and y the bytes of the largest segment.

Changed: a layer is a forward node that allocates, all values that cross a cut are kept, and each value is recomputed
when it is needed, not a segment at a time. The method uses neither times nor a budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from ..choices import Policy, lives_of
from ..model import StepModel
from ..search import Search, strategy

ROOT_TWO = math.sqrt(2.0)
SEARCHED = 6  # segment sizes to try on either side of the best guess


@strategy("chen")
def propose(search: Search) -> Iterator[Policy]:
    """Propose sqrt(n) segments of equal length, then segments of equal bytes."""
    model, forward = search.model, search.model.graph.forward
    cuts = equal_cuts(model)
    equal = keep_crossing(model, cuts)
    yield equal
    made = [sum(model.sizes[s] for s in model.graph.allocates[node]) for node in forward]
    kept = sum(model.sizes[s] for s in equal.kept)
    largest = max((sum(made[a:b]) for a, b in pairwise([0, *cuts, len(forward)])), default=0)
    guess = math.sqrt(max(1, kept) * max(1, largest))  # b = sqrt(x y) of the segments of equal length
    for step in range(-SEARCHED, SEARCHED + 1):
        yield keep_crossing(model, cuts_by_bytes(model, guess * ROOT_TWO ** (step / SEARCHED)))


def equal_cuts(model: StepModel) -> list[int]:
    """Return the forward positions that cut n layers into sqrt(n) segments."""
    layers = [position for position, node in enumerate(model.graph.forward) if model.graph.allocates[node]]
    count = math.isqrt(len(layers))
    return [layers[len(layers) * k // count] for k in range(1, count)]


def cuts_by_bytes(model: StepModel, most_bytes: float) -> list[int]:
    """Return the forward positions at which a segment has made more than `most_bytes`."""
    cuts, made = list[int](), 0
    for position, node in enumerate(model.graph.forward):
        if made > most_bytes:
            cuts.append(position)
            made = 0
        made += sum(model.sizes[s] for s in model.graph.allocates[node])
    return cuts


def keep_crossing(model: StepModel, cuts: list[int]) -> Policy:
    """Return the policy that keeps the values that cross some cuts of the forward."""
    choices, lives = set(model.choices), lives_of(model.graph)
    crossing = (s for s, (made, last) in lives.items() if any(made < cut <= last for cut in cuts))
    return Policy(frozenset(s for s in crossing if s in choices))
