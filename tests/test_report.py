"""The report: what it says, how it looks at any width, and who gets to see it."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import rich
import torch.distributed
from rich.console import Console, RenderableType

from hiremate_lightning.costs import Profile
from hiremate_lightning.graph import OUTSIDE
from hiremate_lightning.plan import Plan
from hiremate_lightning.report import (
    ASCII,
    ModuleRow,
    ModuleUse,
    Reporter,
    add_uses,
    is_rank_zero,
    measured_line,
    module_rows,
    plan_lines,
    plan_table,
    timeline_text,
    uses_by_module,
)
from hiremate_lightning.solvers.base import Status
from hiremate_lightning.units import Budget

from .tiny import KB, Builder, plan_keeping, transformer

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
TERMINAL_VARIABLES = ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


@pytest.fixture(autouse=True)
def _one_process_without_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK_VARIABLES, *TERMINAL_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(rich, "_console", None)


def blocks_plan(blocks: int = 4, keep: tuple[str, ...] = ("residual", "up"), **changes: Any) -> Plan:
    """Keep some values of every block of a transformer."""
    graph, profile = transformer(blocks)
    return plan_keeping(graph, profile, [f"{name}{i}" for name in keep for i in range(blocks)], **changes)


def mixed_plan(blocks: int = 4, kept_blocks: int = 2) -> Plan:
    """Keep all of the first blocks, and of the others only what they start from."""
    graph, profile = transformer(blocks)
    kept = [node.name for node in graph.nodes if node.name[-1:].isdigit() and int(node.name[-1]) < kept_blocks]
    return plan_keeping(graph, profile, [*kept, *(f"residual{i}" for i in range(blocks))])


def render(what: RenderableType, width: int = 80, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class AsciiFile(io.StringIO):
    """A stream that can't encode more than ASCII."""

    encoding = "ascii"  # type: ignore[assignment]


# ---------------------------------------------------------------- what a plan does to each module


def test_bytes_belong_to_the_module_that_allocates_them():
    uses = uses_by_module(blocks_plan(1))
    # In units of 64 kB: kept are up (4), mask (1/4), residual (1); not kept are embed, qkv (3), add, gelu (4), norm.
    assert uses == {
        "net.embed": ModuleUse(0, 64 * KB, 1, 1, 0.1),
        "net.blocks.0.attn": ModuleUse(0, 3 * 64 * KB, 2, 2, 2.0),
        "net.blocks.0": ModuleUse(64 * KB, 64 * KB, 1, 2, 0.1),
        "net.blocks.0.mlp": ModuleUse(4 * 64 * KB, 4 * 64 * KB, 1, 3, 0.1),
        "net.blocks.0.dropout": ModuleUse(16 * KB, 0, 0, 1, 0.0),
        "net.norm": ModuleUse(0, 64 * KB, 1, 1, 0.1),
        "net.head": ModuleUse(0, 0, 0, 1, 0.0),
        OUTSIDE: ModuleUse(32 * KB, 0, 0, 0, 0.0),
    }


@pytest.mark.parametrize("keep", [("residual", "up"), ("qkv",), ()])
def test_uses_add_up_to_what_the_simulator_counts(keep: tuple[str, ...]):
    plan = blocks_plan(3, keep)
    total = add_uses(uses_by_module(plan).values())
    assert total.kept_bytes == plan.planned.saved_bytes
    assert total.extra_ms == pytest.approx(plan.planned.recompute_ms)


def test_kept_and_not_kept_are_what_plain_training_keeps_if_the_plan_keeps_part_of_it():
    plan = blocks_plan(2, keep=("qkv", "add", "up", "gelu", "residual"))
    total = add_uses(uses_by_module(plan).values())
    assert total.kept_bytes + total.dropped_bytes == plan.unplanned.saved_bytes


def test_an_operation_that_runs_twice_again_counts_once_with_all_its_time():
    plan = blocks_plan(1)
    recompute = plan.solution.recompute
    embed = 0
    twice = replace(plan.solution, recompute=(*recompute[:-1], (*recompute[-1], embed)))
    use = uses_by_module(replace(plan, solution=twice))["net.embed"]
    assert (use.recomputed, use.operations, use.extra_ms) == (1, 1, pytest.approx(0.2))


def test_a_replayed_dropout_counts_as_the_dropout():
    b = Builder()
    x = b.op("x", (), 100)
    dropped = b.op("dropout", (x,), 100, 25, random=True)
    b.op("g", (dropped, dropped + 1), 100, backward=True)
    b.replay(1, (x, dropped + 1), dropped, time=0.5)
    graph, profile = b.graph()
    use = uses_by_module(plan_keeping(graph, profile, ["x"]))[""]
    assert use == ModuleUse(kept_bytes=125, dropped_bytes=100, recomputed=1, operations=2, extra_ms=0.5)


def test_a_storage_counts_once_and_for_the_first_that_makes_it():
    b = Builder()
    b.module = "first"
    a = b.op("a", (), 100)
    b.module = "second"
    alias = b.op("alias", (), view_of=a)
    b.op("g", (a, alias), 1, backward=True)
    graph, profile = b.graph()
    uses = uses_by_module(plan_keeping(graph, profile, ["a"]))
    assert (uses["first"].kept_bytes, uses["second"].kept_bytes) == (100, 0)


def test_resident_bytes_are_not_kept_by_the_plan():
    b = Builder()
    weight = b.input("weight", 1000)
    transposed = b.op("transpose", (weight,), view_of=weight)
    b.op("g", (transposed,), 1, backward=True)
    graph, profile = b.graph()
    assert uses_by_module(plan_keeping(graph, profile, ["transpose"]))[""] == ModuleUse()


def test_views_are_no_operations():
    uses = uses_by_module(blocks_plan(1))
    assert uses["net.blocks.0.attn"].operations == 2  # qkv and attend; split is a view


def test_the_share_kept_is_unknown_where_there_is_nothing_to_keep():
    assert ModuleUse().kept_share is None
    assert ModuleUse(kept_bytes=1, dropped_bytes=3).kept_share == 0.25


# ---------------------------------------------------------------- modules rolled up into rows


def labels(rows: tuple[ModuleRow, ...]) -> list[tuple[int, str, int]]:
    return [(row.depth, row.label, row.count) for row in rows]


def test_equal_blocks_share_a_row_above_their_parts():
    assert labels(module_rows(blocks_plan(4))) == [
        (0, "net.embed", 1),
        (0, "net.blocks.0-3", 4),
        (1, "attn", 1),
        (1, "mlp", 1),
        (1, "dropout", 1),
        (1, "(itself)", 1),
        (0, "net.norm", 1),
        (0, "net.head", 1),
        (0, "outside the plan", 1),
    ]


def test_rows_add_up_to_the_whole_and_parts_to_their_blocks():
    plan = mixed_plan()
    rows = module_rows(plan)
    whole = add_uses(row.use for row in rows if not row.depth)
    assert whole.kept_bytes == plan.planned.saved_bytes
    blocks = next(row for row in rows if row.count == 4)
    parts = add_uses(row.use for row in rows if row.depth)
    assert (parts.kept_bytes, parts.dropped_bytes) == (blocks.use.kept_bytes, blocks.use.dropped_bytes)
    assert (parts.recomputed, parts.operations) == (blocks.use.recomputed, blocks.use.operations)


def test_blocks_planned_alike_show_no_shares():
    assert all(row.shares == () for row in module_rows(blocks_plan(4)))


def test_blocks_planned_differently_stay_in_one_row_that_shows_the_share_of_each():
    row = next(row for row in module_rows(mixed_plan(4, kept_blocks=2)) if row.label == "net.blocks.0-3")
    assert row.shares == pytest.approx((1.0, 1.0, 5 / 53, 5 / 53))


@pytest.mark.parametrize("limit", [2, 3, 5, 8, 12])
@pytest.mark.parametrize("blocks", [1, 30])
def test_rows_stay_within_their_limit(limit: int, blocks: int):
    rows = module_rows(blocks_plan(blocks), limit)
    assert len(rows) <= limit + 1  # and what runs outside
    assert add_uses(row.use for row in rows if not row.depth).kept_bytes == blocks_plan(blocks).planned.saved_bytes


def flat_plan(sizes: tuple[int, ...], name: str = "layer{}.act") -> Plan:
    """A chain in which each module keeps one value of its own size."""
    b = Builder()
    x = b.input("x")
    saved = []
    for i, size in enumerate(sizes):
        b.module = name.format(i)
        x = b.op("a", (x,), size)
        saved.append(x)
    g = b.tangent("dy", 1)
    for tensor in reversed(saved):
        g = b.op("g", (g, tensor), 1, backward=True)
    graph, profile = b.graph(gradients=(g,))
    return plan_keeping(graph, profile, ["a"], resident_bytes=0)


def test_different_modules_get_rows_until_there_is_no_room_and_the_rest_is_summed_up():
    sizes = tuple(1000 + i for i in range(30))
    rows = module_rows(flat_plan(sizes, "layers.{}"), limit=5)
    assert [row.label for row in rows] == ["layers.26", "layers.27", "layers.28", "layers.29", "26 others"]
    assert rows[-1].use.kept_bytes == sum(sizes[:26])


def test_modules_too_small_to_matter_are_summed_up():
    rows = module_rows(flat_plan((10_000, 1, 2, 20_000)))
    assert [row.label for row in rows] == ["layer0.act", "layer3.act", "2 others"]


def test_one_small_module_keeps_its_row():
    assert len(module_rows(flat_plan((10_000, 1, 20_000)))) == 3


def test_numbers_in_names_group_like_numbers_in_paths():
    assert labels(module_rows(flat_plan((1000,) * 12, "encoder_layer_{}"))) == [(0, "encoder_layer_0-11", 12)]


def test_equal_blocks_with_others_between_them_are_marked_as_not_all():
    rows = module_rows(flat_plan((1000, 500, 1000, 500), "blocks.{}"))
    assert labels(rows) == [(0, "blocks.0..2", 2), (0, "blocks.1..3", 2)]


def test_operations_of_the_planned_module_itself_have_a_row():
    assert labels(module_rows(flat_plan((1000,), ""))) == [(0, "(itself)", 1)]


def test_an_empty_step_has_no_rows():
    graph, profile = Builder().graph()
    assert module_rows(plan_keeping(graph, profile, [])) == ()


# ---------------------------------------------------------------- words


def test_plain_lines_say_peak_time_solver_and_what_each_module_gives_up():
    assert plan_lines(blocks_plan(4)) == [
        "HiRemate plan of GPT: peak 5.48 MiB -> 3.69 MiB, budget 3.79 MiB, extra time +16.8%",
        "  hilp: optimal; gap 0.0% (no plan below +16.8%); planned in 1.95 s: tracing 500 ms, profiling 250 ms, "
        "solving 1.2 s",
        "  net.embed: 62.5 KiB not kept, 1 of 1 ops recomputed, +100 us",
        "  net.blocks.0-3 x4: 1.28 MiB kept, 1.95 MiB not kept, 16 of 32 ops recomputed, +8.8 ms",
        "  net.norm: 62.5 KiB not kept, 1 of 1 ops recomputed, +100 us",
    ]


def test_plain_lines_are_ascii():
    "".join(plan_lines(mixed_plan())).encode("ascii")


def test_a_plan_that_does_nothing_says_so():
    graph, profile = transformer(2)
    plan = plan_keeping(graph, profile, [node.name for node in graph.nodes])
    first, second = plan_lines(plan)
    assert "extra time +0.0%" in first
    assert second.startswith("  hilp: optimal; nothing is recomputed; planned in 1.95 s")


def test_a_share_shows_beside_its_bytes():
    assert "budget 3.79 MiB (50%)" in plan_lines(blocks_plan(4, budget=Budget(share=0.5)))[0]
    assert "budget 3.79 MiB (auto)" in plan_lines(blocks_plan(4, budget=Budget()))[0]


def test_a_solver_that_was_stopped_says_why_and_how_far_it_got():
    plan = blocks_plan(4)
    solution = replace(plan.solution, status=Status.FEASIBLE, stopped_by="time limit", bound_ms=8.0)
    line = plan_lines(replace(plan, solution=solution))[1]
    assert line.startswith("  hilp: feasible, stopped by time limit; gap 1.6% (no plan below +14.9%); ")


def test_a_solver_without_a_bound_claims_none():
    plan = blocks_plan(4)
    line = plan_lines(replace(plan, solution=replace(plan.solution, bound_ms=0.0)))[1]
    assert "no lower bound known" in line
    assert "gap" not in line


def test_planning_stages_that_took_no_time_are_left_out():
    plan = blocks_plan(4)
    line = plan_lines(replace(plan, planning=replace(plan.planning, capture_s=0.0, profile_s=0.0)))[1]
    assert line.endswith("planned in 1.2 s: solving 1.2 s")


def test_a_plan_over_its_budget_says_so_in_capitals():
    plan = blocks_plan(4)
    over = replace(plan, budget_bytes=plan.planned_peak_bytes - 2**20)
    assert "-> 3.69 MiB (1.00 MiB OVER the budget), budget 2.69 MiB" in plan_lines(over)[0]
    assert "3.69 MiB planned (1.00 MiB OVER the budget)" in render(plan_table(over))


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({}, "nothing yet"),
        ({"peak_bytes": 3_800_000}, "peak 3.62 MiB, predicted 3.69 MiB, budget 3.79 MiB"),
        ({"step_ms": 60.0, "recompute_ms": 10.0}, "extra time +20.0%, predicted +16.8%"),
        (
            {"peak_bytes": 5_000_000, "step_ms": 60.0, "recompute_ms": 10.0},
            "peak 4.77 MiB (1004 KiB OVER the budget), predicted 3.69 MiB, budget 3.79 MiB; "
            "extra time +20.0%, predicted +16.8%",
        ),
    ],
)
def test_measured_stands_beside_predicted(measured: dict[str, Any], said: str):
    assert measured_line(blocks_plan(4).with_measured(**measured)) == f"HiRemate plan of GPT, measured: {said}"


def test_the_root_needs_no_name():
    assert plan_lines(blocks_plan(1, target=""))[0].startswith("HiRemate plan: peak ")


# ---------------------------------------------------------------- the table

# ruff: noqa: RUF001 - the multiplication sign before a count is what the table shows
TABLE = """\
╭─ HiRemate plan of GPT ───────────────────────────────────────────────────────╮
│ peak      5.48 MiB → 4.67 MiB planned, 4.39 MiB measured                     │
│ at        net.blocks.3.mlp, backward, tiny.d_down3                           │
│ budget    4.76 MiB, 1.91 MiB of it resident before the step                  │
│ time      53.6 ms → 60.2 ms, +12.3% planned, +7.1% measured                  │
│ solver    hilp: optimal; gap 0.0% (no plan below +12.3%)                     │
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
def test_no_line_is_wider_than_the_console_and_none_wider_than_110(width: int):
    lines = render(plan_table(mixed_plan(12)), width).splitlines()
    assert {len(line) for line in lines} == {min(width, 110)}


def test_a_narrow_table_leaves_out_the_bars_and_keeps_the_numbers():
    wide, narrow = render(plan_table(mixed_plan()), 80), render(plan_table(mixed_plan()), 60)
    assert "share kept" in wide
    assert "share kept" not in narrow
    assert "not kept" in narrow


def test_a_terminal_gets_colours_and_a_pipe_none():
    plan = mixed_plan()
    assert "\x1b[" in render(plan_table(plan), force_terminal=True, color_system="standard")
    assert "\x1b" not in render(plan_table(plan))


def test_colours_add_nothing_to_the_text():
    plan = mixed_plan()
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


def test_square_brackets_in_names_are_no_markup():
    text = render(plan_table(flat_plan((1000, 2000), "[red]{}[/]")))
    assert "[red]0[/]" in text


def test_estimated_times_are_called_estimates():
    plan = blocks_plan(2)
    estimated = replace(plan, profile=replace(plan.profile, device="estimate"))
    assert "times are estimates" in render(plan_table(estimated))
    assert "times are estimates" not in render(plan_table(plan))


def test_the_place_of_the_peak_is_named():
    assert "net.blocks.3.mlp, backward, tiny.d_down3" in render(plan_table(blocks_plan(4)))


def test_a_peak_outside_the_plan_is_called_that():
    plan = blocks_plan(2)
    outside = next(i for i, node in enumerate(plan.graph.nodes) if node.op == OUTSIDE)
    workspace = list(plan.profile.workspace_bytes)
    workspace[outside] = 10**8
    plan = replace(plan, profile=Profile(plan.profile.time_ms, tuple(workspace), "tiny"))
    assert "code outside the plan, forward" in render(plan_table(plan))


# ---------------------------------------------------------------- the timeline

TIMELINE = """\
          █ planned ░ unplanned ─ budget ━ recomputing
5.48 MiB │              ░░░░░░
         │            ░░░░░░░░░░░
4.76 MiB │──────────────────────────────────────────────────
         │         ░░░░░░░░░░░▇▇░░░░   ▇▇▇
         │        ░▅▅▂▂▆▃▃▃▂▃▇██▇▇▅▅▃▃▆███▆▄▄▂▂▂▂
         │      ▃▇███████████████████████████████▂
         │   ▁▃▆████████████████████████████████████▆▆▆
         │ ▁▆██████████████████████████████████████████▅▅▃▃▂
         │▆█████████████████████████████████████████████████
1.91 MiB ┴───────────────┴─━━━───────━━━────────────────────
          forward 18.8 ms  backward 41.4 ms"""


def test_the_timeline_is_exactly_this():
    assert timeline_text(mixed_plan(4), 60).plain == TIMELINE


def test_the_timeline_in_ascii_has_the_same_shape():
    unicode, ascii_only = (timeline_text(mixed_plan(4), 60, *glyphs).plain for glyphs in ((), (ASCII,)))
    ascii_only.encode("ascii")
    assert [len(line) for line in ascii_only.splitlines()] == [len(line) for line in unicode.splitlines()]


def budget_line(plan: Plan) -> tuple[list[str], list[str]]:
    """The rows above the budget line, and those below it."""
    lines = timeline_text(plan, 70).plain.splitlines()[1:-2]
    at = next(i for i, line in enumerate(lines) if line.endswith("─" * 20))
    return lines[:at], lines[at + 1 :]


@pytest.mark.parametrize("kept_blocks", [0, 1, 2])
def test_the_plan_is_drawn_below_its_budget_and_plain_training_above(kept_blocks: int):
    above, below = budget_line(mixed_plan(4, kept_blocks))
    assert "░" in "".join(above)
    assert not set("".join(above)) & set("▁▂▃▄▅▆▇█")
    assert "█" in "".join(below)


def test_a_plan_over_its_budget_is_drawn_over_it():
    plan = mixed_plan(4)
    above, _ = budget_line(replace(plan, budget_bytes=(plan.planned_peak_bytes + plan.resident_bytes) // 2))
    assert "█" in "".join(above)


def test_a_budget_far_above_all_memory_is_not_drawn():
    plan = mixed_plan(4)
    text = timeline_text(replace(plan, budget_bytes=100 * plan.budget_bytes), 70).plain
    assert "budget" not in text
    assert len(text.splitlines()) <= 13


def test_a_budget_close_to_nothing_does_not_blow_the_drawing_up():
    plan = mixed_plan(4)
    assert len(timeline_text(replace(plan, budget_bytes=plan.resident_bytes + 1), 70).plain.splitlines()) <= 14


def test_recomputation_is_marked_on_the_axis_of_the_backward():
    axis = timeline_text(mixed_plan(4), 80).plain.splitlines()[-2]
    forward, backward = axis.split("┴")[1:]
    assert "━" not in forward
    assert "━" in backward


def test_without_recomputation_nothing_is_marked():
    graph, profile = transformer(2)
    plan = plan_keeping(graph, profile, [node.name for node in graph.nodes])
    assert "━" not in timeline_text(plan, 80).plain


def test_a_step_that_takes_no_time_is_drawn_by_its_operations():
    plan = mixed_plan(4)
    plan = replace(plan, profile=replace(plan.profile, time_ms=(0.0,) * len(plan.profile.time_ms)))
    assert "█" in timeline_text(plan, 60).plain


def test_an_empty_step_is_drawn_empty():
    graph, profile = Builder().graph()
    assert "█ planned" in timeline_text(plan_keeping(graph, profile, []), 60).plain


# ---------------------------------------------------------------- who sees what


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The package's logger, as if nobody had set up logging: pytest's own handlers are out of its sight."""
    logger = logging.getLogger("hiremate_lightning")
    before = logger.level, logger.propagate, logger.handlers[:]
    logger.propagate = False
    logger.handlers.clear()
    yield logger
    logger.level, logger.propagate, logger.handlers[:] = before
    logger.setLevel(before[0])


def terminal() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def show_all(reporter: Reporter) -> None:
    plan = mixed_plan().with_measured(peak_bytes=4_000_000)
    with reporter.stage("tracing"):
        reporter.progress("operations", 1, 2)
    reporter.planned(plan)
    reporter.measured(plan)
    reporter.note("a note")


def test_a_terminal_gets_progress_then_the_table_then_lines():
    console = terminal()
    show_all(Reporter(console=console))
    text = written(console)
    shown = ("HiRemate: tracing", "╭─ HiRemate plan of GPT", "HiRemate plan of GPT, measured: peak 3.81 MiB", "a note")
    places = [text.index(words) for words in shown]
    assert places == sorted(places)
    assert text.endswith("a note\n")


def test_a_console_that_is_no_terminal_gets_plain_lines_and_no_progress():
    console = Console(file=io.StringIO(), width=40)
    show_all(Reporter(console=console))
    plan = mixed_plan().with_measured(peak_bytes=4_000_000)
    assert written(console).splitlines() == [*plan_lines(plan), measured_line(plan), "a note"]


def test_silence_on_request():
    console = terminal()
    show_all(Reporter(verbose=False, console=console))
    assert written(console) == ""


def test_silence_on_other_ranks(monkeypatch: pytest.MonkeyPatch):
    console = terminal()
    monkeypatch.setenv("RANK", "1")
    show_all(Reporter(console=console))
    assert written(console) == ""


def test_silence_reaches_the_log_and_standard_error(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    show_all(Reporter(verbose=False))
    monkeypatch.setenv("LOCAL_RANK", "3")
    show_all(Reporter())
    assert capsys.readouterr() == ("", "")


def test_without_terminal_and_logging_lines_go_to_standard_error(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
):
    Reporter().planned(blocks_plan(4))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == plan_lines(blocks_plan(4))


def test_without_terminal_lines_go_to_the_log_where_it_takes_them(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    with caplog.at_level(logging.INFO, "hiremate_lightning"):
        Reporter().planned(blocks_plan(4))
    assert caplog.messages == plan_lines(blocks_plan(4))
    assert capsys.readouterr() == ("", "")


def test_a_log_that_was_never_asked_for_such_lines_does_not_swallow_them(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    assert logging.getLogger("hiremate_lightning").level == logging.NOTSET  # and the root's is WARNING
    Reporter().note("seen")
    assert capsys.readouterr().err == "seen\n"
    assert caplog.messages == []


def test_a_logger_set_to_warnings_silences_the_lines(logger: logging.Logger, capsys: pytest.CaptureFixture[str]):
    logger.setLevel(logging.WARNING)
    Reporter().note("unseen")
    assert capsys.readouterr() == ("", "")


def test_by_default_a_terminal_is_drawn_on_through_the_console_that_all_of_rich_shares(
    monkeypatch: pytest.MonkeyPatch,
):
    console = terminal()
    monkeypatch.setattr(rich, "_console", console)
    Reporter().note("shared")
    assert written(console) == "shared\n"


def test_stages_nest_and_vanish_also_when_they_fail():
    console = terminal()
    reporter = Reporter(console=console)
    with pytest.raises(KeyError), reporter.stage("profiling"), reporter.stage("solving"):
        raise KeyError
    with reporter.stage("again"):
        pass
    text = written(console)
    assert "HiRemate: solving" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 2  # the cursor came back both times


def test_stages_nest_with_a_progress_bar_that_is_already_there():
    from rich.progress import Progress

    console = terminal()
    with Progress(console=console) as bar:
        bar.add_task("epoch 0")
        with Reporter(console=console).stage("tracing"):
            pass
    assert "epoch 0" in written(console)


@pytest.mark.parametrize(("total", "shown"), [(20, "3/20 operations"), (None, "operations")])
def test_progress_counts_within_its_stage(total: int | None, shown: str):
    console = terminal()
    reporter = Reporter(console=console)
    with reporter.stage("profiling"):
        reporter.progress("operations", 3, total)
    last = written(console).rpartition("HiRemate: profiling")[2]
    assert f" {shown}" in last
    assert ("/" in last) is (total is not None)


def test_progress_outside_of_a_stage_is_nothing():
    console = terminal()
    Reporter(console=console).progress("operations", 1, 2)
    assert written(console) == ""


def test_one_process_is_rank_zero():
    assert is_rank_zero()


@pytest.mark.parametrize("name", RANK_VARIABLES)
def test_the_launcher_says_which_rank_this_is(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "0")
    assert is_rank_zero()
    monkeypatch.setenv(name, "1")
    assert not is_rank_zero()


def test_the_global_rank_counts_before_the_local_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not is_rank_zero()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_running_process_group_counts_before_the_environment(rank: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setenv("RANK", str(1 - rank))
    assert is_rank_zero() is (rank == 0)
