"""Crossovers: one policy for the early part of the forward, another for the rest.

Networks of equal blocks make relaxations flip all blocks at once: one rounding keeps too much, the next one far too
little. Of two such policies, the one that fits may be used for just as many nodes as it takes, found by bisection with
a replay for each step. A heuristic for the first second, when nothing better is at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .greedy import Found
from .incumbent import Search
from .model import StepModel
from .policies import Policy

FITTING = 3  # policies that fit, the fastest first, to be mixed with those that don't


def try_crossovers(search: Search, policies: Iterable[Policy], deadline: float) -> None:
    """Offer the policies that fit, and the crossovers of these with those that don't.

    Args:
        search: Takes what is found.
        policies: Policies without drops.
        deadline: Stop when so much work was done.
    """
    found = sorted((Found(p, search.model.replay(p)) for p in dict.fromkeys(policies)), key=lambda f: f.rank)
    fitting = [f for f in found if f.replay.peak_bytes <= search.limit]
    for small in fitting[:FITTING]:
        search.offer(small)
        for large in found:
            if large.replay.recompute_ms >= small.replay.recompute_ms or large in fitting:
                continue
            for mixed in _bisections(search.model, large.policy, small.policy, search.limit):
                search.offer(mixed)
                if search.model.work.is_past(deadline):
                    return


def _bisections(model: StepModel, large: Policy, small: Policy, limit: int) -> Iterator[Found]:
    """Return what is on the way to the most of the large policy that fits, from either end of the forward."""
    for large_first in (True, False):
        fits, too_much = 0, len(model.graph.forward)  # nodes under the large policy
        while too_much - fits > 1:
            count = (fits + too_much) // 2
            mixed = _mix(model, large, small, count, large_first)
            found = Found(mixed, model.replay(mixed))
            if found.replay.peak_bytes <= limit:
                fits = count
                yield found
            else:
                too_much = count


def _mix(model: StepModel, large: Policy, small: Policy, count: int, large_first: bool) -> Policy:
    """Use the large policy for so many nodes at one end of the forward, the small one for the others."""
    cut = count if large_first else len(model.graph.forward) - count
    early, late = (large, small) if large_first else (small, large)
    return Policy(
        frozenset(s for s in early.kept if model.made_at[s] < cut)
        | frozenset(s for s in late.kept if model.made_at[s] >= cut)
    )
