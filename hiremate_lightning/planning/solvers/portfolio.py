"""The portfolio, the default strategy: cheap heuristics first, then the refined phased model.

Roundings and segmentations give a schedule within a second on thousands of nodes. If none of them fits, the search for
the least memory gives a start. The phased model then improves it until a proof or the time limit; the time left is for
keeping more values.
"""

from __future__ import annotations

from .greedy import keep_more, segment_policies
from .least_memory import find_smallest
from .refine import refine
from .search import Search, strategy, try_segments
from .turn_point import prove, roundings

CLOSE = 0.02  # share of the step's time: a start this near to the bound is good enough
QUICK_SHARE = 0.15  # of the time left, for each kind of start
SMALLEST_SHARE = 0.4  # of the time left, for the least memory
REFINE_SHARE = 0.85  # of the time limit, up to which `refine` may run


@strategy("portfolio", needs_programs=True)
def portfolio(search: Search) -> None:
    """Find starts by cheap heuristics, then refine the phased model from the best one."""
    model = search.model
    if not prove(search):
        return
    rounded = list(roundings(search, search.within(QUICK_SHARE)))
    for policy in dict.fromkeys([*rounded[::2], *segment_policies(model)]):
        search.offer(model.replay(policy))
    if search.best is None or search.best.recompute_ms > search.bound_ms + CLOSE * search.problem.step_ms:
        try_segments(search, search.within(QUICK_SHARE))
        deadline = search.within(QUICK_SHARE)
        for policy in rounded:
            if not search.is_done and not model.work.is_past(deadline):
                search.repair(policy, deadline)
    if search.best is None and search.left_s() > 0:
        smallest = find_smallest(model, SMALLEST_SHARE * search.left_s(), search.limit)
        if smallest.peak_bytes <= search.limit:
            search.fill(smallest, search.within(QUICK_SHARE))
    refine(search, has_neighbourhoods=True, reserve_s=(1 - REFINE_SHARE) * search.problem.options.time_limit_s)
    if search.best is not None and not search.is_done:
        search.offer(keep_more(model, search.best, search.limit, model.work.done_s + max(0.5, search.left_s())))
