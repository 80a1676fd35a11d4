"""The plan: all decisions for one training step, their predictions, and later measurements.

`Plan` is immutable and serialisable: it has all data to run on a captured graph, to be reported, and to be stored on
disk.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..records.costs import Profile, step_time_ms
from ..records.graph import Graph
from ..records.offload import with_offloads
from ..records.schedule import Schedule, lower
from ..records.simulation import Simulation, simulate_eager
from ..units import Budget, format_bytes, format_ratio, format_time
from .headroom import Room
from .solvers.base import Problem, Solution, Status, replay_solution

Numbers = Mapping[str, Any]  # the numbers of a plan, by the names in `Plan.to_dict`

STAGES = {  # stages of planning: the name that users read, and the field of `PlanningTime`
    "tracing": "capture_s",
    "proving": "prove_s",
    "compiling": "compile_s",
    "profiling": "profile_s",
    "solving": "solve_s",
}
NO_GAP = 0.0005  # share of a step's time: a smaller gap would be written as 0.0%
SAVES_NOTHING = 0.99  # a planned step that adds at least this share of the eager step's bytes saves no memory


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurements of a plan on the device; None if not measured yet.

    Attributes:
        peak_bytes: Peak of a whole step by the allocator's events, resident bytes included.
        step_ms: Time of the captured part of a step, recomputation included.
        recompute_ms: Time of recomputation within `step_ms`.
        predicted_bytes: The largest predicted peak of the measured steps. The steps of one plan differ: some begin with
            gradients in memory, others without.
    """

    peak_bytes: int | None = None
    step_ms: float | None = None
    recompute_ms: float | None = None
    predicted_bytes: int | None = None

    @property
    def overhead(self) -> float | None:
        """Time of recomputation / time of the rest of the step, a ratio; None if not measured."""
        if self.step_ms is None or self.recompute_ms is None or self.step_ms <= self.recompute_ms:
            return None
        return self.recompute_ms / (self.step_ms - self.recompute_ms)


@dataclass(frozen=True, slots=True)
class PlanningTime:
    """Seconds that each stage of planning took, for all plans of a model so far."""

    capture_s: float = 0.0
    profile_s: float = 0.0
    solve_s: float = 0.0
    compile_s: float = 0.0
    prove_s: float = 0.0

    @property
    def all_s(self) -> float:
        """The seconds of all stages."""
        return self.capture_s + self.profile_s + self.solve_s + self.compile_s + self.prove_s

    def plus(self, stage: str, seconds: float) -> PlanningTime:
        """Return the sums with a stage added, if it is one of `STAGES`."""
        name = STAGES.get(stage)
        return self if name is None else replace(self, **{name: getattr(self, name) + seconds})


@dataclass(frozen=True)
class Plan:
    """A schedule of one training step under a budget.

    Attributes:
        target: Path of the planned module; "" for the root.
        graph: The step, with the code outside of the captured graphs.
        profile: Costs of the graph's nodes.
        solution: Decisions, bound and status.
        budget: The budget as the user gave it.
        budget_bytes: The budget in bytes, resident bytes included.
        resident_bytes: Bytes that exist before the step and throughout: parameters, buffers, optimizer state, batch.
        planning: Seconds of planning, summed over this plan and the earlier plans of the model.
        measured: Measurements of steps that ran this plan.
        proved: How many captured graphs are proved against eager PyTorch, and why the rest are not, in words; "" if
            unknown.
        rounded: The values in which captured code differs from eager PyTorch by rounding, in words.
        resident_parts: Resident bytes by kind ("parameters and buffers", for example); empty if not counted.
    """

    target: str
    graph: Graph = field(repr=False)
    profile: Profile = field(repr=False)
    solution: Solution = field(repr=False)
    budget: Budget
    budget_bytes: int
    resident_bytes: int
    planning: PlanningTime = PlanningTime()
    measured: Measurement = Measurement()
    resident_parts: tuple[tuple[str, int], ...] = ()
    proved: str = ""
    rounded: tuple[str, ...] = ()

    @property
    def room(self) -> Room:
        """The budget, and the bytes that the step may add within it."""
        return Room(self.budget, self.budget_bytes, self.resident_bytes)

    @cached_property
    def schedule(self) -> Schedule:
        """The sequence of operations that runs."""
        return with_offloads(self.graph, lower(self.graph, self.solution.recompute), self.solution.offloads)

    @cached_property
    def planned(self) -> Simulation:
        """The simulated step under the plan."""
        return replay_solution(Problem(self.graph, self.profile, self.budget_bytes), self.solution)

    @cached_property
    def unplanned(self) -> Simulation:
        """The simulated step with everything kept, as eager PyTorch runs it."""
        return simulate_eager(self.graph, self.profile)

    @property
    def unplanned_peak_bytes(self) -> int:
        """Predicted peak of the eager step, resident bytes included."""
        return self.resident_bytes + self.unplanned.peak_bytes

    @property
    def planned_peak_bytes(self) -> int:
        """Predicted peak, resident bytes included."""
        return self.resident_bytes + self.planned.peak_bytes

    @property
    def compared_peak_bytes(self) -> int:
        """The predicted peak to compare with the measured peak, resident bytes included."""
        return self.planned_peak_bytes if self.measured.predicted_bytes is None else self.measured.predicted_bytes

    @property
    def predicted_overhead(self) -> float:
        """(Time of recomputation + waits for copies) / time of the eager step, a ratio."""
        return self.planned.overhead

    @property
    def gap(self) -> float:
        """Most by which the plan can be slower than the best plan, a proven share of the step's time."""
        return self.solution.gap(step_time_ms(self.graph, self.profile))

    @property
    def bound_overhead(self) -> float:
        """Proven lower bound on the overhead of every schedule, a ratio.

        The bound holds for the budget that was solved for. That leaves bytes free for scalars outside of the planned
        modules (at most 64 KiB) and, if an earlier plan was measured above the budget, for its excess.
        """
        step_ms = step_time_ms(self.graph, self.profile)
        return self.solution.bound_ms / step_ms if step_ms else 0.0

    @property
    def kept_compiled(self) -> tuple[str, ...]:
        """Calls of functions that the user compiled, in words: "2 calls of silu_mul (model.py:31)"."""
        calls = Counter((node.compiled, Path(node.source).name) for node in self.graph.nodes if node.compiled)
        return tuple(
            f"{count} call{'s' * (count > 1)} of {name}{f' ({place})' if place else ''}"
            for (name, place), count in calls.items()
        )

    @property
    def exceeds_budget(self) -> bool:
        """Whether the planned peak exceeds the budget: nothing fits, and the plan takes the least memory."""
        return self.planned_peak_bytes > self.budget_bytes

    @property
    def saves_nothing(self) -> bool:
        """Whether the plan exceeds the budget and adds nearly as many bytes as the eager step."""
        return self.exceeds_budget and self.planned.peak_bytes >= SAVES_NOTHING * self.unplanned.peak_bytes

    def with_measured(self, **changes: Any) -> Plan:
        """Return the plan with fields of its measurement replaced."""
        return replace(self, measured=replace(self.measured, **changes))

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers of the plan: bytes, milliseconds and ratios, by name."""
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
            "note": self.solution.note,
            "planning": asdict(self.planning),
            "proved": self.proved,
            "rounded": list(self.rounded),
            "kept_compiled": list(self.kept_compiled),
            "costs": self.profile.device,
            "step_ms": step_time_ms(self.graph, self.profile),
            "planned_step_ms": self.planned.time_ms,
            "offloaded_bytes": self.planned.host_bytes,
            "offload_wait_ms": self.planned.wait_ms,
        }

    def to_json(self) -> str:
        """Write the numbers of the plan as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Describe the plan, and its measurements, in a few plain lines."""
        lines = planned_lines(self)
        if self.measured.peak_bytes is not None or self.measured.overhead is not None:
            lines.append(measured_line(self))
        elif self.proved:  # the plan runs
            lines.append("  measured: nothing yet; a step of the planned input sizes is measured when it comes")
        if self.proved:
            lines.append(f"  proved: {self.proved}")
        return "\n".join(lines)


def planned_lines(plan: Plan) -> list[str]:
    """Describe a plan: peak and time, then solver and planning."""
    numbers, offload = plan.to_dict(), offload_words(plan.to_dict())
    peak = f"{format_bytes(plan.unplanned_peak_bytes)} -> {peak_words(numbers, 'planned_peak_bytes')}"
    return [
        f"{plan_title(plan)}: peak {peak}, budget {budget_words(numbers)}, "
        f"extra time {format_ratio(plan.predicted_overhead)}{offload and f'; {offload}'}",
        f"  {solver_words(numbers)}; planned in {planning_words(numbers)}",
    ]


def measured_line(plan: Plan) -> str:
    """Describe the measurements of a plan, beside its predictions, in one line of ASCII."""
    parts = []
    if plan.measured.peak_bytes is not None:
        predicted, budget = format_bytes(plan.compared_peak_bytes), format_bytes(plan.budget_bytes)
        peak = peak_words(plan.to_dict(), "measured_peak_bytes")
        parts.append(f"peak {peak}, predicted {predicted}, budget {budget}")
    if (overhead := plan.measured.overhead) is not None:
        parts.append(f"extra time {format_ratio(overhead)}, predicted {format_ratio(plan.predicted_overhead)}")
    return f"{plan_title(plan)}, measured: {'; '.join(parts) or 'nothing yet'}"


def plan_title(plan: Plan) -> str:
    """Name a plan."""
    return f"HiRemate plan of {plan.target}" if plan.target else "HiRemate plan"


def peak_words(numbers: Numbers, name: str, kind: str = "") -> str:
    """Write the peak of this name, and its excess over the budget."""
    over = numbers[name] - numbers["budget_bytes"]
    return f"{format_bytes(numbers[name])}{kind}" + (f" ({format_bytes(over)} OVER the budget)" if over > 0 else "")


def budget_words(numbers: Numbers) -> str:
    """Write the budget in bytes, and as the user gave it."""
    size, asked = format_bytes(numbers["budget_bytes"]), numbers["budget"]
    return size if size == asked else f"{size} ({asked})"


def offload_words(numbers: Numbers) -> str:
    """Describe the bytes that a step offloads to the host, and their cost; "" if it offloads none."""
    if not numbers.get("offloaded_bytes"):  # missing in files of earlier versions
        return ""
    waits = numbers["offload_wait_ms"] / numbers["step_ms"] if numbers["step_ms"] else 0.0
    size = format_bytes(numbers["offloaded_bytes"])
    return f"{size} in the host's memory meanwhile, waits for copies {format_ratio(waits)}"


def solver_words(numbers: Numbers) -> str:
    """Describe the strategy, the proven quality of its solution, and why the search ended."""
    is_plain = not numbers["predicted_overhead"]
    good = "at no extra time" if numbers.get("offloaded_bytes") else "nothing is recomputed"
    words = f"{numbers['strategy']}: {good if is_plain else proof_words(numbers)}"
    if numbers["stopped_by"] not in ("", "proof") and numbers["status"] != Status.OPTIMAL:
        words += f", stopped by {numbers['stopped_by']}"
    return f"{words} ({numbers['note'].rstrip('.')})" if numbers.get("note") else words


def proof_words(numbers: Numbers) -> str:
    """Describe how near a plan is proven to be to the fastest one within its budget."""
    if not numbers["bound_overhead"]:
        return "no lower bound known"
    return f"{near_words(numbers['gap'])} (no plan below {format_ratio(numbers['bound_overhead'])})"


def near_words(gap: float) -> str:
    """Describe the proven gap to the fastest plan, a share of the step's time."""
    return f"within {100 * gap:.1f}% of the best possible" if gap >= NO_GAP else "the best possible"


def planning_words(numbers: Numbers) -> str:
    """Describe how long planning took, stage by stage."""
    seconds = numbers["planning"]
    taken = [(name, 1000 * seconds[field]) for name, field in STAGES.items() if seconds[field]]
    parts = ", ".join(f"{name} {format_time(time_ms)}" for name, time_ms in taken)
    return f"{format_time(1000 * sum(seconds.values()))}{': ' if parts else ''}{parts}"


def describe_peak(name: str, plan: Plan | None) -> str:
    """Describe the planned and the measured peak of a model; without a plan, say that it ran at the least memory."""
    if plan is None:
        return f"{name} ran at the least memory found, before there was a plan."
    text = (
        f"{name} is planned for a peak of {format_bytes(plan.planned_peak_bytes)} within a budget of "
        f"{format_bytes(plan.budget_bytes)}; {format_bytes(plan.resident_bytes)} of it exist before the step."
    )
    if plan.measured.peak_bytes is None:
        return text
    return f"{text} Measured before: {format_bytes(plan.measured.peak_bytes)}."
