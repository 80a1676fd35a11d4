"""A plan drawn in the terminal: `plan_table` puts its numbers, its modules and its memory timeline in a panel.

Only the terminal's own sixteen colours are used, without yellow and white, so that light and dark backgrounds both
work. Colour alone carries no meaning. A stream that takes only ASCII gets the same drawing in ASCII.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, OverflowMethod, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..planning.plan import Numbers, Plan, plan_title
from ..units import format_bytes, format_time
from .plan_summary import ModuleRow, all_numbers, rows_of, summary_rows, total_row, use_cells
from .timeline import TINY, Band, DrawnStep, eager_run, planned_run

MAX_WIDTH = 110  # columns; wider tables are harder to read along a row
TIMELINE_ROWS = 8
ROUNDED = 3  # most differences by rounding to list


# The characters of drawings, and their ASCII replacements.
LEVELS = "▁▂▃▄▅▆▇█"  # cells filled from the bottom, from nearly empty to full
FULL, SHADE, OFFLOADED = "█", "░", "▒"  # bytes of the plan, of the eager step, and offloaded bytes
LINE, AGAIN, TURN, SIDE = "─", "━", "┴", "│"  # the axis: time, recomputation, the turn, the vertical line
TIMES, NONE = "\u00d7", "·"  # in tables: before a count of equal modules, and for zero
ASCII = str.maketrans(LEVELS + SHADE + OFFLOADED + LINE + AGAIN + TURN + SIDE + TIMES + NONE, "__ooOO##:%-=+|x.")
_KEPT, FAINT, _BUDGET, _AGAIN, _OVER, _OFFLOADED = "green", "dim", "magenta", "cyan", "bold red", "blue"


@dataclass(frozen=True)
class Drawn:
    """A drawing of the width of a rich console, at least 60 columns; in ASCII if the encoding needs it."""

    draw: Callable[[int, bool], RenderableType]  # takes the columns, and whether to use only ASCII

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawn = self.draw(min(options.max_width, MAX_WIDTH), options.ascii_only)
        for segment in console.render(drawn, options):
            yield segment._replace(text=segment.text.translate(ASCII)) if options.ascii_only else segment


def plan_table(plan: Plan) -> RenderableType:
    """Draw a plan with predictions and measurements: its numbers, a row for each module, its memory over time."""

    def draw(width: int, is_ascii: bool) -> Panel:
        numbers = all_numbers(plan)
        timeline = MemoryTimeline(plan, width - 4).draw()  # less the panel's border and padding
        shown = Group(_facts(numbers, is_ascii), "", module_table(rows_of(numbers)), "", timeline)
        return Panel(shown, title=Text(plan_title(plan), "bold"), title_align="left", width=width, border_style=FAINT)

    return Drawn(draw)


def _facts(numbers: Numbers, is_ascii: bool) -> Table:
    """Draw the plan's numbers as a table of names and words."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style=FAINT, no_wrap=True)
    grid.add_column()
    for name, words in summary_rows(numbers, ROUNDED)[1:]:
        shown = Text(words)
        if name in ("peak", "time"):
            arrow = "->" if is_ascii else "→"
            shown = Text(words.replace("->", arrow), _OVER if "OVER" in words else "bold")
        grid.add_row(name, shown)
    return grid


def module_table(rows: Sequence[ModuleRow]) -> RenderableType:
    """Draw the rows of modules, and their sum, as a table."""

    def draw(width: int, is_ascii: bool) -> Table:
        bar_width = 20 if width >= 90 else 10 if width >= 70 else 0
        table = Table(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), show_footer=True, width=width
        )
        table.header_style = table.border_style = FAINT
        headers = ("module", "kept", "not kept", "recomputed", "extra", *(["share kept"] if bar_width else []))
        overflow: OverflowMethod = "crop" if is_ascii else "ellipsis"
        for header, footer in zip(headers, _cells(total_row(rows), bar_width), strict=True):
            is_words = header in ("module", "share kept")
            table.add_column(header, footer, justify="left" if is_words else "right", no_wrap=True, overflow=overflow)
        table.columns[0].ratio = 1
        for row in rows:
            table.add_row(*_cells(row, bar_width))
        if bar_width and any(row.shares for row in rows):
            marks = f"{NONE}{LEVELS[4]}{FULL}"
            table.caption = Text(f"{marks}  equal modules planned differently, the share kept in each", FAINT)
            table.caption_justify = "left"
        return table

    return Drawn(draw)


def _cells(row: ModuleRow, bar_width: int) -> tuple[RenderableType, ...]:
    use = row.use
    label = Text("  " * row.depth + row.label, FAINT if row.depth else "")
    label.append(f" {TIMES}{row.count}" if row.count > 1 else "", FAINT)
    numbers = (cell or Text(NONE, FAINT) for cell in use_cells(use))
    if not bar_width:
        return label, *numbers
    if not row.shares:
        return label, *numbers, _bar(use.kept_share, bar_width)
    bar = Text()
    size = -(-len(row.shares) // bar_width)
    for start in range(0, len(row.shares), size):  # a column is the mean of `size` neighbours
        present = [s for s in row.shares[start : start + size] if s is not None]
        mean = sum(present) / len(present) if present else 0.0
        bar.append(_level(mean) if mean else NONE, _KEPT if mean else FAINT)
    return label, *numbers, bar


def _bar(share: float | None, width: int) -> Text:
    """Draw a share as a bar from the left."""
    if share is None:
        return Text("")
    filled = round(share * width)
    return Text.assemble((FULL * filled, _KEPT), (SHADE * (width - filled), FAINT))


def _level(share: float) -> str:
    """Return the character of a cell filled to a share in (0, 1]."""
    return LEVELS[min(len(LEVELS) - 1, int(share * len(LEVELS)))]


# ---------------------------------------------------------------- the memory timeline


class MemoryTimeline:
    """The memory of the planned step in front of the eager step's: time to the right, bytes upwards.

    The vertical axis starts at the resident bytes; the budget is a line, unless it is far above all memory. Each column
    shows the most bytes of its time, with the bytes of offloaded values at the bottom. The width, with labels, is at
    least 40 columns.
    """

    def __init__(self, plan: Plan, width: int) -> None:
        self.plan, self.width, self.run = plan, width, planned_run(plan)
        self.end_ms = max(plan.planned.time_ms, plan.unplanned.time_ms)  # at the right edge
        self.top_bytes = max(plan.unplanned.peak_bytes, plan.planned.peak_bytes, 1)  # at the top, without resident
        below = max(1, round(TIMELINE_ROWS * plan.room.step_bytes / self.top_bytes))
        self.budget_row = below if below <= TIMELINE_ROWS + 1 else 0  # rows below its line; 0 if it is far above
        exact = plan.room.step_bytes / self.budget_row if self.budget_row else 0.0  # puts the line between two rows
        self.row_bytes = max(exact, self.top_bytes / (TIMELINE_ROWS + 1))
        sizes = plan.resident_bytes + self.top_bytes, plan.budget_bytes, plan.resident_bytes
        self.labels = tuple(map(format_bytes, sizes))  # at the top, at the budget, and at the bottom
        self.columns = max(20, width - max(map(len, self.labels)) - 2)
        self.indent = " " * (width - self.columns)
        self.spans = list(self.run.spans(self.columns, self.end_ms))

    def draw(self) -> Text:
        """Draw all rows, from the legend down to the axis."""
        top, budget, resident = self.labels
        plain, planned, again = self._levels(eager_run(self.plan)), self._levels(self.run), self._recomputes()
        rows = max(math.ceil(self.top_bytes / self.row_bytes - 1e-9), self.budget_row)
        lines = [self._legend(any(again), any(offloaded_bytes for _, offloaded_bytes in planned))]
        for row in reversed(range(rows)):
            if row + 1 == self.budget_row:
                lines.append(self._line(budget, [(LINE, _BUDGET)] * self.columns))
            label = top if row == rows - 1 and row + 1 != self.budget_row else ""
            lines.append(self._line(label, [self._cell(row, *cell) for cell in zip(planned, plain, strict=True)]))
        turn = min(self.columns - 1, int(self.spans[self.run.simulation.turn][1])) if self.spans else 0
        axis = [(AGAIN, _AGAIN) if runs else (LINE, FAINT) for runs in again]
        axis[turn] = (TURN, FAINT)
        forward_ms = self.run.starts_ms[self.plan.planned.turn]
        forward, backward = format_time(forward_ms), format_time(self.plan.planned.time_ms - forward_ms)
        phases = Text(f"{self.indent}{f'forward {forward}':<{turn}}  backward {backward}", FAINT)
        return Text("\n").join([*lines, self._line(resident, axis, TURN), phases])

    def _levels(self, run: DrawnStep) -> list[tuple[int, int]]:
        """Return for each column the most bytes of its time, and the bytes of offloaded values in it; 0 at the end."""
        offloaded, timeline = run.bands.get(Band.OFFLOADED), run.simulation.timeline
        positions = run.by_column(self.columns, self.end_ms)
        levels = [(timeline[at].peak_bytes, offloaded[at] if offloaded else 0) for at in positions]
        return [*levels, *[(0, 0)] * (self.columns - len(levels))]

    def _recomputes(self) -> list[bool]:
        """Return for each column whether much of its time is recomputation."""
        again = [0.0] * self.columns
        for position, start, end in self.spans:
            if self.run.is_again(position):
                for column in range(int(start), min(math.ceil(end - TINY), self.columns)):
                    again[column] += min(end, column + 1) - max(start, column)
        return [share > 0.25 for share in again]

    def _cell(self, row: int, planned: tuple[int, int], plain: tuple[int, int]) -> tuple[str, str]:
        size_bytes, offloaded_bytes = planned
        filled = size_bytes / self.row_bytes - row
        if row < round(offloaded_bytes / self.row_bytes):
            return OFFLOADED, _OFFLOADED
        if filled > 0:
            return _level(min(1.0, filled)), _KEPT
        return (SHADE, FAINT) if plain[0] / self.row_bytes > row else (" ", "")

    def _line(self, label: str, cells: Sequence[tuple[str, str]], side: str = SIDE) -> Text:
        text = Text().append(f"{label:>{len(self.indent) - 2}} {side}", FAINT)
        for style, run in groupby(cells, key=lambda cell: cell[1]):
            text.append("".join(glyph for glyph, _ in run), style)
        text.rstrip()
        return text

    def _legend(self, runs_again: bool, offloads: bool) -> Text:
        gap = "   " if self.width >= 70 else " "
        items = [(FULL, _KEPT, "planned"), (SHADE, FAINT, "unplanned")]
        items += [(OFFLOADED, _OFFLOADED, "goes to the host")] if offloads else []
        items += [(LINE, _BUDGET, "budget")] if self.budget_row else []
        items += [(AGAIN, _AGAIN, "recomputing")] if runs_again else []
        lines = [Text(self.indent)]
        for mark, style, words in items:
            key = Text.assemble((mark, style), f" {words}{gap}")
            if len(lines[-1]) + len(key) - len(gap) > self.width:
                lines.append(Text(self.indent))
            lines[-1].append(key)
        for line in lines:
            line.rstrip()
        return Text("\n").join(lines)


class Output(Console):
    """Standard output that drops the rest without an error if its reader has ended, as behind `| head`."""

    def on_broken_pipe(self) -> None:
        """Discard the rest of the output."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_json(numbers: Mapping[str, Any], target: str) -> None:
    """Write numbers as JSON to a file, or to standard output if the target is "-"."""
    text = json.dumps(numbers, indent=2)
    if target == "-":
        Output().out(text, highlight=False)
        return
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def plain_table(headers: Iterable[str], rows: Iterable[Iterable[str]], words: Container[str] = ()) -> Table:
    """Return a table without a frame: columns whose header is in `words` align left, all others (numbers) right."""
    table = Table(box=box.SIMPLE_HEAD if Console().is_terminal else box.ASCII2, show_edge=False, pad_edge=False)
    for header in headers:
        table.add_column(header, justify="left" if header in words else "right")
    for row in rows:
        table.add_row(*row)
    return table
