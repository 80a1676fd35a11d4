"""The portfolio: the refined phased model, with every cheaper strategy as a net below it; the default.

A schedule is at hand after the segmentations, within a second on thousands of nodes. Where none of them fits, the
least memory and evictions are tried for one to start from. The phased model then improves it until a proof or the time
limit. Where it ends without a proof, these get the rest of the time, and the best by replay wins.
"""

from __future__ import annotations

from .greedy import ReplayedPolicy, keep_more
from .incumbent import Search, searching
from .least_memory import find_smallest
from .neighbourhoods import Neighbourhoods
from .refine import QUICK_SHARE, polish, refine
from .segments import segment_policies, try_evictions, try_segments
from .turn_point import prove, roundings, try_limits

CLOSE = 0.02  # of the step's time: a start so near the bound needs no other
SMALLEST_SHARE = 0.4  # of the time that is left: for the least memory, before other strategies are asked
REFINE_SHARE = 0.85  # of the time limit, where no proof ends it earlier


def _try_least_memory(search: Search) -> None:
    """Fill up the smallest schedule that is found."""
    smallest = find_smallest(search.model, SMALLEST_SHARE * search.left_s(), search.limit)
    if smallest.replay.peak_bytes <= search.limit:
        search.offer(keep_more(search.model, smallest, search.limit, search.within(QUICK_SHARE)))


def _try_evictions(search: Search) -> None:
    """Evict from all segmentations, for half of the time that is left."""
    try_evictions(search, search.within(0.5))


@searching("portfolio", needs_programs=True)
def portfolio(search: Search) -> None:
    """Refine the phased model from the best start at hand; the best of all strategies by replay."""
    if not prove(search):
        return
    deadline = search.within(QUICK_SHARE)
    for policy in dict.fromkeys([*roundings(search, deadline), *segment_policies(search.model)]):
        search.offer(ReplayedPolicy(policy, search.model.replay(policy)))
    close_ms = search.bound_ms + CLOSE * search.problem.step_ms
    if search.best is None or search.best.replay.recompute_ms > close_ms:
        try_segments(search, search.within(QUICK_SHARE))
        try_limits(search, relax=True, deadline=search.within(QUICK_SHARE))
    for attempt in (_try_least_memory, _try_evictions):
        if search.best is None and search.left_s() > 0:
            attempt(search)
    refine(
        search,
        improve=Neighbourhoods(search).improve,
        reserve_s=(1 - REFINE_SHARE) * search.problem.options.time_limit_s,
    )
    for attempt in (_try_least_memory, _try_evictions):
        if not search.is_done and search.left_s() > 0:
            attempt(search)
    polish(search)
