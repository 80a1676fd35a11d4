"""What is offloaded: within the budget, found whenever it is possible, and never faster than what is proven."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest

from hiremate_lightning.errors import ConfigurationError
from hiremate_lightning.planning.solvers.base import UNLIMITED, Problem, Solution, Status, replay_solution
from hiremate_lightning.planning.solvers.model import StepModel, decisions
from hiremate_lightning.planning.solvers.offload import fastest_choice, least_bytes, offload_bound
from hiremate_lightning.records.costs import Link
from hiremate_lightning.records.offload import Host, Idle, Offload, idle_storages, with_offloads
from hiremate_lightning.records.schedule import Schedule, keep_all, lower
from hiremate_lightning.records.simulation import simulate
from tests.helpers import all_lazy, problem_of, random_graph
from tests.tiny import chain, recompute_lazily, transformer

DEADLINE = 1e9
LINKS = [Link(1e9, 1e9), Link(40.0, 40.0), Link(20.0, 10.0, latency_ms=0.1)]
ALONE = Solution("none", Status.NOT_FOUND)
SLOW = [Link(2.0, 4.0), Link(4.0, 1.0)]


def with_link(step, link: Link, budget_bytes: int = 0) -> Problem:
    graph, profile = step
    return replace(problem_of((graph, replace(profile, link=link)), budget_bytes), host=Host(UNLIMITED))


def kept_bytes(problem: Problem) -> int:
    return simulate(problem.graph, problem.profile, lower(problem.graph, keep_all(problem.graph))).peak_bytes


def within(share: float, blocks: int = 4) -> Problem:
    """Ask for a transformer within a share of what keeping everything takes."""
    problem = with_link(transformer(blocks), Link(2e5, 2e5))
    return replace(problem, budget_bytes=int(share * kept_bytes(problem)))


def found_for(problem: Problem) -> Solution:
    """Find the fastest choice where everything is kept, which there is."""
    choice = fastest_choice(problem, [keep_all(problem.graph)], ALONE)
    assert choice is not None
    return choice


def check(problem: Problem, choice: Solution, host_bytes: int = UNLIMITED) -> None:
    """Hold a choice to what it says of itself."""
    schedule = with_offloads(problem.graph, lower(problem.graph, choice.recompute), choice.offloads)
    found = simulate(problem.graph, problem.profile, schedule)
    assert (found.peak_bytes, found.extra_ms) == (choice.peak_bytes, choice.extra_ms)
    assert found.peak_bytes <= problem.budget_bytes
    assert found.host_bytes <= host_bytes


def all_offloads(idle: tuple[Idle, ...]) -> Iterator[tuple[Offload, ...]]:
    """Enumerate all that can be offloaded, copied out as soon as it is made, at all places and in all orders of use."""
    for count in range(len(idle) + 1):
        for chosen in combinations(sorted(idle, key=lambda i: (i.first, i.made, i.storage)), count):
            gone = [range(i.last, i.end + 1) for i in chosen]
            back = [range(i.start, i.first + 1) for i in chosen]
            for places in product(product(*gone), product(*back)):
                yield tuple(Offload(i.storage, i.made, g, b) for i, g, b in zip(chosen, *places, strict=True))


def exhaustive_ms(problem: Problem, schedule: Schedule) -> float | None:
    """Try all there is for a schedule; return the least extra time."""
    times = []
    for offloads in all_offloads(idle_storages(problem.graph, schedule)):
        found = simulate(problem.graph, problem.profile, with_offloads(problem.graph, schedule, offloads))
        if found.peak_bytes <= problem.budget_bytes:
            times.append(found.recompute_ms + found.wait_ms)
    return min(times, default=None)


def small_steps(count: int, links: list[Link] = LINKS) -> Iterator[tuple[int, Problem]]:
    """Yield steps that are small enough to try everything, with a budget from what is just too little upwards."""
    seed = found = 0
    while found < count:
        seed += 1
        rng = random.Random(seed)
        problem = with_link(random_graph(seed, 4), rng.choice(links))
        schedule = lower(problem.graph, keep_all(problem.graph))
        idle = idle_storages(problem.graph, schedule)
        widest = [Offload(i.storage, i.made, i.last, i.first) for i in idle]
        least = simulate(problem.graph, problem.profile, with_offloads(problem.graph, schedule, widest)).peak_bytes
        ways = math.prod(1 + (i.end + 1 - i.last) * (i.first + 1 - i.start) for i in idle)
        if ways < 1500 and least < kept_bytes(problem):
            found += 1
            yield seed, replace(problem, budget_bytes=rng.randint(least - 1, kept_bytes(problem)))


def test_it_fits_whenever_that_is_possible_mostly_the_fastest():
    fits, best = 0, 0
    for seed, problem in small_steps(40):
        expected = exhaustive_ms(problem, lower(problem.graph, keep_all(problem.graph)))
        choice = fastest_choice(problem, [keep_all(problem.graph)], ALONE)
        assert (choice is None) == (expected is None), seed
        if choice is not None and expected is not None:
            check(problem, choice)
            assert choice.extra_ms >= expected - 1e-9, seed
            fits, best = fits + 1, best + (choice.extra_ms <= expected + 1e-9)
    assert fits >= 30
    assert best >= 0.9 * fits


def test_no_choice_is_faster_than_what_is_proven():
    bounded = 0
    for seed, problem in small_steps(16, LINKS + SLOW):
        model = StepModel(problem)
        everything = all_lazy(model, 40)
        if everything is None:
            continue
        bound = offload_bound(model, problem.budget_bytes, DEADLINE)
        schedules = {lower(problem.graph, decisions(model, rows)) for rows in everything}
        found = [ms for schedule in schedules if (ms := exhaustive_ms(problem, schedule)) is not None]
        if bound is None:
            assert not found, seed
        elif found:
            assert bound <= min(found) + 1e-3, seed
            bounded += bound > 0
    assert bounded >= 3


def test_nothing_is_offloaded_where_all_fits():
    problem = within(1.0, blocks=2)
    choice = found_for(problem)
    assert (choice.offloads, choice.extra_ms) == ((), 0.0)
    assert offload_bound(StepModel(problem), problem.budget_bytes, DEADLINE) == 0.0


def test_the_host_is_not_given_more_than_it_has():
    problem = within(0.7)
    needed = found_for(problem)
    hosts = [
        Host(size)
        for size in (problem.budget_bytes // 10, replay_solution(problem, needed).host_bytes, UNLIMITED, 1000)
    ]
    few, enough, free, tight = (replace(problem, host=host) for host in hosts)
    assert fastest_choice(few, [keep_all(problem.graph)], ALONE) is None
    assert fastest_choice(enough, [keep_all(problem.graph)], ALONE) == needed
    free, tight = (offload_bound(StepModel(own), problem.budget_bytes, DEADLINE) for own in (free, tight))
    assert free is not None
    assert tight is None or tight >= free


@pytest.mark.parametrize("seed", range(12))
def test_the_smallest_budget_is_enough_and_a_byte_less_is_not(seed: int):
    problem = with_link(random_graph(seed, 6), LINKS[0])
    kept = [keep_all(problem.graph), recompute_lazily(problem.graph, ())]
    least = least_bytes(problem, kept)
    assert least is not None
    assert fastest_choice(replace(problem, budget_bytes=least - 1), kept, ALONE) is None
    choice = fastest_choice(replace(problem, budget_bytes=least), kept, ALONE)
    assert choice is not None
    check(replace(problem, budget_bytes=least), choice)
    assert least_bytes(replace(problem, host=Host(-1)), kept) is None


def test_what_is_pinned_stays():
    problem = within(0.8)
    choice = found_for(problem)
    pinned = {choice.offloads[0].storage}
    other = fastest_choice(replace(problem, host=Host(UNLIMITED, frozenset(pinned))), [keep_all(problem.graph)], ALONE)
    assert other is None or pinned.isdisjoint(offload.storage for offload in other.offloads)


def test_a_bound_needs_to_know_how_fast_copies_are():
    with pytest.raises(ConfigurationError, match="give the profile a link"):
        offload_bound(StepModel(problem_of(chain(3), 100)), 100, DEADLINE)
