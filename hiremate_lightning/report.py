"""What people see of a plan: the only module that knows rich.

`uses_by_module` accounts a plan to modules: a storage belongs to the module whose operation allocates it. `module_rows`
rolls these up to a dozen rows, equal blocks in one row. `plan_table` draws them below the plan's numbers and above its
memory timeline; `plan_lines` and `measured_line` say the same in plain ASCII lines. `Reporter` decides who sees what: a
table and progress on a terminal, lines in the log elsewhere, nothing on ranks other than zero.

The terminal's own sixteen colours are used, none of them yellow or white, so that light and dark backgrounds both work;
no meaning is in colour alone.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import rich
import torch.distributed
from rich import box
from rich.console import Console, ConsoleOptions, Group, OverflowMethod, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .graph import OUTSIDE, Graph, Phase
from .plan import Plan, budget_words, measured_line, over_words, plan_title, planned_lines, planning_words, solver_words
from .schedule import Schedule, keep_all, lower
from .simulation import Simulation
from .units import format_bytes, format_ratio, format_time

LOGGER = logging.getLogger("hiremate_lightning")
MAX_ROWS = 12  # of modules, so that plan and prompt fit one screen
MAX_WIDTH = 110  # columns; wider tables are harder to read along a row
TIMELINE_ROWS = 8
_SMALL = 0.01  # share of bytes and time below which modules are summed up as "others"
_WORTH_OPENING = 0.05  # share below which a module is not broken up into its children


# ---------------------------------------------------------------- what a plan does to each module


@dataclass(frozen=True, slots=True)
class ModuleUse:
    """What a plan does to some modules.

    Attributes:
        kept_bytes: Bytes kept from forward to backward.
        dropped_bytes: Bytes that plain training keeps there, and the plan does not.
        recomputed: Forward operations that are recomputed; views don't count.
        operations: Forward operations; views don't count.
        extra_ms: Time of all recomputation.
    """

    kept_bytes: int = 0
    dropped_bytes: int = 0
    recomputed: int = 0
    operations: int = 0
    extra_ms: float = 0.0

    @property
    def kept_share(self) -> float | None:
        """Bytes kept over those and the bytes not kept, None where there are neither."""
        both = self.kept_bytes + self.dropped_bytes
        return self.kept_bytes / both if both else None


def add_uses(uses: Iterable[ModuleUse]) -> ModuleUse:
    """Add up what a plan does to several modules."""
    uses = tuple(uses)
    return ModuleUse(
        sum(u.kept_bytes for u in uses),
        sum(u.dropped_bytes for u in uses),
        sum(u.recomputed for u in uses),
        sum(u.operations for u in uses),
        math.fsum(u.extra_ms for u in uses),
    )


def uses_by_module(plan: Plan) -> dict[str, ModuleUse]:
    """Account a plan to the modules whose operations allocate bytes and are recomputed.

    Args:
        plan: A feasible plan.

    Returns:
        Uses by module path, in order of execution; "" is the planned module itself, `graph.OUTSIDE` what runs outside.
    """
    graph = plan.graph
    kept = _kept_storages(graph, plan.schedule)
    dropped = _kept_storages(graph, lower(graph, keep_all(graph))) - kept
    again = plan.schedule.recomputed(graph)
    repeated = {_original(graph, node) for node in again}
    uses: dict[str, ModuleUse] = {}
    counted: set[int] = set()
    for index in graph.forward:
        storages = [s for s in graph.allocates[index] if s not in counted]
        counted.update(storages)
        works = _works(graph, index)
        use = ModuleUse(
            sum(graph.sizes[s] for s in storages if s in kept),
            sum(graph.sizes[s] for s in storages if s in dropped),
            int(works and index in repeated),
            int(works),
        )
        path = _path(graph, index)
        uses[path] = add_uses((uses.get(path, ModuleUse()), use))
    for index in again:
        path = _path(graph, index)
        uses[path] = add_uses((uses[path], ModuleUse(extra_ms=plan.profile.time_ms[index])))
    return uses


def _kept_storages(graph: Graph, schedule: Schedule) -> set[int | None]:
    """Find the storages that live at the turn."""
    return {graph.tensors[t].storage for t in (*schedule.saved, *graph.held)}


def _original(graph: Graph, index: int) -> int:
    replays = graph.nodes[index].replays
    return index if replays is None else replays


def _works(graph: Graph, index: int) -> bool:
    """Whether an operation of the captured part does more than look at memory in another way."""
    node = graph.nodes[index]
    return node.op != OUTSIDE and bool(graph.allocates[index] or node.is_mutating or node.flops)


def _path(graph: Graph, index: int) -> str:
    node = graph.nodes[index]
    return OUTSIDE if node.op == OUTSIDE else node.module


# ---------------------------------------------------------------- modules rolled up into rows


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One row of the table.

    Attributes:
        label: Module path, with the numbers of equal blocks as a range.
        count: How many equal blocks the row stands for.
        depth: 0, or 1 for a part of the blocks in the row above.
        use: The sum over all that the row stands for.
        shares: Where equal modules were planned differently, the share kept in each, None where nothing could be.
    """

    label: str
    count: int
    depth: int
    use: ModuleUse
    shares: tuple[float | None, ...] = ()


def module_rows(plan: Plan, limit: int = MAX_ROWS) -> tuple[ModuleRow, ...]:
    """Roll modules up into few rows: equal blocks together, the largest opened first, the small ones summed up.

    Args:
        plan: A feasible plan.
        limit: Most rows, at least 2; one more may follow for what runs outside the plan.

    Returns:
        Rows in order of execution. Those of depth 1 are part of the last row of depth 0; those of depth 0 add up to the
        whole.
    """
    uses = uses_by_module(plan)
    outside = uses.pop(OUTSIDE, ModuleUse())
    rows = _Modules(plan.graph, uses).rows(limit)
    if outside.kept_bytes:
        rows = (*rows, ModuleRow("outside the plan", 1, 0, outside))
    return rows


@dataclass(frozen=True, slots=True)
class _Block:
    """Modules that go into one row.

    Attributes:
        label: As in `ModuleRow`.
        members: For each of the equal modules, the paths in it that run something.
        roots: Paths of the equal modules, empty for what can't be opened.
        count: How many of them each parent has.
        depth: As in `ModuleRow`.
    """

    label: str
    members: tuple[tuple[str, ...], ...]
    roots: tuple[str, ...] = ()
    count: int = 1
    depth: int = 0

    @property
    def is_group(self) -> bool:
        """Whether its row stays, as a heading, when it is opened."""
        return self.count > 1


class _Modules:
    """The module tree of a graph, and what a plan does to it."""

    def __init__(self, graph: Graph, uses: dict[str, ModuleUse]) -> None:
        self.uses = uses
        self.total = add_uses(uses.values())
        self.below: dict[str, list[str]] = {}  # path -> itself and the paths in it that run something
        for path in uses:
            parts = path.split(".") if path else []
            for depth in range(len(parts) + 1):
                self.below.setdefault(".".join(parts[:depth]), []).append(path)
        self.keys: dict[str, list[str]] = {path: [] for path in uses}
        for index in graph.forward:
            if graph.nodes[index].op != OUTSIDE:
                self.keys[graph.nodes[index].module].append(graph.nodes[index].key or graph.nodes[index].op)

    def rows(self, limit: int) -> tuple[ModuleRow, ...]:
        if not self.uses:
            return ()
        shown = self._fold(self._children(_Block("", (), ("",))), limit)
        while (opened := self._open_one(shown, limit)) is not None:
            shown = opened
        return tuple(self._row(block) for block in shown)

    def _children(self, block: _Block) -> list[_Block]:
        """Break a block up into the modules in it, equal ones together, and its own operations."""
        depth = block.depth + block.is_group
        above = "" if block.is_group else block.label
        found = []
        for names in self._equal_names(block.roots[0]):
            roots = tuple(_join(root, name) for root in block.roots for name in names)
            members = tuple(tuple(self.below[root]) for root in roots)
            found.append(_Block(_join(above, _range_label(names)), members, roots, len(names), depth))
        if block.roots[0] in self.uses:
            label = f"{above} (itself)".strip()
            found.append(_Block(label, tuple((root,) for root in block.roots), depth=depth))
        return found

    def _equal_names(self, path: str) -> list[list[str]]:
        """Cluster the modules in one: equal are those that do the same work under names that differ in their number."""
        start = len(path) + 1 if path else 0
        names = dict.fromkeys(p[start:].split(".")[0] for p in self.below[path] if p != path)
        clusters: dict[tuple[object, ...], list[str]] = {}
        for name in names:
            stem = name.rstrip("0123456789")
            alike = (name,) if stem == name else (stem, self._work(_join(path, name)))
            clusters.setdefault(alike, []).append(name)
        return list(clusters.values())

    def _work(self, path: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return tuple((p[len(path) :], tuple(self.keys[p])) for p in self.below[path])

    def _open_one(self, shown: list[_Block], limit: int) -> list[_Block] | None:
        """Open the largest block that can be opened and has room; None if there is none."""
        for block in sorted(shown, key=self._weight, reverse=True):
            at = shown.index(block)
            is_open = any(later.depth > block.depth for later in shown[at + 1 : at + 2])
            is_nested = block.is_group and block.depth
            if is_open or is_nested or not self._has_parts(block) or self._weight(block) < _WORTH_OPENING:
                continue
            room = limit - len(shown) + (not block.is_group)
            children = self._fold(self._children(block), room)
            if len(children) > block.is_group and room > 1:
                return [*shown[: at + block.is_group], *children, *shown[at + 1 :]]
        return None

    def _has_parts(self, block: _Block) -> bool:
        return bool(block.roots) and self.below[block.roots[0]] != [block.roots[0]]

    def _fold(self, blocks: list[_Block], limit: int) -> list[_Block]:
        """Sum up the small blocks, and those for which the limit leaves no room, in one row."""
        ranked = sorted(blocks, key=self._weight, reverse=True)
        shown = [b for b in ranked if self._weight(b) >= _SMALL]
        if len(blocks) <= limit and len(blocks) - len(shown) < 2:
            return blocks
        shown = shown[: limit - 1]
        rest = [b for b in blocks if b not in shown]
        paths = tuple(path for b in rest for member in b.members for path in member)
        others = _Block(f"{sum(b.count for b in rest)} others", (paths,), depth=rest[0].depth)
        return [*(b for b in blocks if b in shown), others]

    def _weight(self, block: _Block) -> float:
        """Share of the bytes, or of the extra time, of the whole: the larger of the two."""
        use, total = add_uses(self._member_uses(block)), self.total
        size = (use.kept_bytes + use.dropped_bytes) / max(1, total.kept_bytes + total.dropped_bytes)
        return max(size, use.extra_ms / total.extra_ms if total.extra_ms else 0.0)

    def _member_uses(self, block: _Block) -> list[ModuleUse]:
        return [add_uses(self.uses[path] for path in member) for member in block.members]

    def _row(self, block: _Block) -> ModuleRow:
        members = self._member_uses(block)
        decided_alike = len({(u.kept_bytes, u.dropped_bytes, u.recomputed) for u in members}) == 1
        shares = () if decided_alike else tuple(u.kept_share for u in members)
        return ModuleRow(block.label, block.count, block.depth, add_uses(members), shares)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _range_label(names: Sequence[str]) -> str:
    """Write equal names as one: "0-9" where all numbers are there, "0..10" where some are not."""
    if len(names) == 1:
        return names[0]
    stem = names[0].rstrip("0123456789")
    numbers = sorted(int(name[len(stem) :]) for name in names)
    has_all = numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{stem}{numbers[0]}{'-' if has_all else '..'}{numbers[-1]}"


# ---------------------------------------------------------------- words, in the table and in the log


def plan_lines(plan: Plan) -> list[str]:
    """Say in a few plain lines what `plan_table` draws.

    Args:
        plan: A plan.

    Returns:
        ASCII lines: peak and time, then solver and planning, then one for each module that is not left as it is.
    """
    lines = planned_lines(plan)
    for row in module_rows(plan):
        if not row.depth and (row.use.dropped_bytes or row.use.recomputed):
            lines.append(f"  {row.label}{f' x{row.count}' if row.count > 1 else ''}: {_use_words(row.use)}")
    return lines


def _place_words(plan: Plan) -> str:
    """Say where in the step the planned peak is."""
    node = plan.graph.nodes[plan.planned.peak_moment.node]
    if node.op == OUTSIDE:
        return f"code outside the plan, {node.phase.value}"
    return f"{node.module or 'the module itself'}, {node.phase.value}, {node.op.removesuffix('.default')}"


def _use_words(use: ModuleUse) -> str:
    said = []
    for size_bytes, word in ((use.kept_bytes, "kept"), (use.dropped_bytes, "not kept")):
        if size_bytes:
            said.append(f"{format_bytes(size_bytes)} {word}")
    if use.recomputed:
        said.append(f"{use.recomputed} of {use.operations} ops recomputed")
    if use.extra_ms:
        said.append(f"+{format_time(use.extra_ms)}")
    return ", ".join(said)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters to draw with.

    Attributes:
        levels: Cells filled from the bottom, from nearly empty to full.
        shade: What plain training keeps.
        line: Axis, and budget line.
        again: Axis where operations are recomputed.
        turn: Where forward and backward meet on the axis.
        side: Between labels and drawing.
        times: Before a count of equal modules.
        arrow: Between before and after.
        none: Zero, in tables.
    """

    levels: str = "▁▂▃▄▅▆▇█"
    shade: str = "░"
    line: str = "─"
    again: str = "━"
    turn: str = "┴"
    side: str = "│"
    times: str = "\u00d7"
    arrow: str = "→"
    none: str = "·"

    @property
    def full(self) -> str:
        """A cell filled to the top."""
        return self.levels[-1]

    def level(self, share: float) -> str:
        """Choose the cell that is filled to a share in (0, 1]."""
        return self.levels[min(len(self.levels) - 1, int(share * len(self.levels)))]


UNICODE = Glyphs()
ASCII = Glyphs(levels="_oO#", shade=":", line="-", again="=", turn="+", side="|", times="x", arrow="->", none=".")
_KEPT, _FAINT, _BUDGET, _AGAIN, _OVER = "green", "dim", "magenta", "cyan", "bold red"


def plan_table(plan: Plan) -> RenderableType:
    """Draw a plan: its numbers, what it does to each module, and its memory over time.

    Args:
        plan: A plan; what was measured of it is shown beside what was predicted.

    Returns:
        Something to print on a rich console of 60 columns or more; in ASCII where the console's encoding asks for it.
    """
    return _PlanTable(plan)


@dataclass(frozen=True)
class _PlanTable:
    plan: Plan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyphs = ASCII if options.ascii_only else UNICODE
        width = min(options.max_width, MAX_WIDTH)
        inside = width - 4  # the panel's border and padding
        yield Panel(
            Group(
                _facts(self.plan, glyphs),
                "",
                _module_table(self.plan, inside, glyphs),
                "",
                timeline_text(self.plan, inside, glyphs),
            ),
            title=Text(plan_title(self.plan), "bold"),
            title_align="left",
            width=width,
            border_style=_FAINT,
        )


def _facts(plan: Plan, glyphs: Glyphs) -> Table:
    """Put the plan's numbers under a few words."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style=_FAINT, no_wrap=True)
    grid.add_column()
    resident = format_bytes(plan.resident_bytes)
    grid.add_row("peak", _peak_text(plan, glyphs))
    grid.add_row("at", Text(_place_words(plan)))
    grid.add_row("budget", Text(f"{budget_words(plan)}, {resident} of it resident before the step"))
    grid.add_row("time", _time_text(plan, glyphs))
    grid.add_row("solver", Text(solver_words(plan)))
    grid.add_row("planning", Text(planning_words(plan)))
    return grid


def _peak_text(plan: Plan, glyphs: Glyphs) -> Text:
    text = Text(f"{format_bytes(plan.unplanned_peak_bytes)} {glyphs.arrow} ")
    _append_peak(text, plan, plan.planned_peak_bytes, "planned")
    if plan.measured.peak_bytes is not None:
        _append_peak(text.append(", "), plan, plan.measured.peak_bytes, "measured")
    return text


def _append_peak(text: Text, plan: Plan, peak_bytes: int, word: str) -> None:
    over = over_words(plan, peak_bytes)
    text.append(f"{format_bytes(peak_bytes)} {word}{over}", _OVER if over else "bold")


def _time_text(plan: Plan, glyphs: Glyphs) -> Text:
    again_ms, all_ms = plan.planned.recompute_ms, plan.planned.time_ms
    text = Text(f"{format_time(all_ms - again_ms)} {glyphs.arrow} {format_time(all_ms)}, ")
    text.append(f"{format_ratio(plan.predicted_overhead)} planned", "bold")
    if plan.measured.overhead is not None:
        text.append(", ").append(f"{format_ratio(plan.measured.overhead)} measured", "bold")
    if plan.profile.device == "estimate":
        text.append("; times are estimates")
    return text


def _module_table(plan: Plan, width: int, glyphs: Glyphs) -> Table:
    rows = module_rows(plan)
    total = ModuleRow("all", 1, 0, add_uses(row.use for row in rows if not row.depth))
    bar_width = 20 if width >= 90 else 10 if width >= 70 else 0
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), show_footer=True, width=width
    )
    table.header_style = table.border_style = _FAINT
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
        table.caption = Text(f"{marks}  equal modules planned differently, the share kept in each", _FAINT)
        table.caption_justify = "left"
    return table


def _cells(row: ModuleRow, bar_width: int, glyphs: Glyphs) -> tuple[RenderableType, ...]:
    use, zero = row.use, Text(glyphs.none, _FAINT)
    label = Text("  " * row.depth + row.label, _FAINT if row.depth else "")
    label.append(f" {glyphs.times}{row.count}" if row.count > 1 else "", _FAINT)
    numbers = (
        format_bytes(use.kept_bytes) if use.kept_bytes else zero,
        format_bytes(use.dropped_bytes) if use.dropped_bytes else zero,
        f"{use.recomputed}/{use.operations}" if use.recomputed else zero,
        f"+{format_time(use.extra_ms)}" if use.extra_ms else zero,
    )
    if not bar_width:
        return label, *numbers
    bar = _columns_bar(row.shares, bar_width, glyphs) if row.shares else _bar(use.kept_share, bar_width, glyphs)
    return label, *numbers, bar


def _bar(share: float | None, width: int, glyphs: Glyphs) -> Text:
    """Draw a share as a bar from the left."""
    if share is None:
        return Text("")
    filled = round(share * width)
    return Text.assemble((glyphs.full * filled, _KEPT), (glyphs.shade * (width - filled), _FAINT))


def _columns_bar(shares: Sequence[float | None], width: int, glyphs: Glyphs) -> Text:
    """Draw one column for each share; neighbours go into one column, at their mean, where the width does not do."""
    size = -(-len(shares) // width)
    text = Text()
    for start in range(0, len(shares), size):
        known = [s for s in shares[start : start + size] if s is not None]
        mean = sum(known) / len(known) if known else 0.0
        text.append(glyphs.level(mean) if mean else glyphs.none, _KEPT if mean else _FAINT)
    return text


# ---------------------------------------------------------------- the memory timeline


def timeline_text(plan: Plan, width: int, glyphs: Glyphs = UNICODE) -> Text:
    """Draw the memory of the planned step over that of the plain one: time to the right, bytes upwards.

    The axis starts at the resident bytes; the budget is a line, unless it is far above all memory. Each column shows
    the most bytes of its time.

    Args:
        plan: A plan.
        width: Columns of the drawing, labels included, at least 40.
        glyphs: Characters to draw with.

    Returns:
        About a dozen lines.
    """
    return _Timeline(plan, width, glyphs).draw()


@dataclass(frozen=True)
class _Timeline:
    plan: Plan
    width: int
    glyphs: Glyphs

    @cached_property
    def top_bytes(self) -> int:
        """Height of the drawing, in bytes above the resident ones."""
        return max(self.plan.unplanned.peak_bytes, self.plan.planned.peak_bytes, 1)

    @cached_property
    def budget_row(self) -> int | None:
        """Rows below the budget line; None where the budget is far above all memory."""
        room = self.plan.budget_bytes - self.plan.resident_bytes
        rows = max(1, round(TIMELINE_ROWS * room / self.top_bytes))
        return rows if rows <= TIMELINE_ROWS + 1 else None

    @cached_property
    def row_bytes(self) -> float:
        """Bytes of one row, such that the budget is between two of them."""
        room = self.plan.budget_bytes - self.plan.resident_bytes
        exact = room / self.budget_row if self.budget_row else 0.0
        return max(exact, self.top_bytes / (TIMELINE_ROWS + 1))

    @cached_property
    def labels(self) -> tuple[str, str, str]:
        """Bytes at the top, at the budget, and on the axis."""
        resident = self.plan.resident_bytes
        return format_bytes(resident + self.top_bytes), format_bytes(self.plan.budget_bytes), format_bytes(resident)

    @cached_property
    def columns(self) -> int:
        return max(20, self.width - max(len(label) for label in self.labels) - 2)

    def draw(self) -> Text:
        plain, _ = self._columns(self.plan.unplanned)
        planned, again = self._columns(self.plan.planned)
        rows = max(math.ceil(self.top_bytes / self.row_bytes - 1e-9), self.budget_row or 0)
        top, budget, _ = self.labels
        lines = [self._legend(any(again))]
        for row in reversed(range(rows)):
            if row + 1 == self.budget_row:
                lines.append(self._line(budget, [(self.glyphs.line, _BUDGET)] * self.columns))
            label = top if row == rows - 1 and row + 1 != self.budget_row else ""
            cells = [self._cell(row, *levels) for levels in zip(planned, plain, strict=True)]
            lines.append(self._line(label, cells))
        return Text("\n").join([*lines, self._axis(again), self._phases()])

    def _columns(self, simulation: Simulation) -> tuple[list[int], list[bool]]:
        """Give for each column the most bytes of its time, and whether much of that time runs something again."""
        peaks, again = [0] * self.columns, [0.0] * self.columns
        clock = 0.0
        for position, moment in enumerate(simulation.timeline):
            start, clock = clock, clock + self._duration(moment.node)
            for column in range(int(start), max(int(start) + 1, math.ceil(clock - 1e-9))):
                at = min(column, self.columns - 1)
                peaks[at] = max(peaks[at], moment.peak_bytes)
                if position >= simulation.turn and self.plan.graph.nodes[moment.node].phase is Phase.FORWARD:
                    again[at] += min(clock, column + 1) - max(start, column)
        return peaks, [share > 0.25 for share in again]

    def _duration(self, node: int) -> float:
        """Give the time of a node, in columns."""
        total_ms = max(self.plan.planned.time_ms, self.plan.unplanned.time_ms)
        if not total_ms:
            return self.columns / max(1, len(self.plan.planned.timeline))
        return self.plan.profile.time_ms[node] / total_ms * self.columns

    @property
    def _turn(self) -> int:
        planned = self.plan.planned
        return min(self.columns - 1, int(sum(self._duration(m.node) for m in planned.timeline[: planned.turn])))

    def _cell(self, row: int, planned: int, plain: int) -> tuple[str, str]:
        filled = planned / self.row_bytes - row
        if filled > 0:
            return self.glyphs.level(min(1.0, filled)), _KEPT
        return (self.glyphs.shade, _FAINT) if plain / self.row_bytes > row else (" ", "")

    def _line(self, label: str, cells: Sequence[tuple[str, str]], side: str = "") -> Text:
        text = Text().append(f"{label:>{self.width - self.columns - 2}} {side or self.glyphs.side}", _FAINT)
        for style, run in groupby(cells, key=lambda cell: cell[1]):
            text.append("".join(glyph for glyph, _ in run), style)
        text.rstrip()
        return text

    def _axis(self, again: Sequence[bool]) -> Text:
        cells = [(self.glyphs.again, _AGAIN) if runs else (self.glyphs.line, _FAINT) for runs in again]
        cells[self._turn] = (self.glyphs.turn, _FAINT)
        return self._line(self.labels[2], cells, self.glyphs.turn)

    def _phases(self) -> Text:
        plan = self.plan
        forward_ms = sum(plan.profile.time_ms[m.node] for m in plan.planned.timeline[: plan.planned.turn])
        forward = f"forward {format_time(forward_ms)}"
        backward = f"backward {format_time(plan.planned.time_ms - forward_ms)}"
        indent = " " * (self.width - self.columns)
        return Text(f"{indent}{forward:<{self._turn}}  {backward}", _FAINT)

    def _legend(self, runs_again: bool) -> Text:
        glyphs = self.glyphs
        items = [(glyphs.full, _KEPT, "planned"), (glyphs.shade, _FAINT, "unplanned")]
        items += [(glyphs.line, _BUDGET, "budget")] if self.budget_row else []
        items += [(glyphs.again, _AGAIN, "recomputing")] if runs_again else []
        gap = "   " if self.width >= 70 else " "
        keys = [Text.assemble((mark, style), f" {words}") for mark, style, words in items]
        return Text(" " * (self.width - self.columns)) + Text(gap).join(keys)


# ---------------------------------------------------------------- who sees what


class Reporter:
    """Shows the stages of planning, then the plan, then what was measured.

    On a terminal: progress that vanishes, and the table. Elsewhere: plain lines, to the logger `hiremate_lightning` at
    level INFO where the program has set up its logging for that, else to standard error. On ranks other than zero:
    nothing.

    Args:
        verbose: Whether to show anything.
        console: Where to; by default rich's own console, on which progress bars of others nest with ours.
    """

    def __init__(self, verbose: bool = True, console: Console | None = None) -> None:
        self.verbose = verbose
        self._console = console
        self._progress: Progress | None = None
        self._tasks: list[TaskID] = []

    @property
    def is_silent(self) -> bool:
        """Whether nothing is shown, here and now."""
        return not self.verbose or not is_rank_zero()

    @property
    def console(self) -> Console:
        """The console on which tables and progress are drawn."""
        return self._console or rich.get_console()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show that a stage of planning runs, for as long as it does.

        Args:
            name: What is being done, such as "tracing".
        """
        LOGGER.debug(name)
        if self.is_silent or not self.console.is_interactive:
            yield
            return
        outermost = self._progress is None
        if self._progress is None:
            self._progress = _stage_progress(self.console)
            self._progress.start()
        progress = self._progress
        self._tasks.append(progress.add_task(name, total=None, detail=""))
        try:
            yield
        finally:
            if outermost:
                progress.stop()
                self._progress = None
            progress.remove_task(self._tasks.pop())

    def progress(self, description: str, completed: float, total: float | None = None) -> None:
        """Show how far the stage under way is; outside of a stage, nothing.

        Args:
            description: What to show beside the stage's name: what is counted, or the incumbent of a solve.
            completed: How much is done.
            total: How much there is to do, None if nobody knows.
        """
        if self._progress is not None and self._tasks:
            detail = description if total is None else f"{completed:g}/{total:g} {description}"
            self._progress.update(self._tasks[-1], completed=completed, total=total, detail=detail)

    def planned(self, plan: Plan) -> None:
        """Show a new plan."""
        if self.is_silent:
            return
        if self._draws:
            self.console.print(plan_table(plan))
        else:
            self._write(plan_lines(plan))

    def measured(self, plan: Plan) -> None:
        """Show what was measured of a plan beside what it predicted."""
        self.note(measured_line(plan))

    def note(self, text: str) -> None:
        """Show a line."""
        if not self.is_silent:
            self._write([text])

    @property
    def _draws(self) -> bool:
        return self.console.is_terminal or self.console.is_jupyter

    def _write(self, lines: Iterable[str]) -> None:
        console = self.console if self._draws or self._console else None
        for line in lines:
            if console is not None:
                console.print(Text(line), soft_wrap=True)
            elif LOGGER.hasHandlers() and LOGGER.isEnabledFor(logging.INFO):
                LOGGER.info(line)
            elif LOGGER.level <= logging.INFO:  # not silenced, only not set up
                Console(stderr=True, highlight=False).print(Text(line), soft_wrap=True)


def _stage_progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("HiRemate: {task.description}", markup=False),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", markup=False, style=_FAINT),
        console=console,
        transient=True,
    )


def is_rank_zero() -> bool:
    """Whether this process speaks for all: by torch.distributed where it runs, else by the launcher's environment."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    ranks = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    return next((rank for rank in ranks if rank), "0") == "0"
