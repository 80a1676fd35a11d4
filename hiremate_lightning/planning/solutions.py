"""Stored solutions of steps: in this process for the latest steps, and in a folder if there is one.

In the process, the solutions of a step form a curve. It answers a budget at once if the answer is proven, or if an
earlier search for this budget had at least the same time limit. So a smaller budget never gives a faster plan than a
larger one, even without proofs. The schedules also serve the same step with other times: a search that ends without a
proof is never worse than a stored schedule. Two steps are the same if their graphs and workspaces are equal.

A file holds the solution of one problem. Its name is made from the graph, the budget, the solver, the host, and the
version of this package. A reader checks it: workspaces must equal the measured ones, and the schedule is replayed. The
solution keeps the times that it was solved for. Another file holds the latest schedules of the step for any budget.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..errors import HiRemateError
from ..housekeeping import JsonFile, Latest, log
from ..records.costs import Profile, profile_from
from ..records.graph import Graph
from ..records.offload import Host, Offload
from ..records.step import Decisions
from .comparing import Curve
from .solvers.base import Problem, Solution, Status, Strategy, replay_solution, with_decisions

FORMAT = 3
STEPS, SCHEDULES = 16, 8  # most steps (with their costs) kept in the process, most schedules of a step in its file
KNOWN_BEFORE = "found before"  # why a search ended, if its answer is a stored schedule


@dataclass
class _Entry:
    """The solutions of a step at certain costs."""

    curve: Curve  # solutions and bounds by budget
    seconds: dict[int, float] = field(default_factory=dict)  # for each budget, the time limit of the latest search


# By the strategy that solved the step, "" for schedules of any strategy, and by the step and its costs.
_memory = Latest[tuple[str, Graph, Profile, Host], _Entry](STEPS)
_lock = threading.Lock()  # models may be trained in several threads


def _entry(problem: Problem, solver: str) -> _Entry:
    """Return the entry of a step at these costs and of a strategy; add an empty one if there is none."""
    options = replace(problem.options, progress=None)  # the callback would keep the trained model alive
    empty = _Entry(Curve(replace(problem, options=options), (), ()))
    with _lock:
        return _memory.get_or((solver, problem.graph, problem.profile, problem.host), lambda: empty)


def remembering(strategy: Strategy, solver: str) -> Strategy:
    """Wrap a strategy so that it answers from earlier solutions if these are as good as a new solve."""

    @wraps(strategy)
    def solve(problem: Problem) -> Solution:
        entry, budget_bytes, limit_s = _entry(problem, solver), problem.budget_bytes, problem.options.time_limit_s
        answer = entry.curve.solution(budget_bytes)
        was_asked = answer.is_feasible and entry.seconds.get(budget_bytes, 0.0) >= limit_s
        if was_asked or answer.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return answer
        fresh = strategy(problem)
        entry.seconds[budget_bytes] = limit_s
        entry.curve = entry.curve.with_solution(budget_bytes, fresh)
        answer = entry.curve.solution(budget_bytes)
        return replace(answer, solve_s=fresh.solve_s) if answer.is_feasible else fresh

    return solve


def forget() -> None:
    """Forget all schedules of this process; files stay."""
    with _lock:
        _memory.clear()


@dataclass(frozen=True, slots=True)
class Solutions:
    """Reads and writes stored solutions, in this process and in a folder."""

    folder: Path | None = None  # folder of the files; None for no files

    def read(self, problem: Problem, solver: str) -> tuple[Solution, Profile] | None:
        """Read a problem's solution from the folder, with the profile that it was solved for; None if there is none.

        A file of another version or step is ignored, and so is a file whose schedule does not fit.
        """
        file = self._plan_file(problem, solver)
        stored = file.read(lambda data: _decode(data, problem))
        if stored is not None and stored[1].workspace_bytes != problem.profile.workspace_bytes:
            log.info("The plan in %s is for other memory costs: solving again", file.path)
            return None
        return stored

    def write(self, problem: Problem, solver: str, solution: Solution) -> None:
        """Write the solution of a problem to the folder."""
        data = {"format": FORMAT, "solution": asdict(solution), "profile": asdict(problem.profile)}
        self._plan_file(problem, solver).write(data)

    def remember(self, problem: Problem, solution: Solution) -> None:
        """Store the schedule of a step for later searches under any budget."""
        if solution.recompute not in _schedules(problem):
            entry = _entry(problem, "")
            entry.curve = entry.curve.with_solution(problem.budget_bytes, replace(solution, status=Status.FEASIBLE))
        before = self._read_schedules(problem)
        fresh = [recompute for recompute in _schedules(problem) if recompute not in before]
        if fresh:
            self._schedules_file(problem).write([*before, *fresh][-SCHEDULES:])

    def at_least(self, problem: Problem, solution: Solution) -> Solution:
        """Return the solution, or the fastest stored schedule that fits, with the solution's bound, if it is better."""
        if solution.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return solution
        best, feasible = solution, replace(solution, status=Status.FEASIBLE, stopped_by=KNOWN_BEFORE)
        for recompute in (*_schedules(problem), *self._read_schedules(problem)):
            try:
                stored = with_decisions(problem, feasible, recompute)
            except (HiRemateError, IndexError, KeyError):  # the file holds no schedule of this step
                continue
            is_better = not best.is_feasible or best.extra_ms > stored.extra_ms
            if stored.peak_bytes <= problem.budget_bytes and is_better:
                best = stored
        return best

    def _read_schedules(self, problem: Problem) -> list[Decisions]:
        """List the schedules of a step in the folder, unchecked."""
        return self._schedules_file(problem).read(lambda data: [*map(_rows, data)]) or []

    def _schedules_file(self, problem: Problem) -> JsonFile:
        return self._file("found", problem.graph, problem.profile.workspace_bytes)

    def _plan_file(self, problem: Problem, solver: str) -> JsonFile:
        host = problem.host.size_bytes and (problem.host.size_bytes, problem.profile.link)
        return self._file("plan", solver, problem.budget_bytes, host, problem.graph)

    def _file(self, kind: str, *parts: object) -> JsonFile:
        path = None
        if self.folder is not None:
            name = hashlib.sha256(repr((FORMAT, package_version(), *parts)).encode()).hexdigest()[:32]
            path = self.folder / f"{kind}-{name}.json"
        return JsonFile(
            path, "Ignored the plan in %s: %s", "Could not keep the plan in %s (%s); the next run solves again"
        )


def _schedules(problem: Problem) -> list[Decisions]:
    """List the schedules of a step that this process has stored, without those that offload."""
    step = problem.profile.workspace_bytes, problem.graph
    with _lock:
        curves = [e.curve for (_, graph, costs, _), e in _memory.items() if (costs.workspace_bytes, graph) == step]
    return list(dict.fromkeys(point.recompute for curve in curves for point in curve.points if not point.offloads))


def package_version() -> str:
    """Return the installed version of this package."""
    try:
        return version("hiremate-lightning")
    except PackageNotFoundError:
        return "from a checkout"


def _rows(data: Any) -> Decisions:
    return tuple(tuple(int(node) for node in row) for row in data)


def _decode(data: Any, problem: Problem) -> tuple[Solution, Profile]:
    """Decode the contents of a file.

    Raises:
        ValueError: If the format differs, or the schedule is invalid or does not fit; for other contents other errors.
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
