"""The plan: everything decided for one training step, what it predicts, and what was measured since.

`Plan` is pure and serialisable: what is needed to run it on a captured graph, to report it, and to keep it on disk.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from .costs import Profile, step_time_ms
from .graph import Graph
from .schedule import Schedule, keep_all, lower
from .simulation import Simulation, simulate
from .solvers.base import Solution
from .units import Budget


@dataclass(frozen=True, slots=True)
class Measurement:
    """What the device showed of a plan; None where not measured yet.

    Attributes:
        peak_bytes: Peak of a whole step by the allocator's events, resident bytes included.
        step_ms: Time of the captured part of a step, recomputation included.
        recompute_ms: Time of what was recomputed within it.
    """

    peak_bytes: int | None = None
    step_ms: float | None = None
    recompute_ms: float | None = None

    @property
    def overhead(self) -> float | None:
        """Time of recomputation over the time of the rest, a ratio."""
        if self.step_ms is None or self.recompute_ms is None or self.step_ms <= self.recompute_ms:
            return None
        return self.recompute_ms / (self.step_ms - self.recompute_ms)


@dataclass(frozen=True, slots=True)
class PlanningTime:
    """Seconds that each stage of planning took."""

    capture_s: float = 0.0
    profile_s: float = 0.0
    solve_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A schedule of one training step under a budget.

    Attributes:
        target: Path of the planned module; "" for the root.
        graph: The step, with the outside of the captured part.
        profile: Costs of its nodes.
        solution: Decisions, bound and status.
        budget: The budget as it was asked for.
        budget_bytes: The budget in bytes, resident bytes included.
        resident_bytes: Bytes that exist before the step and throughout: parameters, buffers, optimizer state, batch.
        planning: How long planning took.
        measured: What was measured while running it.
    """

    target: str
    graph: Graph
    profile: Profile
    solution: Solution
    budget: Budget
    budget_bytes: int
    resident_bytes: int
    planning: PlanningTime = PlanningTime()
    measured: Measurement = Measurement()

    @cached_property
    def schedule(self) -> Schedule:
        """The straight-line program that runs."""
        return lower(self.graph, self.solution.recompute)

    @cached_property
    def planned(self) -> Simulation:
        """The simulated step under the plan."""
        return simulate(self.graph, self.profile, self.schedule)

    @cached_property
    def unplanned(self) -> Simulation:
        """The simulated step with everything kept."""
        return simulate(self.graph, self.profile, lower(self.graph, keep_all(self.graph)))

    @property
    def unplanned_peak_bytes(self) -> int:
        """Peak without a plan, resident bytes included."""
        return self.resident_bytes + self.unplanned.peak_bytes

    @property
    def planned_peak_bytes(self) -> int:
        """Predicted peak, resident bytes included."""
        return self.resident_bytes + self.planned.peak_bytes

    @property
    def predicted_overhead(self) -> float:
        """Time of recomputation over the time of the step without it, a ratio."""
        return self.planned.overhead

    @property
    def gap(self) -> float:
        """Proven share of the step time by which the plan may be slower than the best one."""
        return self.solution.gap(step_time_ms(self.graph, self.profile))

    @property
    def bound_overhead(self) -> float:
        """Proven lower bound on the overhead of every schedule within the budget, a ratio."""
        step_ms = step_time_ms(self.graph, self.profile)
        return self.solution.bound_ms / step_ms if step_ms else 0.0

    def with_measured(self, **changes: Any) -> Plan:
        """Return the plan with fields of its measurement replaced."""
        return replace(self, measured=replace(self.measured, **changes))

    def to_dict(self) -> dict[str, Any]:
        """Give the numbers of the plan: bytes, milliseconds and ratios, by name."""
        return {
            "target": self.target,
            "budget": str(self.budget),
            "budget_bytes": self.budget_bytes,
            "resident_bytes": self.resident_bytes,
            "unplanned_peak_bytes": self.unplanned_peak_bytes,
            "planned_peak_bytes": self.planned_peak_bytes,
            "measured_peak_bytes": self.measured.peak_bytes,
            "predicted_overhead": self.predicted_overhead,
            "measured_overhead": self.measured.overhead,
            "bound_overhead": self.bound_overhead,
            "gap": self.gap,
            "strategy": self.solution.strategy,
            "status": self.solution.status.value,
            "stopped_by": self.solution.stopped_by,
            "planning": asdict(self.planning),
        }

    def to_json(self) -> str:
        """Write the numbers of the plan as JSON."""
        return json.dumps(self.to_dict(), indent=2)
