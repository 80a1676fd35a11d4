"""Plans kept on disk, so that the same step under the same budget is not solved again.

A file is found by what a plan depends on: the graph, the budget, the solver, and the version of this package. It is
believed only as far as it can be checked: what operations take in memory must be what was measured now, and the
schedule is replayed before it is used. Times are those that the plan was solved for.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..errors import HiRemateError
from ..records.away import Away
from ..records.costs import Profile, profile_from_json
from ..records.step import Decisions
from .solvers.base import Problem, Solution, Status, replay_solution

log = logging.getLogger("hiremate_lightning")
FORMAT = 2
MOST_FOUND = 8  # schedules of a step, the latest


@dataclass(frozen=True, slots=True)
class PlanFiles:
    """A folder of plans.

    Attributes:
        folder: Where they are.
    """

    folder: Path

    def read(self, problem: Problem, solver: str) -> tuple[Solution, Profile] | None:
        """Find the solution of a problem, and the profile that it was solved for.

        A file that can't be read, was written by another version or for another step, or holds a schedule that does
        not fit, is ignored with a warning.
        """
        path = self._path(problem, solver)
        if not path.is_file():
            return None
        try:
            solution, profile = _decode(path.read_text(), problem)
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, HiRemateError) as error:
            log.warning("Ignored the plan in %s: %s", path, error)
            return None
        if profile.workspace_bytes != problem.profile.workspace_bytes:
            log.info("The plan in %s is for other memory costs: solving again", path)
            return None
        return solution, profile

    def write(self, problem: Problem, solver: str, solution: Solution) -> None:
        """Keep a solution."""
        path = self._path(problem, solver)
        text = json.dumps({"format": FORMAT, "solution": asdict(solution), "profile": asdict(problem.profile)})
        self._write(path, text)

    def read_found(self, problem: Problem) -> list[Decisions]:
        """List the schedules that were found for a step under any budget; nobody has checked them."""
        path = self._found_path(problem)
        try:
            data = json.loads(path.read_text()) if path.is_file() else []
            return [tuple(tuple(int(node) for node in row) for row in recompute) for recompute in data]
        except (OSError, ValueError, TypeError) as error:
            log.warning("Ignored the plan in %s: %s", path, error)
            return []

    def write_found(self, problem: Problem, known: Sequence[Decisions]) -> None:
        """Keep schedules of a step, beside those that other runs have left."""
        before = self.read_found(problem)
        fresh = [recompute for recompute in known if recompute not in before]
        if fresh:
            self._write(self._found_path(problem), json.dumps([*before, *fresh][-MOST_FOUND:]))

    def _write(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(text)
            partial.replace(path)
        except OSError as error:
            log.warning("Could not keep the plan in %s (%s); the next run solves again", path, error)

    def _path(self, problem: Problem, solver: str) -> Path:
        host = problem.host and (problem.host.size_bytes, problem.profile.link)
        said = (FORMAT, package_version(), solver, problem.budget_bytes, host, problem.graph)
        return self.folder / f"plan-{_name_of(said)}.json"

    def _found_path(self, problem: Problem) -> Path:
        said = (FORMAT, package_version(), problem.graph, problem.profile.workspace_bytes)
        return self.folder / f"found-{_name_of(said)}.json"


def _name_of(said: tuple[object, ...]) -> str:
    return hashlib.sha256(repr(said).encode()).hexdigest()[:32]


def package_version() -> str:
    """Return the version of this package, as it was installed."""
    try:
        return version("hiremate-lightning")
    except PackageNotFoundError:
        return "from a checkout"


def _decode(text: str, problem: Problem) -> tuple[Solution, Profile]:
    """Read a file.

    Raises:
        ValueError: If it is of another format, or its schedule is not valid or does not fit; other errors come from a
            file that is no such file.
    """
    data = json.loads(text)
    if data["format"] != FORMAT:
        raise ValueError("it was written by another version")
    fields = data["solution"]
    recompute = tuple(tuple(int(node) for node in row) for row in fields.pop("recompute"))
    aways = tuple(Away(**{name: int(place) for name, place in row.items()}) for row in fields.pop("aways"))
    solution = Solution(**{**fields, "status": Status(fields["status"]), "recompute": recompute, "aways": aways})
    profile = profile_from_json(json.dumps(data["profile"]))
    if not len(profile.time_ms) == len(profile.workspace_bytes) == len(problem.graph.nodes):
        raise ValueError("its profile is of another graph")
    if aways and not (problem.host is not None and problem.host.holds(problem.graph, aways)):
        raise ValueError("it puts more in the host's memory than there is")
    peak_bytes = replay_solution(Problem(problem.graph, profile, problem.budget_bytes), solution).peak_bytes
    if peak_bytes > problem.budget_bytes or peak_bytes != solution.peak_bytes:
        raise ValueError(f"its schedule takes {peak_bytes:,} bytes, where it says {solution.peak_bytes:,}")
    return solution, profile
