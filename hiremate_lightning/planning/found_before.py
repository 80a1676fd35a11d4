"""What was found for a step before: schedules that a later search of the same step is not to be worse than.

They are kept in this process for the latest steps, and in a folder for later runs where there is one. A step is the
same where its graph and what its operations take in memory are; times may differ from run to run. What is kept is
believed only as far as its replay goes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..errors import HiRemateError
from ..records.graph import Graph
from ..records.step import Decisions
from .plan_files import PlanFiles
from .solvers.base import Problem, Solution, Status, replay

STEPS, EACH = 8, 8  # the latest steps, and the latest schedules of each, that are kept in a process
KNOWN_BEFORE = "found before"  # why a search ended with such a schedule


@dataclass(frozen=True)
class _Found:
    """The schedules of one step."""

    graph: Graph
    workspace_bytes: tuple[int, ...]
    decisions: deque[Decisions] = field(default_factory=lambda: deque(maxlen=EACH))

    def is_of(self, problem: Problem) -> bool:
        return self.workspace_bytes == problem.profile.workspace_bytes and (
            self.graph is problem.graph or self.graph == problem.graph
        )


_steps: deque[_Found] = deque(maxlen=STEPS)
_lock = threading.Lock()  # models may be trained in several threads


def remember(problem: Problem, recompute: Decisions, files: PlanFiles | None = None) -> None:
    """Keep a schedule of a step for later searches."""
    with _lock:
        found = next((found for found in _steps if found.is_of(problem)), None)
        if found is None:
            found = _Found(problem.graph, problem.profile.workspace_bytes)
            _steps.append(found)
        if recompute not in found.decisions:
            found.decisions.append(recompute)
        known = tuple(found.decisions)
    if files is not None:
        files.write_found(problem, known)


def forget() -> None:
    """Forget all that was found in this process."""
    with _lock:
        _steps.clear()


def at_least(problem: Problem, solution: Solution, files: PlanFiles | None = None) -> Solution:
    """Return a solution, or in its place what was found before, where that fits and is faster, or alone fits.

    Args:
        problem: The step and its budget.
        solution: What a search has found now; its bound stays.
        files: A folder of plans.
    """
    if solution.status in (Status.OPTIMAL, Status.INFEASIBLE):
        return solution
    best = solution
    for recompute in _known(problem, files):
        try:
            found = replay(problem, recompute)
        except (HiRemateError, IndexError, KeyError):  # of a file that holds no schedule of this step
            continue
        if found.peak_bytes <= problem.budget_bytes and not (best.is_feasible and best.extra_ms <= found.recompute_ms):
            best = replace(
                solution,
                status=Status.FEASIBLE,
                recompute=recompute,
                recompute_ms=found.recompute_ms,
                peak_bytes=found.peak_bytes,
                bound_ms=min(solution.bound_ms, found.recompute_ms),
                aways=(),
                wait_ms=0.0,
                stopped_by=KNOWN_BEFORE,
            )
    return best


def _known(problem: Problem, files: PlanFiles | None) -> Sequence[Decisions]:
    with _lock:
        known = [recompute for found in _steps if found.is_of(problem) for recompute in found.decisions]
    return [*known, *(files.read_found(problem) if files is not None else ())]
