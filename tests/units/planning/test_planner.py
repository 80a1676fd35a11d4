"""Budgets become bytes, and no plan passes its budget unless it says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hiremate_lightning.options import SessionOptions
from hiremate_lightning.out_of_memory import InfeasibleBudgetError
from hiremate_lightning.planning import planner
from hiremate_lightning.planning.headroom import AUTO_MARGIN, Need, Room, Short, resolve, unless_short
from hiremate_lightning.planning.planner import first_solution, make_plan
from hiremate_lightning.planning.solvers.base import Problem, Solution, Status, register, with_decisions
from hiremate_lightning.planning.solvers.least_memory import solve_least_memory
from hiremate_lightning.records.schedule import keep_all
from hiremate_lightning.records.step import Call, Gap, merge
from hiremate_lightning.units import Budget, parse_budget
from tests.tiny import KB, chain, room, transformer

MANY = 10**9


def step_of(graph, profile, held=0):
    return merge([Call(graph, profile, after_forward=Gap(held, held))], [0])


def plan_of(step, budget_bytes, resident_bytes=0, **options):
    return unless_short(make_plan(step, room(budget_bytes, resident_bytes), SessionOptions(**options), target="Net"))


def smallest_of(step):
    return plan_of(step, 1, on_infeasible="warn").planned_peak_bytes


@pytest.mark.parametrize(
    ("budget", "size_bytes"),
    [
        ("2 MiB", 2 * 2**20),
        ("50%", 1000 + 150),  # of what the unplanned step adds
        ("100%", 1000 + 301),
        ("auto", 1000 + int(10_000 * (1 - AUTO_MARGIN))),  # what is free less a margin
    ],
)
def test_a_budget_becomes_bytes(budget, size_bytes):
    assert resolve(parse_budget(budget), resident_bytes=1000, unplanned_bytes=301, free_bytes=10_000) == size_bytes


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9, 1.0])
def test_a_plan_is_within_its_budget(share):
    """The same step and budget give the same one."""
    step = step_of(*transformer(2))
    smallest, most = smallest_of(step), step.eager_bytes
    budget = int(smallest + share * (most - smallest))
    first, second = (plan_of(step, budget) for _ in range(2))
    assert first.planned_peak_bytes <= budget
    assert first.solution.recompute == second.solution.recompute


def test_resident_bytes_are_part_of_the_budget():
    step = step_of(*transformer(2))
    budget = smallest_of(step)
    plan = plan_of(step, budget + 500, resident_bytes=500)
    assert plan.planned_peak_bytes <= budget + 500
    with pytest.raises(InfeasibleBudgetError):
        plan_of(step, budget + 500, resident_bytes=501)


def test_a_margin_is_left_free():
    step = step_of(*transformer(2))
    most = step.eager_bytes
    plan = unless_short(make_plan(step, room(most, margin_bytes=KB), SessionOptions()))
    assert plan.planned_peak_bytes <= most - KB


def test_the_budget_that_an_infeasible_one_names_is_feasible():
    step = step_of(*transformer(2))
    smallest = smallest_of(step)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_of(step, smallest - 1)
    error, text = caught.value, str(caught.value)
    assert error.budget_bytes == smallest - 1
    assert error.smallest_bytes == smallest
    assert f"({smallest - 1:,} bytes) is too small for Net" in text
    assert f"({smallest:,} bytes)" in text
    assert "Raise the budget" in text
    assert "CUDA out of memory." not in text, "people read it"
    assert error.args[0].endswith("CUDA out of memory."), "batch-size finders look for these words there"
    assert plan_of(step, smallest).planned_peak_bytes <= smallest
    outcome = make_plan(step, room(1), SessionOptions())
    assert isinstance(outcome, Short)
    assert outcome.need.peak_bytes == outcome.error().smallest_bytes == smallest
    assert str(outcome) == str(outcome.error())


@pytest.mark.parametrize(
    ("step", "words", "module"),
    [
        (lambda: step_of(*transformer(2)), r"The peak is at .+ in module 'net\.", "net."),
        (lambda: step_of(*chain(3), held=MANY), "in the code outside of the planned modules", ""),
        (lambda: step_of(*chain(3)), "in the code of the planned module itself", ""),
    ],
    ids=["a module", "code outside", "the planned module's own code"],
)
def test_an_infeasible_budget_names_what_blocks(step, words, module):
    with pytest.raises(InfeasibleBudgetError, match=words) as caught:
        plan_of(step(), 10**6 if "outside" in words else 1)
    assert caught.value.module.startswith(module)
    assert bool(caught.value.module) is bool(module)


def test_an_infeasible_budget_names_what_holds_most_of_the_peak():
    """A buffer that code works in, say, which is there as long as the operation that it is in."""
    step = step_of(*chain(3))
    at = replace(step.graph, nodes=tuple(replace(node, source="/home/me/net/loss.py:7") for node in step.graph.nodes))
    profile = replace(step.profile, workspace_bytes=(1000,) * len(step.graph.nodes))
    for known, words in (
        (step, r"100 B of it are one value, made by \S+ in the code of"),
        (replace(step, graph=at), r"100 B of it are one value, made at me/net/loss\.py:7 \(\S+\)\."),
        (replace(step, profile=profile), r"1000 B of it are what \S+ needs while it runs\."),
    ):
        with pytest.raises(InfeasibleBudgetError, match=words):
            plan_of(known, 1)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_of(step_of(*chain(40)), 1)
    assert "of it are" not in str(caught.value), "many hold the peak"


def test_a_share_that_is_too_small_is_named_as_a_share():
    step = step_of(*transformer(2))
    with pytest.raises(InfeasibleBudgetError, match=r"The budget 1% .*% of what the unplanned step adds"):
        unless_short(make_plan(step, Room(Budget(share=0.01), 10), SessionOptions()))


def test_a_share_that_is_named_is_never_above_all_of_the_step():
    step = step_of(*chain(3))
    smallest = plan_of(step, MANY).solution
    problem = Problem(step.graph, step.profile, MANY)
    need = Need(problem, smallest, 0, is_guarded=True)
    assert need.peak_bytes > step.eager_bytes
    assert need.share == 1.0
    assert replace(need, less_bytes=KB).share > 1.0


def test_with_warn_an_infeasible_budget_gives_the_least_memory():
    plan = plan_of(step_of(*transformer(2)), 1, on_infeasible="warn")
    assert 1 < plan.planned_peak_bytes < plan.unplanned_peak_bytes
    step = step_of(*chain(12))
    smallest = solve_least_memory(Problem(step.graph, step.profile, 0))
    plan = plan_of(step, smallest.peak_bytes // 2, on_infeasible="warn")
    assert plan.planned_peak_bytes <= smallest.peak_bytes
    assert plan.solution.recompute_ms < smallest.recompute_ms


@pytest.mark.usefixtures("_own_strategies")
def test_a_strategy_that_lies_about_its_peak_is_not_believed():
    step = step_of(*transformer(2))
    nothing = ((),) * (len(step.graph.backward) + 1)

    register("a liar, for a test", lambda problem: Solution("liar", Status.OPTIMAL, nothing, peak_bytes=0))

    budget = step.eager_bytes - 1
    plan = plan_of(step, budget, solver="a liar, for a test")
    assert plan.planned_peak_bytes <= budget
    assert plan.solution.strategy != "liar"


def first_of(step, budget_bytes, free_bytes=0):
    outcome = first_solution(step, room(budget_bytes), SessionOptions(), "Net", free_bytes=lambda: free_bytes)
    return unless_short(outcome)


def test_a_part_beyond_budget_and_device_is_refused():
    step = step_of(*transformer(2))
    smallest = smallest_of(step)
    assert first_of(step, smallest).peak_bytes == smallest
    assert first_of(step, smallest - 1, free_bytes=smallest).peak_bytes == smallest
    with pytest.raises(InfeasibleBudgetError, match=r"too small for Net.* It needs at least"):
        first_of(step, smallest - 1, free_bytes=smallest - 1)


def test_a_solver_is_asked_before_the_first_step_is_refused(monkeypatch):
    def solve_least_memory(problem):
        return with_decisions(problem, Solution("all", Status.NOT_FOUND), keep_all(problem.graph))

    monkeypatch.setattr(planner, "solve_least_memory", solve_least_memory)
    step = step_of(*transformer(2))
    budget = step.eager_bytes * 7 // 10
    assert first_of(step, budget).peak_bytes <= budget
