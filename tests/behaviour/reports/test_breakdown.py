"""What a plan does to each module: what is counted, how it is grouped, and the words for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hiremate_lightning.planning.plan import measured_line, planned_lines
from hiremate_lightning.planning.solvers.base import Status
from hiremate_lightning.records.graph import OUTSIDE
from hiremate_lightning.reporting.plan_summary import (
    ModuleRow,
    ModuleUse,
    add_uses,
    module_rows,
    uses_by_module,
)
from hiremate_lightning.units import Budget
from tests.tiny import KB, Builder, blocks_plan, flat_plan, mixed_plan, plan_keeping, transformer

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


def test_kept_and_not_kept_add_up_to_what_eager_keeps():
    plan = blocks_plan(2, keep=("qkv", "add", "up", "gelu", "residual"))
    total = add_uses(uses_by_module(plan).values())
    assert total.kept_bytes + total.dropped_bytes == plan.unplanned.saved_bytes


def test_an_operation_run_twice_again_counts_once_with_all_time():
    """Views are no operations: of qkv, its split and attend two are."""
    plan = blocks_plan(1)
    assert uses_by_module(plan)["net.blocks.0.attn"].operations == 2
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
    """Resident bytes are not kept by the plan."""
    b = Builder()
    weight = b.input("weight", 1000)
    b.module = "first"
    a = b.op("a", (), 100)
    b.module = "second"
    alias, transposed = b.op("alias", (), view_of=a), b.op("transpose", (weight,), view_of=weight)
    b.op("g", (a, alias, transposed), 1, backward=True)
    uses = uses_by_module(plan_keeping(*b.graph(), ["a", "transpose"]))
    assert uses["first"].kept_bytes == 100
    assert (uses["second"].kept_bytes, uses["second"].dropped_bytes) == (0, 0)


def test_the_share_kept_is_unknown_with_nothing_to_keep():
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
    """Blocks that are planned differently stay in one row, which shows the share of each."""
    plan = mixed_plan(4, kept_blocks=2)
    rows = module_rows(plan)
    whole = add_uses(row.use for row in rows if not row.depth)
    assert whole.kept_bytes == plan.planned.saved_bytes
    (blocks,) = (row for row in rows if row.count == 4)
    assert (blocks.label, blocks.shares) == ("net.blocks.0-3", pytest.approx((1.0, 1.0, 5 / 53, 5 / 53)))
    parts = add_uses(row.use for row in rows if row.depth)
    assert (parts.kept_bytes, parts.dropped_bytes) == (blocks.use.kept_bytes, blocks.use.dropped_bytes)
    assert (parts.recomputed, parts.operations) == (blocks.use.recomputed, blocks.use.operations)
    assert all(row.shares == () for row in module_rows(blocks_plan(4))), "planned alike"


@pytest.mark.parametrize("limit", [2, 3, 5, 8, 12])
@pytest.mark.parametrize("blocks", [1, 30])
def test_rows_stay_within_their_limit(limit: int, blocks: int):
    rows = module_rows(blocks_plan(blocks), limit)
    assert len(rows) <= limit + 1  # and what runs outside
    assert add_uses(row.use for row in rows if not row.depth).kept_bytes == blocks_plan(blocks).planned.saved_bytes


@pytest.mark.parametrize(
    ("sizes", "name", "limit", "expected"),
    [
        (tuple(1000 + i for i in range(30)), "layers.{}", 5, [*(f"layers.{i}" for i in range(26, 30)), "26 others"]),
        ((10_000, 1, 2, 20_000), "layer{}.act", 20, ["layer0.act", "layer3.act", "2 others"]),
        ((10_000, 1, 20_000), "layer{}.act", 20, ["layer0.act", "layer1", "layer2.act"]),
        ((1000,) * 12, "encoder_layer_{}", 20, ["encoder_layer_0-11 x12"]),
        ((1000, 500, 1000, 500), "blocks.{}", 20, ["blocks.0..2 x2", "blocks.1..3 x2"]),
        ((1000,), "", 20, ["(itself)"]),
    ],
    ids=["no more rows", "too small to matter", "one is small", "numbers in names", "others between", "itself"],
)
def test_modules_get_rows_and_the_rest_is_summed_up(sizes, name, limit, expected):
    rows = module_rows(flat_plan(sizes, name), limit)
    assert {row.depth for row in rows} == {0}
    assert [
        f"{row.label} x{row.count}" if ".." in row.label or "-" in row.label else row.label for row in rows
    ] == expected
    assert add_uses(row.use for row in rows).kept_bytes == sum(sizes)


def test_an_empty_step_has_no_rows():
    graph, profile = Builder().graph()
    assert module_rows(plan_keeping(graph, profile, [])) == ()


# ---------------------------------------------------------------- words


def test_plans_are_described_by_peak_time_and_solver():
    """The root needs no name; stages of planning that took no time are left out."""
    plan = blocks_plan(4)
    assert planned_lines(plan) == [
        "HiRemate plan of GPT: peak 5.48 MiB -> 3.69 MiB, budget 3.79 MiB, extra time +16.8%",
        "  hilp: the best possible (no plan below +16.8%); planned in 1.95 s: tracing 500 ms, profiling 250 ms, "
        "solving 1.2 s",
    ]
    assert planned_lines(blocks_plan(1, target=""))[0].startswith("HiRemate plan: peak ")
    line = planned_lines(replace(plan, planning=replace(plan.planning, capture_s=0.0, profile_s=0.0)))[1]
    assert line.endswith("planned in 1.2 s: solving 1.2 s")


def test_a_plan_that_does_nothing_says_so():
    graph, profile = transformer(2)
    plan = plan_keeping(graph, profile, [node.name for node in graph.nodes])
    first, second = planned_lines(plan)
    assert "extra time +0.0%" in first
    assert second.startswith("  hilp: nothing is recomputed; planned in 1.95 s")


def test_a_share_or_excess_of_the_budget_shows_beside_its_bytes():
    assert "budget 3.79 MiB (50%)" in planned_lines(blocks_plan(4, budget=Budget(share=0.5)))[0]
    assert "budget 3.79 MiB (auto)" in planned_lines(blocks_plan(4, budget=Budget()))[0]
    plan = blocks_plan(4)
    over = replace(plan, budget_bytes=plan.planned_peak_bytes - 2**20)
    assert "-> 3.69 MiB (1.00 MiB OVER the budget), budget 2.69 MiB" in planned_lines(over)[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bound_ms": 9.0}, "  hilp: the best possible (no plan below +16.8%)"),
        ({"bound_ms": 8.8}, "  hilp: within 0.3% of the best possible"),
        (
            {"status": Status.FEASIBLE, "stopped_by": "time limit", "bound_ms": 8.0},
            "  hilp: within 1.6% of the best possible (no plan below +14.9%), stopped by time limit; ",
        ),
        ({"bound_ms": 0.0}, "  hilp: no lower bound known"),
    ],
)
def test_what_may_be_slower_is_not_called_optimal(changes, words):
    """A solver calls itself optimal within the gap that it was given."""
    plan = blocks_plan(4)
    line = planned_lines(replace(plan, solution=replace(plan.solution, **changes)))[1]
    assert line.startswith(words)
    assert "optimal" not in line
    assert ("best possible" in line) == (changes["bound_ms"] > 0)


@pytest.mark.parametrize(
    ("measured", "text"),
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
def test_measured_stands_beside_predicted(measured: dict[str, Any], text: str):
    assert measured_line(blocks_plan(4).with_measured(**measured)) == f"HiRemate plan of GPT, measured: {text}"
