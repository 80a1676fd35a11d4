"""A plan drawn in the terminal: `plan_table` puts its numbers, its modules and its memory timeline in a panel.

The terminal's own sixteen colours are used, none of them yellow or white, so that light and dark backgrounds both work;
no meaning is in colour alone. Where a stream takes ASCII only, the same is drawn in ASCII.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, OverflowMethod, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..planning.plan import Plan, plan_title
from ..units import format_bytes, format_time
from .plan_summary import ModuleRow, all_numbers, module_rows, summary_rows, total_row, use_cells
from .timeline import TINY, Band, DrawnStep, plain_run, planned_run

MAX_WIDTH = 110  # columns; wider tables are harder to read along a row
TIMELINE_ROWS = 8
ROUNDED = 3  # differences by rounding that are listed


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters to draw with."""

    levels: str = "▁▂▃▄▅▆▇█"  # cells filled from the bottom, from nearly empty to full
    shade: str = "░"  # what plain training keeps
    offloaded: str = "▒"  # values that go to the host's memory, while they are on the device
    line: str = "─"  # axis, and budget line
    again: str = "━"  # axis where operations are recomputed
    turn: str = "┴"  # where forward and backward meet on the axis
    side: str = "│"  # between labels and drawing
    times: str = "\u00d7"  # before a count of equal modules
    arrow: str = "→"  # between before and after
    none: str = "·"  # zero, in tables

    @property
    def full(self) -> str:
        """A cell filled to the top."""
        return self.levels[-1]

    def level(self, share: float) -> str:
        """Choose the cell that is filled to a share in (0, 1]."""
        return self.levels[min(len(self.levels) - 1, int(share * len(self.levels)))]


UNICODE = Glyphs()
ASCII = Glyphs(
    levels="_oO#", shade=":", offloaded="%", line="-", again="=", turn="+", side="|", times="x", arrow="->", none="."
)
_KEPT, FAINT, _BUDGET, _AGAIN, _OVER, _OFFLOADED = "green", "dim", "magenta", "cyan", "bold red", "blue"


@dataclass(frozen=True)
class Drawn:
    """What is drawn as wide as a rich console is, of 60 columns or more; in ASCII where its encoding asks for that."""

    draw: Callable[[int, Glyphs], RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.draw(min(options.max_width, MAX_WIDTH), ASCII if options.ascii_only else UNICODE)


def plan_table(plan: Plan) -> RenderableType:
    """Draw a plan, as predicted and measured: its numbers, what it does to each module, and its memory over time."""

    def draw(width: int, glyphs: Glyphs) -> Panel:
        rows, title = module_rows(plan), Text(plan_title(plan), "bold")
        timeline = timeline_text(plan, width - 4, glyphs)  # within the panel's border and padding
        shown = Group(_facts(plan, glyphs), "", module_table(rows, total_row(rows)), "", timeline)
        return Panel(shown, title=title, title_align="left", width=width, border_style=FAINT)

    return Drawn(draw)


def _facts(plan: Plan, glyphs: Glyphs) -> Table:
    """Put the plan's numbers under a few words."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style=FAINT, no_wrap=True)
    grid.add_column()
    for name, words in summary_rows(all_numbers(plan), ROUNDED)[1:]:
        if name in ("peak", "time"):
            grid.add_row(name, Text(words.replace("->", glyphs.arrow), _OVER if "OVER" in words else "bold"))
        else:
            grid.add_row(name, Text(words))
    return grid


def module_table(rows: Sequence[ModuleRow], total: ModuleRow) -> RenderableType:
    """Draw what each module keeps, and the sum, as a table."""

    def draw(width: int, glyphs: Glyphs) -> Table:
        bar_width = 20 if width >= 90 else 10 if width >= 70 else 0
        table = Table(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), show_footer=True, width=width
        )
        table.header_style = table.border_style = FAINT
        headers = ("module", "kept", "not kept", "recomputed", "extra", *(["share kept"] if bar_width else []))
        overflow: OverflowMethod = "crop" if glyphs is ASCII else "ellipsis"
        for header, footer in zip(headers, _cells(total, bar_width, glyphs), strict=True):
            is_words = header in ("module", "share kept")
            table.add_column(header, footer, justify="left" if is_words else "right", no_wrap=True, overflow=overflow)
        table.columns[0].ratio = 1
        for row in rows:
            table.add_row(*_cells(row, bar_width, glyphs))
        if bar_width and any(row.shares for row in rows):
            marks = f"{glyphs.none}{glyphs.levels[len(glyphs.levels) // 2]}{glyphs.full}"
            table.caption = Text(f"{marks}  equal modules planned differently, the share kept in each", FAINT)
            table.caption_justify = "left"
        return table

    return Drawn(draw)


def _cells(row: ModuleRow, bar_width: int, glyphs: Glyphs) -> tuple[RenderableType, ...]:
    use = row.use
    label = Text("  " * row.depth + row.label, FAINT if row.depth else "")
    label.append(f" {glyphs.times}{row.count}" if row.count > 1 else "", FAINT)
    numbers = (cell or Text(glyphs.none, FAINT) for cell in use_cells(use))
    if not bar_width:
        return label, *numbers
    bar = _columns_bar(row.shares, bar_width, glyphs) if row.shares else _bar(use.kept_share, bar_width, glyphs)
    return label, *numbers, bar


def _bar(share: float | None, width: int, glyphs: Glyphs) -> Text:
    """Draw a share as a bar from the left."""
    if share is None:
        return Text("")
    filled = round(share * width)
    return Text.assemble((glyphs.full * filled, _KEPT), (glyphs.shade * (width - filled), FAINT))


def _columns_bar(shares: Sequence[float | None], width: int, glyphs: Glyphs) -> Text:
    """Draw one column for each share. Where there are more shares than columns, neighbours share one, at their mean."""
    size = -(-len(shares) // width)
    text = Text()
    for start in range(0, len(shares), size):
        known = [s for s in shares[start : start + size] if s is not None]
        mean = sum(known) / len(known) if known else 0.0
        text.append(glyphs.level(mean) if mean else glyphs.none, _KEPT if mean else FAINT)
    return text


# ---------------------------------------------------------------- the memory timeline


def timeline_text(plan: Plan, width: int, glyphs: Glyphs = UNICODE) -> Text:
    """Draw the memory of the planned step over that of the plain one: time to the right, bytes upwards.

    The axis starts at the resident bytes; the budget is a line, unless it is far above all memory. Each column shows
    the most bytes of its time, those of values that go to the host below. The width is of 40 columns at least, labels
    included.
    """
    return _Timeline(plan, width, glyphs).draw()


@dataclass(frozen=True)
class _Timeline:
    plan: Plan
    width: int
    glyphs: Glyphs

    @cached_property
    def run(self) -> DrawnStep:
        """The planned step."""
        return planned_run(self.plan)

    @cached_property
    def top_bytes(self) -> int:
        """Height of the drawing, in bytes above the resident ones."""
        return max(self.plan.unplanned.peak_bytes, self.plan.planned.peak_bytes, 1)

    @cached_property
    def budget_row(self) -> int | None:
        """Rows below the budget line; None where the budget is far above all memory."""
        rows = max(1, round(TIMELINE_ROWS * self.plan.room.step_bytes / self.top_bytes))
        return rows if rows <= TIMELINE_ROWS + 1 else None

    @cached_property
    def row_bytes(self) -> float:
        """Bytes of one row, such that the budget is between two of them."""
        exact = self.plan.room.step_bytes / self.budget_row if self.budget_row else 0.0
        return max(exact, self.top_bytes / (TIMELINE_ROWS + 1))

    @cached_property
    def labels(self) -> tuple[str, str, str]:
        """Bytes at the top, at the budget, and on the axis."""
        resident = self.plan.resident_bytes
        return format_bytes(resident + self.top_bytes), format_bytes(self.plan.budget_bytes), format_bytes(resident)

    @cached_property
    def columns(self) -> int:
        return max(20, self.width - max(len(label) for label in self.labels) - 2)

    @cached_property
    def spans(self) -> list[tuple[int, float, float]]:
        """The columns where each operation starts and ends."""
        return list(self.run.spans(self.columns, self.end_ms))

    @property
    def end_ms(self) -> float:
        """Time at the right edge."""
        return max(self.plan.planned.time_ms, self.plan.unplanned.time_ms)

    def draw(self) -> Text:
        glyphs, (top, budget, resident) = self.glyphs, self.labels
        plain, planned, again = self._levels(plain_run(self.plan)), self._levels(self.run), self._recomputes()
        rows = max(math.ceil(self.top_bytes / self.row_bytes - 1e-9), self.budget_row or 0)
        lines = [self._legend(any(again), any(offloaded_bytes for _, offloaded_bytes in planned))]
        for row in reversed(range(rows)):
            if row + 1 == self.budget_row:
                lines.append(self._line(budget, [(glyphs.line, _BUDGET)] * self.columns))
            label = top if row == rows - 1 and row + 1 != self.budget_row else ""
            lines.append(self._line(label, [self._cell(row, *cell) for cell in zip(planned, plain, strict=True)]))
        turn = min(self.columns - 1, int(self.spans[self.run.simulation.turn][1])) if self.spans else 0
        axis = [(glyphs.again, _AGAIN) if runs else (glyphs.line, FAINT) for runs in again]
        axis[turn] = (glyphs.turn, FAINT)
        forward_ms = self.run.starts_ms[self.plan.planned.turn]
        forward, backward = format_time(forward_ms), format_time(self.plan.planned.time_ms - forward_ms)
        phases = Text(f"{self._indent}{f'forward {forward}':<{turn}}  backward {backward}", FAINT)
        return Text("\n").join([*lines, self._line(resident, axis, glyphs.turn), phases])

    def _levels(self, run: DrawnStep) -> list[tuple[int, int]]:
        """Return for each column the most bytes of its time, and those of values that go to the host; 0 at the end."""
        offloaded, timeline = run.bands.get(Band.OFFLOADED), run.simulation.timeline
        positions = run.by_column(self.columns, self.end_ms)
        levels = [(timeline[at].peak_bytes, offloaded[at] if offloaded else 0) for at in positions]
        return [*levels, *[(0, 0)] * (self.columns - len(levels))]

    def _recomputes(self) -> list[bool]:
        """Whether much of the time of each column runs something again."""
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
            return self.glyphs.offloaded, _OFFLOADED
        if filled > 0:
            return self.glyphs.level(min(1.0, filled)), _KEPT
        return (self.glyphs.shade, FAINT) if plain[0] / self.row_bytes > row else (" ", "")

    def _line(self, label: str, cells: Sequence[tuple[str, str]], side: str = "") -> Text:
        text = Text().append(f"{label:>{len(self._indent) - 2}} {side or self.glyphs.side}", FAINT)
        for style, run in groupby(cells, key=lambda cell: cell[1]):
            text.append("".join(glyph for glyph, _ in run), style)
        text.rstrip()
        return text

    @property
    def _indent(self) -> str:
        return " " * (self.width - self.columns)

    def _legend(self, runs_again: bool, offloads: bool) -> Text:
        glyphs, gap = self.glyphs, "   " if self.width >= 70 else " "
        items = [(glyphs.full, _KEPT, "planned"), (glyphs.shade, FAINT, "unplanned")]
        items += [(glyphs.offloaded, _OFFLOADED, "goes to the host")] if offloads else []
        items += [(glyphs.line, _BUDGET, "budget")] if self.budget_row else []
        items += [(glyphs.again, _AGAIN, "recomputing")] if runs_again else []
        lines = [Text(self._indent)]
        for mark, style, words in items:
            key = Text.assemble((mark, style), f" {words}{gap}")
            if len(lines[-1]) + len(key) - len(gap) > self.width:
                lines.append(Text(self._indent))
            lines[-1].append(key)
        for line in lines:
            line.rstrip()
        return Text("\n").join(lines)


class Output(Console):
    """Standard output. Where nobody reads it any more, as behind `| head`, the rest is dropped: that is no error."""

    def on_broken_pipe(self) -> None:
        """Write the rest nowhere."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def write(self, text: str) -> None:
        """Write text as it is."""
        try:
            self.file.write(text)
            self.file.flush()
        except BrokenPipeError:
            self.on_broken_pipe()


def write_json(numbers: Mapping[str, Any], target: str) -> None:
    """Write numbers as JSON to a file, or to the output where the target is "-"."""
    text = f"{json.dumps(numbers, indent=2)}\n"
    if target == "-":
        Output().write(text)
        return
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def plain_table(headers: Iterable[str], rows: Iterable[Iterable[str]], words: Container[str] = ()) -> Table:
    """Make a table without a frame, of ASCII alone where what is printed is not shown on a terminal.

    Columns whose headers are among the words begin at the left; numbers end at the right.
    """
    table = Table(box=box.SIMPLE_HEAD if Console().is_terminal else box.ASCII2, show_edge=False, pad_edge=False)
    for header in headers:
        table.add_column(header, justify="left" if header in words else "right")
    for row in rows:
        table.add_row(*row)
    return table
