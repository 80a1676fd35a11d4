"""Mixed-integer programs: both backends give typed results, within limits and without a word."""

from __future__ import annotations

import random
import time

import pytest

from hiremate_lightning.planning.solvers import mip_backend
from hiremate_lightning.planning.solvers.base import SolveOptions, Status
from hiremate_lightning.planning.solvers.mip_backend import (
    BACKENDS,
    LinearProgram,
    Result,
    backend_name,
    failure,
    solve,
)


def knapsack() -> LinearProgram:
    """Values 5, 4 and 3 with weights 2, 3 and 1, of which 5 fit."""
    program = LinearProgram()
    items = [program.variable(-value) for value in (5.0, 4.0, 3.0)]
    program.row("weight", list(zip(items, (2.0, 3.0, 1.0), strict=True)), upper=5.0)
    return program


def hard() -> LinearProgram:
    """A knapsack with many rows, which takes minutes to close."""
    rng, program = random.Random(0), LinearProgram()
    items = [program.variable(-rng.randint(50, 99)) for _ in range(60)]
    for row in range(40):
        program.row(f"row_{row}", [(item, float(rng.randint(10, 99))) for item in items], upper=900.0)
    return program


def with_backend(program: LinearProgram, backend: str, seconds: float = 10.0) -> Result:
    return solve(program, SolveOptions(backend=backend), seconds)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_knapsack_is_solved(backend: str):
    """A start is taken too; relaxed, a part of an item is."""
    result = with_backend(knapsack(), backend)
    assert result.status is Status.OPTIMAL
    assert result.values == (1.0, 1.0, 0.0)
    assert (result.objective, result.bound) == (pytest.approx(-9), pytest.approx(-9))
    started = solve(knapsack(), SolveOptions(backend=backend), 10.0, start=(1.0, 1.0, 0.0))
    assert started.objective == pytest.approx(-9)
    result = with_backend(knapsack().relaxed(), backend)
    assert result.status is Status.OPTIMAL
    assert result.values == pytest.approx((1, 2 / 3, 1))
    assert result.bound == pytest.approx(-32 / 3)


@pytest.mark.parametrize("is_relaxed", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_no_value_meets_is_infeasible(backend: str, is_relaxed: bool):
    program = knapsack()
    program.row("more than there is", [(0, 1.0)], lower=2.0)
    result = with_backend(program.relaxed() if is_relaxed else program, backend)
    assert (result.status, result.values) == (Status.INFEASIBLE, ())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_with_two_limits_holds_on_both_sides(backend: str):
    program = LinearProgram()
    first, second = program.variable(1.0, upper=9.0), program.variable(-1.0, upper=9.0)
    program.row("difference", [(second, 1.0), (first, -1.0)], lower=-2.0, upper=3.0)
    result = with_backend(program, backend)
    assert result.objective == pytest.approx(-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_running_out_of_time_leaves_a_bound_not_infeasibility(backend: str):
    start = time.process_time()  # by the clock, other load on the machine would count
    result = with_backend(hard(), backend, 0.5)
    assert time.process_time() - start < 2.0
    assert result.status in (Status.FEASIBLE, Status.NOT_FOUND)
    assert result.bound <= result.objective


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_that_works_prints_nothing_and_has_no_failure(backend: str, capfd: pytest.CaptureFixture[str]):
    for program in (knapsack(), LinearProgram()):
        with_backend(program, backend)
        with_backend(program.relaxed(), backend)
    assert failure.__wrapped__(backend) == ""
    assert capfd.readouterr() == ("", "")


def test_a_program_without_variables_is_decided_by_its_rows():
    program = LinearProgram()
    assert solve(program, SolveOptions(), 1.0) == Result(Status.OPTIMAL, (), 0.0, 0.0)
    program.row("at most -1", [], upper=-1.0)
    assert solve(program, SolveOptions(), 1.0).status is Status.INFEASIBLE


def test_a_backend_that_solves_wrongly_does_not_work(monkeypatch: pytest.MonkeyPatch):
    wrong = Result(Status.OPTIMAL, (1.0, 0.0, 1.0), 7.0, 7.0)
    monkeypatch.setattr(mip_backend, "solve", lambda *args, **options: wrong)
    assert failure.__wrapped__("HIGHS") == "a program whose optimum is 5 ended optimal at 7"
    assert backend_name(SolveOptions()) == "HIGHS"
    assert backend_name(SolveOptions(backend="CBC")) == "CBC", "what is asked for comes first"
