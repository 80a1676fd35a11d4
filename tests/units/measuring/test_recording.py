"""A record of a step knows what ran, what it was given, and what lived between the parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hiremate_lightning import hiremate
from hiremate_lightning.measuring.left import LeftOutputs
from hiremate_lightning.measuring.recorded_calls import calls_of
from hiremate_lightning.measuring.recording import StepMeasurement
from hiremate_lightning.measuring.resident import Resident
from hiremate_lightning.records.step import HELD_TO_THE_END, Call
from hiremate_lightning.testing import session_of
from tests.exact import assert_foreseen, network

ROWS, WIDTH = 256, 16
SIZE = ROWS * WIDTH * 4  # bytes of an activation


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.decoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def record_of(step, make=Net) -> tuple[StepMeasurement, list[Call], list[int]]:
    """Run one step of a planned model; give its finished record, its calls, and the order of their backwards."""
    torch.manual_seed(0)
    model = hiremate(make(), "100%", verbose=False)
    step(model)
    session = session_of(model)
    session.end_step()
    record = session.steps.ended.measurement
    return record, *calls_of(record)


def chained(model):
    model.decoder(model.encoder(batch())).square().mean().backward()


def test_runs_are_in_the_order_of_their_forwards_and_linked():
    """An input that is an earlier output is linked, a gradient that goes on backwards passed on."""
    record, *_ = record_of(chained)
    first, second = record.runs
    assert record.graphs == (0, 1)
    assert record.backwards == [1, 0]
    assert first.links == {}
    assert list(second.links.values()) == [(0, first.graph.outputs[0])]
    assert first.passed_on == ()
    assert len(second.passed_on) == 1
    assert record.peak_bytes > record.resident.existing_bytes > 0, "the peak counts what was there before"


@pytest.mark.parametrize("is_kept", [False, True])
def test_an_input_made_by_code_is_freed_with_its_backward(is_kept):
    kept = []

    def step(model):
        made = model.encoder(batch()) + 1
        kept.extend([made] if is_kept else [])
        output = model.decoder(made)
        del made
        output.square().mean().backward()

    record, (first, second), _ = record_of(step)
    assert record.runs[1].links == {}
    assert (first.released_bytes, second.released_bytes) == (0, 0 if is_kept else SIZE)


def test_an_input_from_before_the_step_is_not_made_by_code():
    _, (call,), _ = record_of(lambda model: model.encoder(batch().requires_grad_() + 1).square().mean().backward())
    assert call.released_bytes == 0


def test_a_gradient_of_a_leaf_stays():
    record, *_ = record_of(lambda model: model.encoder(batch().requires_grad_()).square().mean().backward())
    assert record.runs[0].passed_on == ()


@pytest.mark.parametrize("is_kept", [True, False])
def test_outputs_that_someone_holds_stay_to_the_end(is_kept):
    kept = []

    def step(model):
        output = model.encoder(batch())
        loss = (output * 2).sum()
        if is_kept:
            kept.append(output)
        del output
        loss.backward()

    _, (call,), _ = record_of(step)
    assert list(call.held_until.values()) == ([HELD_TO_THE_END] if is_kept else [])


@pytest.mark.parametrize("is_held", [True, False])
def test_what_other_code_holds_or_needs_for_a_moment_is_measured(is_held):
    kept = []

    def step(model):
        output = model.encoder(batch())
        made = torch.ones(5, SIZE // 4)
        kept.extend([made] if is_held else [])
        del made
        output.sum().backward()

    _, (call,), order = record_of(step)
    assert order == [0]
    if is_held:
        assert 5 * SIZE <= call.after_forward.held_bytes <= 6 * SIZE
        assert call.after_forward.peak_bytes >= 5 * SIZE
    else:
        assert call.after_forward.held_bytes < SIZE
        assert call.called_at == len(call.stages) == 1
        assert call.stages[0].peak_bytes >= 5 * SIZE > call.after_forward.peak_bytes


class Embedded(nn.Module):
    """Its embedding can't be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4 * ROWS, WIDTH)
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    @torch._dynamo.disable
    def embed(self, words: torch.Tensor) -> torch.Tensor:
        return self.embedding(words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embed(words))


def test_code_before_and_after_the_captured_calls_is_measured():
    _, (call,), _ = record_of(lambda model: model(torch.arange(ROWS)).square().mean().backward(), Embedded)
    assert call.before_forward.held_bytes == SIZE  # what the embedding returns
    assert call.after_backward.peak_bytes >= 4 * SIZE  # its gradient


def test_a_forward_without_a_backward_is_no_call_of_the_step():
    def step(model):
        model.decoder(batch())
        model.encoder(batch()).sum().backward()

    record, calls, order = record_of(step)
    assert record.graphs == (0, 1)
    assert len(calls) == 1
    assert order == [0]


def test_one_part_may_run_twice_in_a_step():
    def step(model):
        model.encoder(model.encoder(batch().requires_grad_())).sum().backward()

    record, calls, order = record_of(step)
    assert record.graphs == (0, 0)
    assert order == [1, 0]
    assert list(calls[1].links.values()) == [(0, calls[0].graph.outputs[0])]


@pytest.mark.parametrize("is_by_hand", [False, True])
@pytest.mark.parametrize("outlives_update", [False, True])
def test_the_peak_counts_no_update_whenever_an_output_is_let_go(outlives_update, is_by_hand):
    torch.manual_seed(0)
    model = hiremate(nn.Sequential(nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, WIDTH)), "100%", verbose=False)
    optimizer = torch.optim.SGD(model.parameters())

    def update():
        torch.empty(1000 * SIZE)  # more than the step takes
        if not is_by_hand:
            optimizer.step()

    def step():
        output = model(batch())
        output.square().mean().backward()
        if outlives_update:
            update()

    for _ in range(4):
        step()
        if not outlives_update:
            update()
        model.zero_grad()
    assert_foreseen(model, rel=0.02)


def test_a_step_under_another_profiler_runs_unmeasured():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        record = StepMeasurement(torch.device("cpu"), sees_frees=True)
    assert not record.is_measured
    assert record.peak_bytes is None
    record.close()


@network(lambda: {"shift": nn.Parameter(torch.zeros(WIDTH))})
def shifted(self, x):
    """Needs its output for the backward, and not its input."""
    return torch.tanh(x + self.shift)


def test_outside_code_does_not_hold_what_the_next_part_consumes():
    def make():
        model = Net()
        model.decoder = shifted()
        return model

    _, calls, _ = record_of(chained, make)
    assert HELD_TO_THE_END not in calls[0].held_until.values()
    assert calls[0].after_forward.held_bytes == 0


class Left:
    """Stands for the record of a step with outputs that somebody holds, until they are dropped."""

    is_measured = True
    runs = ()
    left_at_return: bool | None = None

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def left_outputs(self):
        return {0: self.size_bytes}

    def left_inputs(self):
        return []


def test_a_full_count_takes_outputs_freed_early_as_stale():
    everything, left, record = Resident(1000, 50), LeftOutputs(), Left(200)
    left.step_ended(record)
    left.measure(())
    assert left.sort_out(everything) == everything
    record.size_bytes = 0
    left.learn_frees()
    record.size_bytes = 200
    left.measure(())
    assert left.sort_out(everything) == Resident(800, 250)


@pytest.mark.parametrize("stale_bytes", [0, 50])
def test_outputs_freed_as_the_forward_returns_are_not_stale(stale_bytes):
    before, left, record = Resident(1000, stale_bytes), LeftOutputs(), Left(200)
    record.left_at_return = True
    left.step_ended(record)
    left.measure(())
    assert left.add_to(before).size_bytes == 1200  # not yet seen
    record.size_bytes = 0
    left.learn_frees()
    record.size_bytes = 200
    left.measure(())
    assert left.add_to(before) == Resident(1000, stale_bytes, left_bytes=200)
    assert left.sort_out(before) == Resident(800, stale_bytes, left_bytes=200)

    record.left_at_return = False  # once is enough: they may be held again
    left.measure(())
    assert left.add_to(before) == Resident(1000, stale_bytes + 200)


def called(output, made):
    """Return what a model did, maybe with something allocated before."""
    if made is not None:
        made.append(torch.ones(SIZE))
    return output


@pytest.mark.parametrize("holds", ["nothing", "a new tensor", "the outputs"])
def test_outputs_of_the_step_before_are_seen_released(holds):
    model, made, output = hiremate(Net(), "100%", verbose=False), [], None
    session = session_of(model)
    for _ in range(2):
        held = output if holds == "the outputs" else None
        output = called(model.encoder(batch()), made if holds == "a new tensor" else None)
        record, loss = session.steps.current.measurement, output.square().mean()
        del held
        loss.backward()
        session.end_step()

    assert record is not None
    assert record.left_at_return is (holds == "nothing")
    assert record.returned_bytes == (SIZE if holds == "nothing" else 0)
