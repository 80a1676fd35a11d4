"""What `hiremate run` says at the end: what was planned, what was measured of it, and why nothing was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..errors import ConfigurationError
from ..integrations.any_script import DRY_STEPS, Finder
from ..planning.plan import Plan
from ..reporting.html_report import write_html
from ..reporting.report import is_rank_zero
from ..reporting.terminal import write_json
from ..units import format_bytes, format_ratio

PROGRAM = "hiremate run"


def write_line(line: str) -> None:
    """Write a line to standard error, in the first of several processes."""
    if is_rank_zero():
        sys.stderr.write(f"{PROGRAM}: {line}\n")
        sys.stderr.flush()


def show(finder: Finder, page: Path | None, numbers: str | None) -> None:
    """Print the last words on a script that has ended, and write the files that were asked for.

    Args:
        finder: What found the models.
        page: Where to write the page of the plan, None for nowhere.
        numbers: Where to write the numbers as JSON; "-" for the output, None for nowhere.
    """
    seen = finder.seen
    for trained in finder.trained:
        write_line(f"{trained.name}: {_words(trained.plan, seen.ended_by)}")
    if not finder.trained:
        write_line(f"no training step was seen: {seen.reason}")
    if is_rank_zero():
        plans = [trained.plan for trained in finder.trained if trained.plan is not None]
        for write in (partial(_write_pages, page, plans), partial(_write_numbers, numbers, finder)):
            try:
                write()
            except (OSError, ConfigurationError) as error:  # the script has ended: its exit code stays
                write_line(f"can't write what was asked for: {error}")
    if seen.is_stopped:
        write_line(f"stopped by --dry-run after {seen.updates} updates of the weights")


def _write_pages(page: Path | None, plans: Sequence[Plan]) -> None:
    if page is None:
        return
    if not plans:
        write_line(f"{page} is not written: there is no plan")
        return
    page.parent.mkdir(parents=True, exist_ok=True)
    for index, plan in enumerate(plans):
        path = page if not index else page.with_stem(f"{page.stem}-{index + 1}")
        write_line(f"written: {write_html(plan, path, curve_limit_s=0)}")


def _write_numbers(target: str | None, finder: Finder) -> None:
    if target is None:
        return
    models = [{"model": t.name, "plan": None if t.plan is None else t.plan.to_dict()} for t in finder.trained]
    numbers = {"updates": finder.seen.updates, "models": models, "unplanned": None if models else finder.seen.reason}
    write_json(numbers, target)
    if target != "-":
        write_line(f"written: {target}")


def _words(plan: Plan | None, ended_by: str | None) -> str:
    """Describe a plan: the peak as measured, or as predicted, beside that of the plain step; budget and time."""
    if plan is None and ended_by is not None:
        return f"no plan was made before the script ended, by {ended_by}"
    if plan is None:
        return f"no plan was made. One is made in the second step; {DRY_STEPS} are needed at least"
    peak = _measured_or(plan.measured.peak_bytes, plan.planned_peak_bytes, format_bytes)
    overhead = _measured_or(plan.measured.overhead, plan.predicted_overhead, format_ratio)
    plain, budget = format_bytes(plan.unplanned_peak_bytes), format_bytes(plan.budget_bytes)
    return f"peak {peak}, {plain} without a plan; budget {budget} ({plan.budget}); extra time {overhead}"


def _measured_or(measured: float | None, predicted: float, write: Callable[[float], str]) -> str:
    return f"{write(predicted)} (predicted)" if measured is None else f"{write(measured)} (measured)"
