"""Plans after the first one, solved in the background while training goes on."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from hiremate_lightning import ConfigurationError, InfeasibleBudgetError, get_plan, hiremate, remove_hiremate
from hiremate_lightning.options import make_options
from hiremate_lightning.planning import background
from hiremate_lightning.planning.background import BackgroundPlan
from hiremate_lightning.planning.planner import DECIDED
from hiremate_lightning.planning.solvers import smallest_budget
from hiremate_lightning.planning.solvers.base import _STRATEGIES, get_strategy
from hiremate_lightning.planning.solvers.worker import Worker, WorkerLostError
from hiremate_lightning.records.schedule import keep_all
from tests.helpers import problem_of, random_graph
from tests.life import ROWS, batch, make, planned, recorded, session_of, step, warm_up

MORE_ROWS = ROWS + 64

pytestmark = pytest.mark.usefixtures("_captures_all")


class SlowSolver:
    """Finds the least memory at once for the first step and where nothing fits, and waits before it solves others.

    Attributes:
        may_end: To be set for it to go on.
        error: What it raises then, None for nothing.
        most: How many steps it solved at once.
    """

    def __init__(self) -> None:
        self.may_end, self.error, self._solves = threading.Event(), None, 0
        self.most = self._now = 0

    def __call__(self, problem):
        self._solves += 1
        smallest = smallest_budget(problem)
        if self._solves == 1 or smallest.peak_bytes > problem.budget_bytes:
            return smallest
        self._now += 1
        self.most = max(self.most, self._now)
        assert self.may_end.wait(60)
        self._now -= 1
        if self.error is not None:
            raise self.error
        return get_strategy("portfolio")(problem)


@pytest.fixture
def solver(monkeypatch: pytest.MonkeyPatch):
    solver = SlowSolver()
    monkeypatch.setitem(_STRATEGIES, "slow", solver)
    yield solver
    solver.may_end.set()


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """List the processes that solve in the background."""
    found: list[Worker] = []

    def start() -> Worker:
        found.append(Worker())
        return found[-1]

    monkeypatch.setattr(background, "Worker", start)
    return found


def is_soon(condition) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def begin(solver: SlowSolver):
    """Train up to a second kind of step, whose plan is being made."""
    model = planned("60%", solver="slow", background=True)
    torch.manual_seed(2)
    losses = [step(model, index, rows) for index, rows in enumerate([*[ROWS] * 2, *[MORE_ROWS] * 4])]
    (made,) = background_of(model).values()
    assert get_plan(model).is_meanwhile
    assert not made.future.done()
    return model, losses, made


def background_of(model):
    history = session_of(model).planned.history
    return {kind.graphs: kind.background for kind in history if kind.background is not None}


def plans_of(model):
    return [*session_of(model).plans.values()]


def step_twice(model) -> None:
    """Train a step of two calls."""
    model.zero_grad()
    (model(batch(0)).square().mean() + model(batch(1)).square().mean()).backward()


def test_training_continues_until_a_background_plan_is_ready(solver, workers):
    model, losses, made = begin(solver)
    meanwhile = get_plan(model).solution.recompute_ms
    assert "until a plan that is solved in the background takes over" in get_plan(model).summary()
    solver.may_end.set()
    assert is_soon(lambda: made.future.done())
    losses += [step(model, index, MORE_ROWS) for index in range(6, 9)]

    plan = get_plan(model)
    assert plan.solution.recompute_ms < meanwhile
    assert plan.solution.strategy == "portfolio"
    assert 0 < plan.measured.peak_bytes <= plan.budget_bytes
    assert is_soon(lambda: not workers[0].is_usable)
    plain = make()
    torch.manual_seed(2)
    expected = [step(plain, index, ROWS if index < 2 else MORE_ROWS) for index in range(9)]
    assert [loss.item() for loss in losses] == [loss.item() for loss in expected]


def test_other_code_runs_as_at_first_until_it_is_solved(solver):
    """Nothing is planned for a step of two calls, which runs as its first one did."""
    model = warm_up(planned("60%", solver="slow", background=True))
    for _ in range(5):
        step_twice(model)
    first, plan = plans_of(model)
    assert not first.is_meanwhile
    assert plan.is_meanwhile
    assert len(plan.solution.recompute) > len(first.solution.recompute)
    assert 0 < plan.measured.peak_bytes <= plan.budget_bytes


def test_a_changed_budget_is_solved_in_the_background(solver, workers):
    """Kinds of steps are planned one after the other, and again where another budget does not come.

    So are they where a plan was made for more room than there is in the end.
    """
    model, _, made = begin(solver)
    plan = get_plan(model)
    larger = replace(plan.solution, recompute=keep_all(plan.graph))
    made.close()
    made.future = Future()
    made.future.set_result(plan.changed(solution=larger, budget_bytes=2 * plan.budget_bytes))
    step(model, 6, MORE_ROWS)
    assert [*background_of(model).values()] not in ([], [made])
    assert get_plan(model).solution.recompute == plan.solution.recompute

    hiremate(model, "65%", verbose=False)
    assert [plan.is_meanwhile for plan in plans_of(model)] == [True, True]
    with pytest.raises(InfeasibleBudgetError):
        hiremate(model, "1%", verbose=False)
    assert not any(worker.is_usable for worker in workers)
    step(model, 0, ROWS)
    assert len(background_of(model)) == 2
    solver.may_end.set()
    end = time.monotonic() + 60
    while background_of(model) and time.monotonic() < end:
        step(model, 0, ROWS)
    assert [plan.solution.strategy for plan in plans_of(model)] == ["portfolio", "portfolio"]
    assert solver.most == 1


def test_a_plan_that_fails_in_the_background_is_announced_once(solver, workers):
    """No process is left where planning ends."""
    model, _, made = begin(solver)
    solver.error = RuntimeError("the solver broke")
    solver.may_end.set()
    assert is_soon(lambda: made.future.done())
    with recorded() as said:
        for index in range(3):
            step(model, index, MORE_ROWS)
    assert [text for text in said if "in the background" in text] == [
        "A better plan could not be made in the background: training goes on with what it has. (the solver broke)"
    ]
    assert get_plan(model).solution.strategy == DECIDED
    solver.may_end.clear()
    hiremate(model, "65%", verbose=False)
    assert workers[-1].is_usable
    remove_hiremate(model)
    assert not any(worker.is_usable for worker in workers)


def test_training_waits_where_no_process_can_be_started(solver, monkeypatch):
    def fail():
        raise OSError("no more processes")

    monkeypatch.setattr(background, "Worker", fail)
    solver.may_end.set()
    model = planned("60%", solver="slow", background=True)
    for index, rows in enumerate([*[ROWS] * 2, *[MORE_ROWS] * 5]):
        step(model, index, rows)
    assert [plan.solution.strategy for plan in plans_of(model)] == ["least_memory", "portfolio"]


def test_training_waits_where_nothing_known_fits(solver):
    solver.may_end.set()
    model = planned("60%", solver="slow", background=True)
    session_of(model).planned.maker._decided_like = lambda *_: []
    for index, rows in enumerate([*[ROWS] * 2, *[MORE_ROWS] * 4]):
        step(model, index, rows)
    assert [plan.solution.strategy for plan in plans_of(model)] == ["least_memory", "portfolio"]


def test_a_process_that_dies_ends_the_solve(workers):
    problem = problem_of(random_graph(1), 2**30)

    def make(solve):
        workers[0]._process.kill()
        return solve(problem)

    made = BackgroundPlan(make, "portfolio")
    assert is_soon(lambda: made.future.done())
    assert isinstance(made.future.exception(), WorkerLostError)
    assert not workers[0].is_usable


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_background_is_true_or_false(value):
    with pytest.raises(ConfigurationError, match="background must be True or False"):
        make_options("1 GiB", background=value)
