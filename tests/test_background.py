"""Plans after the first one, solved in the background while training goes on."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from hiremate_lightning import ConfigurationError, get_plan, remove_hiremate
from hiremate_lightning.options import make_options
from hiremate_lightning.planning import background
from hiremate_lightning.planning.background import BackgroundPlan
from hiremate_lightning.planning.planner import DECIDED
from hiremate_lightning.planning.solvers import smallest_budget
from hiremate_lightning.planning.solvers.base import _STRATEGIES, get_strategy
from hiremate_lightning.planning.solvers.worker import Worker, WorkerLostError

from .helpers import problem_of, random_graph
from .life import ROWS, make, planned, recorded, session_of, step

MORE_ROWS = ROWS + 64

pytestmark = pytest.mark.usefixtures("_captures_all")


class SlowSolver:
    """Finds the least memory at once for the first step, and waits before it solves others.

    Attributes:
        may_end: To be set for it to go on.
        error: What it raises then, None for nothing.
    """

    def __init__(self) -> None:
        self.may_end, self.error, self._solves = threading.Event(), None, 0

    def __call__(self, problem):
        self._solves += 1
        if self._solves == 1:
            return smallest_budget(problem)
        assert self.may_end.wait(60)
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

    def start(**options) -> Worker:
        found.append(Worker(**options))
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
    (made,) = session_of(model).planned.maker._background.values()
    assert get_plan(model).solution.strategy == DECIDED
    return model, losses, made


def test_training_continues_until_a_background_plan_is_ready(solver, workers):
    model, losses, made = begin(solver)
    meanwhile = get_plan(model).solution.recompute_ms
    assert not made.future.done()
    solver.may_end.set()
    assert is_soon(lambda: made.future.done())
    losses += [step(model, index, MORE_ROWS) for index in range(6, 9)]

    plan = get_plan(model)
    assert plan.solution.recompute_ms < meanwhile
    assert plan.solution.strategy != DECIDED
    assert 0 < plan.measured.peak_bytes <= plan.budget_bytes
    assert is_soon(lambda: not workers[0].is_usable)
    plain = make()
    torch.manual_seed(2)
    expected = [step(plain, index, ROWS if index < 2 else MORE_ROWS) for index in range(9)]
    assert [loss.item() for loss in losses] == [loss.item() for loss in expected]


def test_a_plan_that_fails_in_the_background_is_announced_once(solver):
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


def test_no_process_is_left_where_planning_ends_first(solver, workers):
    model, _, _ = begin(solver)
    assert workers[0].is_usable
    remove_hiremate(model)
    assert not workers[0].is_usable


def test_training_waits_where_nothing_known_fits(solver):
    solver.may_end.set()
    model = planned("60%", solver="slow", background=True)
    session_of(model).planned.maker._decided_like = lambda known: []
    for index, rows in enumerate([*[ROWS] * 2, *[MORE_ROWS] * 4]):
        step(model, index, rows)
    assert len(session_of(model).plans) == 2
    assert get_plan(model).solution.strategy != DECIDED


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
