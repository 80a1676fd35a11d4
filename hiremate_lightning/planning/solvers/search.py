"""A search: every strategy offers schedules to it; it keeps the best one within the budget and returns the solution.

A *method* of a paper is a generator of policies. Each policy is replayed, and offered if it fits the budget. If none
fits, those of the smallest peaks are *repaired*: values are evicted at the peak until they fit. The best policy is
*filled up*: it keeps more values while it still fits. The solution has the time and peak of the method's own schedule
beside the final one, and a note if the method could not handle the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ...units import format_bytes
from .base import CLOCK, Problem, Solution, Status, keeping_everything, register, with_decisions
from .choices import Policy
from .greedy import evict, keep_more, segment_policies
from .model import Replay, StepModel, decisions

PROPOSING_SHARE = 0.6  # of the time limit, for the method's proposals; the rest is for repairs and filling up
REPAIR_SHARE = 0.5  # of the time left after the proposals, for each policy to repair
FILL_SHARE = 0.8  # of the time left at the end, for filling up
MOST_REPAIRED = 4  # policies to repair: those of the smallest peaks


@dataclass
class Search:
    """Holds the incumbent, the best policy within a budget, and the best proven bound."""

    problem: Problem  # the problem to solve
    best: Replay | None = None  # the fastest policy found that fits
    bound_ms: float = 0.0  # proven lower bound on the recompute time
    is_infeasible: bool = False  # proven: no schedule fits
    proposed: Replay | None = None  # the method's own best schedule, see `Solution.proposed_ms`
    notes: list[str] = field(default_factory=list)  # what the method could not do, and what it did instead
    model: StepModel = field(init=False)  # the choices of the problem, and their replays

    def __post_init__(self) -> None:
        self._start = time.monotonic()  # only reports use the clock
        self.model = StepModel(self.problem)

    @property
    def limit(self) -> int:
        """The budget, in bytes."""
        return self.problem.budget_bytes

    def left_s(self) -> float:
        """Seconds of work left."""
        return self.model.work.left_s(self.problem.options.time_limit_s)

    def within(self, share: float) -> float:
        """Return the deadline, in seconds of work, at which a share of the remaining work is done."""
        return self.model.work.done_s + share * self.left_s()

    def offer(self, candidate: Replay) -> None:
        """Make a policy the incumbent if it fits and is better."""
        if candidate.peak_bytes <= self.limit and (self.best is None or candidate.rank < self.best.rank):
            self.best = candidate
            self._show_progress()

    def fill(self, start: Replay, deadline: float) -> None:
        """Keep more values of a policy that fits, and offer the result."""
        self.offer(keep_more(self.model, start, self.limit, deadline))

    def repair(self, policy: Policy, deadline: float) -> None:
        """Evict from a policy until it fits, fill it up again, and offer it."""
        last = None
        for last in evict(self.model, policy, self.limit, deadline):
            if self.best is not None and last.recompute_ms > 1.5 * self.best.recompute_ms:
                return  # evictions only add time, and filling up rarely wins back a third
        if last is not None and last.peak_bytes <= self.limit:
            self.fill(last, deadline)

    def take(self, policy: Policy, repaired_excess: float, deadline: float) -> Replay:
        """Offer a policy; repair it if it exceeds the budget by at most a share; return its replay."""
        replayed = self.model.replay(policy)
        self.offer(replayed)
        if self.limit < replayed.peak_bytes <= (1 + repaired_excess) * self.limit:
            self.repair(policy, deadline)
        return replayed

    def raise_bound(self, bound_ms: float) -> None:
        """Store a proven bound if it is higher than the present one."""
        if bound_ms > self.bound_ms:
            self.bound_ms = bound_ms
            self._show_progress()

    def _show_progress(self) -> None:
        if self.problem.options.progress is not None:
            self.problem.options.progress(math.inf if self.best is None else self.best.recompute_ms, self.bound_ms)

    @property
    def is_done(self) -> bool:
        """Whether the search is over: the incumbent is proven within the gap, or it is proven that nothing fits."""
        if self.is_infeasible:
            return True
        return self.best is not None and self.best.recompute_ms <= self.bound_ms + self.problem.gap_ms

    def answer(self, name: str) -> Solution:
        """Return the solution, with time and peak from the independent simulator."""
        stopped_by = "time limit" if self.left_s() <= 0 else "end of the search"
        if self.is_done:
            stopped_by = "proof"
        elif self.model.work.is_cut:
            stopped_by = CLOCK
        answer = Solution(
            strategy=name,
            status=Status.INFEASIBLE if self.is_infeasible else Status.NOT_FOUND,
            bound_ms=self.bound_ms,
            stopped_by=stopped_by,
            solve_s=time.monotonic() - self._start,
            work_s=self.model.work.done_s,
            proposed_ms=0.0 if self.proposed is None else self.proposed.recompute_ms,
            proposed_bytes=0 if self.proposed is None else self.proposed.peak_bytes,
            note=" ".join(self.notes),
        )
        if self.best is None or self.is_infeasible:
            return answer
        answer = replace(answer, status=Status.OPTIMAL if self.is_done else Status.FEASIBLE)
        return with_decisions(self.problem, answer, decisions(self.model, self.best.rows))


Find = TypeVar("Find", bound=Callable[[Search], Iterator[Policy] | None])


def strategy(name: str, needs_programs: bool = False) -> Callable[[Find], Find]:
    """Register a function as a strategy; it is not called if keeping everything fits.

    The function offers schedules to the search or, as the method of a paper does, yields policies to replay.
    """

    def add(find: Find) -> Find:
        def solve(problem: Problem) -> Solution:
            search = Search(problem)
            if search.model.keep_all_bytes <= problem.budget_bytes:
                return keeping_everything(problem)
            proposed = find(search)
            if proposed is not None:
                passing = _take(search, proposed)
                if search.best is None and not search.is_infeasible:
                    _repair(search, passing[:MOST_REPAIRED], name)
                if search.best is not None and not search.is_done:
                    search.fill(search.best, search.within(FILL_SHARE))
            return search.answer(name)

        register(name, solve, needs_programs)
        return find

    return add


@strategy("none")
def none(search: Search) -> None:
    """Find nothing: `strategy` keeps everything, as eager training does, if that fits the budget."""


# ---------------------------------------------------------------- segments


def try_segments(search: Search, deadline: float) -> None:
    """Fill up the two fastest segmentations that fit; if none fits, repair the one of the smallest peak."""
    replayed = sorted(map(search.model.replay, segment_policies(search.model)), key=lambda r: r.rank)
    fitting = [r for r in replayed if r.peak_bytes <= search.limit]
    if not fitting:
        search.repair(min(replayed, key=lambda r: r.peak_bytes).policy, deadline)
    for start in fitting[:2]:
        search.fill(start, deadline)


def try_evictions(search: Search, deadline: float) -> None:
    """Repair all segmentations: each start leads to other evictions."""
    for policy in segment_policies(search.model):
        if search.model.work.is_past(deadline) or search.is_done:
            return
        search.repair(policy, deadline)


@strategy("segments")
def segments(search: Search) -> None:
    """Fill up segmentations, then repair each; solves no programs."""
    try_segments(search, search.within(0.5))
    try_evictions(search, search.within(1.0))


# ---------------------------------------------------------------- the methods of the papers


def _take(search: Search, proposed: Iterator[Policy]) -> list[Replay]:
    """Offer each policy, and store the best in `proposed`; return those above the budget, the smallest peak first."""
    passing, seen, deadline_s = list[Replay](), set[Policy](), (1 - PROPOSING_SHARE) * search.left_s()
    for policy in proposed:
        if policy not in seen:
            seen.add(policy)
            replayed = search.take(policy, 0.0, 0.0)
            if replayed.peak_bytes > search.limit:
                passing.append(replayed)
            elif search.proposed is None or replayed.rank < search.proposed.rank:
                search.proposed = replayed
        if search.is_done or search.left_s() < deadline_s:
            break
    passing.sort(key=lambda r: (r.peak_bytes, r.rank))
    search.proposed = search.proposed or next(iter(passing), None)
    return passing


def _repair(search: Search, passing: list[Replay], name: str) -> None:
    """Repair policies until one fits; if none does, try segments."""
    for replayed in passing:
        search.repair(replayed.policy, search.within(REPAIR_SHARE))
        if search.best is not None:
            peak = format_bytes(replayed.peak_bytes)
            search.notes.append(f"No schedule of {name} fits; values were evicted from the one that peaks at {peak}.")
            return
    try_segments(search, search.within(REPAIR_SHARE))
    if search.best is None:
        try_evictions(search, search.within(1.0))
    if search.best is not None:
        search.notes.append(f"No schedule of {name} fits, not even after evictions; `segments` found this one.")
