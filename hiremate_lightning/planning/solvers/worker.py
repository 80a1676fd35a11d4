"""Solving in a process of its own, so that a leak or a crash of a MIP solver does not reach the training.

The process imports neither torch nor the script that is being run. It is started once, serves one problem after
another, and ends with the process that asked. Strategies that are not of this package, and all of them where no process
can be started, run in place.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import IO, Any

from .base import Problem, Solution, Status, Strategy, get_strategy

log = logging.getLogger("hiremate_lightning")
GRACE_S = 60.0  # after its time limit a solve is given up
Progress = Callable[[float, float], None]


class WorkerLostError(Exception):
    """The process ended, or was ended, before it answered."""


class Worker:
    """A process that solves problems, one at a time."""

    def __init__(self) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # an interrupt from the keyboard is for the training
        )

    @property
    def is_usable(self) -> bool:
        """Whether it runs, and was started by this process and not by the one that forked it."""
        return self._owner == os.getpid() and self._process.poll() is None

    def solve(self, problem: Problem, name: str, limit_s: float) -> Solution:
        """Solve a problem there.

        Args:
            problem: The problem; its `progress` is called here.
            name: Name of the strategy.
            limit_s: Seconds after which the process is ended.

        Raises:
            WorkerLostError: If there is no answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        progress = problem.options.progress
        request = replace(problem, options=replace(problem.options, progress=None))
        watchdog = threading.Timer(limit_s, self._process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            _send(self._process.stdin, (request, name))
            while True:
                answer = pickle.load(self._process.stdout)
                if isinstance(answer, Solution):
                    return answer
                if isinstance(answer, str):
                    raise WorkerLostError(answer)
                if progress is not None:
                    progress(*answer)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            self.close()
            raise WorkerLostError(f"the process of the solver ended with {self._process.returncode}") from error
        except WorkerLostError:
            raise
        except BaseException:  # Ctrl-C too: an answer still to come would be taken for that of the next problem
            self.close()
            raise
        finally:
            watchdog.cancel()

    def close(self) -> None:
        """End the process."""
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                with suppress(OSError):  # what was not sent has nobody to go to
                    if stream is not None:
                        stream.close()


_lock = threading.Lock()
_worker: Worker | None = None


def warm_up() -> None:
    """Start the process, without waiting until it is ready."""
    with _lock:
        _running()


def apart(name: str) -> Strategy:
    """Give a strategy that solves in the process of its own.

    Raises:
        ConfigurationError: If there is no strategy of that name.
    """
    strategy = get_strategy(name)
    if not strategy.__module__.startswith(__package__ or ""):
        return strategy
    return partial(_solve_apart, name=name, in_place=strategy)


def _solve_apart(problem: Problem, name: str, in_place: Strategy) -> Solution:
    with _lock:
        worker = _running()
        if worker is None:
            return in_place(problem)
        try:
            return worker.solve(problem, name, problem.options.time_limit_s + GRACE_S)
        except WorkerLostError as error:
            log.warning("Solving was given up: %s", error)
            return Solution(name, Status.NOT_FOUND, stopped_by=str(error))


def _running() -> Worker | None:
    """Give the process, started anew where it has ended; None where none can be started."""
    global _worker
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
    """Answer requests from the standard input until it ends; what solvers print goes nowhere."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            problem, name = pickle.load(sys.stdin.buffer)
        except EOFError:
            return

        def tell(best_ms: float, bound_ms: float) -> None:
            _send(answers, (best_ms, bound_ms))

        options = replace(problem.options, progress=tell)
        try:
            _send(answers, get_strategy(name)(replace(problem, options=options)))
        except Exception:  # whatever it is, the one who asked shall read it
            _send(answers, traceback.format_exc())


if __name__ == "__main__":
    # Under this name the classes here would be others than those that the package imports.
    from hiremate_lightning.planning import solvers  # noqa: F401  (registers the strategies)

    _serve()
