"""Tests of steps of several captured graphs that come with sizes for which there is no plan."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.housekeeping import collecting_what_it_leaves
from hiremate_lightning.sessions.modes import Mode
from hiremate_lightning.signatures import watching
from hiremate_lightning.testing import session_of
from tests.exact import simple_loop, train_both

WIDTH, LONG = 32, 200
MEASURED = watching.Look(is_measured=True)


class Broken(nn.Module):
    """Runs two captured graphs, one of two others, and one whose sizes never change, on a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))))
            for _ in range(2)
        )
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
        self.goes_right = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = x + self.second(x)
        x = x + (self.right(x).sigmoid().sin().cos().exp() if self.is_right() else self.left(x).sigmoid())
        x = x.mean(1)
        torch._dynamo.graph_break()
        return self.head(x)

    @torch._dynamo.disable
    def is_right(self) -> bool:
        return self.goes_right


def batch(length: int, seed: int = 0) -> Tensor:
    return torch.randn(4, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, length: int) -> None:
    model.zero_grad()
    model(batch(length)).square().mean().backward()


def planned(budget: int | str, lengths: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    model = hiremate(Broken(), budget, verbose=False)
    for length in lengths:
        step(model, length)
    return model


def tight_budget() -> int:
    """Give the bytes of a budget in which the longest step has to compute something again."""
    model = planned("70%", (LONG,) * 4)
    assert get_plan(model).solution.recompute_ms > 0
    return get_plan(model).budget_bytes


@pytest.fixture
def searched(planning_log) -> Callable[[], int]:
    """Count the searches for a first schedule since the latest count."""

    def count() -> int:
        searches = planning_log.of("searching for a first schedule")
        planning_log.texts.clear()
        return len(searches)

    return count


@pytest.fixture
def peaks_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module, tuple[int, ...]], list[int | None]]:
    """Train on, each step measured; give the peaks."""

    def train(model: nn.Module, lengths: tuple[int, ...]) -> list[int | None]:
        records, session = [], session_of(model)
        monkeypatch.setattr(watching.WatchPolicy, "choose_look", lambda *_, **__: MEASURED)
        for length in lengths:
            step(model, length)
            records.append(session.steps.current.measurement)
        session.end_step()
        peaks = [record.peak_bytes for record in records if record is not None]  # a step may run as it is written
        assert peaks
        return peaks

    return train


@pytest.mark.usefixtures("without_made_code")
def test_smaller_steps_of_several_graphs_run_by_the_largest_plan(searched, peaks_of):
    budget = tight_budget()
    model = planned(budget, (LONG,) * 4)
    searched()
    peaks = peaks_of(model, (LONG - 1, LONG - 7, LONG // 2, 3))
    assert not searched()
    assert len(session_of(model).plans) == 1
    assert all(peak is not None and peak <= budget for peak in peaks), (peaks, budget)


@pytest.mark.usefixtures("_captures_all")
def test_a_larger_step_takes_the_least_memory_then_is_planned(searched):
    model = planned("80%", (LONG,) * 4)
    searched()
    step(model, LONG + 9)
    assert searched()
    step(model, 5)
    plans = list(session_of(model).plans.values())
    assert len(plans) == 2
    assert plans[1].unplanned.peak_bytes > plans[0].unplanned.peak_bytes
    searched()
    step(model, LONG + 8)
    assert not searched()


@pytest.mark.usefixtures("_captures_all")
def test_all_programs_of_a_step_are_of_one_plan(monkeypatch):
    """The graph at the end is of the same size in each step: it has a program of its own for each plan."""
    budget = tight_budget()
    model = planned(budget, (LONG,) * 4)
    chosen = []
    for length in (LONG, LONG - 3):
        step(model, length)
        chosen += session_of(model).steps.current.forwards
    assert len(chosen) == 8
    assert all(forward.mode is not Mode.LEAST for forward in chosen)
    for one, other in zip(chosen[:3], chosen[4:7], strict=True):
        rows = [f.program.schedule.decisions(f.captured.graph) for f in (one, other)]
        assert rows[0] == rows[1]


@pytest.mark.usefixtures("_captures_all")
def test_a_step_of_unknown_rest_begins_at_the_least_memory(searched):
    model = planned("80%", (LONG,) * 4)
    model.goes_right = True
    for _ in range(4):
        step(model, LONG)
    assert len(session_of(model).plans) == 2
    searched()
    step(model, LONG - 5)
    assert searched() == 2, "for the graphs before the ways part"
    searched()
    model.goes_right = False
    step(model, LONG - 5)
    assert not searched(), "the same graphs, and one that goes on as was planned"


@pytest.mark.usefixtures("_captures_all")
def test_what_was_taken_over_is_not_kept_by_a_smaller_budget(searched, peaks_of):
    budget = tight_budget()
    model = planned("100%", (LONG,) * 4)
    searched()
    step(model, LONG - 20)
    assert not searched()
    hiremate(model, budget, verbose=False)
    assert all(peak <= budget for peak in peaks_of(model, (LONG - 20,)))


@pytest.mark.parametrize("budget", ["55%", "75%"])
def test_training_is_exact_where_plans_are_taken_over(budget):
    lengths = (LONG, LONG, LONG, 150, 40, 199, 210, 40, 205, 150, 209)
    loop = simple_loop(lambda index: batch(lengths[index], index), steps=len(lengths))
    train_both(Broken, loop, budget)


@pytest.mark.usefixtures("_captures_all", "without_made_code")
def test_code_with_gradients_of_terms_is_traced_once_a_size(planning_log):
    """The second graph reads what the first gives twice; at the first size nobody knows that."""
    model = planned("80%", (LONG, LONG - 1, LONG - 2, LONG - 3))
    planning_log.texts.clear()
    step(model, LONG - 4)
    assert len(planning_log.of("tracing for the sizes")) == 3, "one for each graph whose size is new"
    assert not planning_log.of("tracing again")


def test_only_the_cycles_of_a_span_are_collected():
    class Seen:
        count = 0

        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            Seen.count += 1

    old = Seen()
    gc.collect()
    del old
    with collecting_what_it_leaves():
        lasting = Seen()
        Seen()
        assert not gc.isenabled()
    assert Seen.count == 1
    assert gc.isenabled()
    gc.collect()
    assert Seen.count == 2
    assert lasting.itself is lasting
    gc.disable()
    try:
        with collecting_what_it_leaves():
            pass
        assert not gc.isenabled(), "as it was"
    finally:
        gc.enable()


def test_a_share_met_by_two_views_is_not_refused_for_one():
    torch.manual_seed(0)
    model = hiremate(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), "50%", verbose=False)
    x = torch.randn(4096, 16)

    for _ in range(3):
        (model(x) - model(x + 1)).square().mean().backward()

    plan = get_plan(model)
    assert plan.measured.peak_bytes <= plan.budget_bytes
