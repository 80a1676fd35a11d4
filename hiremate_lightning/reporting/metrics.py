"""The numbers of a plan as metrics for experiment trackers, under one prefix."""

from __future__ import annotations

from ..planning.plan import Plan

PREFIX = "hiremate/"
NAMES = (
    "budget_bytes",
    "resident_bytes",
    "unplanned_peak_bytes",
    "planned_peak_bytes",
    "measured_peak_bytes",
    "predicted_overhead",
    "measured_overhead",
    "gap",
)


def plan_metrics(plan: Plan, plans: int = 1) -> dict[str, float]:
    """Name the numbers of a plan.

    Args:
        plan: A plan.
        plans: How many plans there are, one for each kind of step.

    Returns:
        Bytes, ratios and seconds by name; what was not measured yet is left out.
    """
    numbers = plan.to_dict()
    found = {name: numbers[name] for name in NAMES}
    found |= {"planning_s": sum(numbers["planning"].values()), "plans": plans}
    return {f"{PREFIX}{name}": float(value) for name, value in found.items() if value is not None}
