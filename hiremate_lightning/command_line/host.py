"""What the host's memory gives a plan: how much smaller a budget may be, and what that costs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..measuring.links import measure_link
from ..planning.outcome import least_need
from ..planning.plan import Plan
from ..planning.solvers import UNLIMITED, Problem, SolveOptions
from ..records.away import Host, storages_in
from ..records.costs import Link
from ..records.step import Step
from ..running.copies import pinned_storages
from ..units import format_bytes, format_ratio, parse_budget
from .offline import OfflineStep

GB_PER_S, LATENCY_MS = 25.0, 0.01  # of a link of PCIe 4 with 16 lanes, one way


@dataclass(frozen=True, slots=True)
class HostUse:
    """A step whose values may go away.

    Attributes:
        step: The step, whose profile has a link.
        host: The memory that they may go to.
        resident_bytes: What exists before the step.
    """

    step: Step
    host: Host
    resident_bytes: int

    def words(self, made: Plan, alone: Callable[[], Plan]) -> str:
        """Describe a plan beside the one in which all stays on the device.

        Args:
            made: The plan.
            alone: Makes the other one, or that of the least memory.
        """
        link, without = self.step.profile.link, alone()
        assert link is not None, "a step whose values may go away has a link"
        problem = Problem(self.step.graph, self.step.profile, 0, SolveOptions())
        needs = (
            least_need(problem, self.resident_bytes),
            least_need(replace(problem, host=self.host), self.resident_bytes),
        )
        least, away = (need.peak_bytes for need in needs)
        is_within = without.planned_peak_bytes <= without.budget_bytes
        least = min(least, without.planned_peak_bytes)
        away = min(away, made.planned_peak_bytes, least)
        use = "nothing goes there, since that would not be faster"
        if made.solution.aways:
            size, cost = format_bytes(made.planned.host_bytes), format_ratio(made.predicted_overhead)
            use = f"{size} go there in a step, which takes {cost} more time than a plain one"
        other = f"takes {format_ratio(without.predicted_overhead)} more time" if is_within else "is not possible"
        smallest = f"The smallest budget found is {format_bytes(away, up=True)} with it"
        return (
            f"The host's memory, {link.out_bytes_per_ms / 1e6:.3g} GB/s there and "
            f"{link.in_bytes_per_ms / 1e6:.3g} GB/s back: {use}; without it, this budget {other}. "
            f"{smallest}, {format_bytes(least, up=True)} without."
        )


def host_use(captured: OfflineStep, step: Step, asked: argparse.Namespace) -> HostUse | None:
    """Return a step whose values may go away, None where all stays on the device."""
    if not asked.offload:
        return None
    if asked.measure and asked.host_link is None:
        link = measure_link(captured.options.device)
    else:
        bytes_per_ms = 1e6 * (asked.host_link or GB_PER_S)
        link = Link(bytes_per_ms, bytes_per_ms, LATENCY_MS)
    size_bytes = None if asked.host_budget is None else parse_budget(asked.host_budget).size_bytes
    pinned = storages_in(step, [pinned_storages(run.part.captured) for run in captured.recorded.runs])
    host = Host(UNLIMITED if size_bytes is None else size_bytes, pinned, has_round_blocks=True)
    return HostUse(replace(step, profile=replace(step.profile, link=link)), host, captured.resident_bytes)
