"""The least memory that a heuristic finds: narrow segments, then evictions at the peak until none helps.

The first training step runs the schedule found, and errors name its peak as the smallest budget: an upper bound on the
true minimum, which is NP-hard to find. The search uses estimated times, not measured ones, so that the next run finds
the same budget. `docs/formulation.md` has its steps; it takes about as many replays as there are values.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product

from ...records.costs import estimate
from .base import Problem, Solution, Status, with_decisions
from .greedy import cheapest, evict, keep_more, largest, neighbours, segment_policies
from .model import Replay, StepModel, decisions

STARTS = 3  # segmentations from which evictions start
AT_BOUND = 0.015  # stop trying starts once a peak exceeds the proven bound by at most this share
PATIENCE, DEEP_PATIENCE = 40, 15  # most evictions in a row without a smaller peak: from a start, and in `_lower`
DEEP_STEPS = 250  # most evictions from all values at a peak together
SEARCH_S, DEEP_S, KEEP_S = 4.0, 8.0, 2.0
SLACK, FASTER = 0.005, 0.5  # accept a peak larger by the first share if the time is less than the second share


def find_smallest(model: StepModel, time_limit_s: float, budget_bytes: int = 0) -> Replay:
    """Find a policy of small peak, and of short recompute time for this peak, within a limit of work.

    While nothing fits the budget, the search goes on for up to `DEEP_S` seconds.
    """
    smallest = _find_smallest(model.with_times(estimate(model.graph).time_ms), time_limit_s, budget_bytes)
    return model.replay(smallest.policy)


def _find_smallest(model: StepModel, time_limit_s: float, budget_bytes: int) -> Replay:
    *segments, everything = map(model.replay, segment_policies(model))
    segments.sort(key=lambda f: (f.peak_bytes, f.rank))
    near, lowest = _near([*segments[:1], everything], budget_bytes), []
    deadline = model.work.done_s + min(SEARCH_S, time_limit_s)
    for order, first in product((cheapest, largest), (*segments[:STARTS], everything)):
        is_needed = order is cheapest and first is not everything
        if not is_needed and _least(near) <= min(budget_bytes, (1 + AT_BOUND) * model.least_bytes):
            break
        low, stalled = first, 0
        for step in evict(model, first.policy, 0, deadline, order):
            stalled = 0 if step.peak_bytes < _least(near) else stalled + 1
            near, low = _near([*near, step], budget_bytes), min(low, step, key=_by_peak)
            if stalled > PATIENCE:
                break
        lowest.append(low)
    leanest = min(near, key=_by_peak)
    filled = _filled(model, leanest, time_limit_s)
    enough_bytes, deadline = max(budget_bytes, model.least_bytes), model.work.done_s + min(DEEP_S, time_limit_s)
    better: Replay | None
    for better in (filled, *lowest):
        while _least(near) > enough_bytes and (better := _lower(model, better, deadline)):
            near = _near([*near, better], budget_bytes)
    smallest, fastest = min(near, key=_by_peak), min(near, key=lambda f: f.rank)
    smallest = filled if smallest is leanest else _filled(model, smallest, time_limit_s)
    while smallest.peak_bytes > enough_bytes:
        way = zip(evict(model, smallest.policy, 0, deadline), range(PATIENCE), strict=False)
        low = min((step for step, _ in way), key=_by_peak)
        if low.peak_bytes >= smallest.peak_bytes:
            break
        smallest = _filled(model, low, time_limit_s)
    if fastest.recompute_ms < FASTER * smallest.recompute_ms:
        return _filled(model, fastest, time_limit_s)
    return smallest


def _lower(model: StepModel, start: Replay, deadline: float) -> Replay | None:
    """Evict each value at the peak in turn, then more values, until the peak is lower; return None if none helps."""
    steps = 0
    for policy, order in product(neighbours(model, start), (largest, cheapest)):
        low, stalled = None, 0
        for step in evict(model, policy, 0, deadline, order):
            if step.peak_bytes < start.peak_bytes:
                return step
            steps += 1
            stalled = 0 if low is None or step.peak_bytes < low else stalled + 1
            low = step.peak_bytes if stalled == 0 else low
            if stalled > DEEP_PATIENCE:
                break
        if steps > DEEP_STEPS or model.work.is_past(deadline):
            break
    return None


def _by_peak(replayed: Replay) -> tuple[int, tuple[float, int]]:
    return replayed.peak_bytes, replayed.rank


def _filled(model: StepModel, start: Replay, time_limit_s: float) -> Replay:
    return keep_more(model, start, None, model.work.done_s + min(KEEP_S, time_limit_s))


def _least(policies: list[Replay]) -> int:
    return min(policy.peak_bytes for policy in policies)


def _near(policies: list[Replay], budget_bytes: int) -> list[Replay]:
    """Return the policies within the slack of the smallest peak, and within the budget if the smallest is."""
    least = _least(policies)
    limit = int(least * (1 + SLACK))
    if least <= budget_bytes < limit:
        limit = budget_bytes
    return [policy for policy in policies if policy.peak_bytes <= limit]


def solve_least_memory(problem: Problem) -> Solution:
    """Find the smallest peak, whether or not it fits the budget, and a short recompute time for this peak.

    The search ends early if a peak fits the budget. A budget of 0 finds the least peak; `UNLIMITED` ends the search at
    once.
    """
    start = time.monotonic()
    model = StepModel(problem)
    smallest = find_smallest(model, problem.options.time_limit_s, problem.budget_bytes)
    solution = Solution(
        strategy="least_memory",
        status=Status.NOT_FOUND,
        stopped_by="end of the search",
        solve_s=time.monotonic() - start,
        work_s=model.work.done_s,
    )
    solution = with_decisions(problem, solution, decisions(model, smallest.rows))
    return replace(solution, status=Status.FEASIBLE) if solution.peak_bytes <= problem.budget_bytes else solution
