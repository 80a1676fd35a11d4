"""From the schedules that a method proposes to a solution: one way for all methods of the papers.

A method is a generator of policies. Each policy is replayed, and offered where it fits the budget. Where none fits, the
nearest ones are repaired: values are evicted at the peak until they do. The best is filled up: it keeps more values for
as long as that fits. The solution names the method's own schedule beside the final one, and says in one line where the
method could not serve a step, and which substitute it took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps

from ...units import format_bytes
from .choices import Policy
from .greedy import ReplayedPolicy, keep_more
from .incumbent import Search, searching
from .segments import try_evictions, try_segments

PROPOSING_SHARE = 0.6  # of the time limit; the rest is for repairs, or to fill up
REPAIR_SHARE = 0.5  # of the time left then, for each policy that is repaired
FILL_SHARE = 0.8  # of the time left in the end
MOST_REPAIRED = 4  # policies, those of the smallest peak

Method = Callable[[Search], Iterator[Policy]]


def method(name: str, needs_programs: bool = False) -> Callable[[Method], Method]:
    """Register a generator of policies as a strategy.

    Args:
        name: Name to look it up by.
        needs_programs: Whether it solves mixed-integer or linear programs.
    """

    def register(propose: Method) -> Method:
        @searching(name, needs_programs)
        @wraps(propose)
        def find(search: Search) -> None:
            carry_out(search, propose, name)

        return propose

    return register


def carry_out(search: Search, propose: Method, name: str) -> None:
    """Take the proposals of a method, repair them where none fits, and fill up the best, for a search to receive."""
    passing = _take(search, propose)
    if search.is_infeasible:
        return
    if search.best is None:
        _repair(search, passing[:MOST_REPAIRED], name)
    if search.best is not None and not search.is_done:
        search.offer(keep_more(search.model, search.best, search.limit, search.within(FILL_SHARE)))


def _take(search: Search, propose: Method) -> list[ReplayedPolicy]:
    """Offer each policy, and note the best; return those that pass the budget, the smallest peak first."""
    passing, seen, deadline_s = list[ReplayedPolicy](), set[Policy](), (1 - PROPOSING_SHARE) * search.left_s()
    for policy in propose(search):
        if policy not in seen:
            seen.add(policy)
            replayed = ReplayedPolicy(policy, search.model.replay(policy))
            search.offer(replayed)
            if replayed.replay.peak_bytes > search.limit:
                passing.append(replayed)
            elif search.proposed is None or replayed.rank < search.proposed.rank:
                search.proposed = replayed
        if search.is_done or search.left_s() < deadline_s:
            break
    passing.sort(key=lambda f: (f.replay.peak_bytes, f.rank))
    search.proposed = search.proposed or next(iter(passing), None)
    return passing


def _repair(search: Search, passing: list[ReplayedPolicy], name: str) -> None:
    """Evict from policies until one fits; where none does, take segments."""
    for replayed in passing:
        search.repair(replayed.policy, search.within(REPAIR_SHARE))
        if search.best is not None:
            peak = format_bytes(replayed.replay.peak_bytes)
            search.say(f"No schedule of {name} fits; values were evicted from the one that peaks at {peak}.")
            return
    try_segments(search, search.within(REPAIR_SHARE))
    if search.best is None:
        try_evictions(search, search.within(1.0))
    if search.best is not None:
        search.say(f"No schedule of {name} fits, not even after evictions; `segments` found this one.")
