"""The life of each block: the same bytes as the simulator's, with names."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.planning.solvers.base import Problem
from hiremate_lightning.planning.solvers.model import StepModel, decisions
from hiremate_lightning.records.graph import Graph
from hiremate_lightning.records.schedule import Schedule, keep_all, lower
from hiremate_lightning.records.simulation import simulate
from hiremate_lightning.records.step import Call, merge
from hiremate_lightning.reporting.timeline import Band, Lifetime, band_bytes, lifetimes
from tests.helpers import random_graph, random_policy, retaining
from tests.tiny import KB, Builder, blocks_plan, chain, mixed_plan


def bytes_by_operation(graph: Graph, schedule: Schedule, length: int) -> list[int]:
    bands = band_bytes(lifetimes(graph, schedule), length)
    return [sum(sizes[i] for sizes in bands.values()) for i in range(length)]


@pytest.mark.parametrize("is_retained", [False, True], ids=["", "retained"])
@pytest.mark.parametrize("seed", range(60))
def test_blocks_add_up_to_the_simulated_bytes_at_every_operation(seed: int, is_retained: bool):
    step = random_graph(seed, length=8)
    graph, profile = retaining(step) if is_retained else step
    model = StepModel(Problem(graph, profile, 0))
    recompute = decisions(model, model.replay(random_policy(model, random.Random(seed))).rows)
    schedule = lower(graph, recompute)
    timeline = simulate(graph, profile, schedule).timeline
    expected = [moment.peak_bytes - profile.workspace_bytes[moment.node] for moment in timeline]
    assert bytes_by_operation(graph, schedule, len(timeline)) == expected


@pytest.mark.parametrize("plan", [mixed_plan(3), blocks_plan(2, keep=())], ids=["mixed", "none kept"])
def test_saved_blocks_are_those_that_live_at_the_turn(plan: Plan):
    lives = lifetimes(plan.graph, plan.schedule)
    kept = [life for life in lives if life.band in (Band.SAVED, Band.OUTSIDE) and life.last >= plan.planned.turn]
    assert sum(life.size_bytes for life in kept) == plan.planned.saved_bytes


def test_recomputed_blocks_are_those_of_nodes_that_run_again():
    plan = mixed_plan(3)
    again = {life.node for life in lifetimes(plan.graph, plan.schedule) if life.band is Band.RECOMPUTED}
    assert again
    assert again <= set(plan.schedule.recomputed(plan.graph))
    lives = lifetimes(plan.graph, lower(plan.graph, keep_all(plan.graph)))
    assert Band.RECOMPUTED not in {life.band for life in lives}


def test_a_chain_is_followed_block_by_block():
    graph, _ = chain(2, 100)
    named = [(life.node, life.band, life.first, life.last) for life in lifetimes(graph, lower(graph, keep_all(graph)))]
    assert named == [
        (0, Band.SAVED, 0, 2),  # a0 is read by g1, the first of the backward
        (1, Band.PASSING, 1, 1),  # a1 is returned and dies at the turn
        (None, Band.GRADIENT, 2, 2),  # dy
        (2, Band.GRADIENT, 2, 3),
        (3, Band.GRADIENT, 3, 3),
    ]


def test_memory_held_by_others_lives_on_outside_of_the_plan():
    b = Builder()
    loss = b.outside((b.op("a", (), 100),), 30)
    b.op("g", (), 1, backward=True)
    graph, _ = b.graph(held=(loss,))
    held = next(life for life in lifetimes(graph, lower(graph, keep_all(graph))) if life.size_bytes == 30)
    assert (held.band, held.first, held.last) == (Band.OUTSIDE, 1, 2)


def test_gradients_of_the_step_before_are_gradients():
    step = merge([Call(*chain(2, 100))], [0], stale_bytes=5 * KB)
    lives = lifetimes(step.graph, lower(step.graph, keep_all(step.graph)))
    assert [life.band for life in lives if life.size_bytes == 5 * KB] == [Band.GRADIENT]


def test_bands_that_do_not_occur_are_left_out():
    life = Lifetime(0, 0, Band.SAVED, 10, 1, 2)
    assert band_bytes([life, replace(life, band=Band.GRADIENT, last=0)], 4) == {Band.SAVED: [0, 10, 10, 0]}
