"""What the host's memory gives a plan: how much smaller a budget may be, and what that costs."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from ..measuring.links import measure_link
from ..planning.headroom import least_need
from ..planning.plan import Plan
from ..planning.solvers import UNLIMITED, Problem, SolveOptions
from ..records.costs import Link
from ..records.offload import Host, storages_in
from ..records.step import Step
from ..running.copies import pinned_storages
from ..units import format_bytes, format_ratio
from .offline import OfflineStep

GB_PER_S, LATENCY_MS = 25.0, 0.01  # of a link of PCIe 4 with 16 lanes, one way


def host_of(captured: OfflineStep, step: Step, size_bytes: int | None) -> Host:
    """Return the host's memory as a step may use it; without a limit where no size is named."""
    pinned = storages_in(step, [pinned_storages(run.part.captured) for run in captured.recorded.runs])
    return Host(UNLIMITED if size_bytes is None else size_bytes, pinned, has_round_blocks=True)


def with_link(step: Step, device: torch.device, asked: argparse.Namespace) -> Step:
    """Return a step whose profile has the link to the host: as named, as measured, or as of PCIe 4."""
    if asked.measure and asked.host_link is None:
        link = measure_link(device)
    else:
        bytes_per_ms = 1e6 * (asked.host_link or GB_PER_S)
        link = Link(bytes_per_ms, bytes_per_ms, LATENCY_MS)
    return replace(step, profile=replace(step.profile, link=link))


def host_words(step: Step, host: Host, made: Plan, without: Plan) -> str:
    """Describe a plan that may offload beside one that may not; the latter is at the least memory if nothing fits."""
    link = step.profile.link
    assert link is not None, "a step that may offload has a link"
    problem = Problem(step.graph, step.profile, 0, SolveOptions())
    needs = (least_need(each, made.resident_bytes) for each in (problem, replace(problem, host=host)))
    least, offloaded = (need.peak_bytes for need in needs)
    least = min(least, without.planned_peak_bytes)
    offloaded = min(offloaded, made.planned_peak_bytes, least)
    use = "nothing goes there, since that would not be faster"
    if made.solution.offloads:
        size, cost = format_bytes(made.planned.host_bytes), format_ratio(made.predicted_overhead)
        use = f"{size} go there in a step, which takes {cost} more time than a plain one"
    is_within = without.planned_peak_bytes <= without.budget_bytes
    other = f"takes {format_ratio(without.predicted_overhead)} more time" if is_within else "is not possible"
    return (
        f"The host's memory, {link.out_bytes_per_ms / 1e6:.3g} GB/s there and "
        f"{link.in_bytes_per_ms / 1e6:.3g} GB/s back: {use}; without it, this budget {other}. "
        f"The smallest budget found is {format_bytes(offloaded, up=True)} with it, "
        f"{format_bytes(least, up=True)} without."
    )
