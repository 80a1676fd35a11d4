"""Costs: the analytic estimate, the sums over a step, and their way through JSON."""

from __future__ import annotations

import pytest

from hiremate_lightning.records.costs import Machine, estimate, step_time_ms
from tests.tiny import Builder, chain, transformer

MACHINE = Machine(flops_per_ms=100.0, bytes_per_ms=10.0, launch_ms=0.5)


def test_an_estimate_is_launch_and_arithmetic_and_traffic():
    """Views cost nothing, updates in place their traffic once, and resident bytes are read at a cost."""
    b = Builder()
    a = b.op("a", (), 40)
    b.op("matmul", (a,), 60, flops=300)
    b.op("view", (a,), view_of=a)
    b.op("add_", (a,), view_of=a, mutating=True)
    b.op("scale", (b.input("weight", 100),), 40)
    graph, _ = b.graph()
    profile = estimate(graph, MACHINE)
    assert profile.time_ms == pytest.approx((0.5 + 4, 0.5 + 3 + 10, 0.0, 0.5 + 4, 0.5 + 14))
    assert profile.workspace_bytes == (0, 0, 0, 0, 0)
    assert profile.device == "estimate"
    graph, _ = transformer(2)
    assert estimate(graph) == estimate(graph)


def test_a_step_takes_its_forward_and_its_backward_and_no_replay():
    graph, profile = chain(3)
    assert step_time_ms(graph, profile) == 6.0
    graph, profile = transformer(2)
    assert step_time_ms(graph, profile) < sum(profile.time_ms)
