"""Searches are limited by work: a slow, busy or stopped machine finds the same, later; the clock ends what hangs."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from hiremate_lightning.options import SessionOptions
from hiremate_lightning.planning import solutions
from hiremate_lightning.planning.headroom import least_need, unless_short
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.planning.planner import make_plan
from hiremate_lightning.planning.solvers import mip_backend
from hiremate_lightning.planning.solvers.base import (
    CLOCK,
    Problem,
    Solution,
    SolveOptions,
    Status,
    Work,
    clock_limit_s,
    get_strategy,
)
from hiremate_lightning.planning.solvers.least_memory import solve_least_memory
from hiremate_lightning.planning.solvers.mip_backend import LinearProgram, SolverMeter, solve
from hiremate_lightning.planning.solvers.model import StepModel
from hiremate_lightning.planning.solvers.worker import Worker
from hiremate_lightning.records.step import Call, merge
from tests.helpers import problem_of
from tests.tiny import room, transformer
from tests.units.planning.test_mip_backend import hard

LIMIT_S = 0.5  # of work: the step below needs more for a proof
NEED_TIME = ("portfolio", "segments", "hilp", "rockmate", "dtr")


def problem_to_cut(**options: float) -> Problem:
    step = transformer(20)
    whole = StepModel(problem_of(step, 0)).keep_all_bytes
    return problem_of(step, whole * 40 // 100, **{"time_limit_s": LIMIT_S, **options})


def what_was_found(solution: Solution) -> Solution:
    return replace(solution, solve_s=0.0)


@pytest.mark.parametrize("name", NEED_TIME)
def test_a_slow_machine_finds_the_same(name: str, set_clock: Callable[[float], None]):
    problem = problem_to_cut()

    set_clock(1e-9)
    fast = get_strategy(name)(problem)
    set_clock(1e-4)
    slow = get_strategy(name)(problem)

    assert what_was_found(slow) == what_was_found(fast)


def test_the_step_of_these_tests_ends_by_its_limit():
    solution = get_strategy("portfolio")(problem_to_cut())
    assert (solution.status, solution.stopped_by) == (Status.FEASIBLE, "time limit")
    assert LIMIT_S <= solution.work_s < 2 * LIMIT_S


def test_a_worker_that_is_stopped_for_longer_finds_the_same(own_worker: Worker):
    """Each time that it tells of something better it is stopped, in sum for longer than its limit."""
    process, problem = own_worker._process, problem_to_cut()
    stops = list[threading.Timer]()

    def stop(best_ms: float, bound_ms: float) -> None:
        if len(stops) < 3:
            os.kill(process.pid, signal.SIGSTOP)
            stops.append(threading.Timer(LIMIT_S, os.kill, (process.pid, signal.SIGCONT)))
            stops[-1].start()
            stops[-1].join()

    start = time.monotonic()
    starved = own_worker.solve(replace(problem, options=replace(problem.options, progress=stop)), "portfolio", 60.0)

    assert time.monotonic() - start > 3 * LIMIT_S
    assert what_was_found(starved) == what_was_found(get_strategy("portfolio")(problem))


def test_more_work_is_done_where_more_is_asked_for():
    few, more = (get_strategy("portfolio")(problem_to_cut(time_limit_s=limit)) for limit in (0.2, LIMIT_S))
    assert few.work_s < more.work_s
    assert few.recompute_ms >= more.recompute_ms


# ---------------------------------------------------------------- programs


def test_a_program_ends_at_the_same_place_each_time():
    counts = [Work(9.0) for _ in range(2)]
    found = [solve(hard(), SolveOptions(), 0.3, work=count) for count in counts]
    assert found[0] == found[1]
    assert found[0].status is Status.FEASIBLE
    assert counts[0].done_s == counts[1].done_s
    assert 0.3 <= counts[0].done_s < 0.6


def test_a_linear_program_ends_at_a_limit_of_iterations(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SolverMeter, "most_iterations", lambda self: 2)
    cut = solve(hard().relaxed(), SolveOptions(), 0.3)
    assert cut.status is not Status.OPTIMAL
    assert cut.bound == -float("inf"), "of a relaxation that was cut short nothing is proven"


@pytest.mark.parametrize("backend", ["HIGHS", "CBC"])
def test_a_solver_that_cannot_be_asked_gets_a_limit_of_nodes(backend: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mip_backend, "_library", lambda: None)
    first, second = (solve(hard(), SolveOptions(backend=backend), 0.2) for _ in range(2))
    assert first == second
    assert first.status in (Status.FEASIBLE, Status.NOT_FOUND)


def test_a_program_costs_work_even_without_an_iteration():
    program, count = LinearProgram(), Work(1.0)
    program.row("one", [(program.variable(1.0), 1.0)], lower=1.0)
    solve(program, SolveOptions(), 1.0, work=count)
    assert count.done_s > 0


# ---------------------------------------------------------------- the clock


def test_the_clock_ends_a_search_that_takes_many_times_its_work(set_clock: Callable[[float], None]):
    set_clock(clock_limit_s(LIMIT_S) / 20)
    solution = get_strategy("portfolio")(problem_to_cut())
    assert solution.stopped_by == CLOCK
    assert solution.status in (Status.FEASIBLE, Status.NOT_FOUND)
    assert solution.work_s < LIMIT_S


def planned(solve: Callable[[Problem], Solution]) -> Plan:
    """Plan the step of these tests."""
    problem = problem_to_cut()
    step = merge([Call(problem.graph, problem.profile)], [0])
    return unless_short(make_plan(step, room(problem.budget_bytes + 2**16), SessionOptions(), solve=solve))


def test_a_plan_that_the_clock_cut_short_says_so(caplog: pytest.LogCaptureFixture):
    def cut(asked: Problem) -> Solution:
        return replace(get_strategy("segments")(asked), status=Status.FEASIBLE, stopped_by=CLOCK, solve_s=130.0)

    with caplog.at_level(logging.WARNING, "hiremate_lightning"):
        planned(cut)

    assert "Solving was cut short after 130 s" in caplog.text
    assert "pass a time_limit_s above 30" in caplog.text


# ---------------------------------------------------------------- what was found before


def nothing(problem: Problem) -> Solution:
    return Solution("nothing", Status.NOT_FOUND, stopped_by="time limit")


def test_a_named_least_memory_is_taken_where_nothing_is_found():
    """A proof is not compared with it."""
    problem, known = problem_to_cut(), solutions.Solutions()
    named = least_need(problem, 0).smallest
    asked, less = (replace(problem, budget_bytes=named.peak_bytes - more) for more in (0, 1))

    taken = known.at_least(asked, nothing(asked))

    assert (taken.status, taken.recompute, taken.peak_bytes) == (Status.FEASIBLE, named.recompute, named.peak_bytes)
    assert taken.stopped_by == solutions.KNOWN_BEFORE
    assert not known.at_least(less, nothing(asked)).is_feasible
    proven = Solution("mine", Status.INFEASIBLE, stopped_by="proof")
    assert known.at_least(problem, proven) is proven


def test_a_later_run_reads_what_was_named_but_no_spoilt_file(tmp_path):
    kept = solutions.Solutions(tmp_path)
    problem = problem_to_cut()
    named = least_need(problem, 0, solutions=kept).smallest
    solutions.forget()
    asked = replace(problem, budget_bytes=named.peak_bytes)

    assert not solutions.Solutions().at_least(asked, nothing(asked)).is_feasible
    assert kept.at_least(asked, nothing(asked)).recompute == named.recompute
    solutions.forget()
    (path,) = tmp_path.glob("found-*.json")
    for text in ("[[[1, 2", "[[[99999999]]]", '[["a"]]', "{}"):
        path.write_text(text)
        assert not kept.at_least(problem, nothing(problem)).is_feasible


def test_a_plan_is_never_slower_than_the_one_before_it():
    first, second = planned(get_strategy("portfolio")), planned(solve_least_memory)
    assert second.solution.recompute == first.solution.recompute
