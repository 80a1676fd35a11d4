"""Solutions of steps, kept for later: in this process for the latest steps, and in a folder where there is one.

In the process the solutions of a step form a curve, which answers a budget at once where the answer is proven, or was
found in no less time. So a smaller budget never gives a faster plan than a larger one, whatever the time limits left
unproven. Their schedules also serve where times are others: a search that ends without a proof is never worse than what
was known of the step. Steps are the same where graph and workspaces are equal.

A file holds the solution of one problem. Its name is made from the graph, the budget, the solver, and the version of
this package. Its contents are checked: the workspaces of operations must be those that were measured now, and the
schedule is replayed before it is used. Its times are those that it was solved for. Another file beside it holds the
latest schedules of the step, whatever their budgets.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..errors import HiRemateError
from ..housekeeping import JsonFile
from ..records.costs import Profile, profile_from
from ..records.offload import Offload
from ..records.step import Decisions
from .comparing import Curve
from .solvers.base import Problem, Solution, Status, Strategy, replay_solution, with_decisions

log = logging.getLogger("hiremate_lightning")
FORMAT = 3
STEPS, SCHEDULES = 16, 8  # the latest steps at certain costs, and in a folder the latest schedules of each
KNOWN_BEFORE = "found before"  # why a search ended with such a schedule


@dataclass
class _Known:
    """What is known of a step at certain costs."""

    solver: str  # the strategy that has solved it; "" for schedules from elsewhere
    curve: Curve  # its solutions
    seconds: dict[int, float] = field(default_factory=dict)  # spent at most on each budget

    def is_of(self, problem: Problem) -> bool:
        """Whether it is of the same step, whatever its times."""
        own, workspace_bytes = self.curve.problem, problem.profile.workspace_bytes
        return own.profile.workspace_bytes == workspace_bytes and own.graph == problem.graph


_memory: deque[_Known] = deque(maxlen=STEPS)
_lock = threading.Lock()  # models may be trained in several threads


def _known(problem: Problem, solver: str) -> _Known:
    """Return what is known of a step at these costs from a strategy: nothing at first."""
    with _lock:
        for known in _memory:
            own, costs = known.curve.problem, (problem.profile, problem.host)
            if known.solver == solver and (own.profile, own.host) == costs and known.is_of(problem):
                return known
        options = replace(problem.options, progress=None)  # which holds on to the model that is trained
        _memory.append(_Known(solver, Curve(replace(problem, options=options), (), ())))
        return _memory[-1]


def remembering(strategy: Strategy, solver: str) -> Strategy:
    """Wrap a strategy so that it answers from its earlier solutions, where these are as good as a new solve."""

    @wraps(strategy)
    def solve(problem: Problem) -> Solution:
        known, budget_bytes, limit_s = _known(problem, solver), problem.budget_bytes, problem.options.time_limit_s
        answer = known.curve.solution(budget_bytes)
        was_asked = answer.is_feasible and known.seconds.get(budget_bytes, 0.0) >= limit_s
        if was_asked or answer.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return answer
        fresh = strategy(problem)
        known.seconds[budget_bytes] = limit_s
        known.curve = known.curve.with_solution(budget_bytes, fresh)
        answer = known.curve.solution(budget_bytes)
        return replace(answer, solve_s=fresh.solve_s) if answer.is_feasible else fresh

    return solve


def forget() -> None:
    """Forget all schedules of this process; files stay."""
    with _lock:
        _memory.clear()


@dataclass(frozen=True, slots=True)
class Solutions:
    """The solutions that are known."""

    folder: Path | None = None  # folder of the files; None for no files

    def read(self, problem: Problem, solver: str) -> tuple[Solution, Profile] | None:
        """Find the solution of a problem in the folder, and the profile that it was solved for.

        A file of another version or step is ignored, and one that holds a schedule that does not fit.
        """
        file = self._plan_file(problem, solver)
        known = file.read(lambda data: _decode(data, problem))
        if known is not None and known[1].workspace_bytes != problem.profile.workspace_bytes:
            log.info("The plan in %s is for other memory costs: solving again", file.path)
            return None
        return known

    def write(self, problem: Problem, solver: str, solution: Solution) -> None:
        """Keep the solution of a problem in the folder."""
        data = {"format": FORMAT, "solution": asdict(solution), "profile": asdict(problem.profile)}
        self._plan_file(problem, solver).write(data)

    def remember(self, problem: Problem, solution: Solution) -> None:
        """Keep the schedule of a step for later searches, under any budget."""
        if solution.recompute not in _schedules(problem):
            known = _known(problem, "")
            known.curve = known.curve.with_solution(problem.budget_bytes, replace(solution, status=Status.FEASIBLE))
        before = self._read_schedules(problem)
        fresh = [recompute for recompute in _schedules(problem) if recompute not in before]
        if fresh:
            self._schedules_file(problem).write([*before, *fresh][-SCHEDULES:])

    def at_least(self, problem: Problem, solution: Solution) -> Solution:
        """Return a solution, or with its bound a known schedule where that is faster and fits, or alone fits."""
        if solution.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return solution
        best, found = solution, replace(solution, status=Status.FEASIBLE, stopped_by=KNOWN_BEFORE)
        for recompute in (*_schedules(problem), *self._read_schedules(problem)):
            try:
                known = with_decisions(problem, found, recompute)
            except (HiRemateError, IndexError, KeyError):  # of a file that holds no schedule of this step
                continue
            is_better = not best.is_feasible or best.extra_ms > known.extra_ms
            if known.peak_bytes <= problem.budget_bytes and is_better:
                best = known
        return best

    def _read_schedules(self, problem: Problem) -> list[Decisions]:
        """List the schedules of a step in the folder; nobody has checked them."""
        return self._schedules_file(problem).read(lambda data: [*map(_rows, data)]) or []

    def _schedules_file(self, problem: Problem) -> JsonFile:
        return self._file("found", problem.graph, problem.profile.workspace_bytes)

    def _plan_file(self, problem: Problem, solver: str) -> JsonFile:
        host = problem.host.size_bytes and (problem.host.size_bytes, problem.profile.link)
        return self._file("plan", solver, problem.budget_bytes, host, problem.graph)

    def _file(self, kind: str, *said: object) -> JsonFile:
        path = None
        if self.folder is not None:
            name = hashlib.sha256(repr((FORMAT, package_version(), *said)).encode()).hexdigest()[:32]
            path = self.folder / f"{kind}-{name}.json"
        return JsonFile(
            path, "Ignored the plan in %s: %s", "Could not keep the plan in %s (%s); the next run solves again"
        )


def _schedules(problem: Problem) -> list[Decisions]:
    """List the schedules of a step that are known in this process, in which nothing is offloaded."""
    with _lock:
        curves = [known.curve for known in _memory if known.is_of(problem)]
    return list(dict.fromkeys(point.recompute for curve in curves for point in curve.points if not point.offloads))


def package_version() -> str:
    """Return the version of this package, as it was installed."""
    try:
        return version("hiremate-lightning")
    except PackageNotFoundError:
        return "from a checkout"


def _rows(data: Any) -> Decisions:
    return tuple(tuple(int(node) for node in row) for row in data)


def _decode(data: Any, problem: Problem) -> tuple[Solution, Profile]:
    """Decode the contents of a file.

    Raises:
        ValueError: If it is of another format, or its schedule is not valid or does not fit. A file with other contents
            raises other errors.
    """
    if data["format"] != FORMAT:
        raise ValueError("it was written by another version")
    fields = data["solution"]
    recompute = _rows(fields.pop("recompute"))
    offloads = tuple(Offload(**{name: int(place) for name, place in row.items()}) for row in fields.pop("offloads"))
    solution = Solution(**{**fields, "status": Status(fields["status"]), "recompute": recompute, "offloads": offloads})
    profile = profile_from(data["profile"])
    if not len(profile.time_ms) == len(profile.workspace_bytes) == len(problem.graph.nodes):
        raise ValueError("its profile is of another graph")
    if not problem.host.holds(problem.graph, offloads):
        raise ValueError("it puts more in the host's memory than there is")
    peak_bytes = replay_solution(Problem(problem.graph, profile, problem.budget_bytes), solution).peak_bytes
    if peak_bytes > problem.budget_bytes or peak_bytes != solution.peak_bytes:
        raise ValueError(f"its schedule takes {peak_bytes:,} bytes, where it says {solution.peak_bytes:,}")
    return solution, profile
