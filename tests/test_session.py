"""The life of plans: when they appear, what they adapt to, and what users may do between forward and backward."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hiremate_lightning import HiRemateWarning, InfeasibleBudgetError, get_plan, hiremate, remove_hiremate
from hiremate_lightning.errors import CaptureError
from hiremate_lightning.measuring.profiling import TimedRun
from hiremate_lightning.memory.metering import MemoryMeter, measure_peak
from hiremate_lightning.planning.planner import make_plan
from hiremate_lightning.planning.solvers.base import Problem, replay
from hiremate_lightning.planning.solvers.decisions import decisions
from hiremate_lightning.planning.solvers.model import Model
from hiremate_lightning.planning.solvers.turn_point import segment_policies
from hiremate_lightning.reporting.breakdown import advice_lines
from hiremate_lightning.sessions import announcements, deciding, first_steps, plan_maker, steps
from hiremate_lightning.sessions import planned as planning
from hiremate_lightning.sessions.targets import targets_of
from hiremate_lightning.torch_private import dynamo
from hiremate_lightning.units import format_bytes

WIDTH, ROWS, MANY = 16, 256, 4096


class Net(nn.Module):
    """A chain in which activations outweigh weights, with dropout and batch norm."""

    def __init__(self, depth: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.body = nn.Sequential()
        for _ in range(depth):
            self.body.extend([nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1)])
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def batch(seed: int = 0, rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def make(seed: int = 1, **options) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def planned(budget="75%", seed: int = 1, **options) -> Net:
    return hiremate(make(seed), budget, **{"verbose": False, **options})


def step(model: nn.Module, seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    """Do one training step, without an optimizer."""
    model.zero_grad()
    loss = model(batch(seed, rows)).square().mean()
    loss.backward()
    return loss.detach()


def warm_up(model: nn.Module, steps: int = 2, rows: int = ROWS) -> nn.Module:
    """Do the steps after which a plan runs."""
    for index in range(steps):
        step(model, index, rows)
    return model


def session_of(model: nn.Module):
    return targets_of(model).session


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def run_both(act, budget="75%", warm: int = 3, **options) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Do the same with a planned and with a plain model, from the same random state."""
    results = []
    for is_planned in (True, False):
        model = planned(budget, **options) if is_planned else make()
        torch.manual_seed(2)
        warm_up(model, warm)
        results.append(act(model))
    return results[0], results[1]


@contextlib.contextmanager
def recorded():
    """Collect the package's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HiRemateWarning)
        said: list[str] = []
        yield said
    said.extend(str(w.message) for w in caught if issubclass(w.category, HiRemateWarning))


def test_a_plan_appears_at_the_second_step():
    model = planned()
    step(model)
    assert get_plan(model) is None
    step(model)
    assert get_plan(model) is not None


def test_nothing_is_captured_again_when_the_plan_takes_over():
    model = warm_up(planned(), steps=4)
    assert session_of(model).captured_count == 1


def test_another_input_shape_gets_a_plan_of_its_own():
    model = warm_up(planned(), steps=3)
    first = get_plan(model)
    warm_up(model, steps=6, rows=2 * ROWS)
    second = get_plan(model)
    assert len(session_of(model).plans) == 2
    assert second.unplanned.peak_bytes > 1.5 * first.unplanned.peak_bytes
    assert second.measured.peak_bytes <= second.budget_bytes


def test_steps_of_two_shapes_in_turn_stay_exact():
    def act(model):
        losses = [step(model, index, rows=ROWS * (1 + index % 2)) for index in range(8)]
        return [*losses, *gradients(model)]

    found, expected = run_both(act)
    assert_same(found, expected)


class Weighted(Net):
    """Computes with a number that changes."""

    def __init__(self, use) -> None:
        super().__init__()
        self.use, self.weight = use, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(super().forward(x), self.weight)


@pytest.mark.parametrize(
    ("use", "captured"),
    [(lambda y, w: y + w * y.square(), 2), (lambda y, w: y.clamp(-w, w), announcements.CAPTURES + 1)],
)
def test_a_number_that_changes_is_captured_once_more_or_that_is_told(use, captured):
    plain, planned = Weighted(use), Weighted(use)
    planned.load_state_dict(plain.state_dict())
    hiremate(planned, "90%", verbose=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HiRemateWarning)
        for index in range(announcements.CAPTURES + 1):
            for model in (plain, planned):
                torch.manual_seed(index)
                model.weight = 1 + index / 10
                step(model, index)
            assert_same(gradients(planned), gradients(plain))
    assert session_of(planned).captured_count == captured
    assert len([w for w in caught if "captured anew in each of 8 steps" in str(w.message)]) == (captured > 2)


def appends(seen: list[torch.Tensor], output: torch.Tensor) -> None:
    seen.append(output.detach().mean())


@pytest.mark.parametrize(("append", "is_told"), [(appends, True), (torch.compiler.disable(appends), False)])
def test_a_list_that_grows_is_named_where_it_makes_each_step_captured_anew(append, is_told):
    model, seen = hiremate(Net(), "100%", verbose=False), []
    model.body[0].register_forward_hook(lambda module, inputs, output: append(seen, output))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HiRemateWarning)
        for index in range(announcements.CAPTURES + 1):
            step(model, index)
    told = [str(w.message).partition("is for this alone: ")[2] for w in caught if "captured anew" in str(w.message)]
    assert len(told) == is_told
    assert all(f"== {announcements.CAPTURES - 2}" in text and "seen.append" in text for text in told)
    assert len(seen) == announcements.CAPTURES + 1


@pytest.mark.parametrize("steps_before", [1, 6])
def test_more_kinds_of_steps_than_max_plans_are_announced_once(steps_before):
    model = warm_up(planned(max_plans=1), steps=steps_before)
    with recorded() as said:
        for index in range(6):
            step(model, index, rows=2 * ROWS)
    assert len(session_of(model).plans) == 1
    assert len([text for text in said if "max_plans" in text]) == 1


def test_another_size_runs_as_was_planned_where_that_fits_and_else_at_the_least_memory(monkeypatch):
    model = warm_up(planned(), steps=3, rows=MANY)
    first, searched = get_plan(model), []
    model = warm_up(planned(first.budget_bytes), steps=3, rows=MANY)
    search = first_steps.first_solution
    monkeypatch.setattr(first_steps, "first_solution", lambda *a, **k: (searched.append(1), search(*a, **k))[1])
    for index, rows in enumerate((MANY - 3, MANY - 9, MANY // 2, MANY - 5)):
        step(model, index, rows)
    assert not searched
    assert len(session_of(model).plans) == 1, "sizes that don't come again are not solved for"
    step(model, 5, MANY + 512)
    assert searched


def test_a_step_of_other_code_is_not_taken_for_another_size():
    """Of one kind of step three outputs get no gradients; the other kind has a single output."""

    class TwoKinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Net(), Net()

        def forward(self, x: torch.Tensor, first: bool) -> tuple[torch.Tensor, ...]:
            y = self.one(x) if first else self.other(x)
            return (y.relu(), y * 2, y.sigmoid(), y.tanh()) if first else (y,)

    model = hiremate(TwoKinds(), "90%", verbose=False)
    for index in range(8):
        model.zero_grad()
        model(batch(index), index < 4)[0].square().mean().backward()
    assert len(session_of(model).plans) == 2


class TwoNets(nn.Module):
    """Calls one of two networks."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Net(), Net()

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        return self.one(x) if first else self.other(x)


def test_a_graph_that_broke_in_another_model_is_none_that_broke_in_this_one():
    torch.manual_seed(0)
    broken = planned("100%")
    broken.body[0].register_forward_hook(torch.compiler.disable(lambda module, inputs, output: None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HiRemateWarning)
        warm_up(broken)
    model = hiremate(TwoNets(), "100%", verbose=False)
    for index in range(8):
        model.zero_grad()
        model(batch(index), index < 4).square().mean().backward()  # a warning would be an error
    assert session_of(model).captured_count == 2


def test_training_goes_on_when_torch_has_dropped_what_it_compiled():
    def act(model):
        losses = []
        for index, rows in enumerate((200, 190, 190, 180, 180, 200)):
            losses.append(step(model, index, rows))
            torch.compiler.reset()
            gc.collect()
        return [*losses, *gradients(model)]

    assert_same(*run_both(act))


def test_what_runs_as_was_planned_for_another_size_stays_within_the_budget_and_exact():
    budget = get_plan(warm_up(planned(), steps=3, rows=MANY)).budget_bytes
    rows = (MANY, MANY, MANY, MANY - 3, MANY - 9, MANY // 2, *[MANY - 3] * 6)

    def act(model):
        losses = [step(model, index, count) for index, count in enumerate(rows)]
        if get_plan(model) is not None:
            peaks = [plan.measured.peak_bytes for plan in session_of(model).plans.values()]
            assert len(peaks) == 2
            assert all(peak <= budget for peak in peaks), peaks
        return [*losses, *gradients(model)]

    assert_same(*run_both(act, budget, warm=0))


@pytest.mark.parametrize("has_buffers", [True, False])
def test_buffers_that_checkpoint_would_update_twice_are_announced(has_buffers):
    class Checkpointing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            body = self.body if has_buffers else self.body[0]
            return self.head(torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False))

    model = hiremate(Checkpointing(), "90%", verbose=False, on_infeasible="warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(model, 0)
    assert any("around code that updates buffers" in str(w.message) for w in caught) == has_buffers


@pytest.mark.usefixtures("_captures_all")
def test_a_share_is_of_the_largest_step_so_far():
    model = warm_up(planned("80%"), steps=4, rows=2 * ROWS)
    large = get_plan(model)
    warm_up(model, steps=5)
    small = get_plan(model)
    assert small is not large
    assert small.solution.recompute_ms == 0
    assert small.budget_bytes - small.resident_bytes == large.budget_bytes - large.resident_bytes
    warm_up(model, steps=6, rows=3 * ROWS)
    assert get_plan(model).budget_bytes > large.budget_bytes


def test_a_share_is_of_the_step_and_not_of_what_a_part_of_it_might_take():
    """Before the first step is known, gradients of all outputs are expected."""

    class TwoOutputs(Net):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.body(x)
            return self.head(hidden), torch.cat([hidden] * 20, 1)

    model = hiremate(TwoOutputs(), "95%", verbose=False)
    for index in range(4):
        model.zero_grad()
        model(batch(index))[0].square().mean().backward()
    plan = get_plan(model)
    assert plan.budget_bytes == plan.resident_bytes + int(0.95 * plan.unplanned.peak_bytes)


@pytest.mark.filterwarnings("ignore:Something was captured anew")
def test_a_plan_is_measured_less_and_less_often_while_steps_of_other_sizes_come(monkeypatch):
    model = warm_up(planned(), steps=4, rows=MANY)
    budget = get_plan(model).budget_bytes
    model, measured = planned(budget), []
    measure = steps.StepRecord
    monkeypatch.setattr(
        steps, "StepRecord", lambda *a: (measured.append(session_of(model).steps.count), measure(*a))[1]
    )
    warm_up(model, steps=2, rows=MANY)
    for index in range(20):
        step(model, index, MANY - 2 - index)
    assert get_plan(model).measured.peak_bytes is not None
    model = planned(budget)
    step(model, 0, MANY)
    measured.clear()
    for index in range(20):
        step(model, index, MANY - 2 - index)
    assert get_plan(model).measured.peak_bytes is None, "no step of that size came again"
    assert 4 <= len(measured) <= 7
    warm_up(model, steps=20, rows=MANY)
    assert get_plan(model).measured.peak_bytes <= budget


def test_steps_of_a_whole_epoch_are_not_measured_to_meet_its_smaller_last_batch(monkeypatch):
    model, measured = warm_up(planned("90%"), steps=4), []
    measure = steps.StepRecord
    monkeypatch.setattr(
        steps, "StepRecord", lambda *a: (measured.append(session_of(model).steps.count), measure(*a))[1]
    )
    for _ in range(2):  # the first one runs by the plan there is
        warm_up(model, steps=5)
        step(model, rows=ROWS - 8)
    measured.clear()
    warm_up(model, steps=20)
    assert len(measured) <= 4, "now and then, since its loss is outside of the plan"
    for _ in range(2):
        step(model, rows=ROWS - 8)
    assert len(session_of(model).plans) == 2


@pytest.mark.usefixtures("_captures_all")
def test_a_size_that_is_captured_twice_keeps_its_plan():
    """Dynamo captures the first sizes as they are, and once more where it has symbols for them."""
    model = planned("90%", max_plans=3)
    with recorded() as said:
        for rows in (ROWS, 200, 160, ROWS):
            warm_up(model, steps=6, rows=rows)
    session = session_of(model)
    assert not said
    assert session.captured_count == 4
    assert get_plan(model).measured.peak_bytes is not None
    assert len({plan.solution.recompute for plan in session.plans.values()}) <= 3


def test_a_changed_budget_plans_anew_without_capturing():
    model = warm_up(planned("90%"), steps=3)
    before = get_plan(model)
    hiremate(model, "70%", verbose=False)
    after = get_plan(model)
    assert after.planned_peak_bytes < before.planned_peak_bytes
    assert session_of(model).captured_count == 1


def test_a_step_of_the_plan_before_does_not_count_as_a_measurement_of_the_plan():
    model = planned("60%")
    step(model)
    step(model)  # its measurement ends when the next step begins
    hiremate(model, "100%")
    step(model)
    step(model)
    measured = get_plan(model).measured.peak_bytes
    assert measured == pytest.approx(get_plan(model).planned_peak_bytes, rel=0.01)


class Caching(nn.Module):
    """Returns what the next call could reuse, as language models return keys and values: callers drop it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        cache = []
        for layer in self.layers:
            cache.append(torch.tanh(layer(x)))
            x = x + cache[-1].exp()
        return self.head(x), cache


@pytest.mark.parametrize("budget", ["100%", "75%"])
def test_an_output_that_callers_drop_is_counted_where_the_plan_keeps_it(budget):
    model = hiremate(Caching(), budget, verbose=False)
    for seed in range(4):
        model.zero_grad()
        loss = (4 * model(batch(seed))[0]).exp().sin().square().mean()  # takes more than the backward of the model
        loss.backward()
    plan = get_plan(model)
    assert plan.measured.peak_bytes == pytest.approx(plan.planned_peak_bytes, rel=0.01)


@pytest.mark.parametrize("drops_first", [False, True])
def test_outputs_are_counted_until_callers_drop_them(drops_first):
    model = hiremate(Caching(), "100%", verbose=False)
    for seed in range(4):
        model.zero_grad()
        output, cache = model(batch(seed))
        if drops_first:
            del cache
        loss = (4 * output).exp().sin().square().mean()
        del output
        cache = None
        loss.backward()
    plan = get_plan(model)
    assert plan.measured.peak_bytes == pytest.approx(plan.planned_peak_bytes, abs=64)


def test_a_budget_that_fits_everything_recomputes_nothing():
    model = warm_up(planned("100%"), steps=3)
    assert get_plan(model).predicted_overhead == 0
    assert get_plan(model).planned_peak_bytes == get_plan(model).unplanned_peak_bytes


def test_a_second_request_with_an_unreadable_budget_changes_nothing():
    model = warm_up(planned())
    plan = get_plan(model)
    with pytest.raises(ValueError, match="bananas"):
        hiremate(model, "10 bananas")
    assert get_plan(model) is plan


def test_a_second_request_with_a_budget_that_nothing_fits_changes_nothing():
    model = warm_up(planned(), steps=5, rows=8 * MANY)
    plan, options = get_plan(model), session_of(model).options
    with pytest.raises(InfeasibleBudgetError):
        hiremate(model, "1 MiB")
    assert get_plan(model) is plan
    assert session_of(model).options is options


@pytest.fixture
def two_kinds() -> tuple[nn.Module, int]:
    """A model with two kinds of steps, and the budget that the smaller one needs to recompute nothing."""
    model = planned("90%")
    warm_up(model, steps=4, rows=MANY)
    small_bytes = get_plan(model).unplanned_peak_bytes
    warm_up(model, steps=4, rows=8 * MANY)
    assert len(session_of(model).plans) == 2
    return model, small_bytes


@pytest.mark.parametrize("fails_at", ["solving", "building programs"])
def test_a_budget_that_fails_at_the_second_kind_changes_nothing(two_kinds, fails_at, monkeypatch):
    model, small_bytes = two_kinds
    session, told, built = session_of(model), [], []
    before, options = session.plans, session.options

    def build_one(*arguments):
        built.append(arguments)
        if len(built) > 1:
            raise MemoryError
        return build(*arguments)

    build = plan_maker.build
    if fails_at == "building programs":
        monkeypatch.setattr(plan_maker, "build", build_one)
    session.listeners.append(told.append)
    with pytest.raises((InfeasibleBudgetError, MemoryError)), warnings.catch_warnings(record=True) as said:
        hiremate(model, small_bytes if fails_at == "solving" else "80%", verbose=False)
    assert session.plans == before
    assert session.options is options
    assert told == []
    assert not said
    monkeypatch.undo()
    hiremate(model, "80%", verbose=False)
    assert [plan.budget_bytes for plan in told] == [plan.budget_bytes for plan in session.plans.values()]


def test_listeners_hear_of_a_budget_once_all_kinds_have_their_plans(two_kinds):
    model, _ = two_kinds
    session, seen = session_of(model), []
    before = dict(session.plans)
    session.listeners.append(lambda plan: seen.append(dict(session.plans)))
    hiremate(model, "80%", verbose=False)
    assert seen == [dict(session.plans)] * 2
    assert all(seen[0][kind] is not before[kind] for kind in before)


def test_a_step_whose_backward_failed_is_not_what_is_planned():
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = make(1), make(2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            between = self.first(x)
            torch._dynamo.graph_break()
            return between, self.last(between)

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    def train(model: nn.Module, failing: int) -> nn.Module:
        for index in range(5):
            model.zero_grad()
            between, result = model(batch(index, MANY))
            if index == failing:
                between.register_hook(fail)
            with contextlib.suppress(ArithmeticError):
                result.square().mean().backward()
            del between, result
        return model

    expected = get_plan(train(hiremate(Breaks(), "70%", verbose=False), failing=-1))
    for failing in (0, 1):
        found = get_plan(train(hiremate(Breaks(), "70%", verbose=False), failing))
        assert found.unplanned_peak_bytes == expected.unplanned_peak_bytes
        assert found.planned_peak_bytes <= found.budget_bytes == expected.budget_bytes
        assert found.measured.peak_bytes == found.planned_peak_bytes


def test_peak_and_overhead_are_measured_in_the_steps_after_the_plan():
    model = warm_up(planned(), steps=2)
    assert get_plan(model).measured.peak_bytes is None
    warm_up(model, steps=3)
    measured = get_plan(model).measured
    assert measured.peak_bytes > 0
    assert measured.step_ms > measured.recompute_ms > 0
    assert measured.overhead > 0


def test_listeners_hear_of_the_plan_and_of_its_measurement():
    model, heard = planned(), []
    session_of(model).listeners.append(heard.append)
    warm_up(model, steps=5)
    assert heard[0].measured.peak_bytes is None
    assert heard[-1].measured.overhead is not None


@pytest.mark.parametrize("clear_late", [False, True], ids=["at the top", "after the forward"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_cleared_before_or_after_the_forward(clear_late, set_to_none):
    def act(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for index in range(6):
            if not clear_late:
                optimizer.zero_grad(set_to_none=set_to_none)
            loss = model(batch(index)).square().mean()
            if clear_late:
                optimizer.zero_grad(set_to_none=set_to_none)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        plan = get_plan(model)
        if plan is not None:
            assert plan.measured.peak_bytes <= plan.budget_bytes
        return [*losses, *model.parameters()]

    found, expected = run_both(act, warm=0)
    assert_same(found, expected)


def test_gradients_accumulate_over_several_backwards():
    def act(model):
        model.zero_grad()
        for index in range(4):
            model(batch(index)).square().mean().backward()
        return gradients(model)

    found, expected = run_both(act)
    assert_same(found, expected)


def test_an_absolute_budget_holds_when_optimizer_state_appears():
    probe = warm_up(planned("75%"), steps=2)
    weights = sum(p.nbytes for p in probe.parameters())
    budget = max(2**20, get_plan(probe).budget_bytes + 3 * weights)
    model = planned(budget)
    optimizer = torch.optim.AdamW(model.parameters())
    resident = []
    for index in range(5):
        optimizer.zero_grad()
        model(batch(index)).square().mean().backward()
        optimizer.step()
        plan = get_plan(model)
        if plan is not None:
            resident.append(plan.resident_bytes)
            assert plan.planned_peak_bytes <= plan.budget_bytes == budget
    assert resident[-1] >= 3 * weights
    assert plan.measured.peak_bytes <= budget


def test_a_share_grows_with_what_is_resident():
    model = planned("75%")
    step(model)
    step(model)
    before = get_plan(model)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    step(model)
    after = get_plan(model)
    assert after.resident_bytes > before.resident_bytes
    assert after.budget_bytes - after.resident_bytes == before.budget_bytes - before.resident_bytes
    assert after.solution == before.solution


class TwoBodies(nn.Module):
    """A small body and a large one, called one by one."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(WIDTH, WIDTH), Net(depth=4)


def sum_of_bodies(model, index, trains_large):
    large, small = model.large(batch(index)), model.small(batch(index))
    (large.sum() + small.sum() if trains_large else small.sum()).backward()
    model.zero_grad()


def test_a_share_waits_for_larger_steps_where_the_first_one_has_dropped_most_of_the_model():
    model = hiremate(TwoBodies(), "70%", verbose=False)
    sum_of_bodies(model, 0, trains_large=False)  # its share is too small for it
    for index in range(1, 5):
        sum_of_bodies(model, index, trains_large=True)
    plan = get_plan(model)
    assert plan.measured.peak_bytes <= plan.budget_bytes
    assert len(plan.graph.backward) > 10
    sum_of_bodies(model, 5, trains_large=False)


def test_a_share_that_dropped_parts_never_meet_is_an_error_in_the_end():
    model = hiremate(TwoBodies(), "70%", verbose=False)
    sum_of_bodies(model, 0, trains_large=False)
    sum_of_bodies(model, 1, trains_large=False)
    with pytest.raises(InfeasibleBudgetError):
        sum_of_bodies(model, 2, trains_large=False)


def test_a_share_gives_the_first_of_accumulated_backwards_as_much_as_the_others():
    model, budgets = planned("50%"), []
    for index in range(8):
        if index % 2 == 0:
            model.zero_grad()
        model(batch(index)).square().mean().backward()
        budgets.append(get_plan(model).budget_bytes if index else None)
    assert len(set(budgets[1:])) == 1


def test_a_peak_that_was_measured_with_more_resident_bytes_is_measured_again():
    model = planned("75%")
    optimizer = torch.optim.AdamW(model.parameters())
    for seed in range(5):
        step(model, seed)
        optimizer.step()
    before = get_plan(model)
    for state in optimizer.state.values():
        state.clear()
    step(model)
    assert get_plan(model).budget_bytes < before.measured.peak_bytes
    assert get_plan(model).measured == replace(before.measured, peak_bytes=None)
    step(model)
    after = get_plan(model)
    assert after.solution == before.solution
    freed = before.resident_bytes - after.resident_bytes
    assert before.measured.peak_bytes - after.measured.peak_bytes == pytest.approx(freed, abs=1024)


def test_a_peak_that_was_measured_before_the_optimizer_had_state_is_measured_again():
    model = planned("75%")
    optimizer = torch.optim.AdamW(model.parameters())
    for index in range(16):
        model(batch(index)).square().mean().backward()
        if index % 4 == 3:  # planned and measured in the first of accumulated backwards
            optimizer.step()
            optimizer.zero_grad()
    plan = get_plan(model)
    assert plan.measured.peak_bytes == plan.planned_peak_bytes


def test_with_warn_a_budget_too_small_is_announced_once_and_trains():
    def act(model):
        return [step(model, index) for index in range(3)]

    with recorded() as said:
        found, expected = run_both(act, budget="1%", on_infeasible="warn")
    assert_same(found, expected)
    assert len([text for text in said if "Nothing fits the budget" in text]) == 1


def test_the_first_step_of_another_kind_above_its_budget_is_said_once():
    model = planned("70%")
    with recorded() as said:
        for index in range(3):
            step(model, index)
        planned_kinds = targets_of(model).session._planned
        ((kind, plan),) = planned_kinds.plans.items()
        planned_kinds._see_first(kind, plan.budget_bytes + 2**20)
        assert not said  # the first kind of all
        planned_kinds.kinds.install((*kind, 1), plan, {})
        for excess in (2**10, 2**20, 2**21):
            planned_kinds._see_first((*kind, 1), plan.budget_bytes + excess)
    (text,) = said
    assert "The first step of another kind took" in text
    assert "1.00 MiB above its budget: it had no plan yet" in text


def test_the_least_memory_is_announced_again_where_more_of_it_is_resident_or_measured():
    model = planned("1%", on_infeasible="warn")
    with recorded() as said:
        for index in range(4):
            step(model, index)
        life = targets_of(model).session
        ((kind, plan),) = life.plans.items()
        resident = life._planned.kinds[kind].known.resident
        more = replace(resident, size_bytes=resident.size_bytes + 2**20)
        life._planned.adapt(kind, more)  # an optimizer's state has appeared, say
        life._planned.adapt(kind, more)
        for added in (2**21, 2**20):  # outside code takes more than at first
            life._planned.peak_measured(kind, plan.planned_peak_bytes + added, more)
    found = [text.rsplit(" found, ")[1] for text in said if "Nothing fits" in text]
    assert found == [f"{format_bytes(plan.planned_peak_bytes + added)}." for added in (0, 2**20, 2**21)]


@pytest.mark.filterwarnings("ignore:Nothing fits")
def test_what_can_not_fit_is_not_planned_again_when_more_is_resident(monkeypatch):
    made = []
    monkeypatch.setattr(plan_maker, "make_plan", lambda *args, **options: made.append(1) or make_plan(*args, **options))
    model = warm_up(planned("1 KiB", on_infeasible="warn"))
    before = get_plan(model).resident_bytes
    optimizer = torch.optim.AdamW(model.parameters())
    for seed in range(4):
        step(model, seed)
        optimizer.step()
    plan = get_plan(model)
    assert plan.resident_bytes > before
    assert len(made) == 1


def test_a_retained_graph_can_be_run_backward_again():
    def act(model):
        model.zero_grad()
        loss = model(batch(9)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    found, expected = run_both(act)
    assert_same(found, expected)


@pytest.mark.parametrize("until", ["the next forward", "a second backward", "the end of the step"])
def test_what_a_retained_backward_keeps_is_planned_for(until):
    model, held, batches = planned("60%"), [None], [batch(index, MANY) for index in range(8)]

    def train():
        for x in batches:
            model.zero_grad()
            held[0] = model(x).square().mean()
            held[0].backward(retain_graph=True)
            if until == "a second backward":
                held[0].backward()
            if until == "the end of the step":
                held[0] = None

    train()
    held[0] = None
    model.zero_grad()
    peak_bytes, plan = measure_peak(train), get_plan(model)
    assert plan.solution.recompute_ms > 0
    assert plan.measured.peak_bytes <= plan.budget_bytes
    assert peak_bytes <= plan.budget_bytes - plan.resident_bytes
    if until == "the end of the step":
        assert plan.planned.peak_bytes == pytest.approx(peak_bytes, abs=1024)


def test_gradients_that_are_freed_before_the_backward_are_not_counted_in_it():
    torch.manual_seed(0)
    model = hiremate(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)), "100%", verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(x):
        loss = model(x).exp().sin().square().mean()  # its backward takes more than its forward
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for index in range(6):
        train(batch(index, width=512))
    plan = get_plan(model)
    assert plan.measured.peak_bytes == pytest.approx(plan.planned_peak_bytes, abs=1024)


@pytest.mark.parametrize("share", ["100%", "95%"])
@pytest.mark.parametrize("rows", [(64,), (64, 48)], ids=["one size", "two sizes"])
def test_outputs_that_give_way_to_the_next_ones_are_not_counted_in_the_loss(rows, share):
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = hiremate(nn.Sequential(*layers, nn.Linear(256, 1000)), share, verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    for index in range(10):
        size = rows[index % len(rows)]
        output = model(batch(index, rows=size, width=256))  # those of the last step live until here
        loss = nn.functional.cross_entropy(output, torch.arange(size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    plan = get_plan(model)
    assert plan.measured.peak_bytes == pytest.approx(plan.planned_peak_bytes, abs=1024)


@pytest.mark.parametrize("share", ["100%", "75%"])
@pytest.mark.parametrize("held", ["a loss on large storage", "a copy of the outputs"])
def test_what_goes_of_the_step_before_does_not_pass_for_memory_that_this_one_gives_back(held, share):
    """PyTorch's mean squared error has its mean on the storage of all squares."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))]
    model = hiremate(nn.Sequential(*layers), share, verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    for index in range(8):
        optimizer.zero_grad()
        x = batch(index, rows=256, width=64)
        output = model(x)
        if held == "a copy of the outputs":
            output = output * 2
        loss = nn.functional.mse_loss(output, x) if held == "a loss on large storage" else (output - x).square().mean()
        loss.backward()
        optimizer.step()

    plan = get_plan(model)
    assert plan.measured.peak_bytes == pytest.approx(plan.planned_peak_bytes, abs=1024)


@pytest.mark.parametrize("retains", [True, False])
def test_what_was_retained_is_counted_and_not_watched_beside_that(retains):
    """What was kept for another backward consists of tensors that Python knows, as those that a script holds."""
    model = hiremate(nn.Sequential(nn.Linear(128, 128), nn.GELU()), "100%", verbose=False)
    for index in range(2):
        output = model(batch(index, rows=256, width=128)) * 2
        record = session_of(model).steps.record
        output.sum().backward(retain_graph=retains)

    assert len(record._unwatch) == 1  # the product


def test_a_second_backward_gives_the_usual_error():
    model = warm_up(planned(), steps=3)
    output = model(batch())
    output.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.sum().backward()


def test_training_goes_on_after_a_second_backward_failed():
    def act(model):
        output = model(batch())
        output.sum().backward()
        with contextlib.suppress(RuntimeError):
            output.sum().backward()
        del output
        return [step(model, index) for index in range(3)]

    found, expected = run_both(act)
    assert_same(found, expected)


def test_a_late_second_backward_does_not_cut_the_next_step_short():
    model = warm_up(planned(), steps=3)
    session, output = session_of(model), model(batch())
    output.sum().backward(retain_graph=True)
    session.end_step()
    with recorded():
        output.sum().backward()
        (model(batch(1)) * model(batch(2))).sum().backward()
    assert session.steps.current.kind == (0, 0)


def test_a_forward_without_a_backward_leaks_nothing():
    model = warm_up(planned(), steps=5)
    x = batch()
    kept = []
    with MemoryMeter(torch.device("cpu")) as meter:
        for _ in range(4):
            kept = [model(x)]
            del kept[:]
            gc.collect()
            meter.mark("after")
    live = [interval.start_bytes for interval in meter.intervals if interval.label == "after"]
    assert max(live) - live[0] <= 1024, live


def test_a_forward_without_a_backward_does_not_disturb_the_next_step():
    def act(model):
        model(batch(5))
        losses = [step(model, index) for index in range(2)]
        model(batch(6))
        return [*losses, step(model, 3), *gradients(model)]

    found, expected = run_both(act)
    assert_same(found, expected)


def test_evaluation_between_forward_and_backward_does_not_disturb():
    def act(model):
        model.zero_grad()
        loss = model(batch(5)).square().mean()
        with torch.no_grad():
            model.eval()
            model(batch(6))
            model.train()
        loss.backward()
        return [loss.detach(), *gradients(model)]

    found, expected = run_both(act)
    assert_same(found, expected)


def test_a_backward_outlives_its_model():
    plain, model = make(), warm_up(planned(), steps=3)
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    results = []
    for owner in (plain, model):
        torch.manual_seed(3)
        x = batch(7).requires_grad_()
        results.append((x, owner(x).square().mean()))
    del owner, plain, model
    gc.collect()
    for _, loss in results:
        loss.backward()
    assert torch.equal(results[0][0].grad, results[1][0].grad)


def test_a_planned_model_that_is_dropped_is_freed():
    model = warm_up(planned(), steps=3)
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


def test_a_removed_model_that_is_dropped_is_freed():
    model = remove_hiremate(warm_up(planned(), steps=3))
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


def test_a_removed_plan_leaves_a_backward_under_way_alone():
    def act(model):
        model.zero_grad()
        loss = model(batch(5)).square().mean()
        remove_hiremate(model)
        loss.backward()
        return [loss.detach(), *gradients(model), step(model, 6)]

    found, expected = run_both(act)
    assert_same(found, expected)


@pytest.mark.parametrize("budget", ["100%", "70%"])
def test_a_plan_swapped_between_forward_and_backward_stays_exact(budget):
    def act(model):
        model.zero_grad()
        loss = model(batch(5)).square().mean()
        if targets_of(model) is not None:
            hiremate(model, budget, verbose=False)
        loss.backward()
        first = gradients(model)
        return [loss.detach(), *first, step(model, 6), *gradients(model)]

    found, expected = run_both(act, budget="85%")
    assert_same(found, expected)


def test_two_planned_models_train_side_by_side():
    def run(is_planned):
        models = [planned(seed=s) if is_planned else make(s) for s in (1, 2)]
        torch.manual_seed(4)
        losses = [step(model, index) for index in range(5) for model in models]
        if is_planned:
            assert all(get_plan(model).measured.peak_bytes is not None for model in models)
        return [*losses, *gradients(models[0]), *gradients(models[1])]

    assert_same(run(True), run(False))


@pytest.mark.filterwarnings("ignore:The measured peak")  # what the other model keeps is outside of the plan
def test_two_planned_models_can_share_one_loss():
    def run(is_planned):
        models = [planned("90%", seed=s, on_infeasible="warn") if is_planned else make(s) for s in (1, 2)]
        torch.manual_seed(4)
        for index in range(5):
            for model in models:
                model.zero_grad()
            models[1](models[0](batch(index))).square().mean().backward()
        return [*gradients(models[0]), *gradients(models[1])]

    assert_same(run(True), run(False))


def test_outputs_that_users_keep_stay_as_they_were():
    def act(model):
        kept = []
        for index in range(4):
            model.zero_grad()
            output = model(batch(index))
            kept.append(output)
            output.square().mean().backward()
        return [output.detach().clone() for output in kept]

    found, expected = run_both(act)
    assert_same(found, expected)


def test_one_model_called_twice_in_a_step_is_planned_as_one():
    def act(model):
        for index in range(5):
            model.zero_grad()
            first, second = model(batch(index)), model(batch(index + 10))
            (first * second).square().mean().backward()
        plan = get_plan(model)
        if plan is not None:
            assert plan.measured.peak_bytes <= plan.budget_bytes
            assert next(s for s in session_of(model).plans) == (0, 0)
        return gradients(model)

    found, expected = run_both(act, warm=0)
    assert_same(found, expected)


def test_a_model_applied_to_its_own_output_stays_exact():
    def act(model):
        for index in range(5):
            model.zero_grad()
            model(model(batch(index))).square().mean().backward()
        return gradients(model)

    found, expected = run_both(act, warm=0)
    assert_same(found, expected)


def test_gradients_of_inputs_are_exact():
    def act(model):
        x = batch(5).requires_grad_()
        model(x).square().mean().backward()
        return [x.grad]

    found, expected = run_both(act)
    assert_same(found, expected)


def test_autograd_grad_gives_the_same_and_leaves_no_gradients():
    def act(model):
        model.zero_grad()
        found = torch.autograd.grad(model(batch(5)).square().mean(), list(model.parameters()))
        assert all(p.grad is None for p in model.parameters())
        return list(found)

    found, expected = run_both(act)
    assert_same(found, expected)


def test_a_peak_in_which_algorithms_are_tried_does_not_count(monkeypatch):
    """cuDNN takes memory for all that it tries: a plan that left room for this would be far too tight."""

    def steps_until_measured() -> int:
        model, count = planned("75%"), 0
        while get_plan(model) is None or get_plan(model).measured.peak_bytes is None:
            step(model, count)
            count += 1
        return count

    usual = steps_until_measured()
    monkeypatch.setattr(planning, "may_choose_anew", lambda ops, device: True)
    with recorded() as said:
        assert steps_until_measured() == usual + 1
    assert len(said) == 1


def test_many_gradients_at_once_are_refused():
    model = warm_up(planned("100%"))
    model.zero_grad()
    out = model(batch(5))
    with pytest.raises(CaptureError, match="can't take many gradients at once, as is_grads_batched=True"):
        torch.autograd.grad(out, list(model.parameters()), torch.stack([out, out]).detach(), is_grads_batched=True)


def test_frozen_weights_get_no_gradients():
    def act(model):
        model.body.requires_grad_(False)
        losses = [step(model, index) for index in range(4)]
        return [*losses, *gradients(model)]

    found, expected = run_both(act, budget="100%", warm=0)
    assert_same(found, expected)


@pytest.mark.parametrize("share", ["90%", "75%"])
def test_the_measured_peak_is_within_the_budget_and_near_the_prediction(share):
    model = planned(share)
    optimizer = torch.optim.AdamW(model.parameters())
    for index in range(4):
        step(model, index, rows=4 * ROWS)
        optimizer.step()
    plan = get_plan(model)
    model.zero_grad()
    session_of(model).end_step()
    state = [v for s in optimizer.state.values() for v in s.values()]
    x = batch(0, 4 * ROWS)
    resident = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *state, x))

    peak = resident + measure_peak(lambda: model(x).square().mean().backward())

    assert peak <= plan.budget_bytes
    assert abs(peak - plan.planned_peak_bytes) <= 0.01 * peak, f"{peak:,} measured, {plan.planned_peak_bytes:,} planned"


def test_a_batch_is_given_back_when_its_step_has_ended():
    model = planned()
    optimizer = torch.optim.AdamW(model.parameters())
    x = batch()
    model(x).square().mean().backward()
    optimizer.step()
    watched = weakref.ref(x)
    del x
    gc.collect()
    assert watched() is None


def test_an_exception_in_the_forward_leaves_the_next_step_exact():
    class Fails(Net):
        fails = False

        def forward(self, x):
            if self.fails:
                raise KeyError("the user's own")
            return super().forward(x)

    def run(is_planned):
        torch.manual_seed(1)
        model = Fails()
        if is_planned:
            hiremate(model, "75%", verbose=False)
        torch.manual_seed(2)
        warm_up(model, 3)
        model.fails = True
        with contextlib.suppress(Exception):
            step(model, 3)
        model.fails = False
        return [step(model, 4), *gradients(model)]

    assert_same(run(True), run(False))


def test_a_share_is_not_refused_because_of_a_part_that_cannot_shrink():
    """After a graph break the loss is a graph of its own, and keeps all that it has."""

    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))

        def forward(self, x):
            y = self.net(x)
            torch._dynamo.graph_break()
            return F.cross_entropy(y, y.detach().argmax(dim=1))

    model = hiremate(Breaks(), "70%", verbose=False)
    for _ in range(3):
        model(torch.randn(512, WIDTH)).backward()
        model.zero_grad()
    plan = get_plan(model)
    assert session_of(model).captured_count == 2
    assert plan.planned_peak_bytes <= plan.budget_bytes < plan.unplanned_peak_bytes


def test_the_solvers_count_what_one_part_hands_to_the_next_as_it_is():
    """The backward of the second part reads its input, which only the first part could compute again."""

    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (
                nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))) for _ in range(2)
            )

        def forward(self, x):
            y = self.first(x)
            torch._dynamo.graph_break()
            return self.second(y)

    model = hiremate(Breaks(), "80%", verbose=False)
    for _ in range(3):
        model(torch.randn(512, WIDTH)).square().mean().backward()
        model.zero_grad()
    plan = get_plan(model)
    problem = Problem(plan.graph, plan.profile, 0)
    replayed = Model(problem)
    for policy in segment_policies(replayed):
        found = replayed.replay(policy)
        assert found.peak_bytes == pytest.approx(replay(problem, decisions(replayed, found.rows)).peak_bytes, abs=64)
    assert plan.solution.stopped_by == "proof"


def test_two_kinds_of_steps_in_turn_are_both_measured_and_then_left_alone():
    model = planned("80%")
    for index in range(20):  # ten of each; the ninth and tenth are measured once more
        step(model, index, rows=ROWS * (1 + index % 2))
    session = session_of(model)
    assert len(session.plans) == 2
    for plan in session.plans.values():
        assert plan.measured.peak_bytes <= plan.budget_bytes
        assert plan.measured.step_ms > 0
    step(model, 20)
    assert session.steps.current.record is None
    assert session.steps.current.timed is None


def test_a_plan_says_what_its_resident_bytes_are():
    model = planned()
    warm_up(model, steps=4)
    parts = dict(get_plan(model).resident_parts)
    assert sum(parts.values()) == get_plan(model).resident_bytes
    assert parts["parameters"] >= sum(p.nbytes for p in model.parameters())
    assert parts["batch"] > 0


@pytest.mark.parametrize("steps_before", [0, 4])
def test_an_error_that_memory_has_run_out_says_what_was_planned(steps_before, monkeypatch):
    model = warm_up(planned(), steps=steps_before) if steps_before else planned()

    def run_out(module):
        def run(arguments):
            raise torch.OutOfMemoryError("CUDA out of memory.")

        return run

    if steps_before:
        session = session_of(model)
        kinds = session._planned.kinds
        for kind in kinds.plans:
            programs = kinds[kind].programs.items()
            kinds.change(kind, programs={place: replace(p, backward=run_out(p)) for place, p in programs})
    else:
        monkeypatch.setattr(TimedRun, "_run", lambda *arguments, **options: run_out(None)(arguments))
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        step(model, 0)
    note = "\n".join(getattr(caught.value, "__notes__", caught.value.args))
    assert ("planned for a peak of" if steps_before else "least memory found") in note
    assert ("Measured before" in note) == bool(steps_before)


class HoldsAList(nn.Module):
    """Code between captured graphs holds a large value that nobody reads any more, until the forward returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.first(x)
        values = [wide, wide.mean(-1, keepdim=True)]
        torch._dynamo.graph_break()
        values.append(torch.sigmoid(self.second(x)))
        torch._dynamo.graph_break()
        return (values[1] * values[2]).sum(-1) / len(values)


def test_what_code_between_graphs_holds_for_a_while_is_foreseen():
    torch.manual_seed(1)
    model = hiremate(HoldsAList(), "1 GiB", verbose=False)
    warm_up(model, steps=4)
    plan = get_plan(model)
    assert targets_of(model).session.captured_count > 1
    assert plan.measured.peak_bytes == pytest.approx(plan.planned_peak_bytes, abs=64)


class GivesMore(nn.Module):
    """Computes its loss by itself, after code that is not captured, and gives the large values before it too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net()
        self.head = nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x))
        torch._dynamo.graph_break()
        return {"loss": logits.log_softmax(1).square().mean(), "logits": logits}


@pytest.fixture
def no_automatic_collection():
    """Let cycles live until somebody asks for their collection."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_automatic_collection")
def test_what_tracing_keeps_does_not_pass_for_what_the_user_keeps(monkeypatch):
    capture = dynamo._capture

    def leaving_a_cycle(*arguments, **options):
        cycle = [arguments]  # the values of the frame among them
        cycle.append(cycle)
        return capture(*arguments, **options)

    monkeypatch.setattr(dynamo, "_capture", leaving_a_cycle)
    torch.manual_seed(1)
    model = hiremate(GivesMore(), "1 GiB", verbose=False)
    for index in range(4):
        model.zero_grad()
        model(batch(index))["loss"].backward()
    plan = get_plan(model)
    assert targets_of(model).session.captured_count > 1
    assert plan.measured.peak_bytes == pytest.approx(plan.planned_peak_bytes, abs=64)


class Turns(nn.Module):
    """Goes one of two ways after a common beginning, by data."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net()
        self.short = nn.Linear(WIDTH, WIDTH)
        self.long = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return self.long(y) if x[0, 0] < 0 else self.short(y)


def test_steps_that_begin_alike_stay_within_the_budget_after_the_first_surprise():
    def go(*signs: int) -> None:
        for sign in signs:
            x = batch()
            x[0, 0] = sign
            model.zero_grad()
            model(x).square().mean().backward()

    torch.manual_seed(1)
    model = hiremate(Turns(), "1 GiB", verbose=False)
    go(1, 1, 1, 1, -1, -1, -1, -1)
    short, long = (session_of(model).plans[kind] for kind in ((0, 1), (0, 2)))
    assert long.unplanned_peak_bytes > short.unplanned_peak_bytes
    hiremate(model, f"{short.unplanned_peak_bytes + 12288} B")
    with pytest.warns(HiRemateWarning, match="by the plan of another kind of step"):
        go(1, 1, 1, -1, -1, -1, 1, 1, -1, 1, -1, -1, 1, 1, -1)
    plan = session_of(model).plans[0, 2]
    assert plan.solution.recompute_ms > 0
    for sign in (1, 1, -1, 1, -1, -1, 1):
        gc.collect()
        assert measure_peak(lambda sign=sign: go(sign)) + plan.resident_bytes <= plan.budget_bytes


class NormsBetween(nn.Module):
    """Two captured parts; what is between them is not captured, and saves what it was given for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, 32 * WIDTH)

    @torch._dynamo.disable
    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (8 * WIDTH,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))).tanh().square().mean()


def test_what_code_between_graphs_saves_for_its_backward_is_foreseen():
    torch.manual_seed(1)
    model = hiremate(NormsBetween(), "1 GiB", verbose=False)
    for seed in range(4):
        model.zero_grad()
        model(batch(seed)).backward()
    plan = get_plan(model)
    assert targets_of(model).session.captured_count > 1
    assert plan.measured.peak_bytes == pytest.approx(plan.planned_peak_bytes, rel=0.005)


class CombinesBetween(nn.Module):
    """Two captured parts, and a third that reads what code that is not captured makes of their results."""

    def __init__(self, combine: Callable) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(WIDTH, 8 * WIDTH)
        self.third = nn.Linear(8 * WIDTH, 32 * WIDTH)
        self.combine = torch._dynamo.disable(combine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [self.first(x)]
        torch._dynamo.graph_break()
        values.append(self.second(x))
        return self.third(self.combine(values)).tanh().square().mean()


def added_up(values: list[torch.Tensor]) -> torch.Tensor:
    """Let go of the values as soon as there is their sum, and take as much again."""
    total = values[0] + values[1]
    values.clear()
    return total.sin()


def multiplied(values: list[torch.Tensor]) -> torch.Tensor:
    """Save both values, the first of which nobody holds any more when its own part's backward is next."""
    product = values[0] * values[1]
    values.clear()
    return product


def check_prediction(model: nn.Module) -> None:
    """Take a few steps of a planned model that gives its loss, and compare the measured peak with the predicted one."""
    for seed in range(4):
        model.zero_grad()
        model(batch(seed)).backward()
    plan = get_plan(model)
    assert plan.measured.peak_bytes == pytest.approx(plan.planned_peak_bytes, abs=64)


@pytest.mark.parametrize("combine", [added_up, multiplied])
def test_results_that_code_between_later_graphs_holds_or_lets_go_of_are_foreseen(combine):
    torch.manual_seed(1)
    model = hiremate(CombinesBetween(combine), "1 GiB", verbose=False)
    check_prediction(model)
    assert targets_of(model).session.captured_count > 2


class GoesAround(nn.Module):
    """Two captured parts, the second of which has a residual connection around it that is not captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8 * WIDTH)
        wide = [nn.Linear(8 * WIDTH, 32 * WIDTH), nn.GELU(), nn.Linear(32 * WIDTH, 32 * WIDTH), nn.GELU()]
        self.second = nn.Sequential(*wide, nn.Linear(32 * WIDTH, 8 * WIDTH))

    @torch._dynamo.disable
    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y).square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.loss_of(x, self.second(x))


@pytest.mark.filterwarnings("ignore:Nothing fits")
def test_a_gradient_that_goes_around_a_captured_graph_is_there_throughout_its_backward():
    torch.manual_seed(1)
    model = hiremate(GoesAround(), "30%", verbose=False, on_infeasible="warn")
    check_prediction(model)
    assert targets_of(model).session.captured_count > 1


class TakesMoreAndMore(nn.Module):
    """What it takes between its captured parts depends on data, as packed sequences do."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)]
        self.body = nn.Sequential(*(layer for pair in layers for layer in pair))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.times = 20

    @torch._dynamo.disable
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.detach().repeat(self.times, 1).mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self.body(x))).square().mean()


@pytest.mark.parametrize("clears_late", [False, True])
def test_a_plan_is_measured_again_and_corrected_where_code_outside_comes_to_take_more(clears_late):
    def go(steps: int) -> None:
        for _ in range(steps):
            if not clears_late:
                optimizer.zero_grad()
            loss = model(batch())
            if clears_late:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    torch.manual_seed(1)
    model = TakesMoreAndMore()
    optimizer = torch.optim.SGD(model.parameters())
    hiremate(model, "80%", optimizer=optimizer, verbose=False)
    go(6)
    before = get_plan(model)
    model.times += (before.budget_bytes - before.measured.peak_bytes) // (ROWS * WIDTH * 4) + 1
    go(6)
    after = get_plan(model)
    assert after.planned_peak_bytes < before.planned_peak_bytes
    assert after.planned_peak_bytes < after.measured.peak_bytes <= after.budget_bytes


def channels_last():
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 1)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last), torch.randn(8, 3, 32, 32)


def recognizer():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 512), nn.LogSoftmax(-1)), torch.randn(32, 32, 64)


def recognizer_loss(y):
    return F.ctc_loss(y.transpose(0, 1), torch.ones(32, 10, dtype=torch.long), (32,) * 32, (10,) * 32)


@pytest.mark.parametrize(("make", "loss_of"), [(channels_last, torch.mean), (recognizer, recognizer_loss)])
def test_copies_that_kernels_make_of_gradients_that_come_with_other_strides_are_foreseen(make, loss_of):
    model, batch = make()
    hiremate(model, "100%", verbose=False)
    for _ in range(4):
        loss_of(model(batch)).backward()
        model.zero_grad()
    plan = get_plan(model)
    assert plan.measured.peak_bytes == plan.planned_peak_bytes <= plan.budget_bytes


def test_a_plan_is_corrected_again_where_the_first_margin_was_too_small():
    model = planned("90%")
    for index in range(4):
        step(model, index)
    life = targets_of(model).session
    ((kind, plan),) = life.plans.items()
    resident = life._planned.kinds[kind].known.resident
    for correction in range(1, deciding.CORRECTIONS + 1):
        peak_bytes = plan.budget_bytes + 1000  # what runs outside takes more, whatever is planned
        life._planned.peak_measured(kind, peak_bytes, resident)
        margin_bytes = plan.budget_bytes + 1000 - plan.planned_peak_bytes
        assert life._planned.kinds[kind].known.margin_bytes == margin_bytes
        assert life._planned.kinds[kind].known.corrections == correction
        plan = life.plans[kind]
        assert plan.planned_peak_bytes <= plan.budget_bytes - margin_bytes
    with pytest.warns(HiRemateWarning, match="after planning with a margin"):
        life._planned.peak_measured(kind, plan.budget_bytes + 1000, resident)
    assert life.plans[kind].planned_peak_bytes == plan.planned_peak_bytes


def test_a_margin_that_no_plan_leaves_does_not_stop_training_when_something_else_is_resident():
    model = planned("100%")
    for index in range(4):
        step(model, index)
    life = targets_of(model).session
    ((kind, plan),) = life.plans.items()
    resident = life._planned.kinds[kind].known.resident
    with pytest.warns(HiRemateWarning, match="no plan leaves that margin: the plan stays"):
        life._planned.peak_measured(kind, 2 * plan.budget_bytes, resident)
    life._planned.adapt(kind, replace(resident, size_bytes=resident.size_bytes - 1024))
    assert life.plans[kind].solution == plan.solution


@pytest.mark.parametrize("budget", ["75%", "100%"])
def test_a_peak_is_compared_with_what_existed_before_its_step_where_another_kind_was_foreseen(budget):
    model = planned(budget)
    with recorded() as said:
        for index in range(12):
            step(model, index, ROWS - 8 if index % 4 == 3 else ROWS)  # the last batch of each epoch is smaller
    assert not said
    assert all(known.margin_bytes == 0 for known in session_of(model)._planned.kinds.known.values())


def test_what_an_early_zero_grad_saves_is_said_and_true():
    """The advice names the difference between the peaks of the two orders."""

    def train(is_early: bool):
        model = hiremate(make(width=64), "100%", verbose=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for index in range(4):
            if is_early:
                optimizer.zero_grad()
            loss = model(batch(index, rows=64, width=64)).square().mean()
            if not is_early:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return get_plan(model)

    late, early = train(is_early=False), train(is_early=True)
    saved = late.planned_peak_bytes - early.planned_peak_bytes
    assert [line.rpartition("saves ")[2] for line in advice_lines(late)] == [f"{format_bytes(saved)}."]
    assert "call zero_grad() before the forward" in advice_lines(late)[0]
    assert not advice_lines(early)
