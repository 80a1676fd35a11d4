"""One step under several budgets: the curve of the solutions of one strategy, and the comparison of several methods.

A schedule for one budget fits every larger budget. A bound for one budget holds for every smaller budget and for all
methods. So a curve answers a new budget at once, a larger budget never gives a slower step, and each further solve only
improves the curve. `Comparison` computes the distance of a method to the bound from the outcomes so far; only the last
outcome settles it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from .solvers.base import (
    Problem,
    Solution,
    Status,
    Strategy,
    get_strategy,
    keeping_everything,
    strategy_names,
    with_decisions,
)
from .solvers.least_memory import solve_least_memory
from .solvers.model import StepModel
from .solvers.turn_point import lower_bound
from .solvers.worker import apart

BOUND_SHARE = 0.2  # share of a solve's time limit, to prove a bound apart from the methods
DEFAULT_POINTS = 10


@dataclass(frozen=True)
class Curve:
    """The known solutions and bounds of a step, for any budget."""

    problem: Problem  # the step; the budget of the problem is not used
    points: tuple[Solution, ...]  # solutions, peak ascending and time descending
    # Pairs of a budget and a proven lower bound on the extra time under it, in milliseconds; budgets ascending.
    bounds: tuple[tuple[int, float], ...]
    least_bytes: int = 0  # proven: no schedule has a smaller peak; 0 if nothing is proven

    def solution(self, budget_bytes: int) -> Solution:
        """Return the fastest known solution within a budget, with the best bound that holds for it.

        Its status is INFEASIBLE if it is proven that no schedule fits, NOT_FOUND if no known solution fits.
        """
        bound = max((ms for budget, ms in self.bounds if budget >= budget_bytes), default=0.0)
        if budget_bytes < self.least_bytes:
            return Solution("curve", Status.INFEASIBLE, bound_ms=bound, stopped_by="proof")
        fitting = [point for point in self.points if point.peak_bytes <= budget_bytes]
        if not fitting:
            return Solution("curve", Status.NOT_FOUND, bound_ms=bound, stopped_by="end of the search")
        return replace(fitting[-1], solve_s=0.0).with_bound(bound, self.problem.gap_ms)

    def with_solution(self, budget_bytes: int, solution: Solution) -> Curve:
        """Add the solution of one budget: its schedule, its bound, or the proof that nothing fits."""
        points = [*self.points, solution] if solution.is_feasible else [*self.points]
        fastest = list[Solution]()  # points that are faster than every point of a smaller peak
        for point in sorted(points, key=lambda p: (p.peak_bytes, p.extra_ms)):
            if not fastest or point.extra_ms < fastest[-1].extra_ms:
                fastest.append(point)
        bounds = tuple(sorted({*self.bounds, (budget_bytes, solution.bound_ms)}))
        least = max(self.least_bytes, budget_bytes + 1) if solution.status is Status.INFEASIBLE else self.least_bytes
        return Curve(self.problem, tuple(fastest), bounds, least)


def curve(problem: Problem, points: int = DEFAULT_POINTS, solve: Strategy | None = None) -> Curve:
    """Solve a step for budgets spread evenly from the least memory found to the peak of eager training.

    The solves share the problem's time limit. The search for the least memory ends early within the problem's budget.
    """
    smallest, everything = replace(solve_least_memory(problem), status=Status.FEASIBLE), keeping_everything(problem)
    solved = Curve(problem, (smallest,), ())
    between_bytes = everything.peak_bytes - smallest.peak_bytes
    options = replace(problem.options, time_limit_s=problem.options.time_limit_s / points)
    solve = solve or get_strategy("portfolio")
    for budget in (smallest.peak_bytes + between_bytes * i // points for i in range(points)):
        solved = solved.with_solution(budget, solve(replace(problem, budget_bytes=budget, options=options)))
    return solved.with_solution(everything.peak_bytes, everything)


# ---------------------------------------------------------------- several methods


@dataclass(frozen=True, slots=True)
class Outcome(Solution):
    """The solution of one method under one budget, with time and peak from the simulator (0 without a schedule)."""

    budget_bytes: int = 0  # bytes that the step may add to resident ones
    method: str = ""  # name of the strategy that solved
    fits: bool = False  # whether the simulated peak is within the budget


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outcomes of one step so far, in any order.

    `bounds` are pairs of a budget and a proven lower bound on the recompute time, None if no schedule fits.
    """

    step_ms: float
    outcomes: tuple[Outcome, ...] = ()
    bounds: tuple[tuple[int, float | None], ...] = ()

    def under(self, budget_bytes: int) -> list[Outcome]:
        """Return the outcomes of one budget: the fastest first, those that don't fit last."""
        outcomes = [outcome for outcome in self.outcomes if outcome.budget_bytes == budget_bytes]
        return sorted(outcomes, key=lambda o: (not o.fits, o.recompute_ms, o.solve_s))

    @property
    def budgets(self) -> list[int]:
        """Budgets that have an outcome or a bound, the largest first."""
        budgets = {*(o.budget_bytes for o in self.outcomes), *(budget for budget, _ in self.bounds)}
        return sorted(budgets, reverse=True)

    def is_impossible(self, budget_bytes: int) -> bool:
        """Whether it is proven that no schedule fits a budget."""
        proofs = {budget for budget, bound_ms in self.bounds if bound_ms is None}
        proofs |= {o.budget_bytes for o in self.outcomes if o.status is Status.INFEASIBLE}
        return any(budget_bytes <= budget for budget in proofs)

    def bound_ms(self, budget_bytes: int) -> float:
        """Return the best proven bound on the recompute time of every schedule within a budget."""
        bounds = [*self.bounds, *((o.budget_bytes, o.bound_ms) for o in self.outcomes)]
        return max((ms for budget, ms in bounds if ms is not None and budget >= budget_bytes), default=0.0)

    def bound_overhead(self, budget_bytes: int) -> float:
        """Return `bound_ms` as a share of the step's time."""
        return self.bound_ms(budget_bytes) / self.step_ms if self.step_ms else 0.0

    def overhead(self, outcome: Outcome) -> float:
        """Return the recompute time of an outcome as a share of the step's time."""
        return outcome.recompute_ms / self.step_ms if self.step_ms else 0.0

    def distance(self, outcome: Outcome) -> float:
        """Return how far an outcome is above the best proven bound, as a share of the step's time."""
        above_ms = outcome.recompute_ms - self.bound_ms(outcome.budget_bytes)
        return max(0.0, above_ms) / self.step_ms if self.step_ms else 0.0


def methods_to_compare() -> tuple[str, ...]:
    """List the methods to compare if the user names none."""
    return tuple(name for name in strategy_names() if name != "none")  # "none" is eager training


def proven_ms(problem: Problem) -> float | None:
    """Return a lower bound on the recompute time of every schedule within the budget, None if no schedule fits."""
    return lower_bound(StepModel(problem), problem.budget_bytes, BOUND_SHARE * problem.options.time_limit_s)


def outcome_of(problem: Problem, method: str) -> Outcome:
    """Solve by a method in a separate process, within the time limit; replay the solution by the independent simulator.

    Raises:
        ConfigurationError: If there is no method of that name.
    """
    solution = apart(method)(problem)
    judged = with_decisions(problem, solution, solution.recompute) if solution.recompute else solution
    values = {field.name: getattr(judged, field.name) for field in fields(Solution)}
    fits = bool(solution.recompute) and judged.peak_bytes <= problem.budget_bytes
    return Outcome(**values, budget_bytes=problem.budget_bytes, method=method, fits=fits)
