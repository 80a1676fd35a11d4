"""Solving apart gives what solving in place gives, and survives whatever happens to the process."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from hiremate_lightning import ConfigurationError, HiRemateWarning, hiremate
from hiremate_lightning.callbacks import HiRemateBatchSizeFinder, HiRemateCallback
from hiremate_lightning.housekeeping import Once
from hiremate_lightning.integrations.accelerate import prepare_hiremate
from hiremate_lightning.planning.solvers import worker
from hiremate_lightning.planning.solvers.base import Problem, Solution, SolveOptions, Status, get_strategy, register
from hiremate_lightning.planning.solvers.model import StepModel
from hiremate_lightning.planning.solvers.worker import Worker, WorkerLostError, apart, backend_failures, check_strategy
from tests.processes import run_python
from tests.tiny import transformer

NEED_PROGRAMS = ("portfolio", "hilp", "rockmate", "checkmate", "checkmate_lp")
NEED_NONE = ("segments", "rotor", "pofo", "min_memory", "twremat", "chen", "dtr", "none")
NO_NUMBER = "a budget\nof several lines"


def problem_at(percent, **options):
    graph, profile = transformer()
    whole = Problem(graph, profile, 0)
    return Problem(graph, profile, StepModel(whole).keep_all_bytes * percent // 100, SolveOptions(**options))


def test_a_worker_finds_what_solving_in_place_finds():
    reported = []
    problem = problem_at(80)
    hearing = replace(problem, options=replace(problem.options, progress=lambda *progress: reported.append(progress)))
    apart_found, found = apart("portfolio")(hearing), get_strategy("portfolio")(problem)
    assert found.is_feasible
    assert replace(apart_found, solve_s=0.0) == replace(found, solve_s=0.0)
    assert reported[-1][0] == pytest.approx(apart_found.recompute_ms)
    assert reported == sorted(reported, key=lambda t: (-t[0], t[1]))


def test_a_crash_is_no_solution_and_the_next_solve_works(own_worker, monkeypatch, caplog):
    assert not own_worker.failure("HIGHS")
    own_worker._process.kill()
    monkeypatch.setattr(worker, "_worker", own_worker)
    monkeypatch.setattr(Worker, "is_usable", True)
    lost = apart("portfolio")(problem_at(80))
    assert lost.status is Status.NOT_FOUND
    assert lost.stopped_by == "a failure of the solver (the process of the solver ended with -9)"
    assert "The solver failed (the process of the solver ended with -9). The plan takes the least memory" in caplog.text
    monkeypatch.undo()
    assert apart("portfolio")(problem_at(80)).is_feasible


def test_an_error_in_a_solve_takes_one_line(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, logger="hiremate_lightning")
    problem = replace(problem_at(80), budget_bytes=NO_NUMBER)
    lost = apart("portfolio")(problem)
    assert lost.status is Status.NOT_FOUND
    assert lost.stopped_by.startswith("a failure of the solver (TypeError: ")
    shown = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(shown) == 1
    assert not [text for text in (lost.stopped_by, *shown) if "\n" in text or "Traceback" in text]
    assert "Traceback (most recent call last)" in caplog.text


def test_a_failure_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(worker, "_warn_once", Once(worker.log.warning))
    for _ in range(2):
        apart("portfolio")(replace(problem_at(80), budget_bytes=NO_NUMBER))
    assert caplog.text.count("The solver failed (TypeError: ") == 1


class TestBackends:
    """Which MIP solver works is found out in the process that solves."""

    @pytest.fixture(autouse=True)
    def _found_anew(self):
        backend_failures.cache_clear()
        yield
        backend_failures.cache_clear()

    @pytest.fixture
    def lost(self, monkeypatch):
        """Let backends end the process that tries them, as a library that does not fit may do."""
        lost = []

        def failure(own, backend):
            if backend in lost:
                own._process.kill()
            return real(own, backend)

        real = Worker.failure
        monkeypatch.setattr(Worker, "failure", failure)
        return lost

    def test_a_backend_that_crashes_is_passed_over(self, lost):
        lost.append("HIGHS")
        worker.warm_up()
        worker._worker.failure("CBC")  # it has started
        assert backend_failures() == ("the process of the solver ended with -9",)
        with pytest.warns(HiRemateWarning, match="HiGHS does not work here .*so CBC solves. Plans stay as good"):
            check_strategy("portfolio")
        assert apart("portfolio")(problem_at(80)).is_feasible

    @pytest.fixture
    def _no_backend(self, monkeypatch):
        monkeypatch.setattr(worker, "backend_failure", "{} is not there".format)

    @pytest.mark.usefixtures("_no_backend")
    @pytest.mark.parametrize("strategy_name", NEED_PROGRAMS)
    def test_without_a_backend_what_needs_one_is_refused(self, strategy_name):
        expected = "No MIP solver works here.*HiGHS failed: HIGHS is not there. CBC failed: CBC is not .* pip install "
        with pytest.raises(ConfigurationError, match=expected):
            check_strategy(strategy_name)

    @pytest.mark.usefixtures("_no_backend")
    @pytest.mark.parametrize("strategy_name", NEED_NONE)
    def test_without_a_backend_the_others_solve(self, strategy_name):
        check_strategy(strategy_name)

    @pytest.mark.usefixtures("_no_backend")
    def test_every_way_to_plan_refuses(self):
        for plan in (
            lambda: hiremate(nn.Linear(2, 2), "50%"),
            lambda: HiRemateCallback("50%"),
            lambda: HiRemateBatchSizeFinder(budget="1 GiB"),
            lambda: prepare_hiremate(Accelerator(cpu=True), nn.Linear(2, 2), budget="50%"),
            lambda: torch.compile(nn.Linear(2, 2), backend="hiremate", options={"budget": "50%"})(torch.ones(2, 2)),
        ):
            with pytest.raises(Exception, match="No MIP solver works here"):
                plan()


@pytest.mark.parametrize(
    ("name", "limit_s", "words", "is_usable"),
    [("portfolio", 0.0, "ended with -9", False), ("fastest", 60, "Unknown solver 'fastest'", True)],
    ids=["takes too long", "raises"],
)
def test_a_solve_that_fails_in_the_worker_is_reported_here(own_worker, name, limit_s, words, is_usable):
    """What takes too long is ended with its process."""
    with pytest.raises(WorkerLostError, match=words):
        own_worker.solve(problem_at(80), name, limit_s)
    assert own_worker.is_usable is is_usable


def test_a_worker_serves_problems_until_an_interrupt_ends_it(own_worker):
    def interrupt(best_ms, bound_ms):
        raise KeyboardInterrupt

    process = own_worker._process.pid
    for percent in (90, 80):
        assert own_worker.solve(problem_at(percent), "portfolio", 60).peak_bytes <= problem_at(percent).budget_bytes
    assert own_worker.is_usable
    assert own_worker._process.pid == process
    with pytest.raises(KeyboardInterrupt):
        own_worker.solve(problem_at(80, progress=interrupt), "portfolio", 60)
    assert not own_worker.is_usable


@pytest.mark.usefixtures("_own_strategies")
def test_strategies_of_others_run_in_place():
    register("mine", lambda problem: Solution("mine", Status.NOT_FOUND, stopped_by=str(os.getpid())))

    assert apart("mine")(problem_at(80)).stopped_by == str(os.getpid())


@pytest.fixture
def _not_started(monkeypatch):
    """No worker runs so far."""
    monkeypatch.setattr(worker, "_worker", None)


@pytest.mark.usefixtures("_not_started")
@pytest.mark.parametrize(("executable", "can_start"), [("/nowhere", True), (shutil.which("false"), False)])
def test_without_a_process_that_listens_it_solves_in_place(executable, can_start, monkeypatch):
    """A program that embeds Python may name itself as the interpreter."""
    monkeypatch.setattr(worker, "_can_start", True)
    monkeypatch.setattr(sys, "executable", executable)
    assert apart("portfolio")(problem_at(80)).is_feasible
    assert worker._can_start == can_start


def test_the_process_imports_no_torch():
    code = "import sys, hiremate_lightning.planning.solvers.worker; sys.exit('torch' in sys.modules)"
    assert run_python("-c", code).returncode == 0
