"""What an iteration makes beside graphs that wait is counted once: by what was allocated since it began."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hiremate_lightning.measuring.left import Iterations
from hiremate_lightning.measuring.resident import BESIDE, Resident

KIND, GRAPH = (0,), (1,)  # a step, and what identifies a graph that waits


def grown(size_bytes: int | None) -> Any:
    """Make the record of a step in which memory grew."""
    return SimpleNamespace(grown_bytes=size_bytes)


def found(iterations: Iterations, counted_bytes: int) -> int:
    return dict(iterations.note_and_add(Resident(counted_bytes, 0)).kinds).get(BESIDE, 0)


def run_iteration(iterations: Iterations, grown_bytes: list[int | None]) -> list[int]:
    """Run an iteration of three steps, each of 100 counted bytes, two of them beside a graph that waits."""
    iterations.step_begins(None, KIND, (), has_stepped=True)
    sizes = [found(iterations, 100)]
    for size_bytes in grown_bytes:
        iterations.step_begins(grown(size_bytes), KIND, GRAPH, has_stepped=False)
        sizes.append(found(iterations, 100))
    return sizes


ITERATIONS: dict[str, tuple[list[list[int | None]], list[int]]] = {
    "allocated and not freed": ([[30, 20]], [0, 30, 50]),
    "freed since": ([[30, -10]], [0, 30, 20]),
    "held before the iteration": ([[30, 20], [0, 0]], [0, 0, 0]),
    "not measured, as the most of the last one seen": ([[30, 20], [40, -15], [None, None]], [0, 40, 40]),
}


@pytest.mark.parametrize(("grown_bytes", "sizes"), ITERATIONS.values(), ids=ITERATIONS)
def test_allocations_of_an_iteration_are_counted_once(grown_bytes, sizes):
    iterations = Iterations()
    assert [run_iteration(iterations, each) for each in grown_bytes][-1] == sizes


def test_steps_are_measured_until_a_whole_iteration_was_seen():
    iterations, asked = Iterations(), []
    for size_bytes in (None, 30, 30):
        run_iteration(iterations, [size_bytes, size_bytes])
        asked.append(iterations.needs_measured_steps)
    assert asked == [True, True, False]


def test_nothing_is_asked_for_where_no_graph_waits():
    iterations = Iterations()
    for _ in range(3):
        iterations.step_begins(grown(30), KIND, (), has_stepped=True)
        assert found(iterations, 100) == 0
    assert not iterations.needs_measured_steps


def test_tensors_that_the_iteration_made_are_told_from_older_ones():
    iterations, old = Iterations(), torch.ones(4)
    run_iteration(iterations, [0])
    iterations.step_begins(None, KIND, (), has_stepped=True)
    found(iterations, 100)
    assert len(iterations.note_uncounted([old])) == 1
    iterations.step_begins(grown(0), KIND, GRAPH, has_stepped=False)
    found(iterations, 100)
    assert [tensor is old for tensor in iterations.note_uncounted([torch.ones(4), old])] == [True]
