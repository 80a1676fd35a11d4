"""Solving apart gives what solving in place gives, and survives whatever happens to the process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from hiremate_lightning.planning.solvers import Problem, SolveOptions, Status, get_strategy, worker
from hiremate_lightning.planning.solvers.base import Solution, strategy
from hiremate_lightning.planning.solvers.model import Model
from hiremate_lightning.planning.solvers.worker import Worker, WorkerLostError, apart

from .tiny import transformer


@pytest.fixture
def own_worker():
    own = Worker()
    yield own
    own.close()


def problem_at(percent, **options):
    graph, profile = transformer()
    whole = Problem(graph, profile, 0)
    return Problem(graph, profile, Model(whole).keep_all_bytes * percent // 100, SolveOptions(**options))


def test_it_finds_what_solving_in_place_finds():
    problem = problem_at(80)
    apart_found, found = apart("portfolio")(problem), get_strategy("portfolio")(problem)
    assert found.is_feasible
    assert replace(apart_found, solve_s=0.0) == replace(found, solve_s=0.0)


def test_progress_is_told_here():
    told = []
    solution = apart("portfolio")(problem_at(80, progress=lambda best_ms, bound_ms: told.append((best_ms, bound_ms))))
    assert told[-1][0] == pytest.approx(solution.recompute_ms)
    assert told == sorted(told, key=lambda t: (-t[0], t[1]))


def test_it_serves_one_problem_after_another(own_worker):
    process = own_worker._process.pid
    for percent in (90, 80):
        assert own_worker.solve(problem_at(percent), "portfolio", 60).peak_bytes <= problem_at(percent).budget_bytes
    assert own_worker.is_usable
    assert own_worker._process.pid == process


def test_a_crash_is_no_solution_and_the_next_solve_works(own_worker, monkeypatch, caplog):
    own_worker._process.kill()
    monkeypatch.setattr(worker, "_worker", own_worker)
    monkeypatch.setattr(Worker, "is_usable", True)
    lost = apart("portfolio")(problem_at(80))
    assert lost.status is Status.NOT_FOUND
    assert "Solving was given up: the process of the solver ended with -9" in caplog.text
    monkeypatch.undo()
    assert apart("portfolio")(problem_at(80)).is_feasible


def test_a_solve_that_takes_too_long_is_ended(own_worker):
    with pytest.raises(WorkerLostError, match="ended with -9"):
        own_worker.solve(problem_at(80), "portfolio", 0.0)
    assert not own_worker.is_usable


def test_an_error_there_is_read_here(own_worker):
    with pytest.raises(WorkerLostError, match="Unknown solver 'fastest'"):
        own_worker.solve(problem_at(80), "fastest", 60)
    assert own_worker.is_usable


def test_an_interrupt_ends_the_process(own_worker):
    def interrupt(best_ms, bound_ms):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        own_worker.solve(problem_at(80, progress=interrupt), "portfolio", 60)
    assert not own_worker.is_usable


def test_strategies_of_others_run_in_place(monkeypatch):
    from hiremate_lightning.planning.solvers import base

    monkeypatch.setattr(base, "_STRATEGIES", dict(base._STRATEGIES))

    @strategy("mine")
    def mine(problem):
        return Solution("mine", Status.NOT_FOUND, stopped_by=str(os.getpid()))

    assert apart("mine")(problem_at(80)).stopped_by == str(os.getpid())


def test_without_processes_it_solves_in_place(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no processes here")

    monkeypatch.setattr(worker, "_worker", None)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert apart("portfolio")(problem_at(80)).is_feasible


def test_the_process_imports_no_torch():
    code = "import sys, hiremate_lightning.planning.solvers.worker; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
