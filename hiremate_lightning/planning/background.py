"""A plan that is made in the background: a process of its own solves, of low priority, while training goes on.

A thread waits for that process. What it computes with are records, which nobody changes. What it has found is taken
between two steps, where the session asks for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from .plan import Plan
from .solvers.base import Strategy
from .solvers.worker import Worker, solving_in


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
        worker = Worker(is_nice=True)
        self.future: Future[Plan] = Future()
        self.close = weakref.finalize(self, worker.close)  # at the end of the program too
        arguments = make, solving_in(worker, solver), worker, self.future
        threading.Thread(target=_make, args=arguments, name="hiremate-solving", daemon=True).start()


def _make(make: Callable[[Strategy], Plan], strategy: Strategy, worker: Worker, future: Future[Plan]) -> None:
    try:
        future.set_result(make(strategy))
    except BaseException as error:  # whatever it is, training goes on, and says it
        future.set_exception(error)
    finally:
        worker.close()
