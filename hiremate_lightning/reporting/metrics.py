"""The numbers of a plan as metrics for experiment trackers, under one prefix."""

from __future__ import annotations

from dataclasses import astuple

from ..planning.plan import Plan

PREFIX = "hiremate/"


def plan_metrics(plan: Plan, plans: int = 1) -> dict[str, float]:
    """Name the numbers of a plan.

    Args:
        plan: A plan.
        plans: How many plans there are, one for each kind of step.

    Returns:
        Bytes, ratios and seconds by name; what was not measured yet is left out.
    """
    measured = plan.measured
    found = {
        "budget_bytes": plan.budget_bytes,
        "resident_bytes": plan.resident_bytes,
        "unplanned_peak_bytes": plan.unplanned_peak_bytes,
        "planned_peak_bytes": plan.planned_peak_bytes,
        "measured_peak_bytes": measured.peak_bytes,
        "predicted_overhead": plan.predicted_overhead,
        "measured_overhead": measured.overhead,
        "gap": plan.gap,
        "planning_s": sum(astuple(plan.planning)),
        "plans": plans,
    }
    return {f"{PREFIX}{name}": float(value) for name, value in found.items() if value is not None}
