"""The least memory that a heuristic finds: narrow segments, then evictions at the peak as far as they go.

What need not be given up for that peak is kept in the end. Where the last evictions recompute without end for next to
nothing, a peak half a per cent larger is taken. All of it goes by estimated times: measured ones differ from run to
run, and a budget that one run has named as the smallest is to do in the next. It does where the search ends before its
time limit, and what runs outside of the captured parts needs no more.

It gives the smallest feasible budget for error messages, and the program of a training step about which nothing is
known yet. An upper bound on the true minimum, which is NP-hard to find on general graphs.
"""

from __future__ import annotations

import time
from copy import copy
from itertools import product

from ..costs import estimate
from .base import Problem, Solution, Status, strategy
from .decisions import decisions
from .greedy import Found, cheapest, evict, keep_more, largest
from .model import LEAST_MS, Model
from .turn_point import segment_policies

STARTS = 3  # segmentations from which evictions start
PATIENCE = 40  # evictions without a smaller peak
SEARCH_S, KEEP_S = 4.0, 1.0
SLACK, FASTER = 0.005, 0.5  # share of the peak that is given for so much less time


def find_smallest(model: Model, time_limit_s: float, budget_bytes: int = 0) -> Found:
    """Find a policy of small peak, and for that peak of short time.

    Args:
        model: The step.
        time_limit_s: Seconds to search for.
        budget_bytes: A budget that what is found fits where the smallest does.
    """
    found = _find_smallest(_with_estimated_times(model), time_limit_s, budget_bytes)
    return Found(found.policy, model.replay(found.policy))


def _with_estimated_times(model: Model) -> Model:
    times = estimate(model.graph).time_ms
    found = copy(model)
    found.cost_ms = {node: max(times[node], LEAST_MS) for node in model.makes}
    return found


def _find_smallest(model: Model, time_limit_s: float, budget_bytes: int) -> Found:
    deadline = time.monotonic() + min(SEARCH_S, time_limit_s)
    *segments, everything = [Found(p, model.replay(p)) for p in segment_policies(model)]
    segments.sort(key=lambda f: (f.replay.peak_bytes, f.rank))
    near = _near([*segments[:1], everything], budget_bytes)
    for order, first in product((cheapest, largest), (*segments[:STARTS], everything)):
        stalled = 0
        for step in evict(model, first.policy, 0, deadline, order):
            stalled = 0 if step.replay.peak_bytes < _least(near) else stalled + 1
            near = _near([*near, step], budget_bytes)
            if stalled > PATIENCE:
                break
    smallest, fastest = min(near, key=lambda f: (f.replay.peak_bytes, f.rank)), min(near, key=lambda f: f.rank)
    smallest = _filled(model, smallest, time_limit_s)
    if fastest.replay.recompute_ms < FASTER * smallest.replay.recompute_ms:
        return _filled(model, fastest, time_limit_s)
    return smallest


def _filled(model: Model, found: Found, time_limit_s: float) -> Found:
    return keep_more(model, found, found.replay.peak_bytes, time.monotonic() + min(KEEP_S, time_limit_s))


def _least(found: list[Found]) -> int:
    return min(f.replay.peak_bytes for f in found)


def _near(found: list[Found], budget_bytes: int) -> list[Found]:
    """Leave what is within the slack of the smallest, and within the budget where that is."""
    least = _least(found)
    limit = int(least * (1 + SLACK))
    if least <= budget_bytes < limit:
        limit = budget_bytes
    return [f for f in found if f.replay.peak_bytes <= limit]


@strategy("least_memory")
def least_memory(problem: Problem) -> Solution:
    """Find the smallest peak, and for that peak a short time of recomputation."""
    start = time.monotonic()
    model = Model(problem)
    best = find_smallest(model, problem.options.time_limit_s, problem.budget_bytes)
    return Solution(
        strategy="least_memory",
        status=Status.FEASIBLE if best.replay.peak_bytes <= problem.budget_bytes else Status.NOT_FOUND,
        recompute=decisions(model, best.replay.rows),
        recompute_ms=best.replay.recompute_ms,
        peak_bytes=best.replay.peak_bytes,
        stopped_by="end of the search",
        solve_s=time.monotonic() - start,
    )


def smallest_budget(problem: Problem) -> Solution:
    """Find the decisions of least memory, whether or not they fit the problem's budget."""
    return least_memory(problem)
