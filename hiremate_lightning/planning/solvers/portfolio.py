"""The portfolio: the refined phased model, with every cheaper strategy as a net below it; the default.

A schedule is at hand after the segmentations, within a second on thousands of nodes. Where none of them fits, the
other strategies are asked for one to start from. The phased model then improves it until a proof or the time limit;
where it ends without a proof, the others get the rest of the time, and the best by replay wins. So it is never worse
than any of them that had time to run.
"""

from __future__ import annotations

from collections.abc import Callable

from .chains import min_memory_policies, try_rotor
from .crossover import try_crossovers
from .greedy import Found, keep_more
from .incumbent import Search, searching
from .least_memory import find_smallest
from .neighbourhoods import Neighbourhoods
from .refine import QUICK_SHARE, polish, refine
from .selections import try_fractions, try_walks
from .turn_point import prove, roundings, segment_policies, try_evictions, try_limits, try_segments

CLOSE = 0.02  # of the step's time: a start that near the bound needs no other
SMALLEST_SHARE = 0.4  # of the time that is left: for the least memory, before other strategies are asked
REFINE_SHARE = 0.85  # of the time limit, where no proof ends it earlier


def _try_least_memory(search: Search) -> None:
    """Fill up the smallest schedule that is found, or evict from those that chains have."""
    smallest = find_smallest(search.model, SMALLEST_SHARE * search.left_s(), search.limit)
    if smallest.replay.peak_bytes <= search.limit:
        search.offer(keep_more(search.model, smallest, search.limit, search.within(QUICK_SHARE)))
        return
    found = [Found(p, search.model.replay(p)) for p in min_memory_policies(search.model)]
    for start in sorted(found, key=lambda f: (f.replay.peak_bytes, f.rank))[:2]:
        search.repair(start.policy, search.within(QUICK_SHARE))


def _in_half_the_time(attempt: Callable[[Search, float], None]) -> Callable[[Search], None]:
    """Return an attempt that ends after half of the time that is left."""
    return lambda search: attempt(search, search.within(0.5))


def _is_close(search: Search) -> bool:
    """Whether the best found is good enough to start the phased model from."""
    return (
        search.best is not None and search.best.replay.recompute_ms <= search.bound_ms + CLOSE * search.problem.step_ms
    )


OTHERS: tuple[Callable[[Search], None], ...] = (
    _try_least_memory,
    *map(_in_half_the_time, (try_evictions, try_walks, try_rotor)),
    try_fractions,
)


@searching("portfolio", needs_programs=True)
def portfolio(search: Search) -> None:
    """Refine the phased model from the best start at hand; the best of all strategies by replay."""
    if not prove(search):
        return
    deadline = search.within(QUICK_SHARE)
    try_crossovers(search, [*roundings(search, deadline), *segment_policies(search.model)], deadline)
    if not _is_close(search):
        try_segments(search, search.within(QUICK_SHARE))
        try_limits(search, relax=True, deadline=search.within(QUICK_SHARE))
    for attempt in OTHERS:
        if search.best is None and search.left_s() > 0:
            attempt(search)
    refine(
        search,
        improve=Neighbourhoods(search).improve,
        reserve_s=(1 - REFINE_SHARE) * search.problem.options.time_limit_s,
    )
    for attempt in OTHERS:
        if not search.is_done and search.left_s() > 0:
            attempt(search)
    polish(search)
