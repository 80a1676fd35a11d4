"""How to plan: what the planner is asked for besides the step and its budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .solutions import Solutions

DEFAULT_SOLVER = "portfolio"
DEFAULT_TIME_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How to plan.

    Attributes:
        solver: Name of the strategy, see `solvers`.
        time_limit_s: Seconds for solving one plan, counted in work, see `solvers.work`.
        on_infeasible: "raise" to stop where no schedule fits, "warn" to train on with the least memory found.
        cache_dir: Folder for solutions, reused by later runs; None for no files.
    """

    solver: str = DEFAULT_SOLVER
    time_limit_s: float = DEFAULT_TIME_LIMIT_S
    on_infeasible: str = "raise"
    cache_dir: Path | None = None

    @property
    def solutions(self) -> Solutions:
        """The solutions that are known, in this process and in the folder."""
        return Solutions(self.cache_dir)
