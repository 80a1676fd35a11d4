"""Shows progress and plans: three lines, or the whole table on request, on rank 0 only.

Lines start at the left edge, below or above the progress bars of tqdm and rich, which are drawn again after them.
"""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import rich
import torch.distributed
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from .. import thresholds
from ..housekeeping import log
from ..planning.plan import Plan, PlanningTime, measured_line, near_words, plan_title, planned_lines, planning_words
from ..records.costs import Profile, step_time_ms
from ..records.graph import Graph
from ..units import format_ratio
from .html_report import write_html
from .plan_summary import advice_lines
from .terminal import FAINT, plan_table

CLEARLY_LONGER = 1.1  # report the seconds of planning again at this many times the seconds reported before
LOG_WIDTH = 100  # columns of a table in a log
PAGE = "hiremate_plan.html"


def calls_for(full: str = 'verbose="full"', plan: str = "get_plan(model)") -> str:
    """Describe how to see more: `full` is the argument that shows the table, `plan` the code that returns the plan."""
    names = "get_plan, write_html" if "get_plan" in plan else "write_html"
    page = f'from hiremate_lightning import {names}; write_html({plan}, "plan.html")'
    return f"{full} shows a table; {page} writes a page"


class Reporter:
    """Shows the stages of planning, then the plan, then its measurements, then where to read more.

    Each takes one line by default; `verbose="full"` shows the table of modules. A terminal shows progress, which
    vanishes at the end. Elsewhere, lines go to the logger `hiremate_lightning` at level INFO if the program has set up
    logging for it, else to standard error. Ranks other than zero show nothing. By default the console is rich's own, so
    that other progress bars nest with ours.
    """

    def __init__(self, verbose: bool | str = True, console: Console | None = None) -> None:
        self.verbose = verbose  # "full" for the whole table of a plan
        self.folder: Path | None = None  # for the page of a measured plan; None: say which call writes it
        self.more = calls_for()  # how to see more of a plan
        self.total = PlanningTime()  # the seconds of all stages so far
        self._console = console
        self._progress: Progress | None = None
        self._planning_s = 0.0  # the latest reported seconds of planning
        self._open: list[str] = []  # stages under way, if no progress can be drawn
        self._stages_s = 0.0  # seconds of the stages since the latest plan
        self._largest_bytes = 0  # eager peak of the largest step whose plan was shown

    def show_like(self, other: Reporter) -> None:
        """Show plans where, and in as many words, as another reporter does."""
        self.verbose, self.folder, self.more = other.verbose, other.folder, other.more

    @property
    def is_silent(self) -> bool:
        """Whether nothing is shown by this process now."""
        return not self.verbose or not is_rank_zero()

    @property
    def console(self) -> Console:
        """The console on which tables and progress are drawn."""
        return self._console or rich.get_console()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show a stage of planning while it runs; add its seconds to `total` if it is one of those in reports."""
        log.debug(name)
        start = time.perf_counter()
        shown: AbstractContextManager[None] = nullcontext()
        if not self.is_silent:
            shown = self._drawn(name) if self.console.is_interactive else self._named_if_long(name)
        with shown:
            yield
        self.total = self.total.plus(name, time.perf_counter() - start)

    @contextmanager
    def _drawn(self, name: str) -> Iterator[None]:
        """Draw a stage on its own line, below the stages around it."""
        if self._progress is None:
            columns = (
                SpinnerColumn(),
                TextColumn("HiRemate: {task.description}", markup=False),
                BarColumn(bar_width=20),
                TimeElapsedColumn(),
                TextColumn("{task.fields[detail]}", markup=False, style=FAINT),
            )
            progress = Progress(*columns, console=self.console, transient=True)
            try:
                with _above_bars(), progress as self._progress, self._drawn(name):
                    yield
            finally:
                self._progress = None
            return
        task = self._progress.add_task(name, total=None, detail="")
        try:
            yield
        finally:
            if len(self._progress.task_ids) > 1:  # the outermost one vanishes with the whole drawing
                self._progress.remove_task(task)

    @contextmanager
    def _named_if_long(self, name: str) -> Iterator[None]:
        """Write a line when the stages since the latest plan have taken `long_stage_s`, and at each doubling."""
        self._open.append(name)
        is_done, start, before_s = threading.Event(), time.monotonic(), self._stages_s

        def name_when_due() -> None:
            due_s = thresholds.current.long_stage_s
            while due_s <= before_s:
                due_s *= 2
            while not is_done.wait(due_s - before_s - (time.monotonic() - start)):
                self._write([f"HiRemate: still {(self._open or [name])[-1]}, after {due_s:g} s of planning"])
                due_s *= 2

        if len(self._open) == 1:  # the thread of the outermost stage names the inner ones too
            threading.Thread(target=name_when_due, daemon=True).start()
        try:
            yield
        finally:
            is_done.set()
            self._open.remove(name)
            self._stages_s = before_s + time.monotonic() - start

    def progress(self, description: str, completed: float, total: float | None = None) -> None:
        """Show how far the stage under way is, and what is counted; show nothing outside of a stage."""
        if self._progress is not None:
            detail = description if total is None else f"{completed:g}/{total:g} {description}"
            self._progress.update(self._progress.task_ids[-1], completed=completed, total=total, detail=detail)

    def solving(self, graph: Graph, profile: Profile) -> Callable[[float, float], None]:
        """Return a `SolveOptions.progress` that shows the progress of a solve.

        It takes the recompute time of the incumbent (infinite before the first one) and the proven bound, in
        milliseconds.
        """
        step_ms = step_time_ms(graph, profile)

        def show(best_ms: float, bound_ms: float) -> None:
            if step_ms and math.isinf(best_ms):
                self.progress(f"none found, at least {format_ratio(bound_ms / step_ms)}", 0)
            elif step_ms:
                gap = max(0.0, best_ms - bound_ms) / (step_ms + best_ms)
                self.progress(f"extra time {format_ratio(best_ms / step_ms)}, {near_words(gap)}", 0)

        return show

    def expect(self, name: str, seconds: float) -> None:
        """Report before the first step of a model how long planning will take, if that is long."""
        if seconds >= thresholds.current.long_stage_s:
            rounded = round(seconds) if seconds < 10 else 5 * round(seconds / 5)
            self.report(
                f"HiRemate: the first two steps of {name} take about {rounded} s longer than later ones: "
                "the model is captured, checked, measured and planned"
            )

    def planned(self, plan: Plan, remark: str = "") -> None:
        """Show a new plan as a line, with a remark or with advice that saves memory, or as the whole table.

        The table is shown if `verbose` is "full" and no plan of a larger step was shown.
        """
        self._stages_s = 0.0
        if remark:
            self.report(f"{planned_lines(plan)[0]} ({remark})")
            return
        is_largest = plan.unplanned_peak_bytes >= self._largest_bytes
        self._largest_bytes = max(plan.unplanned_peak_bytes, self._largest_bytes)
        if is_largest and self.verbose == "full":
            self.show(plan_table(plan))
        else:
            lines, seconds = list[str](), plan.planning.all_s
            least_s = max(thresholds.current.long_stage_s, CLEARLY_LONGER * self._planning_s)
            if seconds >= least_s:  # long, and clearly more than reported before
                self._planning_s = seconds
                lines.append(f"planned in {planning_words(plan.to_dict())}")
            lines += advice_lines(plan) if is_largest else []
            self.report(planned_lines(plan)[0], *(f"  {line}" for line in lines))

    def show(self, table: RenderableType) -> None:
        """Show a table: drawn on a terminal, elsewhere as lines of ASCII."""
        if self.is_silent:
            return
        if self._draws:
            with _above_bars():
                self.console.print(table)
        else:
            with io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace") as file:
                Console(file=file, width=LOG_WIDTH).print(table)
                file.seek(0)
                self._write(file.read().splitlines())

    def measured(self, plan: Plan) -> None:
        """Show the measurements of a plan beside its predictions; for the largest step, also where to read more."""
        lines = [measured_line(plan)]
        if not self.is_silent and plan.unplanned_peak_bytes >= self._largest_bytes:
            self._largest_bytes = plan.unplanned_peak_bytes + 1  # say where to read more once
            more = self.more
            if self.folder is not None:
                try:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    more = str(write_html(plan, self.folder / PAGE, curve_limit_s=0))
                except OSError as error:  # a full disk is no reason to stop training
                    log.debug("no page was written: %s", error)
            lines.append(f"{plan_title(plan)}, more: {more}")
        self.report(*lines)

    def report(self, *lines: str) -> None:
        """Show plain lines."""
        if not self.is_silent:
            self._write(lines)

    @property
    def _draws(self) -> bool:
        return self.console.is_terminal or self.console.is_jupyter

    def _write(self, lines: Iterable[str]) -> None:
        console = self.console if self._draws or self._console else None
        with _above_bars(draws_again=self._progress is None):
            for line in lines:
                if console is not None:
                    console.print(Text(line), soft_wrap=True)
                elif log.hasHandlers() and log.isEnabledFor(logging.INFO):
                    log.info(line)
                elif log.level <= logging.INFO:  # logging is not silenced, only not set up
                    Console(stderr=True, highlight=False).print(Text(line), soft_wrap=True)


def _bars() -> list[Any]:
    """List the progress bars of tqdm on the screen, Lightning's included."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    bars = list(getattr(tqdm, "_instances", ()))  # may hold bars that another thread is still making
    return [bar for bar in bars if not getattr(bar, "disable", True) and hasattr(bar, "start_t")]


@contextmanager
def _above_bars(draws_again: bool = True) -> Iterator[None]:
    """Clear the progress bars while lines are written, since text would continue a bar's line; then draw them again."""
    for bar in _bars():
        if bar.fp.isatty():
            bar.clear(nolock=True)
        else:  # in a file a bar can't be cleared
            bar.fp.write("\n")
    try:
        yield
    finally:
        for bar in _bars() if draws_again else ():
            if bar.fp.isatty():
                bar.refresh(nolock=True)


def is_rank_zero() -> bool:
    """Whether this process is rank 0: by torch.distributed if it runs, else by the launcher's environment."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    ranks = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    return next((rank for rank in ranks if rank), "0") == "0"
