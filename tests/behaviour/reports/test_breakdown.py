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


def test_plans_are_described_by_peak_time_and_solver():
    assert planned_lines(blocks_plan(4)) == [
        "HiRemate plan of GPT: peak 5.48 MiB -> 3.69 MiB, budget 3.79 MiB, extra time +16.8%",
        "  hilp: the best possible (no plan below +16.8%); planned in 1.95 s: tracing 500 ms, profiling 250 ms, "
        "solving 1.2 s",
    ]


def test_a_plan_that_does_nothing_says_so():
    graph, profile = transformer(2)
    plan = plan_keeping(graph, profile, [node.name for node in graph.nodes])
    first, second = planned_lines(plan)
    assert "extra time +0.0%" in first
    assert second.startswith("  hilp: nothing is recomputed; planned in 1.95 s")


def test_a_share_shows_beside_its_bytes():
    assert "budget 3.79 MiB (50%)" in planned_lines(blocks_plan(4, budget=Budget(share=0.5)))[0]
    assert "budget 3.79 MiB (auto)" in planned_lines(blocks_plan(4, budget=Budget()))[0]


def test_a_solver_that_was_stopped_says_why_and_how_far_it_got():
    plan = blocks_plan(4)
    solution = replace(plan.solution, status=Status.FEASIBLE, stopped_by="time limit", bound_ms=8.0)
    line = planned_lines(replace(plan, solution=solution))[1]
    assert line.startswith("  hilp: within 1.6% of the best possible (no plan below +14.9%), stopped by time limit; ")


@pytest.mark.parametrize(
    ("bound_ms", "words"),
    [(9.0, "hilp: the best possible (no plan below +16.8%)"), (8.8, "hilp: within 0.3% of the best possible")],
)
def test_what_may_be_slower_is_not_called_optimal(bound_ms, words):
    """A solver calls itself optimal within the gap that it was given."""
    plan = blocks_plan(4)
    line = planned_lines(replace(plan, solution=replace(plan.solution, bound_ms=bound_ms)))[1]
    assert words in line
    assert "optimal" not in line


def test_a_solver_without_a_bound_claims_none():
    plan = blocks_plan(4)
    line = planned_lines(replace(plan, solution=replace(plan.solution, bound_ms=0.0)))[1]
    assert "no lower bound known" in line
    assert "best possible" not in line


def test_planning_stages_that_took_no_time_are_left_out():
    plan = blocks_plan(4)
    line = planned_lines(replace(plan, planning=replace(plan.planning, capture_s=0.0, profile_s=0.0)))[1]
    assert line.endswith("planned in 1.2 s: solving 1.2 s")


def test_a_plan_over_its_budget_says_so_in_capitals():
    plan = blocks_plan(4)
    over = replace(plan, budget_bytes=plan.planned_peak_bytes - 2**20)
    assert "-> 3.69 MiB (1.00 MiB OVER the budget), budget 2.69 MiB" in planned_lines(over)[0]


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
    assert planned_lines(blocks_plan(1, target=""))[0].startswith("HiRemate plan: peak ")
