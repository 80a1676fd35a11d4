"""The search by planning finds what trying every size finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hiremate_lightning.options import SessionOptions
from hiremate_lightning.records.costs import Profile
from hiremate_lightning.records.expressions import Line
from hiremate_lightning.records.graph import Graph
from hiremate_lightning.records.step import MergedStep
from hiremate_lightning.sizes.size_search import TOLERANCE, Forecast, Limit, search
from tests.tiny import chain

OPTIONS = SessionOptions(solver="segments", time_limit_s=1.0, on_infeasible="warn")
FIXED = 5_000


def step(size: int) -> tuple[Graph, Profile]:
    """A chain whose bytes and times grow with its size."""
    graph, profile = chain(8, 100 * size)
    return graph, replace(profile, time_ms=tuple(t * size for t in profile.time_ms))


def forecast(limit: int, fixed_ms: float = 0.0, validation: Line | None = None) -> Forecast:
    samples = {n: MergedStep(*step(n), owners=(), spans=()) for n in (2, 4)}
    resident = Line((2, 4), [FIXED + 100 * n for n in (2, 4)])
    return Forecast(samples, 1, resident, limit, OPTIONS, fixed_ms, validation)


def find(limit: int, high: int = 500, overhead: float = 9.0, objective="largest", plans=30, **options):
    return search(forecast(limit, **options), high, overhead, objective, plans)


def test_the_step_at_a_sampled_size_is_the_sample():
    known = forecast(0)

    assert {n: known.at(n) for n in (2, 4)} == known.samples
    assert known.at(7).graph.storages == step(7)[0].storages


@pytest.mark.parametrize("limit", [20_000, 50_000, 123_456])
def test_memory_alone_gives_the_largest_size_that_can_fit(limit):
    found = find(limit)

    known = forecast(limit)
    assert known.trial(found.size).predicted_peak_bytes <= limit
    assert not known.accepts(round(found.size * (1 + TOLERANCE)) + 1, 9.0)
    assert limit < known.least_bytes(found.size + 1)
    assert known.unplanned_bytes(found.unplanned_size) <= limit < known.unplanned_bytes(found.unplanned_size + 1)
    assert found.limit is Limit.MEMORY
    assert found.size > found.unplanned_size


@pytest.mark.parametrize("overhead", [0.0, 0.1, 0.2])
def test_an_overhead_gives_the_largest_size_that_takes_no_more(overhead):
    found = find(200_000, overhead=overhead)

    known = forecast(200_000)
    beyond = round(found.size * (1 + TOLERANCE)) + 1
    assert known.accepts(found.size, overhead)
    assert not known.accepts(beyond, overhead)
    assert found.limit is Limit.OVERHEAD
    if not overhead:
        assert found.size == found.unplanned_size


def test_other_limits_are_named():
    """The largest allowed is never passed; validation can be what limits."""
    found = find(10**9, high=37)
    assert (found.size, found.unplanned_size, found.limit) == (37, 37, Limit.MAX_VAL)
    found = find(200_000, validation=Line((2, 4), [FIXED + 10_000 * n for n in (2, 4)]))
    assert (found.size, found.limit) == ((200_000 - FIXED) // 10_000, Limit.VALIDATION)
    assert find(FIXED).size == find(FIXED + 150).size == 0


def test_throughput_stops_where_recomputation_costs_too_much():
    alone = find(200_000, objective="throughput")
    with_optimizer = find(200_000, objective="throughput", fixed_ms=10_000.0)

    assert alone.size == alone.unplanned_size
    assert alone.limit is Limit.THROUGHPUT
    assert with_optimizer.size > alone.size


def test_the_number_of_plans_is_limited():
    known = forecast(200_000)

    found = search(known, 500, 0.1, "largest", 4)

    assert found.limit is Limit.TRIALS
    assert known.accepts(found.size, 0.1)
    assert len(known.trials) <= 4
