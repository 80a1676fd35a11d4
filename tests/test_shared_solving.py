"""Rank 0 solves, the others take its plan where it is of use to them, and nobody waits for a rank that is not there."""

from __future__ import annotations

import json
from dataclasses import replace
from threading import Thread

import pytest

from hiremate_lightning.planning.shared_solving import SharedSolving, digest, shared
from hiremate_lightning.planning.solvers import get_strategy
from hiremate_lightning.planning.solvers.base import Problem, Solution, Status

from .helpers import problem_of
from .tiny import transformer

BUDGET = 2_600_000


class Store:
    """A store in this process."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self.sums: dict[str, int] = {}

    def set(self, key, value):
        self.values[key] = value

    def get(self, key):
        return self.values[key].encode()

    def check(self, keys):
        return all(key in self.values for key in keys)

    def add(self, key, amount):
        self.sums[key] = self.sums.get(key, 0) + amount
        return self.sums[key]


class Lost(Store):
    """A store that is gone with the process that had it."""

    def set(self, key, value):
        raise RuntimeError("connection closed")

    get = check = add = set


class Solver:
    """Counts what it is asked."""

    def __init__(self):
        self.asked = 0

    def __call__(self, problem: Problem) -> Solution:
        self.asked += 1
        return get_strategy("portfolio")(problem)


@pytest.fixture
def store():
    return Store()


def problem(budget_bytes: int = BUDGET) -> Problem:
    return problem_of(transformer(4), budget_bytes)


def solve_on(rank: int, store: Store, *problems: Problem, patience_s: float = 0.0) -> tuple[list[Solution], int]:
    """Solve on one rank; give the solutions, and how many of them it found itself."""
    solver = Solver()
    solve = SharedSolving(solver, store, rank, patience_s)
    return [solve(p) for p in problems], solver.asked


def test_the_other_ranks_take_what_rank_zero_found(store):
    (first,), _ = solve_on(0, store, problem())

    (second,), solved = solve_on(1, store, problem())

    assert solved == 0
    assert (second.recompute, second.peak_bytes) == (first.recompute, first.peak_bytes)
    assert second.status is Status.FEASIBLE
    assert second.bound_ms == 0.0  # proven for the costs of rank 0 only


def test_its_time_is_that_of_the_costs_measured_here(store):
    solve_on(0, store, problem())
    graph, profile = transformer(4)
    slower = replace(profile, time_ms=tuple(2 * t for t in profile.time_ms))

    (first,), _ = solve_on(1, store, problem())
    (second,), _ = solve_on(2, store, problem_of((graph, slower), BUDGET))

    assert second.recompute_ms == pytest.approx(2 * first.recompute_ms)


def test_each_solve_of_a_step_is_answered_by_the_same_of_rank_zero(store):
    firsts, _ = solve_on(0, store, problem(), problem(BUDGET * 9 // 10))

    seconds, solved = solve_on(1, store, problem(), problem(BUDGET * 9 // 10))

    assert solved == 0
    assert [s.recompute for s in seconds] == [s.recompute for s in firsts]
    assert firsts[0].recompute != firsts[1].recompute


def test_a_rank_with_a_smaller_budget_solves_alone_where_the_plan_does_not_fit(store):
    (first,), _ = solve_on(0, store, problem())

    (second,), solved = solve_on(1, store, problem(BUDGET * 9 // 10))

    assert solved == 1
    assert second.peak_bytes <= BUDGET * 9 // 10 < first.peak_bytes


def test_a_rank_with_a_larger_budget_goes_along(store):
    (first,), _ = solve_on(0, store, problem())

    (second,), solved = solve_on(1, store, problem(2 * BUDGET))

    assert solved == 0
    assert second.recompute == first.recompute


def test_sizes_measured_outside_of_the_operations_make_no_other_step():
    graph, _ = transformer(4)
    outside = next(i for i, s in enumerate(graph.storages) if not s.kind.is_resident)
    larger = replace(graph.storages[outside], size_bytes=graph.storages[outside].size_bytes + 64)
    changed = replace(graph, storages=(*graph.storages[:outside], larger, *graph.storages[outside + 1 :]))

    assert digest(changed) == digest(graph) != digest(transformer(5)[0])


def test_another_step_is_not_waited_for(store):
    solve_on(0, store, problem_of(transformer(5), 2 * BUDGET))

    _, solved = solve_on(1, store, problem())

    assert solved == 1


def test_rank_zero_without_a_solution_leaves_the_others_alone(store):
    (first,), _ = solve_on(0, store, problem(1))

    _, solved = solve_on(1, store, problem(1))

    assert not first.is_feasible
    assert solved == 1


def test_rank_zero_that_fails_lets_the_others_go_at_once(store):
    def fail(_):
        raise KeyError("no")

    with pytest.raises(KeyError):
        SharedSolving(fail, store, 0, 0.0)(problem())

    _, solved = solve_on(1, store, problem())

    assert solved == 1


def test_decisions_that_are_no_schedule_here_are_not_run(store):
    name = digest(problem().graph)
    store.values = {f"{name}/1/begun": "", f"{name}/1/answer": json.dumps([BUDGET, "portfolio", [[]]])}

    _, solved = solve_on(1, store, problem())

    assert solved == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_is_gone_is_done_without(rank):
    (found,), solved = solve_on(rank, Lost(), problem())

    assert solved == 1
    assert found.is_feasible


def test_rank_zero_is_waited_for(store):
    late = Thread(target=solve_on, args=(0, store, problem()))
    late.start()

    _, solved = solve_on(1, store, problem(), patience_s=60.0)

    late.join()
    assert solved == 0


def test_a_process_on_its_own_solves_as_ever():
    solver = Solver()

    assert shared(solver, None) is solver
