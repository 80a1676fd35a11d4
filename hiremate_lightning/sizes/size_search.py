"""Search for a size by planning: the largest that fits, or the one with the most samples per second.

A `Forecast` knows a step at every size, and what else is there. It answers three questions of a size: the least memory
that it needs, the memory that it needs without a plan, and its plan under the budget. The first two are quick and grow
with the size, so a bisection finds where each passes the limit. A plan takes a solve; its overhead grows with the size
too, but for what the solver leaves, so few plans between the two bounds are enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from ..options import Objective
from ..planning.outcome import unless_short
from ..planning.plan import Plan, PlanOptions
from ..planning.planner import make_plan
from ..planning.solvers import UNLIMITED, smallest_budget
from ..planning.solvers.base import Problem
from ..records.graph_template import GraphTemplate
from ..records.sized_numbers import FittedLines, Line
from ..records.step import Step
from ..units import Budget

TOLERANCE = 0.04  # relative width at which a search for the overhead's limit stops
HALVINGS = 6  # of the budgets between the least memory and no plan, to name one that is enough
GRID = 6  # sizes between the largest without a plan and the largest that fits, tried for throughput
SAME_RATE = 0.001  # relative difference of rates below which the larger size is taken


class Limit(str, Enum):
    """What stands against a larger size."""

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
    """One size.

    Attributes:
        size: The size.
        predicted_peak_bytes: Peak under its plan, resident bytes included; the least memory where no plan fits.
        unplanned_peak_bytes: Peak without a plan, resident bytes included.
        overhead: Predicted time of recomputation over that of the rest, a ratio; None where no plan fits.
        samples_per_s: Predicted samples per second of the captured part and the optimizer; None where no plan fits.
        measured_peak_bytes: Peak of a real step under its plan by the allocator's own events; None where none ran.
    """

    size: int
    predicted_peak_bytes: int
    unplanned_peak_bytes: int
    overhead: float | None
    samples_per_s: float | None
    measured_peak_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Whether a plan fits."""
        return self.overhead is not None


@dataclass(eq=False)
class Forecast:
    """A step at every size under a budget.

    Attributes:
        samples: The step by size, at least 2.
        block_bytes: The allocator hands out multiples of it.
        resident: Bytes that exist before it, by size.
        limit_bytes: The budget, less what to leave free; resident bytes included.
        options: How to plan.
        fixed_ms: What a step takes beside the captured part, whatever its size.
        validation: Peak of validation by size, resident bytes included; None where there is none.
        trials: The sizes that were planned.

    Raises:
        NoTemplateError: If two of the samples differ in more than sizes.
    """

    samples: Mapping[int, Step]
    block_bytes: int
    resident: Line
    limit_bytes: int
    options: PlanOptions
    fixed_ms: float = 0.0
    validation: Line | None = None
    trials: dict[int, SizeTrial] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refit the step from its samples, the largest one first."""
        sizes = sorted(self.samples, reverse=True)
        costed = [(self.samples[size].graph, self.samples[size].profile) for size in sizes]
        self._template, self._base = GraphTemplate(costed, FittedLines(sizes), self.block_bytes), self.samples[sizes[0]]

    def step_at(self, size: int) -> Step:
        """Return the step at a size; at the size of a sample, that sample."""
        if size in self.samples:
            return self.samples[size]
        graph, profile = self._template.at((size,))
        return replace(self._base, graph=graph, profile=profile)

    def least_bytes(self, size: int) -> int:
        """Return the smallest peak found at a size, resident bytes included."""
        step = self.step_at(size)
        smallest = smallest_budget(Problem(step.graph, step.profile, UNLIMITED))
        return self.resident.whole(size) + smallest.peak_bytes

    def unplanned_bytes(self, size: int) -> int:
        """Return the peak at a size without a plan, resident bytes included."""
        return self.resident.whole(size) + self.step_at(size).plain_bytes

    def validation_bytes(self, size: int) -> int:
        """Return the peak of validation at a size, resident bytes included; 0 where there is none."""
        return 0 if self.validation is None else math.ceil(self.validation.measured(size))

    def largest_feasible(self, high: int) -> int:
        """Return the largest size up to one at which the least memory fits, and validation; 0 for none."""
        return largest(lambda s: max(self.validation_bytes(s), self.least_bytes(s)), self.limit_bytes, high)

    def trial(self, size: int) -> SizeTrial:
        """Plan a size; once."""
        if size not in self.trials:
            self.trials[size] = trial_of(size, self._plan(size, self.limit_bytes), self.fixed_ms)
        return self.trials[size]

    def _plan(self, size: int, budget_bytes: int) -> Plan:
        budget, step, resident_bytes = Budget(size_bytes=budget_bytes), self.step_at(size), self.resident.whole(size)
        return unless_short(make_plan(step, budget, budget_bytes, resident_bytes, self.options, target=str(size)))

    def enough_bytes(self, size: int, max_overhead: float) -> int:
        """Return a budget under which a plan fits at a size and takes no more overhead, near the least such one."""
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
        """Whether a plan fits at a size, and takes no more overhead than that."""
        overhead = self.trial(size).overhead
        return overhead is not None and overhead <= max_overhead


def trial_of(size: int, plan: Plan, fixed_ms: float) -> SizeTrial:
    """Read a trial off a plan."""
    fits = plan.planned_peak_bytes <= plan.budget_bytes
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
    """What a search has found.

    Attributes:
        size: The best size; 0 where not even 1 is accepted.
        limit: What stands against a larger one.
        unplanned_size: The largest size that fits without a plan; 0 for none.
    """

    size: int
    limit: Limit
    unplanned_size: int


def search(forecast: Forecast, high: int, max_overhead: float, objective: Objective, max_plans: int) -> FoundSize:
    """Find the best size.

    Args:
        forecast: The step at every size.
        high: Largest size allowed, at least 1.
        max_overhead: Most overhead to accept, a ratio.
        objective: What the best size is.
        max_plans: Most plans to make.

    Returns:
        The size, and what stands against a larger one.
    """
    feasible = forecast.largest_feasible(high)
    if feasible < 1 or not forecast.accepts(1, max_overhead):
        return FoundSize(0, Limit.MEMORY, 0)
    plain = largest(forecast.unplanned_bytes, forecast.limit_bytes, feasible)
    size, limit = _largest_within(forecast, max(1, plain), feasible, max_overhead, max_plans)
    if limit is Limit.MEMORY:
        size = _beyond(forecast, size, high, max_overhead, max_plans)
        limit = _what_limits(forecast, size, high)
    if objective is Objective.THROUGHPUT:
        size, limit = _fastest(forecast, max(1, plain), size, limit, max_overhead)
    return FoundSize(size, limit, plain)


def _beyond(forecast: Forecast, size: int, high: int, max_overhead: float, max_plans: int) -> int:
    """Go on while plans fit: the least memory that a heuristic finds is not the least that there is."""
    while len(forecast.trials) < max_plans:
        larger = min(high, size + max(1, int(TOLERANCE * size)))
        fits = larger > size and forecast.validation_bytes(larger) <= forecast.limit_bytes
        if not fits or not forecast.accepts(larger, max_overhead):
            break
        size = larger
    return size


def _what_limits(forecast: Forecast, size: int, high: int) -> Limit:
    if size == high:
        return Limit.MAX_VAL
    return Limit.VALIDATION if forecast.validation_bytes(size + 1) > forecast.limit_bytes else Limit.MEMORY


def largest(value: Callable[[int], int], limit: int, high: int) -> int:
    """Find the largest size whose value is within a limit, where values grow with the size, about evenly.

    The next size to try is where the line between the two ends meets the limit, the middle where that has not helped.

    Args:
        value: Gives the value of a size.
        limit: Largest value allowed.
        high: Largest size to try.

    Returns:
        The size; 0 where none is within the limit.
    """
    low, at_low, at_high = 1, value(1), value(high)
    if at_low > limit:
        return 0
    if at_high <= limit:
        return high
    while high - low > 1:
        width = high - low
        for share in ((limit - at_low) / (at_high - at_low), 0.5):
            tried = min(max(low + int(share * width), low + 1), high - 1)
            at_tried = value(tried)
            if at_tried <= limit:
                low, at_low = tried, at_tried
            else:
                high, at_high = tried, at_tried
            if high - low <= 1 or 4 * (high - low) < width:
                break
    return low


def _largest_within(forecast: Forecast, low: int, high: int, max_overhead: float, max_plans: int) -> tuple[int, Limit]:
    """Find the largest size whose plan takes no more overhead, between one that needs no plan and one that fits.

    The next size to plan is, in turn, where the line between the two ends meets the limit, and the middle.
    """
    limit = Limit.MEMORY
    if forecast.accepts(high, max_overhead):
        return high, limit
    ends = {size: forecast.trial(size).overhead for size in (low, high)}
    while high - low > max(1, TOLERANCE * low):
        if len(forecast.trials) >= max_plans:
            return low, Limit.TRIALS
        tried = _between(low, high, ends[low] or 0.0, None if len(ends) % 2 else ends[high], max_overhead)
        ends[tried] = forecast.trial(tried).overhead
        if forecast.accepts(tried, max_overhead):
            low = tried
        else:
            high = tried
    return low, limit if ends[high] is None else Limit.OVERHEAD


def _between(low: int, high: int, at_low: float, at_high: float | None, wanted: float) -> int:
    share = 0.5 if at_high is None else (wanted - at_low) / (at_high - at_low)
    inside = min(max(share, 0.1), 0.9)
    return min(max(low + round(inside * (high - low)), low + 1), high - 1)


def _fastest(forecast: Forecast, plain: int, end: int, limit: Limit, max_overhead: float) -> tuple[int, Limit]:
    """Find the size with the most samples per second among a few up to the end."""
    ratio = end / plain
    grid = {round(plain * ratio ** (i / GRID)) for i in range(GRID + 1)} | {s for s in forecast.trials if s <= end}
    accepted = [size for size in sorted(grid) if forecast.accepts(size, max_overhead)]
    rates = {size: forecast.trial(size).samples_per_s or 0.0 for size in accepted}
    top = max(rates.values(), default=0.0)
    best = max((size for size, rate in rates.items() if rate >= (1 - SAME_RATE) * top), default=plain)
    return best, limit if best == end else Limit.THROUGHPUT
