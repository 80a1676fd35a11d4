"""A plan that is made in the background: a process of its own solves, of low priority, while training goes on.

A thread waits for that process. What it computes with are records, which nobody changes. What it has found is taken
between two steps, where the session asks for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from .plan import Plan
from .solvers.base import Strategy
from .solvers.worker import Worker, solving_in


@dataclass(eq=False)
class _Found:
    """What became of a plan: itself, or why there is none; neither while it is being made."""

    plan: Plan | None = None
    error: BaseException | None = None


class BackgroundPlan:
    """Makes a plan in the background. When it is dropped, or closed, its process ends.

    Args:
        make: Makes the plan with a strategy that it is given.
        solver: Name of the strategy.

    Raises:
        OSError: If no process can be started.
    """

    def __init__(self, make: Callable[[Strategy], Plan], solver: str) -> None:
        worker, self._found = Worker(is_nice=True), _Found()
        self.close = weakref.finalize(self, worker.close)  # at the end of the program too
        arguments = make, solving_in(worker, solver), worker, self._found
        threading.Thread(target=_make, args=arguments, name="hiremate-solving", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether there is a plan, or none will come."""
        return self._found.plan is not None or self._found.error is not None

    @property
    def plan(self) -> Plan | None:
        """The plan, None where there is none."""
        return self._found.plan

    @property
    def error(self) -> BaseException | None:
        """Why there is no plan."""
        return self._found.error


def _make(make: Callable[[Strategy], Plan], strategy: Strategy, worker: Worker, found: _Found) -> None:
    try:
        found.plan = make(strategy)
    except BaseException as error:  # whatever it is, training goes on, and says it
        found.error = error
    finally:
        worker.close()
