"""What `hiremate run` says at the end: what was planned, what was measured of it, and why nothing was."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..integrations.any_script import DRY_STEPS, Finder, Trained
from ..reporting.html_report import write_html
from ..reporting.report import is_rank_zero
from ..reporting.terminal import Output
from ..units import format_bytes, format_ratio

PROGRAM = "hiremate run"


def write_line(line: str) -> None:
    """Write a line to standard error, in the first of several processes."""
    if is_rank_zero():
        sys.stderr.write(f"{PROGRAM}: {line}\n")
        sys.stderr.flush()


class Summary:
    """The last words on a script that has ended.

    Args:
        finder: What found the models.
        page: Where to write the page of the plan, None for nowhere.
        numbers: Where to write the numbers as JSON; "-" for the output, None for nowhere.
    """

    def __init__(self, finder: Finder, page: Path | None, numbers: str | None) -> None:
        self._finder, self._page, self._numbers = finder, page, numbers
        self._planned = [found for found in finder.trained if found.plan is not None]

    def show(self) -> None:
        """Print the summary, and write the files that were asked for."""
        for found in self._finder.trained:
            write_line(_line(found, self._finder.seen.ended_by))
        if not self._finder.trained:
            write_line(f"no training step was seen: {reason_of(self._finder)}")
        if is_rank_zero():
            for write in (self._write_page, self._write_numbers):
                try:
                    write()
                except (OSError, ConfigurationError) as error:  # the script has ended: its exit code stays
                    write_line(f"can't write what was asked for: {error}")
        if self._finder.seen.is_stopped:
            write_line(f"stopped by --dry-run after {self._finder.seen.updates} updates of the weights")

    def _write_page(self) -> None:
        if self._page is not None and not self._planned:
            write_line(f"{self._page} is not written: there is no plan")
        for index, found in enumerate(self._planned if self._page is not None else ()):
            assert self._page is not None
            assert found.plan is not None, "only those with a plan are listed"
            path = self._page if not index else self._page.with_stem(f"{self._page.stem}-{index + 1}")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_line(f"written: {write_html(found.plan, path, curve_limit_s=0)}")

    def _write_numbers(self) -> None:
        if self._numbers == "-":
            Output().write(f"{self._as_json()}\n")
        elif self._numbers is not None:
            path = Path(self._numbers)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{self._as_json()}\n", encoding="utf-8")
            write_line(f"written: {path}")

    def _as_json(self) -> str:
        models: list[dict[str, Any]] = [
            {"model": found.name, "plan": None if found.plan is None else found.plan.to_dict()}
            for found in self._finder.trained
        ]
        reason = None if models else reason_of(self._finder)
        return json.dumps({"updates": self._finder.seen.updates, "models": models, "unplanned": reason}, indent=2)


def reason_of(finder: Finder) -> str:
    """Describe why nothing was planned, by the most telling observation."""
    seen = finder.seen
    if seen.planned_by_script:
        return f"the script plans {_names(seen.planned_by_script)} by itself"
    if seen.ended_by is not None and not seen.updates:
        return f"the script ended before one, by {seen.ended_by}"
    if seen.in_eval_mode:
        return (
            f"{_names(seen.in_eval_mode)} was called with gradients on, but in eval mode, which is not planned; "
            "call .train() before training"
        )
    if seen.transformed:
        return f"{_names(seen.transformed)} was called inside of transforms of torch.func, which are not planned"
    if seen.without_optimizer:
        return f"no optimizer of torch.optim has the parameters of {_names(seen.without_optimizer)}"
    if seen.passed_by:
        return (
            "an optimizer stepped, but no call of a module with its parameters was seen. A plan runs where a "
            "module is called; code that is compiled as a whole, or computes with bare parameters, passes it by"
        )
    return (
        "no module with trainable parameters was called with gradients on in this process. Processes that a script "
        "starts by itself are not planned: start them with torchrun -m hiremate_lightning.run"
    )


def _line(found: Trained, ended_by: str | None) -> str:
    """Describe one model: the peak as measured, or as predicted, beside that of the plain step; budget and time."""
    plan = found.plan
    if plan is None and ended_by is not None:
        return f"{found.name}: no plan was made before the script ended, by {ended_by}"
    if plan is None:
        return f"{found.name}: no plan was made. One is made in the second step; {DRY_STEPS} are needed at least"
    measured = plan.measured
    peak = plan.planned_peak_bytes if measured.peak_bytes is None else measured.peak_bytes
    overhead = plan.predicted_overhead if measured.overhead is None else measured.overhead
    return (
        f"{found.name}: peak {format_bytes(peak)} ({'predicted' if measured.peak_bytes is None else 'measured'}), "
        f"{format_bytes(plan.unplanned_peak_bytes)} without a plan; budget {format_bytes(plan.budget_bytes)} "
        f"({plan.budget}); extra time {format_ratio(overhead)} "
        f"({'predicted' if measured.overhead is None else 'measured'})"
    )


def _names(names: set[str]) -> str:
    return " and ".join(sorted(names))
