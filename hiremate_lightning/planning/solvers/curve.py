"""The curve from budget to time: the solutions of a few budgets that no other one beats in both memory and time.

A schedule for one budget fits every larger one, and a bound for one budget holds for every smaller one that is. So the
curve answers a new budget at once, a larger budget never gives a slower step, and solving one more budget only improves
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .base import Problem, Solution, Status, Strategy, get_strategy
from .least_memory import smallest_budget
from .model import StepModel

DEFAULT_POINTS = 10


@dataclass(frozen=True)
class Curve:
    """The known solutions and bounds of a step, for any budget.

    Attributes:
        problem: The step; its budget doesn't count.
        points: Solutions, peak ascending and time descending.
        bounds: Pairs of a budget and the proven least extra time under it, in milliseconds; budgets ascending.
        least_bytes: Below it no schedule exists, as far as proven; 0 if nothing is.
    """

    problem: Problem
    points: tuple[Solution, ...]
    bounds: tuple[tuple[int, float], ...]
    least_bytes: int = 0

    def solution(self, budget_bytes: int) -> Solution:
        """Return the fastest known solution within a budget, with the best bound that holds for it.

        Args:
            budget_bytes: Bytes that the step may add to resident ones.

        Returns:
            A solution; INFEASIBLE where that is proven, NOT_FOUND where no known one fits.
        """
        bound = max((ms for budget, ms in self.bounds if budget >= budget_bytes), default=0.0)
        if budget_bytes < self.least_bytes:
            return Solution("curve", Status.INFEASIBLE, bound_ms=bound, stopped_by="proof")
        fitting = [point for point in self.points if point.peak_bytes <= budget_bytes]
        if not fitting:
            return Solution("curve", Status.NOT_FOUND, bound_ms=bound, stopped_by="end of the search")
        point, gap_ms = fitting[-1], self.problem.options.gap * self.problem.step_ms
        proven = point.extra_ms <= bound + gap_ms
        status = Status.OPTIMAL if proven else Status.FEASIBLE
        ended = "proof" if proven else "end of the search" if point.stopped_by == "proof" else point.stopped_by
        return replace(point, status=status, bound_ms=min(bound, point.extra_ms), stopped_by=ended, solve_s=0.0)

    def with_solution(self, budget_bytes: int, solution: Solution) -> Curve:
        """Add the solution of one budget: its schedule, its bound, or the proof that nothing fits."""
        points = [*self.points, solution] if solution.is_feasible else [*self.points]
        fastest = list[Solution]()  # those that are faster than all smaller ones
        for point in sorted(points, key=lambda p: (p.peak_bytes, p.extra_ms)):
            if not fastest or point.extra_ms < fastest[-1].extra_ms:
                fastest.append(point)
        bounds = tuple(sorted({*self.bounds, (budget_bytes, solution.bound_ms)}))
        least = max(self.least_bytes, budget_bytes + 1) if solution.status is Status.INFEASIBLE else self.least_bytes
        return Curve(self.problem, tuple(fastest), bounds, least)


class Remembering:
    """A strategy that answers from earlier solutions, where these are as good as a new solve.

    Only the solutions of the latest step are remembered. A smaller budget never gives a faster plan than a larger one,
    whatever the time limits left unproven.

    Attributes:
        strategy: The strategy that solves.
        curve: Solutions of the latest step.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.curve: Curve | None = None
        self._seconds: dict[int, float] = {}  # spent at most on each budget of that step

    def __call__(self, problem: Problem) -> Solution:
        """Solve a problem, or answer at once where the answer is proven, or the same was asked before."""
        known = self.curve
        if known is None or _named(known.problem) != _named(problem):
            known = Curve(problem, (), ())
            self._seconds = {}
        answer = known.solution(problem.budget_bytes)
        limit_s = problem.options.time_limit_s
        was_asked = answer.is_feasible and self._seconds.get(problem.budget_bytes, 0.0) >= limit_s
        if was_asked or answer.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return answer
        fresh = self.strategy(problem)
        self._seconds[problem.budget_bytes] = limit_s
        self.curve = known.with_solution(problem.budget_bytes, fresh)
        answer = self.curve.solution(problem.budget_bytes)
        return replace(answer, solve_s=fresh.solve_s) if answer.is_feasible else fresh


def _named(problem: Problem) -> tuple[object, ...]:
    return problem.graph, problem.profile, problem.host


def curve(problem: Problem, budgets: Sequence[int] = (), solve: Strategy | None = None) -> Curve:
    """Solve a step for several budgets, the smallest first.

    Args:
        problem: The step; the time limit is that of all budgets together.
        budgets: Bytes; by default spread evenly from the smallest found to the bytes of keeping everything.
        solve: The strategy that solves each; None for the portfolio, in this process.

    Returns:
        The curve, which includes the schedule of least memory and plain training.
    """
    smallest = smallest_budget(problem)
    whole_bytes = StepModel(problem).keep_all_bytes
    smallest = replace(smallest, status=Status.FEASIBLE)
    solved = Curve(problem, (smallest,), ())
    between_bytes = whole_bytes - smallest.peak_bytes
    spread = [smallest.peak_bytes + between_bytes * i // DEFAULT_POINTS for i in range(DEFAULT_POINTS)]
    chosen = sorted(budgets) or spread
    limit_s = problem.options.time_limit_s / max(1, len(chosen))
    options = replace(problem.options, time_limit_s=limit_s)
    solve = solve or get_strategy("portfolio")
    for budget in chosen:
        solved = solved.with_solution(budget, solve(replace(problem, budget_bytes=budget, options=options)))
    everything = get_strategy("none")(replace(problem, budget_bytes=whole_bytes))
    return solved.with_solution(whole_bytes, everything)
