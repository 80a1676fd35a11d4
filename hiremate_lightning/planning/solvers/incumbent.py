"""The best schedule so far within a budget, which every search collects, improves and answers with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps

from ...records.graph import Graph
from ...records.schedule import keep_all
from .base import CLOCK, Problem, Solution, Status, Strategy, replay, strategy
from .choices import Policy
from .decisions import decisions
from .greedy import ReplayedPolicy, evict, keep_more
from .model import StepModel


@dataclass
class Search:
    """Collects the best policy within a budget, and the best proven bound.

    Attributes:
        problem: The problem.
        model: Its storages, and their replay.
        start: When it began, by `time.monotonic`; only reports read it.
        best: The fastest policy found that fits.
        bound_ms: Proven lower bound on the recompute time.
        is_infeasible: Proven: no schedule fits.
        proposed: The best schedule of a method's own, see `Solution`.
        notes: What the method could not serve, and the substitute that it took.
    """

    problem: Problem
    model: StepModel
    start: float
    best: ReplayedPolicy | None = None
    bound_ms: float = 0.0
    is_infeasible: bool = False
    proposed: ReplayedPolicy | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def limit(self) -> int:
        """The budget, in bytes."""
        return self.problem.budget_bytes

    @property
    def gap_ms(self) -> float:
        """The gap at which solving stops, in milliseconds."""
        return self.problem.options.gap * self.problem.step_ms

    def left_s(self) -> float:
        """Seconds of work left."""
        return self.model.work.left_s(self.problem.options.time_limit_s)

    def within(self, share: float) -> float:
        """Return the seconds of work at which a share of the remaining work will be done."""
        return self.model.work.done_s + share * self.left_s()

    def offer(self, candidate: ReplayedPolicy) -> bool:
        """Take a policy if it fits and is better; return whether it was taken."""
        if candidate.replay.peak_bytes > self.limit or (self.best is not None and self.best.rank <= candidate.rank):
            return False
        self.best = candidate
        self._tell()
        return True

    def repair(self, policy: Policy, deadline: float) -> None:
        """Evict from a policy until it fits, fill it up again, and offer it."""
        last = None
        for last in evict(self.model, policy, self.limit, deadline):
            if self.best is not None and last.replay.recompute_ms > 1.5 * self.best.replay.recompute_ms:
                return  # evictions only add time; filling up rarely wins back a third
        if last is not None and last.replay.peak_bytes <= self.limit:
            self.offer(keep_more(self.model, last, self.limit, deadline))

    def say(self, note: str) -> None:
        """Note what a method can't serve, or the substitute that it took."""
        self.notes.append(note)

    def raise_bound(self, bound_ms: float) -> None:
        """Take a proven bound if it is better."""
        if bound_ms > self.bound_ms:
            self.bound_ms = bound_ms
            self._tell()

    def _tell(self) -> None:
        if self.problem.options.progress is not None:
            best_ms = math.inf if self.best is None else self.best.replay.recompute_ms
            self.problem.options.progress(best_ms, self.bound_ms)

    @property
    def is_done(self) -> bool:
        """Whether the search is over: the best is proven up to the gap, or it is proven that nothing fits."""
        if self.is_infeasible:
            return True
        return self.best is not None and self.best.replay.recompute_ms <= self.bound_ms + self.gap_ms

    def answer(self, strategy: str) -> Solution:
        """Return the solution, with the time and the peak that the independent simulator finds."""
        seconds = time.monotonic() - self.start
        if self.is_done:
            stopped_by = "proof"
        elif self.model.work.is_cut:
            stopped_by = CLOCK
        else:
            stopped_by = "time limit" if self.left_s() <= 0 else "end of the search"
        own = self.proposed
        answer = Solution(
            strategy=strategy,
            status=Status.INFEASIBLE if self.is_infeasible else Status.NOT_FOUND,
            bound_ms=self.bound_ms,
            stopped_by=stopped_by,
            solve_s=seconds,
            work_s=self.model.work.done_s,
            proposed_ms=0.0 if own is None else own.replay.recompute_ms,
            proposed_bytes=0 if own is None else own.replay.peak_bytes,
            note=" ".join(self.notes),
        )
        if self.best is None or self.is_infeasible:
            return answer
        recompute = decisions(self.model, self.best.replay.rows)
        simulated = replay(self.problem, recompute)
        return replace(
            answer,
            status=Status.OPTIMAL if self.is_done else Status.FEASIBLE,
            recompute=recompute,
            recompute_ms=simulated.recompute_ms,
            peak_bytes=simulated.peak_bytes,
            bound_ms=min(self.bound_ms, simulated.recompute_ms),
        )


def searching(
    name: str, needs_programs: bool = False, is_ablation: bool = False
) -> Callable[[Callable[[Search], None]], Strategy]:
    """Register a search as a strategy: it answers with the best it has found, or at once where everything fits.

    Args:
        name: Name to look it up by.
        needs_programs: Whether it solves mixed-integer or linear programs.
        is_ablation: Whether it is a part of the default by itself, which no list of strategies names.
    """

    def register(find: Callable[[Search], None]) -> Strategy:
        @strategy(name, needs_programs, is_ablation)
        @wraps(find)
        def solve(problem: Problem) -> Solution:
            start = time.monotonic()
            search = Search(problem, StepModel(problem), start)
            if search.model.keep_all_bytes <= problem.budget_bytes:
                return keep_everything(problem.graph, search.model.keep_all_bytes)
            find(search)
            return search.answer(name)

        return solve

    return register


def keep_everything(graph: Graph, peak_bytes: int) -> Solution:
    """Return the solution that recomputes nothing: nothing is faster."""
    return Solution("none", Status.OPTIMAL, keep_all(graph), 0.0, peak_bytes, stopped_by="proof")
