"""Several methods on one step, under several budgets: their schedules, by the simulator, and proven bounds.

A bound that one method has proved for a budget holds for all methods, and for every smaller budget. So each distance to
the bound is known only when all are done, and `Comparison` computes it from the outcomes so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .solvers.base import Problem, Solution, Status, replay, strategy_names
from .solvers.model import StepModel
from .solvers.turn_point import lower_bound
from .solvers.worker import apart

BOUND_SHARE = 0.2  # of a solve's time limit, for a bound that no method has to prove
PLAIN = "none"  # keeps everything: plain training, which is no method to compare


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one method under one budget.

    Attributes:
        budget_bytes: Bytes that the step may add to resident ones.
        method: Name of the strategy.
        fits: Whether the simulated peak is within the budget.
        recompute_ms: Simulated time of recomputation, 0 where nothing was found.
        peak_bytes: Simulated peak above resident bytes, 0 where nothing was found.
        bound_ms: Lower bound on the recompute time that the method has proved, 0 if none.
        status: How the solve ended.
        stopped_by: Why it ended, in words.
        solve_s: Seconds taken.
        proposed_ms: Recompute time of the method's own schedule, before anything was evicted or kept beyond it.
        proposed_bytes: The peak of that schedule, 0 where it has none.
        note: What the method could not serve, and the substitute that it took; empty where it served all.
    """

    budget_bytes: int
    method: str
    fits: bool
    recompute_ms: float
    peak_bytes: int
    bound_ms: float
    status: Status
    stopped_by: str
    solve_s: float
    proposed_ms: float = 0.0
    proposed_bytes: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outcomes of one step.

    Attributes:
        step_ms: Time of the step without recomputation.
        outcomes: Outcomes so far, in any order.
        bounds: For each budget the recompute time below which no schedule exists, None where none fits.
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
        """Budgets of which anything is known, the largest first."""
        known = {*(o.budget_bytes for o in self.outcomes), *(budget for budget, _ in self.bounds)}
        return sorted(known, reverse=True)

    def is_impossible(self, budget_bytes: int) -> bool:
        """Whether it is proven that no schedule fits a budget."""
        proofs = {budget for budget, bound_ms in self.bounds if bound_ms is None}
        proofs |= {o.budget_bytes for o in self.outcomes if o.status is Status.INFEASIBLE}
        return any(budget_bytes <= budget for budget in proofs)

    def bound_ms(self, budget_bytes: int) -> float:
        """Return the best proven bound on the recompute time of every schedule within a budget."""
        known = [*self.bounds, *((o.budget_bytes, o.bound_ms) for o in self.outcomes)]
        return max((ms for budget, ms in known if ms is not None and budget >= budget_bytes), default=0.0)

    def bound_overhead(self, budget_bytes: int) -> float:
        """Return that bound as a share of the step's time."""
        return self.bound_ms(budget_bytes) / self.step_ms if self.step_ms else 0.0

    def overhead(self, outcome: Outcome) -> float:
        """Return the extra time, a share of the step's."""
        return outcome.recompute_ms / self.step_ms if self.step_ms else 0.0

    def distance(self, outcome: Outcome) -> float:
        """Return how far a time is above the best proven bound, a share of the step's time."""
        above_ms = outcome.recompute_ms - self.bound_ms(outcome.budget_bytes)
        return max(0.0, above_ms) / self.step_ms if self.step_ms else 0.0


def methods_to_compare() -> tuple[str, ...]:
    """List the methods that are compared where none are named."""
    return tuple(name for name in strategy_names() if name != PLAIN)


def compare(
    problem: Problem, methods: Sequence[str], starting: Callable[[str], None] = lambda method: None
) -> Iterator[Outcome]:
    """Solve a problem by one method after the other, each in a process of its own and within the time limit.

    Args:
        problem: The step, its budget, and the time limit of each solve.
        methods: Names of strategies.
        starting: Called with each method before it starts.

    Yields:
        Each outcome as soon as it is known.

    Raises:
        ConfigurationError: If there is no method of a name.
    """
    for method in methods:
        starting(method)
        yield outcome_of(problem, method, apart(method)(problem))


def proven_ms(problem: Problem) -> float | None:
    """Return a lower bound on the recompute time of every schedule within the budget, None where none fits."""
    return lower_bound(StepModel(problem), problem.budget_bytes, BOUND_SHARE * problem.options.time_limit_s)


def outcome_of(problem: Problem, method: str, solution: Solution) -> Outcome:
    """Judge the solution of a method by the independent simulator."""
    simulation = replay(problem, solution.recompute) if solution.recompute else None
    return Outcome(
        budget_bytes=problem.budget_bytes,
        method=method,
        fits=simulation is not None and simulation.peak_bytes <= problem.budget_bytes,
        recompute_ms=0.0 if simulation is None else simulation.recompute_ms,
        peak_bytes=0 if simulation is None else simulation.peak_bytes,
        bound_ms=solution.bound_ms,
        status=solution.status,
        stopped_by=solution.stopped_by,
        solve_s=solution.solve_s,
        proposed_ms=solution.proposed_ms,
        proposed_bytes=solution.proposed_bytes,
        note=solution.note,
    )
