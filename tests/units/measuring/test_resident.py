"""What exists before a step, and whose optimizers change it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hiremate_lightning.measuring.left import Iterations
from hiremate_lightning.measuring.recording import StepMeasurement
from hiremate_lightning.measuring.resident import BESIDE, Resident
from hiremate_lightning.measuring.resident_memory import ResidentMemory


def test_an_optimizer_of_the_model_is_known_from_others():
    """One that gets parameters of the model later is seen."""
    own, other = nn.Linear(2, 2), nn.Linear(2, 2)
    memory, optimizer = ResidentMemory(own), torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        assert memory.stepped(torch.optim.SGD(own.parameters(), lr=0.1))
        assert not memory.stepped(optimizer)
    optimizer.add_param_group({"params": list(own.parameters())})
    assert memory.stepped(optimizer)


@pytest.mark.filterwarnings("error")  # of PyTorch, where a gradient of what is no leaf is asked for
def test_replaced_parameters_count_beside_their_replacements():
    model = Counted()
    weights = {name: 2 * parameter for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, weights, (torch.ones(1, 64),)).sum().backward()
    torch.func.functional_call(model, weights, (torch.ones(1, 64),))
    alone, plain, replaced = model.seen[0], model.memory.count(()), model.seen[1]
    assert dict(alone.kinds)["parameters"] == dict(replaced.kinds)["parameters"] == 2 * dict(plain.kinds)["parameters"]
    assert dict(replaced.kinds)["gradients"] == dict(plain.kinds)["gradients"] > dict(alone.kinds)["gradients"] == 0


@pytest.mark.parametrize("is_counted_between", [False, True])
def test_gradients_that_stay_against_expectation_are_counted(is_counted_between):
    """A count in between does not change what was seen before the step."""
    model = nn.Linear(8, 8)
    optimizer, memory = torch.optim.SGD(model.parameters()), ResidentMemory(model)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    memory.stepped(optimizer)
    before = memory.count_before_step([])
    assert (before.stale_bytes, before.kept) == (288, frozenset())
    assert memory.as_seen(before) == before
    memory.learn_frees(1)  # they are still there
    if is_counted_between:
        memory.count(())
    seen = memory.as_seen(before)
    assert (seen.size_bytes, seen.stale_bytes, dict(seen.kinds)["gradients"]) == (before.size_bytes + 288, 0, 288)
    assert seen == memory.count_before_step([])


class Counted(nn.Module):
    """A layer that counts what exists whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.memory, self.seen = ResidentMemory(self), list[Resident]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.memory.count(()))
        return self.layer(x)


def test_the_device_is_that_of_a_model_that_has_moved():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    memory = ResidentMemory(model)
    assert memory.device == torch.device("cpu")
    model.to("meta")
    assert memory.device == torch.device("meta")


def test_growth_is_seen_until_it_is_counted():
    model = nn.Linear(4, 4)
    optimizer, memory = torch.optim.Adam(model.parameters()), ResidentMemory(model)
    memory.optimizers.add(optimizer)
    memory.count_before_step([])
    assert not memory.has_grown()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert memory.has_grown()
    assert memory.has_grown(), "a query changes nothing"
    memory.count_before_step([])
    assert not memory.has_grown()


def test_large_tensors_that_nobody_counts_are_watched():
    """Then no release of one of them passes for memory that a step gives back."""
    memory, large, small = ResidentMemory(nn.Linear(2, 2)), torch.ones(2**13), torch.ones(8)
    record, seen = StepMeasurement(torch.device("cpu"), sees_frees=True, root=memory.root), list[int]()
    record.watch_releases = lambda event, tensors: seen.extend(map(id, tensors))  # type: ignore[method-assign]
    memory.watch_releases(record, [])
    record.close(at_once=True)
    assert id(large) in seen
    assert id(small) not in seen


# ---------------------------------------------------------------- iterations


KIND, GRAPH = (0,), (1,)  # a step, and what identifies a graph that waits


def grown(size_bytes: int | None) -> Any:
    """Make the record of a step in which memory grew."""
    return SimpleNamespace(grown_bytes=size_bytes)


def found(iterations: Iterations, counted_bytes: int) -> int:
    iterations.measure(counted_bytes)
    return iterations.add_to(Resident(counted_bytes, 0)).bytes_of(BESIDE)


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


def test_tensors_of_the_iteration_are_not_taken_for_older():
    iterations, old = Iterations(), torch.ones(4)
    run_iteration(iterations, [0])
    iterations.step_begins(None, KIND, (), has_stepped=True)
    found(iterations, 100)
    assert len(iterations.older([old])) == 1
    iterations.step_begins(grown(0), KIND, GRAPH, has_stepped=False)
    found(iterations, 100)
    assert [tensor is old for tensor in iterations.older([torch.ones(4), old])] == [True]
