"""A plan that is made in the background: a process of its own solves while training goes on, one after the other.

A thread waits for that process. What it computes with are records, which nobody changes. What it has found is taken
between two steps, where the session asks for it. The process has the priority of the training: where that keeps all
cores busy, one that gives way gets 4 % of a core, and what it finds by its time limit is worse for good.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from .plan import Plan
from .solvers.base import Strategy
from .solvers.worker import Worker, solving_in

_turn = threading.Lock()  # one solves at a time


class BackgroundPlan:
    """Makes a plan in the background. When it is dropped, or closed, its process ends.

    Args:
        make: Makes the plan with a strategy that it is given.
        solver: Name of the strategy.

    Attributes:
        future: The plan, or why there is none.
        close: Ends the process.

    Raises:
        OSError: If no process can be started.
    """

    def __init__(self, make: Callable[[Strategy], Plan], solver: str) -> None:
        worker = Worker()
        self.future: Future[Plan] = Future()
        self.close = weakref.finalize(self, worker.close)  # at the end of the program too
        arguments = make, solving_in(worker, solver), worker, self.future
        threading.Thread(target=_make, args=arguments, name="hiremate-solving", daemon=True).start()


def _make(make: Callable[[Strategy], Plan], strategy: Strategy, worker: Worker, future: Future[Plan]) -> None:
    try:
        with _turn:
            future.set_result(make(strategy))
    except BaseException as error:  # whatever it is, training goes on, and says it
        future.set_exception(error)
    finally:
        worker.close()
