"""Strategies: each takes a `Problem` and gives a `Solution`."""

from .segments import candidates


from .base import Problem, Solution, Status, strategy


def smallest_budget(problem: Problem) -> Solution:
    """Find the least peak, whatever the time."""
    return min(candidates(problem), key=lambda s: (s.peak_bytes, s.recompute_ms))


from ..schedule import keep_all
from .base import replay


@strategy("hilp")
def hilp(problem):
    ka = keep_all(problem.graph)
    sim = replay(problem, ka)
    ok = [s for s in candidates(problem) if s.peak_bytes <= problem.budget_bytes]
    if sim.peak_bytes <= problem.budget_bytes:
        return Solution("none", Status.OPTIMAL, ka, 0.0, sim.peak_bytes)
    if not ok:
        return Solution("segments", Status.NOT_FOUND)
    return min(ok, key=lambda s: s.recompute_ms)
