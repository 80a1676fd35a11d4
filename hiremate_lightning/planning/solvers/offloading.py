"""A strategy whose answers may have values offloaded: its own answer, or a faster one that offloads some values.

The schedule of a larger budget recomputes less. With its excess offloaded, it may be faster than the schedule of the
budget itself. So a strategy answers the budget first, exactly as it does where nothing may be offloaded. Then it
answers a few larger ones, and the second pass (`offload.py`) offloads the excess of each of these, and of plain
training. The fastest is taken where it gains clearly; else the first answer stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import wraps

from ...records.schedule import keep_all
from ...records.step import Decisions
from .base import Problem, Solution, Status, Strategy, offload_proposals
from .least_memory import smallest_budget
from .model import StepModel
from .offload import Choice, fastest_choice, host_of, least_bytes, offload_bound

SHARES = (0.25, 0.5, 0.75)  # of the bytes that may be offloaded: the budgets between that are solved
SOLVES_SHARE, BOUND_SHARE = 0.5, 0.2  # of the time limit, for all of these together and for the bound
MOST_SHARE = 2.0  # of the time limit that an answer may take, with the proposals of a paper's method


def with_offloading(strategy: Strategy) -> Strategy:
    """Wrap a strategy: where a problem has memory of the host, its answers may have values offloaded."""

    @wraps(strategy)
    def solve(problem: Problem) -> Solution:
        alone = strategy(replace(problem, host=None))
        if not can_offload(problem) or (alone.is_feasible and alone.is_plain):
            return alone
        return _Improving(problem, strategy, alone).answer()

    return solve


def can_offload(problem: Problem) -> bool:
    """Whether values may be offloaded at all."""
    return host_of(problem).size_bytes > 0 and problem.profile.link is not None


def least_with_offloads(problem: Problem, smallest: Solution) -> Solution:
    """Return the solution of least memory of a step where values may be offloaded.

    Args:
        problem: The step; its budget doesn't count.
        smallest: The solution of least memory where all stays on the device; it is returned where none takes less.
    """
    if not can_offload(problem):
        return smallest
    candidates = [keep_all(problem.graph), smallest.recompute]
    least = least_bytes(problem, candidates)
    if least is None or least >= smallest.peak_bytes:
        return smallest
    choice = fastest_choice(replace(problem, budget_bytes=least), candidates)
    return smallest if choice is None else _chosen(smallest, choice)


def _chosen(solution: Solution, choice: Choice) -> Solution:
    return replace(
        solution,
        status=Status.FEASIBLE,
        recompute=choice.recompute,
        recompute_ms=choice.recompute_ms,
        offloads=choice.offloads,
        wait_ms=choice.wait_ms,
        peak_bytes=choice.peak_bytes,
    )


class _Improving:
    """A search for a solution with values offloaded that is faster than one without.

    Args:
        problem: The problem.
        strategy: Solves budgets where all stays on the device.
        alone: Its solution for the budget.
    """

    def __init__(self, problem: Problem, strategy: Strategy, alone: Solution) -> None:
        self._problem, self._strategy, self._alone = problem, strategy, alone
        self._model = StepModel(problem)
        self._gap_ms = problem.options.gap * problem.step_ms
        self._work_s, self._solve_s = alone.work_s, alone.solve_s

    def answer(self) -> Solution:
        """Return the first answer, or a clearly faster one, with a bound that holds for values offloaded too."""
        limit_s, work = self._problem.options.time_limit_s, self._model.work
        bound_ms = offload_bound(self._model, self._problem.budget_bytes, work.done_s + BOUND_SHARE * limit_s)
        self._work_s += work.done_s
        alone = self._alone
        if bound_ms is None or (alone.is_feasible and alone.extra_ms <= bound_ms + self._gap_ms):
            return self._proven(alone, bound_ms)
        choice = fastest_choice(self._problem, self._candidates())
        gains = choice is not None and (not alone.is_feasible or choice.extra_ms < alone.extra_ms - self._gap_ms)
        return self._proven(_chosen(alone, choice) if choice is not None and gains else alone, bound_ms)

    def _candidates(self) -> Iterator[Decisions]:
        """Yield decisions that keep more than the budget, and some of whose values are to be offloaded."""
        alone, lower_bytes = self._alone, self._problem.budget_bytes
        yield keep_all(self._problem.graph)
        if alone.is_feasible:
            yield alone.recompute
        else:
            smallest = smallest_budget(replace(self._problem, host=None))
            lower_bytes = max(lower_bytes, smallest.peak_bytes)
            yield smallest.recompute
        yield from offload_proposals(alone.strategy, self._problem)
        options = self._problem.options
        each = replace(options, time_limit_s=SOLVES_SHARE * options.time_limit_s / len(SHARES), progress=None)
        for share in SHARES:
            larger_bytes = lower_bytes + int(share * (self._most_bytes() - lower_bytes))
            if larger_bytes > lower_bytes:
                larger = self._strategy(replace(self._problem, budget_bytes=larger_bytes, options=each, host=None))
                self._work_s, self._solve_s = self._work_s + larger.work_s, self._solve_s + larger.solve_s
                if larger.is_feasible:
                    yield larger.recompute

    def _most_bytes(self) -> int:
        """Return the largest budget whose excess can be offloaded before that costs more than it can save."""
        problem, alone, most_bytes = self._problem, self._alone, self._model.keep_all_bytes
        link, offloaded_bytes = problem.profile.link, host_of(problem).size_bytes
        assert link is not None, "can_offload has looked"
        if alone.is_feasible:
            halves = (problem.graph.forward, link.out_bytes_per_ms), (problem.graph.backward, link.in_bytes_per_ms)
            for nodes, bytes_per_ms in halves:
                half_ms = sum(problem.profile.time_ms[node] for node in nodes) + alone.extra_ms
                offloaded_bytes = min(offloaded_bytes, int(half_ms * bytes_per_ms))
        return min(most_bytes, problem.budget_bytes + offloaded_bytes)

    def _proven(self, solution: Solution, bound_ms: float | None) -> Solution:
        """Return a solution with the bound of all plans, including those with values offloaded."""
        solution = replace(solution, work_s=self._work_s, solve_s=self._solve_s)
        if not solution.is_feasible:
            status = Status.INFEASIBLE if bound_ms is None else Status.NOT_FOUND
            return replace(solution, status=status, bound_ms=bound_ms or 0.0)
        proven_ms = min(bound_ms or 0.0, solution.extra_ms)
        is_optimal = solution.extra_ms <= proven_ms + self._gap_ms
        ended = "proof" if is_optimal else "end of the search"
        if solution.stopped_by not in ("", "proof") and not is_optimal:
            ended = solution.stopped_by
        status = Status.OPTIMAL if is_optimal else Status.FEASIBLE
        return replace(solution, status=status, bound_ms=proven_ms, stopped_by=ended)
