"""Mixed-integer programs through python-mip: build by rows of numbers, solve with limits, return a typed result.

The backend is the first of HiGHS and CBC that solves a small program in this process. That a package is installed
proves nothing: highspy 1.16 is there and has none of the functions that python-mip 2.0 calls. One thread: HiGHS keeps
one thread count for the life of a process, and these models gain nothing from more. A solve that runs out of time is
never called infeasible.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache

import mip

from .base import SolveOptions, Status
from .metering import Price, SolverMeter
from .work import Work

log = logging.getLogger("hiremate_lightning")
BACKENDS = ("HIGHS", "CBC")  # python-mip's names, the preferred one first


@dataclass
class LinearProgram:
    """Minimise costs over variables in [lower, upper] under linear rows.

    Attributes:
        costs: Objective coefficient of each variable.
        bounds: Lower and upper bound of each variable.
        is_integer: Whether each variable is integer.
        rows: Each row's name, terms as (variable, coefficient), and its lower and upper limit.
    """

    costs: list[float] = field(default_factory=list)
    bounds: list[tuple[float, float]] = field(default_factory=list)
    is_integer: list[bool] = field(default_factory=list)
    rows: list[tuple[str, list[tuple[int, float]], float, float]] = field(default_factory=list)

    def variable(self, cost: float, lower: float = 0.0, upper: float = 1.0, integer: bool = True) -> int:
        """Add a variable; return its number."""
        self.costs.append(cost)
        self.bounds.append((lower, upper))
        self.is_integer.append(integer)
        return len(self.costs) - 1

    def row(self, name: str, terms: list[tuple[int, float]], lower: float = -math.inf, upper: float = math.inf) -> None:
        """Add a row: lower <= sum of terms <= upper."""
        self.rows.append((name, terms, lower, upper))

    def with_fixed(self, values: Sequence[float], free: Container[int]) -> LinearProgram:
        """Return the program with its integer variables fixed at values that fit, except those that stay free."""
        bounds = [
            bound if number in free or not integer else (value, value)
            for number, (bound, integer, value) in enumerate(zip(self.bounds, self.is_integer, values, strict=True))
        ]
        is_open = [lower < upper for lower, upper in bounds]
        return replace(self, bounds=bounds, rows=[row for row in self.rows if any(is_open[v] for v, _ in row[1])])


@dataclass(frozen=True, slots=True)
class Result:
    """How a solve ended.

    Attributes:
        status: Typed outcome; FEASIBLE where limits stopped it.
        values: Value of each variable, empty where none was found.
        objective: Objective of the values.
        bound: Proven lower bound on the objective.
    """

    status: Status
    values: tuple[float, ...] = ()
    objective: float = math.inf
    bound: float = -math.inf


def backend_name(options: SolveOptions) -> str:
    """Name the backend that runs: the one asked for, else the first that works in this process."""
    return options.backend or next((name for name in BACKENDS if not failure(name)), BACKENDS[0])


@cache
def failure(backend: str) -> str:
    """Solve a small program with a backend, once in this process.

    Return why that failed, in one line; empty where it worked.
    """
    program = LinearProgram()
    program.row("two_of_three", [(program.variable(cost), 1.0) for cost in (2.0, 3.0, 5.0)], lower=2.0)
    with _logs_of_python_mip() as logged:
        try:
            result = solve(program, SolveOptions(backend=backend), time_limit_s=10.0)
        except Exception as error:  # python-mip raises a NameError where the library of CBC is missing
            log.debug("%s does not work: %s", backend, logged, exc_info=True)
            return " ".join((logged or [f"{type(error).__name__}: {error}"])[-1].split())
    if result.status is not Status.OPTIMAL or abs(result.objective - 5.0) > 1e-6:
        return f"a program whose optimum is 5 ended {result.status.value} at {result.objective:g}"
    return ""


@contextmanager
def _logs_of_python_mip() -> Iterator[list[str]]:
    """Collect the logs of python-mip, which would go to the console."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mip")
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield logged
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def solve(
    program: LinearProgram,
    options: SolveOptions,
    time_limit_s: float,
    relax: bool = False,
    absolute_gap: float = 0.0,
    start: Sequence[float] = (),
    work: Work | None = None,
) -> Result:
    """Solve a program.

    Args:
        program: The program.
        options: The backend.
        time_limit_s: Seconds of work; a backend may overshoot.
        relax: Solve the linear relaxation.
        absolute_gap: Stop when objective and bound are this close.
        start: A feasible value for each variable, to start from.
        work: Counts it, and has the clock's last word; by default nobody counts.

    Returns:
        The best found, with its bound. Values of integer variables are rounded.
    """
    if not program.costs:  # python-mip would print that there is nothing to optimize
        holds = all(lower <= 0.0 <= upper for _, _, lower, upper in program.rows)
        return Result(Status.OPTIMAL, (), 0.0, 0.0) if holds else Result(Status.INFEASIBLE)
    model = mip.Model(sense=mip.MINIMIZE, solver_name=backend_name(options))
    model.verbose = 0
    model.threads = 1
    if not relax and absolute_gap > 0:
        model.max_mip_gap_abs = absolute_gap
    variables = _add_program(model, program, relax)
    if start and not relax:
        model.start = list(zip(variables, start, strict=True))
    if relax and backend_name(options) == "CBC":  # without an integer, CBC takes a way that writes to the console
        model.add_var(lb=0.0, ub=0.0, var_type=mip.INTEGER)
    work, meter = work or Work(time_limit_s), SolverMeter(price_of(program, relax), time_limit_s)
    status = meter.optimize(model, work.clock_left_s)
    work.add(meter.work_s)
    return _read(model, variables, program, status, relax)


def price_of(program: LinearProgram, relax: bool = False) -> Price:
    """Return the price of solving a program, or its relaxation."""
    is_linear = relax or not any(program.is_integer)
    return Price(len(program.rows), sum(len(terms) for _, terms, _, _ in program.rows), is_linear)


def _add_program(model: mip.Model, program: LinearProgram, relax: bool) -> list[mip.Var]:
    """Add the variables and the rows of a program; return the variables."""
    variables = [
        model.add_var(lb=lower, ub=upper, obj=cost, var_type=mip.INTEGER if integer and not relax else mip.CONTINUOUS)
        for cost, (lower, upper), integer in zip(program.costs, program.bounds, program.is_integer, strict=True)
    ]
    for name, terms, lower, upper in program.rows:
        chosen, coefficients = [variables[v] for v, _ in terms], [c for _, c in terms]
        if lower > -math.inf:
            model.add_constr(mip.LinExpr(chosen, coefficients, -lower, ">"), name)
        if upper < math.inf:
            model.add_constr(mip.LinExpr(chosen, coefficients, -upper, "<"), name)
    return variables


def _read(
    model: mip.Model, variables: list[mip.Var], program: LinearProgram, status: mip.OptimizationStatus, relax: bool
) -> Result:
    if status is mip.OptimizationStatus.INFEASIBLE:
        return Result(Status.INFEASIBLE)
    solved = status in (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE)
    bound = model.objective_bound
    if relax:  # of a relaxation that was cut short nothing is proven
        bound = model.objective_value if status is mip.OptimizationStatus.OPTIMAL else None
    proven = -math.inf if bound is None or not math.isfinite(bound) else float(bound)
    if not solved:
        return Result(Status.NOT_FOUND, bound=proven)
    values = tuple(
        float(round(v.x)) if integer and not relax else float(v.x)
        for v, integer in zip(variables, program.is_integer, strict=True)
    )
    kind = Status.OPTIMAL if status is mip.OptimizationStatus.OPTIMAL else Status.FEASIBLE
    return Result(kind, values, float(model.objective_value), proven)
