"""Ranks agree on one problem, rank 0 solves it, and nobody waits long for a rank that is not there."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import pytest

from hiremate_lightning.options import SessionOptions
from hiremate_lightning.out_of_memory import InfeasibleBudgetError
from hiremate_lightning.planning.headroom import unless_short
from hiremate_lightning.planning.planner import make_plan
from hiremate_lightning.planning.shared_solving import SharedSolving, agreed, announce, digest, shared
from hiremate_lightning.planning.solvers.base import Problem, Solution, Status, get_strategy
from hiremate_lightning.records.step import Call, Gap, merge
from hiremate_lightning.units import format_bytes
from tests.helpers import problem_of
from tests.tiny import room, transformer

BUDGET = 2_600_000
LESS = BUDGET * 9 // 10


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


class Rank:
    """One of two ranks, which counts what it solves itself."""

    def __init__(self, rank: int, store: Store, patience_s: float = 60.0, solver: str = "portfolio"):
        self.solved = 0
        self._solver = solver
        self.solve = SharedSolving(self._count, (store, rank, 2), patience_s)

    def _count(self, problem: Problem) -> Solution:
        self.solved += 1
        return get_strategy(self._solver)(problem)

    def plan(self, problem: Problem) -> Solution:
        return self.solve(agreed(problem, self.solve))


def problem(budget_bytes: int = BUDGET) -> Problem:
    return problem_of(transformer(4), budget_bytes)


def together(*tasks):
    """Run one function for each rank at the same time; return what each gave."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result() for future in [pool.submit(task) for task in tasks]]


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def ranks(store):
    return Rank(0, store), Rank(1, store)


def plan_together(ranks, first: Problem, second: Problem) -> list[Solution]:
    return together(lambda: ranks[0].plan(first), lambda: ranks[1].plan(second))


def test_the_other_ranks_take_what_rank_zero_found(ranks):
    """Each solve is answered by that of rank zero; its time is that of the costs measured here."""
    graph, profile = transformer(4)
    slower = replace(profile, time_ms=tuple(2 * t for t in profile.time_ms))
    first, second = plan_together(ranks, problem(), problem_of((graph, slower), BUDGET))

    assert [rank.solved for rank in ranks] == [1, 0]
    assert (second.recompute, second.peak_bytes) == (first.recompute, first.peak_bytes)
    assert second.recompute_ms == pytest.approx(2 * first.recompute_ms)
    assert second.status is Status.FEASIBLE
    assert second.bound_ms == 0.0  # proven for the costs of rank 0 only
    assert second.stopped_by == "rank 0 solved"

    less, second = plan_together(ranks, problem(LESS), problem(LESS))
    assert ranks[1].solved == 0
    assert second.recompute == less.recompute != first.recompute


@pytest.mark.parametrize("budgets", [(BUDGET, LESS), (LESS, BUDGET)])
def test_all_ranks_keep_to_the_smallest_budget(ranks, budgets):
    first, second = plan_together(ranks, *map(problem, budgets))

    assert first.recompute == second.recompute
    assert first.peak_bytes <= LESS


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_leave_room_for_the_most_code_outside(ranks, rank):
    def step(held_bytes):
        return merge([Call(*transformer(4), after_forward=Gap(held_bytes, held_bytes))], [0])

    steps = [step(500_000 if index == rank else 1) for index in range(2)]
    problems = [Problem(own.graph, own.profile, BUDGET) for own in steps]
    first, second = plan_together(ranks, *problems)

    assert first.recompute == second.recompute
    assert second.stopped_by == "rank 0 solved"
    assert first.peak_bytes == second.peak_bytes <= BUDGET


@pytest.mark.parametrize("rank", [0, 1])
def test_a_budget_too_small_for_one_rank_is_an_error_on_all(ranks, rank):
    """Else the others would wait in a collective for the one that has stopped."""
    step = merge([Call(*transformer(4))], [0])

    def plan(index):
        limit = room(1_000 if index == rank else 100 * BUDGET)
        with pytest.raises(InfeasibleBudgetError) as caught:
            unless_short(make_plan(step, limit, SessionOptions(), solve=ranks[index].solve))
        return str(caught.value)

    texts = together(lambda: plan(0), lambda: plan(1))

    words = f"Another process of this training has {format_bytes(100 * BUDGET - 1_000)} less"
    assert [words in text for text in texts] == [rank == 1, rank == 0]
    assert all("(1,000 bytes)" in text for text in texts)


def test_ranks_that_solve_several_times_do_so_together(store):
    """As where the first solve finds nothing, and another budget follows: each takes the same answers."""
    ranks = [Rank(rank, store, solver="segments") for rank in range(2)]
    step = merge([Call(*transformer(4))], [0])

    def plan(index):
        return unless_short(make_plan(step, room(BUDGET), SessionOptions(), solve=ranks[index].solve))

    first, second = together(lambda: plan(0), lambda: plan(1))

    assert ranks[1].solved == 0
    assert first.solution.recompute == second.solution.recompute


def test_sizes_measured_outside_operations_make_no_other_step():
    graph, _ = transformer(4)
    outside = next(i for i, s in enumerate(graph.storages) if not s.kind.is_resident)
    larger = replace(graph.storages[outside], size_bytes=graph.storages[outside].size_bytes + 64)
    changed = replace(graph, storages=(*graph.storages[:outside], larger, *graph.storages[outside + 1 :]))

    assert digest(changed) == digest(graph) != digest(transformer(5)[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_plans_alone_waits_for_its_patience(store, rank):
    """Where the store is gone it is done without; ranks agree again after one of them planned alone."""
    start = time.perf_counter()
    for alone in (Rank(rank, store, patience_s=0.1), Rank(rank, Lost())):
        assert alone.plan(problem()).is_feasible
        assert alone.solved == 1
    assert time.perf_counter() - start < 30  # with the solve
    ranks = Rank(0, store), Rank(1, store)

    first, second = plan_together(ranks, problem(), problem())

    assert [r.solved for r in ranks] == [1, 0]
    assert first.recompute == second.recompute


def test_a_rank_that_plans_a_step_again_waits_less(ranks, store):
    own = SharedSolving(get_strategy("none"), (store, 0, 2), 60.0, patience_again_s=0.0)
    together(lambda: own(own.agree(problem())), lambda: ranks[1].plan(problem()))
    start = time.perf_counter()

    assert own.agree(again := problem()) is again

    assert time.perf_counter() - start < 10


def test_another_step_is_not_waited_for(store):
    other, own = Rank(0, store, patience_s=0.0), Rank(1, store, patience_s=0.0)
    other.plan(problem_of(transformer(5), 2 * BUDGET))

    own.plan(problem())

    assert own.solved == 1


def fails(_):
    raise KeyError("no")


@pytest.mark.parametrize(
    "answer", [fails, lambda _: Solution("portfolio", Status.OPTIMAL, ((0,) * 3,))], ids=["fails", "no schedule here"]
)
def test_rank_zero_that_has_no_answer_lets_the_others_go_at_once(store, answer):
    first, second = SharedSolving(answer, (store, 0, 2), 60.0), Rank(1, store)

    def solve_first():
        with pytest.raises(KeyError) if answer is fails else nullcontext():
            first(first.agree(problem()))

    together(solve_first, lambda: second.plan(problem()))

    assert second.solved == 1


def test_a_process_on_its_own_solves_as_ever():
    solver = get_strategy("none")

    assert shared(solver, None) is solver
    assert agreed(own := problem(), solver) is own


def test_ranks_that_train_other_models_are_not_waited_for(store):
    """As stages of a pipeline do: each plans alone, at once."""
    for rank, model in enumerate(("first stage", "second stage")):
        announce((store, rank, 2), model)
    solve = [
        SharedSolving(get_strategy("portfolio"), (store, rank, 2), 60.0, model=f"{name} stage")
        for rank, name in enumerate(("first", "second"))
    ]

    start = time.perf_counter()
    first, second = problem(), problem(LESS)
    assert agreed(first, solve[0]).budget_bytes == first.budget_bytes
    assert agreed(second, solve[1]).budget_bytes == second.budget_bytes
    assert time.perf_counter() - start < 10


def test_the_first_rank_of_those_that_train_a_model_solves(store):
    """Ranks 1 and 2 of three: rank 0 trains something else, and answers nobody."""
    for rank, model in enumerate(("first", "second", "second")):
        announce((store, rank, 3), model)
    solve = [SharedSolving(get_strategy("portfolio"), (store, rank, 3), 60.0, model="second") for rank in (1, 2)]

    found = together(*(lambda s=s: s(agreed(problem(), s)) for s in solve))
    assert found[1].stopped_by == "rank 1 solved" != found[0].stopped_by
    assert found[1].recompute == found[0].recompute


def test_a_rank_that_called_its_model_otherwise_plans_alone(store):
    """The names of models are made of their parameters, which code of others may change."""
    for rank in range(2):
        announce((store, rank, 2), "before")
    solve = SharedSolving(get_strategy("portfolio"), (store, 1, 2), 60.0, model="after")

    own = problem(LESS)
    assert agreed(own, solve).budget_bytes == own.budget_bytes
    assert solve(own).is_feasible
