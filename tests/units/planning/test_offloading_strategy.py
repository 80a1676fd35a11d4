"""Plans with values offloaded: faster than without, or possible at all; else the plan that there is without."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hiremate_lightning.options import SessionOptions
from hiremate_lightning.out_of_memory import InfeasibleBudgetError
from hiremate_lightning.planning import solutions
from hiremate_lightning.planning.headroom import unless_short
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.planning.planner import make_plan
from hiremate_lightning.planning.shared_solving import SharedSolving
from hiremate_lightning.planning.solutions import Solutions, remembering
from hiremate_lightning.planning.solvers.base import (
    UNLIMITED,
    Problem,
    Solution,
    Status,
    get_strategy,
)
from hiremate_lightning.planning.solvers.offload import PROPOSALS, fastest_choice, with_offloading
from hiremate_lightning.records.costs import Link
from hiremate_lightning.records.graph import OUTSIDE, Graph
from hiremate_lightning.records.offload import (
    Host,
    idle_storages,
    round_block,
    split_offloads,
    staying,
    storages_in,
    with_offloads,
)
from hiremate_lightning.records.schedule import CopyOut, Schedule, keep_all, lower
from hiremate_lightning.records.simulation import simulate
from hiremate_lightning.records.step import Call, MergedStep, merge
from tests.behaviour.processes.test_shared_solving import Store
from tests.tiny import chain, room, transformer

FAST, SLOW = Link(1e9, 1e9), Link(1e-3, 1e-3)
HOST = Host(UNLIMITED)


@pytest.fixture(autouse=True)
def nothing_found_before():
    solutions.forget()


def step_of(step, link: Link = FAST) -> MergedStep:
    graph, profile = step
    return merge([Call(graph, replace(profile, link=link))], [0])


def drawn_once(length: int = 8) -> MergedStep:
    """A chain of which nothing can be computed again."""
    graph, profile = chain(length)
    return step_of((replace(graph, nodes=tuple(replace(n, is_random=True) for n in graph.nodes)), profile))


def plan_of(step: MergedStep, budget_bytes: int, host: Host | None = HOST, **options) -> Plan:
    options = SessionOptions(time_limit_s=2.0, **options)
    return unless_short(make_plan(step, room(budget_bytes), options, host=host))


def share_of(step: MergedStep, share: float) -> int:
    return int(share * simulate(step.graph, step.profile, lower(step.graph, keep_all(step.graph))).peak_bytes)


def test_a_fast_link_takes_the_place_of_recomputing():
    step = step_of(transformer(4))
    budget = share_of(step, 0.6)
    alone, plan = plan_of(step, budget, host=Host(0)), plan_of(step, budget)
    assert alone.solution.recompute_ms > 0
    assert plan.solution.offloads
    assert plan.planned_peak_bytes <= budget
    assert plan.solution.extra_ms < 0.01 * alone.solution.extra_ms
    assert plan.planned.host_bytes >= share_of(step, 1.0) - budget
    assert plan.solution.bound_ms <= plan.solution.extra_ms


def test_the_plan_is_the_one_without_where_copies_are_slow():
    step = step_of(transformer(4), SLOW)
    budget = share_of(step, 0.6)
    alone, plan = plan_of(step, budget, host=Host(0)), plan_of(step, budget)
    assert plan.solution.offloads == ()
    assert plan.schedule == alone.schedule
    assert plan.solution.bound_ms <= alone.solution.bound_ms


def test_nothing_is_offloaded_where_everything_fits():
    step = step_of(transformer(2))
    assert plan_of(step, share_of(step, 1.01)).solution.keeps_all


def test_a_budget_becomes_possible_that_was_not():
    step = drawn_once()
    budget = share_of(step, 0.8)
    with pytest.raises(InfeasibleBudgetError):
        plan_of(step, budget, host=Host(0))
    plan = plan_of(step, budget)
    assert plan.planned_peak_bytes <= budget
    assert plan.solution.offloads


def test_the_smallest_budget_that_is_named_counts_on_the_host():
    step = drawn_once()
    with pytest.raises(InfeasibleBudgetError) as alone:
        plan_of(step, 1, host=Host(0))
    with pytest.raises(InfeasibleBudgetError, match="in the host's memory and takes at most") as found:
        plan_of(step, 1)
    assert found.value.smallest_bytes < alone.value.smallest_bytes
    assert plan_of(step, found.value.smallest_bytes).planned_peak_bytes <= found.value.smallest_bytes
    least = plan_of(step, 1, on_infeasible="warn")
    assert least.planned_peak_bytes <= found.value.smallest_bytes


def test_no_more_is_offloaded_than_the_host_holds():
    step = step_of(transformer(4))
    budget = share_of(step, 0.6)
    needed = plan_of(step, budget).planned.host_bytes
    small = Host(needed // 3)
    found = plan_of(step, budget, host=small)
    assert found.planned.host_bytes <= small.size_bytes
    rounded = plan_of(step, budget, host=Host(needed, has_round_blocks=True))
    blocks = [round_block(step.graph.sizes[offload.storage]) for offload in rounded.solution.offloads]
    assert sum(blocks) <= needed


def test_what_is_decided_stays_on_the_device():
    step = step_of(transformer(2))
    options = SessionOptions(on_infeasible="warn")
    plan = unless_short(make_plan(step, room(1), options, decided=keep_all(step.graph), host=HOST))
    assert plan.solution.offloads == ()


def test_a_plan_with_offloaded_values_comes_back_from_its_file(tmp_path: Path):
    step = step_of(transformer(4))
    budget = share_of(step, 0.6)
    plan = plan_of(step, budget, cache_dir=tmp_path)
    again = plan_of(step, budget, cache_dir=tmp_path)
    assert again.solution == plan.solution
    assert plan_of(step, budget, host=Host(0), cache_dir=tmp_path).solution.offloads == ()
    problem = Problem(step.graph, step.profile, budget, host=HOST)
    Solutions(tmp_path).write(problem, "portfolio", plan.solution)
    assert Solutions(tmp_path).read(problem, "portfolio") is not None


def test_a_file_is_not_for_a_host_with_less_memory(tmp_path: Path):
    step, files = step_of(transformer(4)), Solutions(tmp_path)
    problem = Problem(step.graph, step.profile, share_of(step, 0.6), host=HOST)
    solution = with_offloading(get_strategy("portfolio"))(problem)
    small = replace(problem, host=Host(solution.offloads and 1))
    files.write(small, "portfolio", solution)
    assert files.read(small, "portfolio") is None


def test_a_repeated_solve_with_offloading_is_remembered():
    step = step_of(transformer(4))
    problem = Problem(step.graph, step.profile, share_of(step, 0.6), host=HOST)
    asked = []

    def counting(problem: Problem) -> Solution:
        asked.append(problem)
        return with_offloading(get_strategy("portfolio"))(problem)

    solve_once = remembering(counting, "portfolio")
    first, second = solve_once(problem), solve_once(problem)
    assert len(asked) == 1
    assert second.offloads == first.offloads != ()
    without = solve_once(replace(problem, host=Host(0)))
    assert len(asked) == 2
    assert without.offloads == ()


def agreed_by_two(one: Problem, other: Problem) -> list[Problem]:
    store = Store()
    ranks = [SharedSolving(get_strategy("portfolio"), (store, rank, 2), 30.0) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda pair: pair[0].agree(pair[1]), zip(ranks, (one, other), strict=True)))


def test_ranks_agree_on_the_smallest_host_and_the_slowest_link():
    """Where one has no host, all stays on the device."""
    step = step_of(transformer(4))
    one = Problem(step.graph, step.profile, share_of(step, 0.6), host=HOST)
    other = replace(one, profile=replace(one.profile, link=Link(2e8, 3e9)), host=Host(10**6))
    for agreed in agreed_by_two(one, other):
        assert agreed.host == Host(10**6)
        assert agreed.profile.link == Link(2e8, 1e9)
    assert [agreed.host for agreed in agreed_by_two(one, replace(one, host=Host(0)))] == [Host(0), Host(0)]


# ---------------------------------------------------------------- a method of a paper


def test_pofo_offloads_what_rotor_computes_again():
    step = step_of(chain(16))
    problem = Problem(step.graph, step.profile, share_of(step, 0.6), host=HOST)
    rotor = get_strategy("rotor")(replace(problem, host=Host(0)))
    choice = fastest_choice(problem, PROPOSALS["pofo"](problem), rotor)
    assert choice is not None
    assert choice.offloads
    assert choice.extra_ms < 0.1 * rotor.extra_ms
    found = with_offloading(get_strategy("pofo"))(problem)
    assert found.strategy == "pofo"
    assert found.extra_ms <= choice.extra_ms


def test_pofo_offloads_less_by_a_slow_link_and_is_rotor_without():
    step = step_of(chain(16))
    problem = Problem(step.graph, step.profile, share_of(step, 0.6), host=HOST)
    slow = replace(problem, profile=replace(step.profile, link=Link(10.0, 10.0)))
    kept = [sum(map(len, recompute)) for recompute in (*PROPOSALS["pofo"](problem), *PROPOSALS["pofo"](slow))]
    assert min(kept) == 0
    assert max(kept) > 0
    alone = replace(problem, host=Host(0))
    assert get_strategy("pofo")(alone).recompute == get_strategy("rotor")(alone).recompute


# ---------------------------------------------------------------- several calls


def two_calls() -> tuple[MergedStep, list[Call]]:
    """A step of two chains, the second of which reads what the first returns."""
    calls = []
    for index in range(2):
        graph, profile = chain(6)
        links = {graph.inputs[0]: (0, graph.outputs[0])} if index else {}
        calls.append(Call(graph, replace(profile, link=FAST), links=links))
    return merge(calls, [1, 0]), calls


def own_schedules(step: MergedStep, calls: list[Call], plan: Plan) -> list[tuple[Graph, Schedule]]:
    """Offload in each call what a plan of the step offloads there."""
    rows = step.split(plan.solution.recompute)
    offloads = split_offloads(step, plan.solution.recompute, plan.solution.offloads)
    graphs = [call.graph for call in calls]
    return [
        (graph, with_offloads(graph, lower(graph, own), offloaded))
        for graph, own, offloaded in zip(graphs, rows, offloads, strict=True)
    ]


def test_values_of_a_call_are_offloaded_between_its_own_halves():
    step, calls = two_calls()
    pinned = storages_in(step, [staying(call.graph) for call in calls])
    schedule = lower(step.graph, keep_all(step.graph))
    outside = [n for n, index in enumerate(step.graph.forward) if step.graph.nodes[index].op == OUTSIDE]
    found = idle_storages(step.graph, schedule, pinned)
    ends = {idle.end for idle in found}
    assert len(ends) == 2
    assert ends <= set(outside)
    assert len({idle.start for idle in found}) == 2


def test_a_plan_of_several_calls_is_carried_out_call_by_call():
    step, calls = two_calls()
    pinned = storages_in(step, [staying(call.graph) for call in calls])
    host = Host(UNLIMITED, pinned)
    plan = plan_of(step, share_of(step, 0.7), host=host)
    schedules = own_schedules(step, calls, plan)
    out = [sum(isinstance(o, CopyOut) for o in schedule.forward) for _, schedule in schedules]
    assert sum(out) == len(plan.solution.offloads) > 0
    assert any(out[:1])
    for (graph, schedule), call in zip(schedules, calls, strict=True):
        simulate(graph, call.profile, schedule)


def test_a_status_is_proven_for_offloaded_values_too():
    step = step_of(transformer(4))
    problem = Problem(step.graph, step.profile, share_of(step, 0.2), host=Host(1000))
    solution = with_offloading(get_strategy("portfolio"))(problem)
    alone = get_strategy("portfolio")(problem)
    assert solution.bound_ms <= alone.bound_ms or solution.status is not Status.OPTIMAL
