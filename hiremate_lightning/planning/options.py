"""How to plan: what the planner is asked for besides the step and its budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .plan_files import PlanFiles

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
    def files(self) -> PlanFiles | None:
        """The folder of plans, None for none."""
        return None if self.cache_dir is None else PlanFiles(self.cache_dir)
