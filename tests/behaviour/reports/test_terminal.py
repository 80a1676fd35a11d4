"""The plan drawn in the terminal: what it says, and how it looks at any width."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.records.costs import Link, Profile
from hiremate_lightning.records.graph import OUTSIDE
from hiremate_lightning.records.offload import Offload, idle_storages
from hiremate_lightning.reporting.terminal import ASCII, MemoryTimeline, plan_table
from tests.tiny import Builder, blocks_plan, flat_plan, mixed_plan, plan_keeping, transformer


def render(what: RenderableType, width: int = 80, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class AsciiFile(io.StringIO):
    """A stream that can't encode more than ASCII."""

    encoding = "ascii"  # type: ignore[assignment]


# ---------------------------------------------------------------- the table

# ruff: noqa: RUF001 - the multiplication sign before a count is what the table shows
TABLE = """\
╭─ HiRemate plan of GPT ───────────────────────────────────────────────────────╮
│ peak      5.48 MiB → 4.67 MiB planned, 4.39 MiB measured                     │
│ at        net.blocks.3.mlp, backward, tiny.d_down3                           │
│ budget    4.76 MiB, 1.91 MiB of it resident before the step                  │
│ time      53.6 ms → 60.2 ms, +12.3% planned, +7.1% measured                  │
│ solver    hilp: the best possible (no plan below +12.3%)                     │
│ planning  1.95 s: tracing 500 ms, profiling 250 ms, solving 1.2 s            │
│                                                                              │
│ module                       kept  not kept  recomputed    extra  share kept │
│ ──────────────────────────────────────────────────────────────────────────── │
│ net.embed                       ·  62.5 KiB         1/1  +100 us  ░░░░░░░░░░ │
│ net.blocks.0-3 ×4        1.77 MiB  1.46 MiB       10/32  +6.4 ms  ██▁▁       │
│   attn                    375 KiB   375 KiB         4/8    +4 ms  ██··       │
│   mlp                    1000 KiB  1000 KiB        4/12  +2.2 ms  ██··       │
│   dropout                62.5 KiB         ·           ·        ·  ██████████ │
│   (itself)                375 KiB   125 KiB         2/8  +200 us  ██▅▅       │
│ net.norm                        ·  62.5 KiB         1/1  +100 us  ░░░░░░░░░░ │
│ net.head                        ·         ·           ·        ·             │
│ outside the plan         31.2 KiB         ·           ·        ·  ██████████ │
│                                                                              │
│ all                      1.80 MiB  1.59 MiB       12/35  +6.6 ms  █████░░░░░ │
│ ·▅█  equal modules planned differently, the share kept in each               │
│                                                                              │
│           █ planned   ░ unplanned   ─ budget   ━ recomputing                 │
│ 5.48 MiB │                   ░░░░░░░                                         │
│          │                ░░░░░░░░░░░░░░                                     │
│ 4.76 MiB │────────────────────────────────────────────────────────────────── │
│          │             ░░░░░░░░░░░░░▇▇▇░░░░░░   ▃▇▇▇                         │
│          │          ░░▁▅▂▂▂▆▆▃▃▃▁▂▃▇███▇▇▇▅▅▃▃▃▆████▆▆▄▄▂▂▂▂▂                │
│          │        ▃▇█████████████████████████████████████████▂▂              │
│          │    ▁▁▃▆███████████████████████████████████████████████▆▆▆▆▆       │
│          │  ▁▆████████████████████████████████████████████████████████▅▅▃▃▂▂ │
│          │▅▆████████████████████████████████████████████████████████████████ │
│ 1.91 MiB ┴────────────────────┴──━━━━────────━━━━─────────────────────────── │
│           forward 18.8 ms       backward 41.4 ms                             │
╰──────────────────────────────────────────────────────────────────────────────╯
"""


def test_the_table_at_80_columns_is_exactly_this():
    plan = mixed_plan(4).with_measured(peak_bytes=4_600_000, step_ms=60.0, recompute_ms=4.0)
    assert render(plan_table(plan)) == TABLE


@pytest.mark.parametrize("width", [60, 72, 80, 110, 140])
def test_no_line_is_wider_than_the_console_or_than_110(width: int):
    """A narrow table leaves out the bars and keeps the numbers."""
    text = render(plan_table(mixed_plan(12)), width)
    assert {len(line) for line in text.splitlines()} == {min(width, 110)}
    assert ("share kept" in text) == (width > 72)
    assert "not kept" in text


def test_a_terminal_gets_colours_and_a_pipe_none():
    """Colours add nothing to the text."""
    plan = mixed_plan()
    assert "\x1b[" in render(plan_table(plan), force_terminal=True, color_system="standard")
    assert "\x1b" not in render(plan_table(plan))
    console = Console(file=io.StringIO(), width=80, force_terminal=True, record=True)
    console.print(plan_table(plan))
    assert console.export_text() == render(plan_table(plan))


def test_a_stream_that_takes_ascii_only_gets_ascii():
    console = Console(file=AsciiFile(), width=80)
    console.print(plan_table(mixed_plan(12)))
    assert isinstance(console.file, AsciiFile)
    text = console.file.getvalue()
    text.encode("ascii")
    assert "net.blocks.0-11 x12" in text


def peaking_outside() -> Plan:
    plan = blocks_plan(2)
    outside = next(i for i, node in enumerate(plan.graph.nodes) if node.op == OUTSIDE)
    workspace = list(plan.profile.workspace_bytes)
    workspace[outside] = 10**8
    return replace(plan, profile=Profile(plan.profile.time_ms, tuple(workspace), "tiny"))


BLOCKS = blocks_plan(4)
SAID = {
    "[red]0[/]": flat_plan((1000, 2000), "[red]{}[/]"),  # no markup
    "3.69 MiB planned (1.00 MiB OVER the budget)": replace(BLOCKS, budget_bytes=BLOCKS.planned_peak_bytes - 2**20),
    "advice    1.91 MiB of the budget exist before the": replace(BLOCKS, budget_bytes=BLOCKS.resident_bytes + 1),
    "times are estimates": replace(BLOCKS, profile=replace(BLOCKS.profile, device="estimate")),
    "net.blocks.3.mlp, backward, tiny.d_down3": BLOCKS,  # the place of the peak
    "code outside the plan, forward": peaking_outside(),
}


@pytest.mark.parametrize(("words", "plan"), SAID.items(), ids=SAID)
def test_what_is_special_stands_in_the_table(words: str, plan: Plan):
    assert words in render(plan_table(plan), 110)
    assert "times are estimates" not in render(plan_table(BLOCKS))


# ---------------------------------------------------------------- the timeline


def test_the_timeline_in_ascii_has_the_same_shape():
    unicode = MemoryTimeline(mixed_plan(4), 60).draw().plain
    ascii_only = unicode.translate(ASCII)
    ascii_only.encode("ascii")
    assert [len(line) for line in ascii_only.splitlines()] == [len(line) for line in unicode.splitlines()]


def budget_line(plan: Plan) -> tuple[list[str], list[str]]:
    """The rows above the budget line, and those below it."""
    lines = MemoryTimeline(plan, 70).draw().plain.splitlines()[1:-2]
    at = next(i for i, line in enumerate(lines) if line.endswith("─" * 20))
    return lines[:at], lines[at + 1 :]


@pytest.mark.parametrize("kept_blocks", [0, 1, 2])
def test_the_plan_is_drawn_below_its_budget_and_eager_above(kept_blocks: int):
    """A plan over its budget is drawn over it."""
    plan = mixed_plan(4, kept_blocks)
    above, below = budget_line(plan)
    assert "░" in "".join(above)
    assert not set("".join(above)) & set("▁▂▃▄▅▆▇█")
    assert "█" in "".join(below)
    above, _ = budget_line(replace(plan, budget_bytes=(plan.planned_peak_bytes + plan.resident_bytes) // 2))
    assert "█" in "".join(above)


def test_a_budget_far_from_all_memory_leaves_the_drawing_small():
    plan = mixed_plan(4)
    far, near = (
        MemoryTimeline(replace(plan, budget_bytes=size_bytes), 70).draw().plain
        for size_bytes in (100 * plan.budget_bytes, plan.resident_bytes + 1)
    )
    assert "budget" not in far
    assert len(far.splitlines()) <= 13
    assert len(near.splitlines()) <= 14


def offload_plan(plan: Plan) -> Plan:
    """The plan with all that may be offloaded put into the host's memory as early as that is possible."""
    idle = idle_storages(plan.graph, plan.schedule)
    offloads = tuple(Offload(one.storage, one.made, one.last, one.first) for one in idle)
    profile = replace(plan.profile, link=Link(1e6, 1e6))
    return replace(plan, profile=profile, solution=replace(plan.solution, offloads=offloads))


def test_what_goes_to_the_host_has_its_own_mark_and_colour():
    """A legend that is too long for the width takes two lines."""
    plan = offload_plan(mixed_plan(4))
    drawn = MemoryTimeline(plan, 70).draw()
    legend, *rows = drawn.plain.splitlines()
    assert "▒ goes to the host" in legend
    assert "▒" in "".join(rows)
    assert {span.style for span in drawn.spans if "▒" in drawn.plain[span.start : span.end]} == {"blue"}
    ascii_only = MemoryTimeline(plan, 70).draw().plain.translate(ASCII)
    ascii_only.encode("ascii")
    assert "% goes to the host" in ascii_only
    lines = MemoryTimeline(plan, 50).draw().plain.splitlines()
    assert max(map(len, lines)) <= 50
    assert "planned" in lines[0]
    assert "recomputing" in lines[1]


def test_recomputation_is_marked_on_the_axis_of_the_backward():
    axis = MemoryTimeline(mixed_plan(4), 80).draw().plain.splitlines()[-2]
    forward, backward = axis.split("┴")[1:]
    assert "━" not in forward
    assert "━" in backward
    graph, profile = transformer(2)
    whole = plan_keeping(graph, profile, [node.name for node in graph.nodes])
    assert "━" not in MemoryTimeline(whole, 80).draw().plain


def test_a_step_that_takes_no_time_is_drawn_by_its_operations():
    plan = mixed_plan(4)
    plan = replace(plan, profile=replace(plan.profile, time_ms=(0.0,) * len(plan.profile.time_ms)))
    assert "█" in MemoryTimeline(plan, 60).draw().plain
    assert "█ planned" in MemoryTimeline(plan_keeping(*Builder().graph(), []), 60).draw().plain
