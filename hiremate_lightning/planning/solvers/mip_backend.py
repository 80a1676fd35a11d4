"""Mixed-integer programs through python-mip: build them from rows, solve within limits, return a typed result.

The backend is the first of HiGHS and CBC that solves a small program in this process. An installed package is no proof:
highspy 1.16 lacks the functions that python-mip 2.0 calls. Solvers use one thread: HiGHS keeps one thread count for the
life of a process, and these programs gain nothing from more. A solve that runs out of time is never called infeasible.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import mip

from ...housekeeping import log
from .base import SolveOptions, Status, Work

BACKENDS = ("HIGHS", "CBC")  # python-mip's names, the preferred one first
UNIT = 2**20  # bytes are scaled to MiB: coefficients near 1 keep the solver exact
PROGRAM_S, ENTRY_S = 1.5e-3, 4e-6  # work to build, presolve and read a program: fixed, and per entry of its rows
LINEAR_S, LINEAR_ROW_S = 2.5e-6, 4e-9  # work of an iteration of a linear program: fixed, and per row
INTEGER_S, INTEGER_ENTRY_S = 2e-4, 1e-8  # the same for an integer program, with cuts and heuristics; per entry
QUESTION_S = 2e-5  # work from one callback of HiGHS to the next, besides iterations
NODE_ITERATIONS = 100  # iterations of a node, if only nodes can be limited
MOST_ITERATIONS = 2**31 - 1  # most that HiGHS can count
LEAST_S = 0.1  # least limit of work, and of the clock
INTERRUPT = 6  # HiGHS's number of the callback that asks whether to stop
FUNCTIONS = """
    int Highs_setCallback(void*, void (*)(int, const char*, const void*, void*, void*), void*);
    int Highs_startCallback(void*, const int);
    const void* Highs_getCallbackDataOutItem(const void*, const char*);
    int Highs_setDoubleOptionValue(void*, const char*, const double);
    int Highs_getIntInfoValue(void*, const char*, int*);
"""


@dataclass
class LinearProgram:
    """Minimise costs over variables in [lower, upper] under rows.

    A row is a tuple: name, terms as (variable, coefficient), lower limit, upper limit.
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

    @property
    def is_linear(self) -> bool:
        """Whether no variable is an integer."""
        return not any(self.is_integer)

    def relaxed(self) -> LinearProgram:
        """Return the linear relaxation: the same program without integers."""
        return replace(self, is_integer=[False] * len(self.is_integer))

    def with_fixed(self, values: Sequence[float], free: Container[int]) -> LinearProgram:
        """Return the program with its integer variables fixed at feasible values, except the free ones."""
        bounds = [
            bound if number in free or not integer else (value, value)
            for number, (bound, integer, value) in enumerate(zip(self.bounds, self.is_integer, values, strict=True))
        ]
        is_open = [lower < upper for lower, upper in bounds]
        return replace(self, bounds=bounds, rows=[row for row in self.rows if any(is_open[v] for v, _ in row[1])])


@dataclass(frozen=True, slots=True)
class Result:
    """How a solve ended (FEASIBLE if a limit stopped it), and the value of each variable if there is a solution."""

    status: Status
    values: tuple[float, ...] = ()
    objective: float = math.inf
    bound: float = -math.inf


def backend_name(options: SolveOptions) -> str:
    """Return the backend of the options, else the first one that works in this process."""
    return options.backend or next((name for name in BACKENDS if not failure(name)), BACKENDS[0])


@cache
def failure(backend: str) -> str:
    """Solve a small program with a backend, once per process; return why it failed, "" if it worked."""
    program = LinearProgram()
    program.row("two_of_three", [(program.variable(cost), 1.0) for cost in (2.0, 3.0, 5.0)], lower=2.0)
    with _logs_of_python_mip() as logged:
        try:
            result = solve(program, SolveOptions(backend=backend), time_limit_s=10.0)
        except Exception as error:  # any error is why it fails: a NameError if CBC's library is missing
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
    absolute_gap: float = 0.0,
    start: Sequence[float] = (),
    work: Work | None = None,
) -> Result:
    """Solve a program from a feasible start; return the incumbent and the bound.

    The solve stops when objective and bound are within the gap, or after `time_limit_s` of work, which a backend may
    overshoot, or at the clock limit of `work`. Values of integer variables are rounded.
    """
    if not program.costs:  # python-mip would print that there is nothing to optimize
        holds = all(lower <= 0.0 <= upper for _, _, lower, upper in program.rows)
        return Result(Status.OPTIMAL, (), 0.0, 0.0) if holds else Result(Status.INFEASIBLE)
    model = mip.Model(sense=mip.MINIMIZE, solver_name=backend_name(options))
    model.verbose = 0
    model.threads = 1
    if absolute_gap > 0 and not program.is_linear:
        model.max_mip_gap_abs = absolute_gap
    variables = _add_program(model, program)
    if start and not program.is_linear:
        model.start = list(zip(variables, start, strict=True))
    if program.is_linear and backend_name(options) == "CBC":  # a program without integers makes CBC print
        model.add_var(lb=0.0, ub=0.0, var_type=mip.INTEGER)
    work, meter = work or Work(time_limit_s), SolverMeter(program, time_limit_s)
    status = meter.optimize(model, work.clock_left_s)
    work.add(meter.work_s)
    return _read(model, variables, program, status)


def _add_program(model: mip.Model, program: LinearProgram) -> list[mip.Var]:
    """Add the variables and the rows of a program; return the variables."""
    variables = [
        model.add_var(lb=lower, ub=upper, obj=cost, var_type=mip.INTEGER if integer else mip.CONTINUOUS)
        for cost, (lower, upper), integer in zip(program.costs, program.bounds, program.is_integer, strict=True)
    ]
    for name, terms, lower, upper in program.rows:
        chosen, coefficients = [variables[v] for v, _ in terms], [c for _, c in terms]
        if lower > -math.inf:
            model.add_constr(mip.LinExpr(chosen, coefficients, -lower, ">"), name)
        if upper < math.inf:
            model.add_constr(mip.LinExpr(chosen, coefficients, -upper, "<"), name)
    return variables


def _read(model: mip.Model, variables: list[mip.Var], program: LinearProgram, status: mip.OptimizationStatus) -> Result:
    if status is mip.OptimizationStatus.INFEASIBLE:
        return Result(Status.INFEASIBLE)
    solved = status in (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE)
    bound = model.objective_bound
    if program.is_linear:  # a relaxation that was cut short proves nothing
        bound = model.objective_value if status is mip.OptimizationStatus.OPTIMAL else None
    proven = -math.inf if bound is None or not math.isfinite(bound) else float(bound)
    if not solved:
        return Result(Status.NOT_FOUND, bound=proven)
    values = tuple(
        float(round(v.x)) if integer else float(v.x) for v, integer in zip(variables, program.is_integer, strict=True)
    )
    kind = Status.OPTIMAL if status is mip.OptimizationStatus.OPTIMAL else Status.FEASIBLE
    return Result(kind, values, float(model.objective_value), proven)


# ---------------------------------------------------------------- the work of a solver


class SolverMeter:
    """Counts the work of solving one program, and ends the solve at a limit of work, independent of the clock.

    HiGHS asks by a callback, at each node and between rounds of cuts, whether to go on. The answer depends on the
    simplex iterations so far; the work of an iteration depends on the size of the program. A linear program gets a
    limit of iterations. So a solve ends at the same iteration on each machine, loaded or idle. It can't end between two
    callbacks, for example in the first relaxation of an integer program.

    CBC, and a HiGHS without callbacks, get a limit of nodes, which is also the same on each machine, but coarse.
    """

    def __init__(self, program: LinearProgram, limit_s: float) -> None:
        entries = sum(len(terms) for _, terms, _, _ in program.rows)
        self._is_linear = program.is_linear
        self._iteration_s = INTEGER_S + INTEGER_ENTRY_S * entries
        if self._is_linear:
            self._iteration_s = LINEAR_S + LINEAR_ROW_S * len(program.rows)
        self._limit_s, self._fixed_s = max(LEAST_S, limit_s), PROGRAM_S + ENTRY_S * entries
        self.work_s, self._questions = self._fixed_s, 0

    def optimize(self, model: mip.Model, clock_left_s: float) -> mip.OptimizationStatus:
        """Solve a program until the limit of work, or for `clock_left_s` by the clock; return python-mip's status."""
        seconds = max(LEAST_S, clock_left_s)
        library = _library() if model.solver_name.upper() == "HIGHS" else None
        if library is None:  # unknown work: a solve that is cut short counts as the limit
            nodes = {} if self._is_linear else {"max_nodes": max(1, self.most_iterations() // NODE_ITERATIONS)}
            status = model.optimize(max_seconds=seconds, **nodes)
            if status not in (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.INFEASIBLE):
                self.work_s = self._limit_s
            return status
        if self._is_linear:
            model.max_iter = self.most_iterations()
            status = model.optimize(max_seconds=seconds)
            self.work_s += self._iteration_s * library.iterations(model)
            return status
        ask = library.watch(model, self._is_enough)
        status = model.optimize(max_seconds=seconds)
        del ask  # HiGHS calls it no more
        return status

    def most_iterations(self) -> int:
        """Return the number of iterations that the limit of work allows."""
        return min(max(1, int((self._limit_s - self._fixed_s) / self._iteration_s)), MOST_ITERATIONS)

    def _is_enough(self, iterations: int) -> bool:
        self._questions += 1
        self.work_s = self._fixed_s + self._iteration_s * iterations + QUESTION_S * self._questions
        return self.work_s >= self._limit_s


class Library:
    """Functions of HiGHS that python-mip lacks, in the library that python-mip has loaded.

    Raises:
        AttributeError: If the library or python-mip has no such function.
        OSError: If the library can't be loaded again.
    """

    def __init__(self) -> None:
        self._ffi = mip.highs.cffi.FFI()  # cffi is installed with python-mip
        self._ffi.cdef(FUNCTIONS)
        self._functions = self._ffi.dlopen(mip.highs.libfile)
        _ = self._functions.Highs_getCallbackDataOutItem, self._functions.Highs_setCallback

    def watch(self, model: mip.Model, is_enough: Callable[[int], bool]) -> object:
        """Call `is_enough` before each node of a solve, with the iterations so far; end the solve if it returns true.

        The returned callback must stay alive until the solve has ended.
        """
        highs = self._pointer(model)

        def ask(kind: int, message: Any, output: Any, answer: Any, data: Any) -> None:
            count = self._functions.Highs_getCallbackDataOutItem(output, b"mip_total_lp_iterations")
            if is_enough(int(self._ffi.cast("int64_t*", count)[0])):
                # Set a time limit of 0 instead of answering "stop": python-mip doesn't know the status of that.
                self._functions.Highs_setDoubleOptionValue(highs, b"time_limit", 0.0)

        callback = self._ffi.callback("void(int, const char*, const void*, void*, void*)", ask)
        self._functions.Highs_setCallback(highs, callback, self._ffi.NULL)
        self._functions.Highs_startCallback(highs, INTERRUPT)
        return callback

    def iterations(self, model: mip.Model) -> int:
        """Return the number of simplex iterations of the latest solve of a linear program."""
        count = self._ffi.new("int*")
        self._functions.Highs_getIntInfoValue(self._pointer(model), b"simplex_iteration_count", count)
        return max(0, int(count[0]))

    def _pointer(self, model: mip.Model) -> Any:
        return self._ffi.cast("void*", int(mip.highs.ffi.cast("uintptr_t", model.solver._model)))


@cache
def _library() -> Library | None:
    try:
        return Library()
    except (AttributeError, OSError) as error:
        log.info("HiGHS can't be asked for its iterations (%s): its work is limited by nodes", error)
        return None
