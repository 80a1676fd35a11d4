"""The curve: what it gives fits and is never slower than solving again; monotone, and quick for a new budget."""

from __future__ import annotations

import time

import pytest

from hiremate_lightning.planning.comparing import Curve, curve
from hiremate_lightning.planning.solutions import remembering
from hiremate_lightning.planning.solvers.base import Problem, Solution, Status, get_strategy, replay
from hiremate_lightning.planning.solvers.least_memory import solve_least_memory
from hiremate_lightning.records.schedule import keep_all
from tests.helpers import problem_of
from tests.tiny import chain, transformer


@pytest.fixture(scope="module")
def found() -> Curve:
    return curve(problem_of(transformer(4), 0, time_limit_s=10.0))


def test_points_are_smaller_or_faster_than_each_other(found: Curve):
    peaks = [point.peak_bytes for point in found.points]
    times = [point.recompute_ms for point in found.points]
    assert peaks == sorted(set(peaks))
    assert times == sorted(set(times), reverse=True)
    assert times[-1] == 0
    assert len(peaks) >= 4


def test_a_larger_budget_is_not_slower_and_everything_fits(found: Curve):
    least, whole = found.points[0].peak_bytes, found.points[-1].peak_bytes
    times = []
    for budget in range(least, whole + 1, (whole - least) // 50):
        solution = found.solution(budget)
        simulated = replay(found.problem, solution.recompute)
        assert simulated.peak_bytes <= budget
        assert simulated.recompute_ms == pytest.approx(solution.recompute_ms)
        assert solution.bound_ms <= solution.recompute_ms
        times.append(solution.recompute_ms)
    assert times == sorted(times, reverse=True)


def test_bounds_of_the_curve_are_not_refuted_by_solving(found: Curve):
    least, whole = found.points[0].peak_bytes, found.points[-1].peak_bytes
    for tenths in (3, 5, 8):
        budget = least + (whole - least) * tenths // 10
        problem = Problem(found.problem.graph, found.problem.profile, budget)
        solved = get_strategy("portfolio")(problem)
        assert found.solution(budget).bound_ms <= solved.recompute_ms + 1e-6


def test_a_new_budget_of_a_solved_chain_takes_no_time(found: Curve):
    start = time.monotonic()
    for budget in range(found.points[0].peak_bytes, found.points[-1].peak_bytes, 10_000):
        found.solution(budget)
    assert time.monotonic() - start < 1.0
    solution = found.solution(found.points[0].peak_bytes - 1)
    assert solution.status in (Status.NOT_FOUND, Status.INFEASIBLE)
    assert not solution.recompute


def test_solving_one_more_budget_only_improves_it():
    problem = problem_of(chain(12), 0, time_limit_s=5.0)
    coarse = curve(problem)
    budget = (coarse.points[0].peak_bytes + coarse.points[-1].peak_bytes) // 2
    solved = get_strategy("portfolio")(Problem(problem.graph, problem.profile, budget))
    finer = coarse.with_solution(budget, solved)
    for limit in range(coarse.points[0].peak_bytes, coarse.points[-1].peak_bytes, 10):
        before, after = coarse.solution(limit), finer.solution(limit)
        assert after.recompute_ms <= before.recompute_ms
        assert after.bound_ms >= before.bound_ms or after.recompute_ms < before.recompute_ms


def test_what_was_found_before_is_remembered():
    step = transformer(3)
    whole = problem_of(step, 10**9)
    peak = replay(whole, keep_all(whole.graph)).peak_bytes
    asked = []

    def solve(problem: Problem) -> Solution:
        asked.append(problem.budget_bytes)
        solve = solve_least_memory if len(asked) == 2 else get_strategy("portfolio")  # the second solve is a weak one
        return solve(problem)

    solve_once = remembering(solve, "portfolio")
    smaller, larger = peak * 70 // 100, peak * 75 // 100
    first = solve_once(problem_of(step, smaller))
    second = solve_once(problem_of(step, larger))
    assert solve_least_memory(problem_of(step, larger)).recompute_ms > first.recompute_ms
    assert second.recompute_ms <= first.recompute_ms
    assert solve_once(problem_of(step, smaller)).status is Status.OPTIMAL
    assert asked == [smaller, larger]
    assert (second.stopped_by == "proof") == (second.status is Status.OPTIMAL)


def test_the_same_problem_is_solved_again_only_with_more_time():
    step = transformer(3)
    budget = replay(problem_of(step, 0), keep_all(step[0])).peak_bytes * 80 // 100
    asked = []

    def solve(problem: Problem) -> Solution:
        asked.append(problem.options.time_limit_s)
        return solve_least_memory(problem)

    solve_once = remembering(solve, "portfolio")
    found = [solve_once(problem_of(step, budget, time_limit_s=limit)) for limit in (2.0, 2.0, 1.0, 3.0)]
    assert found[0].status is Status.FEASIBLE
    assert len({solution.recompute for solution in found}) == 1
    assert asked == [2.0, 3.0]


def test_another_step_is_solved_anew():
    solve_once = remembering(get_strategy("portfolio"), "portfolio")
    for blocks in (3, 2):
        step = transformer(blocks)
        budget = replay(problem_of(step, 0), keep_all(step[0])).peak_bytes * 80 // 100
        solution = solve_once(problem_of(step, budget))
        assert replay(problem_of(step, budget), solution.recompute).peak_bytes <= budget
