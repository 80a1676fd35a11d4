"""Steps of sizes that were never seen run as the user wrote them where they fit the budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.sessions.plain_steps import ROUNDING, TRIES, UNMEASURED_RATIO, ModuleCall, PlainPeak, PlainSteps
from hiremate_lightning.sessions.targets import targets_of

from .exact import simple_loop, train_both

WIDTH = 32
KIND, OTHER, THIRD = (0,), (1,), (2,)


def call(*sizes: int, name: str = "", dtype: torch.dtype = torch.float32) -> ModuleCall:
    return ModuleCall(name, (dtype,), (sizes,))


def known(*kinds: tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]], room: int = 10**9):
    """Make predictions from planned kinds: kind, sizes, bytes, and the kind of the same code."""
    steps, peaks = PlainSteps(), {}
    for kind, sizes, added_bytes, code in kinds:
        steps.learn(kind, [call(*sizes)], code)
        peaks[kind] = PlainPeak(added_bytes, room)
    return steps, peaks


def test_a_step_that_is_nowhere_larger_takes_no_more():
    steps, peaks = known((KIND, (4, 100), 1000, KIND))
    assert steps.bound_bytes([call(4, 60)], peaks, KIND) == 1000


def test_a_larger_step_takes_at_most_the_highest_power_of_what_grew():
    steps, peaks = known((KIND, (4, 100), 1000, KIND))
    assert steps.bound_bytes([call(3, 120)], peaks, KIND) == pytest.approx(1000 * 1.2**2)
    assert steps.bound_bytes([call(8, 120)], peaks, KIND) == pytest.approx(1000 * 2**2 * 1.2**2)
    steps.learn(KIND, [call(4, 100)], KIND, shapes=[(4, 100, 200, 100)])
    assert steps.bound_bytes([call(3, 120)], peaks, KIND) == pytest.approx(1000 * 1.2**3)


def test_between_two_steps_the_straight_line_is_the_bound():
    steps, peaks = known((KIND, (4, 100), 1000, KIND), (OTHER, (4, 20), 200, KIND))
    assert steps.bound_bytes([call(4, 60)], peaks, KIND) == pytest.approx(600)


@pytest.mark.parametrize("exponent", [1, 2, 3])
def test_the_bound_holds_for_products_of_sizes(exponent):
    def added(rows: int, length: int) -> int:
        return 7 * rows * length**exponent + 3 * length + 11

    steps, peaks = known(*(((i,), (r, n), added(r, n), KIND) for i, (r, n) in enumerate([(2, 10), (8, 90), (4, 40)])))
    for rows, length in [(3, 20), (2, 11), (7, 89), (4, 39), (8, 41), (5, 90)]:
        bound = steps.bound_bytes([call(rows, length)], peaks, KIND)
        assert bound is not None
        assert bound >= added(rows, length)


def test_a_step_with_a_plan_for_its_sizes_does_not_run_plain():
    steps, peaks = known((KIND, (4, 100), 1000, KIND))
    assert steps.bound_bytes([call(4, 100)], peaks, KIND) is None


def test_a_step_that_may_not_fit_does_not_run_plain():
    steps, peaks = known((KIND, (4, 100), 1000, KIND), (OTHER, (4, 20), 200, KIND), room=650)
    assert steps.bound_bytes([call(4, 60)], peaks, KIND) is None
    assert steps.bound_bytes([call(4, 40)], peaks, KIND) is not None


def test_calls_of_another_form_tell_nothing():
    steps, peaks = known((KIND, (4, 100), 1000, KIND))
    assert steps.bound_bytes([call(4)], peaks, KIND) is None
    assert steps.bound_bytes([call(4, 60, dtype=torch.float64)], peaks, KIND) is None
    assert steps.bound_bytes([call(4, 60, name="other")], peaks, KIND) is None
    assert steps.bound_bytes([call(4, 60), call(4, 60)], peaks, KIND) is None


def test_other_code_that_may_come_raises_the_bound():
    steps, peaks = known((KIND, (4, 100), 1000, KIND), (OTHER, (4, 20), 200, KIND), (THIRD, (4, 60), 1200, THIRD))
    assert steps.bound_bytes([call(4, 50)], peaks, KIND) == pytest.approx(1200)
    assert steps.bound_bytes([call(4, 80)], peaks, KIND) == pytest.approx(1600)


def test_what_eager_takes_beyond_the_captured_graph_is_left_free():
    room = int(1000 * UNMEASURED_RATIO * ROUNDING) + 1
    for is_enough in (True, False):
        steps, peaks = known((KIND, (4, 100), 1000, KIND), room=room - 2 * (not is_enough))
        assert (steps.bound_bytes([call(4, 60)], peaks, KIND) == 1000) is is_enough


def test_the_first_measured_step_sets_the_ratio():
    steps, peaks = known((KIND, (4, 100), 1000, KIND), room=int(1200 * ROUNDING) + 1)
    assert steps.bound_bytes([call(4, 60)], peaks, KIND) is None
    steps.measured(100, 120)
    assert steps.bound_bytes([call(4, 60)], peaks, KIND) == 1000
    steps.measured(200, 230)
    assert steps.bound_bytes([call(4, 60)], peaks, KIND) == 1000
    steps.measured(300, 390)
    assert steps.bound_bytes([call(4, 60)], peaks, KIND) is None


def test_a_bound_that_lay_high_does_not_lower_the_ratio():
    steps, peaks = known((KIND, (4, 100), 1000, KIND), room=int(1200 * ROUNDING) - 1)
    steps.measured(1000, 700)
    assert steps.bound_bytes([call(4, 60)], peaks, KIND) is None


@pytest.mark.parametrize(("told", "expected"), [(300, 300 + 700 * 0.6), (None, 1000)])
def test_below_the_smallest_step_what_has_no_such_size_remains(told, expected):
    steps = PlainSteps()
    steps.learn(KIND, [call(4, 100)], KIND)
    asked = []

    def without(sizes: frozenset[int]) -> int | None:
        asked.append(sizes)
        return told

    peaks = {KIND: PlainPeak(1000, 10**9, without)}
    assert steps.bound_bytes([call(4, 60)], peaks, KIND) == pytest.approx(expected)
    assert asked == [frozenset({100})]


def test_clearly_larger_steps_are_measured():
    steps = PlainSteps()
    assert steps.is_to_be_measured(1000)
    steps.measured(1000, 1200)
    assert not steps.is_to_be_measured(1000)
    assert steps.is_to_be_measured(1200)


def test_a_step_that_was_not_seen_whole_is_measured_again():
    steps = PlainSteps()
    for _ in range(TRIES):
        assert steps.is_to_be_measured(500)
        steps.measured(500, None)
    assert not steps.is_to_be_measured(500)


class Attending(nn.Module):
    """Attention over a length that varies, dropout and batch norm: memory grows with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.rest = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Dropout(0.2), nn.Linear(96, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.norm(self.rest(x).transpose(1, 2))


LENGTHS = [64, 64, 8, 8, 24, 31, 9, 12, 17, 63, 24, 30, 64]


def lengths_of(step: int) -> torch.Tensor:
    return torch.randn(8, LENGTHS[step], WIDTH, generator=torch.Generator().manual_seed(step))


def test_new_sizes_that_fit_are_exact_and_capture_nothing():
    budget = _budget_of_length(56)
    counts = []

    def count(model: nn.Module) -> None:
        found = targets_of(model)
        counts.append(None if found is None else found.session.captured_count)

    loop = simple_loop(lengths_of, steps=len(LENGTHS))
    train_both(Attending, loop, budget)
    model = hiremate(Attending(), budget, verbose=False)
    for step in range(len(LENGTHS)):
        model.zero_grad()
        model(lengths_of(step)).square().mean().backward()
        count(model)
    assert counts[4:9] == [counts[3]] * 5, "24, 31, 9, 12 and 17 lie between 8 and 64, and fit"
    assert counts[9] == counts[3] + 1, "63 needs a plan"
    assert counts[11] == counts[9], "24 came once more, 30 is new"


def test_new_sizes_stay_within_the_budget():
    budget = _budget_of_length(56)
    model = hiremate(Attending(), budget, verbose=False)
    for step in range(4):
        model.zero_grad()
        model(lengths_of(step)).square().mean().backward()
    resident_bytes = get_plan(model).resident_bytes
    for step in range(4, len(LENGTHS)):
        batch = lengths_of(step)

        def train(batch: torch.Tensor = batch) -> None:
            model.zero_grad()
            model(batch).square().mean().backward()

        assert measure_peak(train) + resident_bytes <= budget + 2**16


def _budget_of_length(length: int) -> int:
    """Return what a plain step of a length takes, so that longer ones need recomputation."""
    model = hiremate(Attending(), "100%", verbose=False)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(8, length, WIDTH)).square().mean().backward()
    return get_plan(model).unplanned_peak_bytes
