"""Costs: the analytic estimate, the sums over a step, and their way through JSON."""

from __future__ import annotations

import pytest

from hiremate_lightning.records.costs import Machine, Profile, estimate, profile_from_json, step_time_ms
from tests.tiny import Builder, chain, transformer

MACHINE = Machine(flops_per_ms=100.0, bytes_per_ms=10.0, launch_ms=0.5)


def test_an_estimate_is_launch_and_arithmetic_and_traffic():
    b = Builder()
    a = b.op("a", (), 40)
    b.op("matmul", (a,), 60, flops=300)
    graph, _ = b.graph()
    profile = estimate(graph, MACHINE)
    assert profile.time_ms == pytest.approx((0.5 + 4, 0.5 + 3 + 10))
    assert profile.workspace_bytes == (0, 0)
    assert profile.device == "estimate"


def test_a_view_costs_nothing():
    b = Builder()
    a = b.op("a", (), 40)
    b.op("view", (a,), view_of=a)
    graph, _ = b.graph()
    assert estimate(graph, MACHINE).time_ms[1] == 0.0


def test_an_update_in_place_costs_its_traffic_once():
    b = Builder()
    a = b.op("a", (), 40)
    b.op("add_", (a,), view_of=a, mutating=True)
    graph, _ = b.graph()
    assert estimate(graph, MACHINE).time_ms[1] == pytest.approx(0.5 + 4)


def test_resident_bytes_are_read_at_a_cost():
    b = Builder()
    b.op("a", (b.input("weight", 100),), 40)
    graph, _ = b.graph()
    assert estimate(graph, MACHINE).time_ms == pytest.approx((0.5 + 14,))


def test_estimates_are_the_same_every_time():
    graph, _ = transformer(2)
    assert estimate(graph) == estimate(graph)


def test_a_step_takes_its_forward_and_its_backward_and_no_replay():
    graph, profile = chain(3)
    assert step_time_ms(graph, profile) == 6.0
    graph, profile = transformer(2)
    assert step_time_ms(graph, profile) < sum(profile.time_ms)


def test_json_gives_an_equal_profile_back():
    profile = Profile((0.1, 2.0), (0, 512), "cpu")
    assert profile_from_json(profile.to_json()) == profile
