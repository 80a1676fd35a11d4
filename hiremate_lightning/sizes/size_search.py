"""Searches for a size by planning: the largest that fits, or the one with the most samples per second.

A `Forecast` has the step and the resident bytes at every size. Bytes grow with the size, and it takes no time to check
whether given decisions fit: so bisections find the largest size that fits without a plan, and the largest at which the
least memory fits. A plan takes a solve. Its overhead grows with the size too, up to the gap of the solver, so a few
plans between these two sizes, and a little beyond, are enough.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ..options import SessionOptions, SizeOptions
from ..planning.headroom import Room, unless_short
from ..planning.plan import Plan
from ..planning.planner import make_plan
from ..planning.solvers.base import UNLIMITED, Problem, Solution
from ..planning.solvers.least_memory import solve_least_memory
from ..records.expressions import Line, on_line
from ..records.graph_at_sizes import GraphAtSizes
from ..records.step import Decisions, MergedStep
from ..units import Budget, format_bytes, format_ratio

TOLERANCE = 0.03  # relative width at which a search for the largest size stops
HALVINGS = 6  # bisection steps between the least memory and no plan, to find a budget that is enough
GRID = 6  # sizes between the largest without a plan and the largest that fits, tried for throughput
SAME_RATE = 0.001  # relative difference of rates below which the larger size is taken


class Limit(str, Enum):
    """The reason why no larger size is accepted."""

    MEMORY = "memory"
    OVERHEAD = "overhead"
    MAX_VAL = "the largest size allowed"
    TRIALS = "the number of trials"
    THROUGHPUT = "fewer samples per second"
    VALIDATION = "memory of validation"
    STEPS = "the number of real steps"
    GRAPH = "other operations at other sizes, which leave nothing to predict from"


@dataclass(frozen=True, slots=True)
class SizeTrial:
    """One size; peaks include resident bytes."""

    size: int
    predicted_peak_bytes: int  # by its plan; by that of the least memory if no plan fits
    unplanned_peak_bytes: int  # predicted without a plan
    overhead: float | None  # predicted time of recomputation over that of the rest, a ratio; None if no plan fits
    samples_per_s: float | None  # predicted for captured graphs and optimizer; None if no plan fits
    measured_peak_bytes: int | None = None  # of a real step by its plan, by the allocator; None if none ran

    @property
    def fits(self) -> bool:
        """Whether a plan fits."""
        return self.overhead is not None


@dataclass(eq=False)
class Forecast:
    """A step at every size under a budget.

    Raises:
        SizesDifferError: If two of the samples differ in more than sizes.
    """

    samples: Mapping[int, MergedStep]  # the step by size, at two sizes or more
    block_bytes: int  # the allocator allocates multiples of these bytes
    resident: Line  # bytes that exist before the step, by size
    limit_bytes: int  # the budget less the bytes to leave free; resident bytes included
    options: SessionOptions  # options of plans
    fixed_ms: float = 0.0  # time of a step outside of captured graphs, the same for all sizes
    validation: Line | None = None  # peak of validation by size, resident bytes included; None without validation
    trials: dict[int, SizeTrial] = field(default_factory=dict)  # the sizes that were planned

    def __post_init__(self) -> None:
        """Fit the step to its samples, the largest one first."""
        sizes = sorted(self.samples, reverse=True)
        costed = [(self.samples[size].graph, self.samples[size].profile) for size in sizes]
        self._at_sizes = GraphAtSizes(costed, [(size,) for size in sizes], on_line, self.block_bytes)
        self._base = self.samples[sizes[0]]
        self._steps = {size: replace(step, replays=self._base.replays) for size, step in self.samples.items()}
        self._rungs: list[Decisions] = [least_memory(self._base).recompute]

    def at(self, size: int) -> MergedStep:
        """Return the step at a size; a sample itself at its size."""
        if size not in self._steps:
            graph, profile = self._at_sizes.at((size,))
            self._steps[size] = replace(self._base, graph=graph, profile=profile)
        return self._steps[size]

    def least_bytes(self, size: int) -> int:
        """Return the smallest peak at a size by decisions found so far, or the peak of validation if that is larger."""
        least_bytes = self.resident.whole(size) + min(map(self.at(size).peak_bytes, self._rungs))
        return max(least_bytes, self.validation_bytes(size))

    def unplanned_bytes(self, size: int) -> int:
        """Return the peak at a size without a plan, resident bytes included."""
        return self.resident.whole(size) + self.at(size).eager_bytes

    def validation_bytes(self, size: int) -> int:
        """Return the peak of validation at a size, resident bytes included; 0 without validation."""
        return 0 if self.validation is None else math.ceil(self.validation.measured(size))

    def largest_feasible(self, high: int) -> int:
        """Return the largest size up to `high` at which the least memory and validation fit; 0 for none.

        The least memory is solved again at that size, as long as this lets a larger size fit.
        """
        sizes = range(1, high + 1)
        size, before = bisect_right(sizes, self.limit_bytes, key=self.least_bytes), -1
        while size > before:
            self._rungs.append(least_memory(self.at(max(1, size))).recompute)
            size, before = bisect_right(sizes, self.limit_bytes, key=self.least_bytes), size
        return size

    def trial(self, size: int) -> SizeTrial:
        """Plan a size, the first time; return the trial."""
        if size not in self.trials:
            self.trials[size] = trial_of(size, self._plan(size, self.limit_bytes), self.fixed_ms)
        return self.trials[size]

    def _plan(self, size: int, budget_bytes: int) -> Plan:
        room = Room(Budget(size_bytes=budget_bytes), budget_bytes, self.resident.whole(size))
        return unless_short(make_plan(self.at(size), room, self.options, target=str(size)))

    def enough_bytes(self, size: int, max_overhead: float) -> int:
        """Return a budget, near the smallest one, under which a size has a plan of at most this overhead."""
        low, high = self.least_bytes(size) - 1, self.unplanned_bytes(size)
        tried = low + 1
        for _ in range(HALVINGS):
            plan = self._plan(size, tried)
            if plan.planned_peak_bytes <= tried and plan.predicted_overhead <= max_overhead:
                high = tried
            else:
                low = tried
            tried = (low + high) // 2
        return high

    def accepts(self, size: int, max_overhead: float) -> bool:
        """Whether validation fits at a size, and a plan of at most this overhead."""
        if self.validation_bytes(size) > self.limit_bytes:
            return False
        overhead = self.trial(size).overhead
        return overhead is not None and overhead <= max_overhead


def least_memory(step: MergedStep) -> Solution:
    """Return a solution of the least memory of a step, by a heuristic."""
    return solve_least_memory(Problem(step.graph, step.profile, UNLIMITED))


def trial_of(size: int, plan: Plan, fixed_ms: float) -> SizeTrial:
    """Return the trial of a size by its plan; `fixed_ms` is added to the time of the step."""
    fits = not plan.exceeds_budget
    step_ms = plan.planned.time_ms + fixed_ms
    return SizeTrial(
        size,
        plan.planned_peak_bytes,
        plan.unplanned_peak_bytes,
        plan.predicted_overhead if fits else None,
        1000 * size / step_ms if fits and step_ms else None,
        plan.measured.peak_bytes,
    )


@dataclass(frozen=True, slots=True)
class FoundSize:
    """The result of a search."""

    size: int  # the best size; 0 if not even 1 is accepted
    limit: Limit  # why no larger size is accepted
    unplanned_size: int  # the largest size that fits without a plan; 0 for none

    def result(
        self, options: SizeOptions, budget_bytes: int, trials: Mapping[int, SizeTrial], real_steps: int, seconds: float
    ) -> BatchSizeResult:
        """Return the result for the user, with all sizes that were planned or run."""
        return BatchSizeResult(
            size=self.size,
            limited_by=self.limit.value,
            unplanned_size=self.unplanned_size,
            objective=options.objective,
            budget_bytes=budget_bytes,
            max_overhead=options.max_overhead,
            margin=options.margin,
            trials=tuple(trials[size] for size in sorted(trials)),
            real_steps=real_steps,
            seconds=seconds,
        )


def search(forecast: Forecast, high: int, max_overhead: float, objective: str, max_plans: int) -> FoundSize:
    """Find the best size up to `high` with at most `max_plans` plans, and why no larger one is accepted."""
    feasible = forecast.largest_feasible(high)
    unplanned = bisect_right(range(1, feasible + 1), forecast.limit_bytes, key=forecast.unplanned_bytes)
    size, refused = max(1, unplanned), high + 1
    if size > 1 and not forecast.accepts(size, max_overhead):  # a plan may need more than eager PyTorch
        size, refused = 1, size
    if not feasible or not forecast.accepts(size, max_overhead):
        return FoundSize(0, Limit.MEMORY, 0)
    while not _is_settled(size, refused, high) and len(forecast.trials) < max_plans:
        if refused <= high:
            tried = (size + refused) // 2
        elif size < feasible:
            tried = feasible
        else:  # the exact least memory may be below that of the heuristic
            tried = min(max(size + 1, int((1 + TOLERANCE) * size)), high)
        if forecast.accepts(tried, max_overhead):
            size = tried
        else:
            refused = tried
    limit = _what_limits(forecast, size, refused, high)
    if objective == "largest":
        return FoundSize(size, limit, unplanned)
    fastest = _fastest(forecast, max(1, unplanned), size, max_overhead)
    return FoundSize(fastest, limit if fastest == size else Limit.THROUGHPUT, unplanned)


def _is_settled(size: int, refused: int, high: int) -> bool:
    return size == high or size < refused <= min(high, size + max(1, TOLERANCE * size))


def _what_limits(forecast: Forecast, size: int, refused: int, high: int) -> Limit:
    if size == high:
        return Limit.MAX_VAL
    if not _is_settled(size, refused, high):
        return Limit.TRIALS
    if forecast.validation_bytes(refused) > forecast.limit_bytes:
        return Limit.VALIDATION
    return Limit.OVERHEAD if forecast.trial(refused).fits else Limit.MEMORY


def _fastest(forecast: Forecast, unplanned: int, end: int, max_overhead: float) -> int:
    """Find the size with the most samples per second among a few up to the end."""
    grid = {round(unplanned * (end / unplanned) ** (i / GRID)) for i in range(GRID + 1)}
    accepted = (s for s in grid | {s for s in forecast.trials if s <= end} if forecast.accepts(s, max_overhead))
    rates = {size: forecast.trial(size).samples_per_s or 0.0 for size in accepted}
    top = max(rates.values(), default=0.0)
    return max((size for size, rate in rates.items() if rate >= (1 - SAME_RATE) * top), default=unplanned)


@dataclass(frozen=True)
class BatchSizeResult:
    """The best size within a budget; `int(result)` is the size.

    Attributes:
        size: The size. It has run.
        limited_by: Why no larger size is accepted.
        unplanned_size: The largest size that was predicted to fit without a plan, 0 for none.
        objective: "largest" or "throughput".
        budget_bytes: The budget, resident bytes included.
        max_overhead: Most predicted overhead that was accepted, a ratio.
        margin: Share of what the budget leaves beside weights and optimizer that predictions left free.
        trials: The sizes that were planned or run, ascending: the curve of size against peak and throughput.
        real_steps: Number of real training steps that the search ran.
        seconds: Time that it took.
    """

    size: int
    limited_by: str
    unplanned_size: int
    objective: str
    budget_bytes: int
    max_overhead: float
    margin: float
    trials: tuple[SizeTrial, ...]
    real_steps: int
    seconds: float

    def __int__(self) -> int:
        """Return the size."""
        return self.size

    @property
    def trial(self) -> SizeTrial | None:
        """The trial of the size; None if its plan could not be predicted."""
        return next((trial for trial in self.trials if trial.size == self.size), None)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, by name: bytes, ratios, seconds."""
        return asdict(self)

    def to_json(self) -> str:
        """Write all numbers as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: str | Path) -> None:
        """Write all numbers as JSON to a file."""
        Path(path).write_text(self.to_json())


COLUMNS = ("size", "predicted peak", "measured peak", "overhead", "samples/s", "verified")


def result_table(result: BatchSizeResult) -> Table:
    """Draw the trials as a table."""
    what = "largest size" if result.objective == "largest" else "size with the most samples per second"
    table = Table(
        title=f"HiRemate: {what} within {format_bytes(result.budget_bytes)} is {result.size}",
        caption=f"limited by {result.limited_by}; without a plan {result.unplanned_size} would fit; "
        f"{result.real_steps} real steps, {result.seconds:.1f} s",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == COLUMNS[-1] else "right")
    for trial in result.trials:
        peak_bytes = trial.measured_peak_bytes
        table.add_row(
            str(trial.size),
            format_bytes(trial.predicted_peak_bytes),
            "" if peak_bytes is None else format_bytes(peak_bytes),
            "does not fit" if trial.overhead is None else format_ratio(trial.overhead),
            "" if trial.samples_per_s is None else f"{trial.samples_per_s:.3g}",
            "no" if peak_bytes is None else "yes" if peak_bytes <= result.budget_bytes else "over the budget",
            style="bold green" if trial.size == result.size else None,
        )
    return table
