"""Solves in a separate process, so that a leak or a crash of a MIP solver does not reach the training.

The process imports neither torch nor the user's script. It starts once, answers one question at a time, and ends with
its parent. Strategies from outside of this package run in this process; so do all strategies if no process can be
started.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import takewhile
from typing import IO, Any, TypeVar

from ...errors import ConfigurationError, HiRemateWarning
from ...housekeeping import Once, log
from . import mip_backend
from .base import Problem, Solution, Status, Strategy, clock_limit_s, get_strategy, needs_programs
from .offload import MOST_SHARE, with_offloading

_warn_once = Once(log.warning)
GRACE_S = 60.0  # seconds after the clock limit of a solve until the process is killed
MENDING = "pip install --force-reinstall highsbox"
READY, PROGRESS, ANSWER, ERROR = range(4)  # the kinds of messages from the process
Progress = Callable[[float, float], None]
Answer = TypeVar("Answer")


class WorkerLostError(Exception):
    """The process ended or was killed before it answered."""


class Worker:
    """A process that solves problems, one at a time."""

    def __init__(self) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._owner = os.getpid()
        self.is_ready = False  # whether its first message has arrived
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C must reach the training only
        )

    @property
    def is_usable(self) -> bool:
        """Whether the process runs and is a child of this process, not of a parent that forked."""
        return self._owner == os.getpid() and self._process.poll() is None

    def solve(self, problem: Problem, name: str, limit_s: float) -> Solution:
        """Solve a problem in the worker by the named strategy; call the problem's `progress` in this process.

        Raises:
            WorkerLostError: If there is no answer within the limit; the process is then killed.
        """
        request = replace(problem, options=replace(problem.options, progress=None))
        solution: Solution = self._ask((request, name), limit_s, problem.options.progress)
        return solution

    def failure(self, backend: str) -> str:
        """Return why a backend fails in the worker, "" if it works; raises as `solve` does."""
        return str(self._ask(backend, GRACE_S))

    def _ask(self, question: Any, limit_s: float, progress: Progress | None = None) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(limit_s, self._process.kill)
        watchdog.daemon = True
        watchdog.start()
        kind = READY
        try:
            _send(self._process.stdin, question)
            while kind not in (ANSWER, ERROR):
                kind, *answer = pickle.load(self._process.stdout)
                self.is_ready = True
                if kind == PROGRESS and progress is not None:
                    progress(*answer)
        except BaseException as error:  # Ctrl-C too: a late answer would be taken for the answer to the next question
            self.close()
            if not isinstance(error, (EOFError, OSError, pickle.UnpicklingError)):
                raise
            raise WorkerLostError(f"the process of the solver ended with {self._process.returncode}") from error
        finally:
            watchdog.cancel()
        if kind == ERROR:
            log.debug("The process of the solver raised:\n%s", answer[1])
            raise WorkerLostError(answer[0])
        return answer[0]

    def close(self) -> None:
        """End the process."""
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                with suppress(OSError):  # closing sends the rest of a question, which nobody reads
                    if stream is not None:
                        stream.close()


_lock = threading.Lock()
_worker: Worker | None = None
_can_start = True


def warm_up() -> None:
    """Start the worker, without waiting until it is ready."""
    with _lock:
        _running()


def check_strategy(name: str) -> None:
    """Check that a strategy can run in the worker; warn if HiGHS does not work and CBC, which is slower, replaces it.

    Raises:
        ConfigurationError: If there is no strategy of that name, or if it needs a MIP solver and none works.
    """
    get_strategy(name)
    failures = backend_failures() if needs_programs(name) else ()
    if len(failures) == len(mip_backend.BACKENDS):
        highs, cbc = failures
        raise ConfigurationError(
            f"No MIP solver works here, and solver={name!r} needs one. HiGHS failed: {highs}. CBC failed: {cbc}. "
            f"Mend it with: {MENDING}"
        )
    if failures:
        warnings.warn(
            f"HiGHS does not work here ({failures[0]}), so CBC solves. Plans stay as good. Solving takes 1.3 times as "
            f"long in the median, and up to 7 times as long. Mend it with: {MENDING}",
            HiRemateWarning,
            stacklevel=2,
        )


@cache
def backend_failures() -> tuple[str, ...]:
    """Return why MIP solvers fail in the worker, in the order of `BACKENDS`, up to the first that works."""
    return tuple(takewhile(bool, map(backend_failure, mip_backend.BACKENDS)))


def backend_failure(backend: str) -> str:
    """Return why a MIP solver fails in the worker, "" if it works."""
    try:
        return _apart(lambda worker: worker.failure(backend), lambda: mip_backend.failure(backend))
    except WorkerLostError as error:
        return str(error)


def apart(name: str) -> Strategy:
    """Return a strategy that solves in the worker.

    Raises:
        ConfigurationError: If there is no strategy of that name.
    """
    strategy = get_strategy(name)
    if not strategy.__module__.startswith(__package__ or ""):
        return with_offloading(strategy)
    return partial(_solve_apart, name=name, in_place=with_offloading(strategy))


def _solve_apart(problem: Problem, name: str, in_place: Strategy) -> Solution:
    if needs_programs(name) and not problem.options.backend:
        chosen = mip_backend.BACKENDS[len(backend_failures()) :][:1]
        problem = replace(problem, options=replace(problem.options, backend="".join(chosen)))
    limit_s = clock_limit_s(MOST_SHARE * problem.options.time_limit_s) + GRACE_S
    try:
        return _apart(lambda worker: worker.solve(problem, name, limit_s), lambda: in_place(problem))
    except WorkerLostError as error:
        _warn_once(
            f"The solver failed ({error}). The plan takes the least memory found instead, and more time than the "
            "budget needs. Logging at level DEBUG shows where it failed."
        )
        return Solution(name, Status.NOT_FOUND, stopped_by=f"a failure of the solver ({error})")


def _apart(ask: Callable[[Worker], Answer], in_place: Callable[[], Answer]) -> Answer:
    """Ask the worker; compute the answer in this process if no worker can be started."""
    global _can_start
    with _lock:
        worker = _running()
        if worker is None:
            return in_place()
        try:
            return ask(worker)
        except WorkerLostError as error:
            if worker.is_ready:
                raise
            log.info("The process for solving does not start (%s): solving in place", error)
            _can_start = False
            return in_place()


def _running() -> Worker | None:
    """Return the worker, started again if it has ended; None if none can be started."""
    global _worker
    if not _can_start:
        return None
    if _worker is None or not _worker.is_usable:
        try:
            _worker = Worker()
        except OSError as error:
            log.info("No process for solving could be started (%s): solving in place", error)
            return None
        atexit.register(_worker.close)
    return _worker


def _send(stream: IO[bytes], message: Any) -> None:
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def _serve() -> None:
    """Answer questions from standard input until it ends; discard what solvers print."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _send(answers, (READY,))
    while True:
        try:
            question = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            _send(answers, (ANSWER, _answer(question, answers)))
        except Exception as error:  # any error is reported to the parent
            line = " ".join(str(error).split())
            _send(answers, (ERROR, f"{type(error).__name__}: {line}", traceback.format_exc()))


def _answer(question: Any, answers: IO[bytes]) -> Solution | str:
    """Solve a problem by a strategy, or return why a backend fails, by the question."""
    if isinstance(question, str):
        return mip_backend.failure(question)
    problem, name = question

    def send(best_ms: float, bound_ms: float) -> None:
        _send(answers, (PROGRESS, best_ms, bound_ms))

    return with_offloading(get_strategy(name))(replace(problem, options=replace(problem.options, progress=send)))


if __name__ == "__main__":
    # Import by the package's name: the classes of `__main__` differ from those that the package imports.
    from hiremate_lightning.planning import solvers  # noqa: F401  (registers the strategies)

    _serve()
