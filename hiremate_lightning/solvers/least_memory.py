"""The least memory that a heuristic finds: narrow segments, then evictions at the peak as far as they go.

What need not be given up for that peak is kept in the end.

It gives the smallest feasible budget for error messages, and the program of a training step about which nothing is
known yet. An upper bound on the true minimum, which is NP-hard to find on general graphs.
"""

from __future__ import annotations

import time

from .base import Problem, Solution, Status, strategy
from .greedy import Found, evict, keep_more
from .model import Model
from .turn_point import segment_policies

STARTS = 3  # segmentations from which evictions start
PATIENCE = 40  # evictions without a smaller peak
SEARCH_S, KEEP_S = 4.0, 1.0


def find_smallest(model: Model, time_limit_s: float) -> Found:
    """Find a policy of small peak, and for that peak of short time."""
    deadline = time.monotonic() + min(SEARCH_S, time_limit_s)
    *segments, everything = [Found(p, model.replay(p)) for p in segment_policies(model)]
    segments.sort(key=lambda f: (f.replay.peak_bytes, f.rank))
    best = min([*segments[:1], everything], key=lambda f: (f.replay.peak_bytes, f.rank))
    for first in (*segments[:STARTS], everything):
        stalled = 0
        for step in evict(model, first.policy, 0, deadline):
            stalled = 0 if step.replay.peak_bytes < best.replay.peak_bytes else stalled + 1
            if not stalled:
                best = step
            if stalled > PATIENCE:
                break
    return keep_more(model, best, best.replay.peak_bytes, time.monotonic() + min(KEEP_S, time_limit_s))


@strategy("least_memory")
def least_memory(problem: Problem) -> Solution:
    """Find the smallest peak, and for that peak a short time of recomputation."""
    start = time.monotonic()
    model = Model(problem)
    best = find_smallest(model, problem.options.time_limit_s)
    return Solution(
        strategy="least_memory",
        status=Status.FEASIBLE if best.replay.peak_bytes <= problem.budget_bytes else Status.NOT_FOUND,
        recompute=model.recompute(best.replay.rows),
        recompute_ms=best.replay.recompute_ms,
        peak_bytes=best.replay.peak_bytes,
        stopped_by="end of the search",
        solve_s=time.monotonic() - start,
    )


def smallest_budget(problem: Problem) -> Solution:
    """Find the decisions of least memory, whether or not they fit the problem's budget."""
    return least_memory(problem)
