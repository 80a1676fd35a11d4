"""The work of a MIP solver on one program: counted as it solves, and ended at a limit that no clock knows.

HiGHS asks again and again, at each node and between rounds of cuts, whether to go on. The answer depends on the number
of iterations of the simplex method so far, each at a price that depends on the size of the program. A linear program
gets a limit of iterations. So a program ends at the same iteration on each machine, loaded or idle. A stretch between
two questions can't be ended, the first relaxation of an integer program for example.

CBC, and a HiGHS that can't be asked, get a limit of nodes. That is the same on each machine too, but coarse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import mip

log = logging.getLogger("hiremate_lightning")
PROGRAM_S, ENTRY_S = 1.5e-3, 4e-6  # to build, presolve and read a program: at least, and for each entry of its rows
LINEAR_S, LINEAR_ROW_S = 2.5e-6, 4e-9  # an iteration of a linear program: at least, and for each row
INTEGER_S, INTEGER_ENTRY_S = 2e-4, 1e-8  # the same of an integer program, with cuts and heuristics, for each entry
QUESTION_S = 2e-5  # from one question of HiGHS to the next, beside iterations
NODE_ITERATIONS = 100  # of a node, where only nodes can be limited
MOST_ITERATIONS = 2**31 - 1  # that HiGHS can count
LEAST_S = 0.1  # work that is done in any case
INTERRUPT = 6  # HiGHS's number for the question
FUNCTIONS = """
    int Highs_setCallback(void*, void (*)(int, const char*, const void*, void*, void*), void*);
    int Highs_startCallback(void*, const int);
    const void* Highs_getCallbackDataOutItem(const void*, const char*);
    int Highs_setDoubleOptionValue(void*, const char*, const double);
    int Highs_getIntInfoValue(void*, const char*, int*);
"""


@dataclass(frozen=True, slots=True)
class Price:
    """The price of solving a program of some size, in seconds of work.

    Attributes:
        rows: Number of its rows.
        entries: Number of the coefficients in them.
        is_linear: Whether it has no integer variables.
    """

    rows: int
    entries: int
    is_linear: bool

    @property
    def fixed_s(self) -> float:
        """Work before the first iteration."""
        return PROGRAM_S + ENTRY_S * self.entries

    @property
    def iteration_s(self) -> float:
        """Work of an iteration of the simplex method."""
        if self.is_linear:
            return LINEAR_S + LINEAR_ROW_S * self.rows
        return INTEGER_S + INTEGER_ENTRY_S * self.entries

    def of(self, iterations: int, questions: int = 0) -> float:
        """Return the work of a solve after so many iterations and questions."""
        return self.fixed_s + self.iteration_s * iterations + QUESTION_S * questions

    def iterations_in(self, limit_s: float) -> int:
        """Return the iterations that a limit of work is enough for."""
        return min(max(1, int((limit_s - self.fixed_s) / self.iteration_s)), MOST_ITERATIONS)


class SolverMeter:
    """Counts the work of solving one program, and ends it at a limit.

    Args:
        price: Its price.
        limit_s: Seconds of work; `LEAST_S` are done in any case.

    Attributes:
        work_s: Seconds of work that were done.
    """

    def __init__(self, price: Price, limit_s: float) -> None:
        self._price, self._limit_s = price, max(LEAST_S, limit_s)
        self._questions = 0
        self.work_s = price.fixed_s

    def optimize(self, model: mip.Model, clock_left_s: float) -> mip.OptimizationStatus:
        """Solve a program; it ends at the limit of work, or after so many seconds by the clock."""
        seconds = max(LEAST_S, clock_left_s)
        library = _library() if model.solver_name.upper() == "HIGHS" else None
        if library is None:
            return self._by_nodes(model, seconds)
        if self._price.is_linear:
            model.max_iter = self._price.iterations_in(self._limit_s)
            status = model.optimize(max_seconds=seconds)
            self.work_s = self._price.of(library.iterations(model))
            return status
        ask = library.watch(model, self._is_enough)
        status = model.optimize(max_seconds=seconds)
        del ask  # HiGHS asks no more
        return status

    def _by_nodes(self, model: mip.Model, seconds: float) -> mip.OptimizationStatus:
        """Solve with a limit of nodes. Its work is not known: it counts as the limit where it did not end by itself."""
        if self._price.is_linear:
            status = model.optimize(max_seconds=seconds)
        else:
            nodes = max(1, self._price.iterations_in(self._limit_s) // NODE_ITERATIONS)
            status = model.optimize(max_seconds=seconds, max_nodes=nodes)
        ended = status in (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.INFEASIBLE)
        self.work_s = self._price.fixed_s if ended else self._limit_s
        return status

    def _is_enough(self, iterations: int) -> bool:
        self._questions += 1
        self.work_s = self._price.of(iterations, self._questions)
        return self.work_s >= self._limit_s


class Library:
    """Functions of HiGHS that python-mip does not call, in the library that it has loaded.

    Raises:
        AttributeError: If the library, or python-mip, is one that can't be asked.
        OSError: If the library can't be loaded again.
    """

    def __init__(self) -> None:
        self._ffi = mip.highs.cffi.FFI()  # python-mip needs cffi, and nothing else here does
        self._ffi.cdef(FUNCTIONS)
        self._functions = self._ffi.dlopen(mip.highs.libfile)
        _ = self._functions.Highs_getCallbackDataOutItem, self._functions.Highs_setCallback

    def watch(self, model: mip.Model, is_enough: Callable[[int], bool]) -> object:
        """Ask before each node of a solve, with the iterations so far, whether to end it.

        Returns:
            An object that has to live until the solve has ended.
        """
        highs = self._pointer(model)

        def ask(kind: int, message: Any, said: Any, answer: Any, data: Any) -> None:
            count = self._functions.Highs_getCallbackDataOutItem(said, b"mip_total_lp_iterations")
            if is_enough(int(self._ffi.cast("int64_t*", count)[0])):
                # Not by its answer: python-mip doesn't know the status that this would give.
                self._functions.Highs_setDoubleOptionValue(highs, b"time_limit", 0.0)

        callback = self._ffi.callback("void(int, const char*, const void*, void*, void*)", ask)
        self._functions.Highs_setCallback(highs, callback, self._ffi.NULL)
        self._functions.Highs_startCallback(highs, INTERRUPT)
        return callback

    def iterations(self, model: mip.Model) -> int:
        """Return the iterations that solving a linear program took."""
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
