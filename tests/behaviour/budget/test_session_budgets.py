"""Budgets: shares and bytes, changed while training, and too small."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hiremate_lightning import InfeasibleBudgetError, get_plan, hiremate
from hiremate_lightning.measuring.profiling import TimedRun
from hiremate_lightning.records.expressions import SizesDifferError
from hiremate_lightning.sessions import offloading
from hiremate_lightning.testing import captured_count, plans, session_of
from hiremate_lightning.units import format_bytes
from tests.exact import network, recorded, take_steps
from tests.life import MANY, ROWS, WIDTH, Net, assert_exact, batch, only_plan, planned, step, warm_up


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


def test_a_share_is_of_the_step_not_of_one_part():
    """Before the first step is known, gradients of all outputs are expected."""

    class TwoOutputs(Net):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.body(x)
            return self.head(hidden), torch.cat([hidden] * 20, 1)

    model = hiremate(TwoOutputs(), "95%", verbose=False)
    plan = take_steps(model, batch, 4, loss_of=lambda y: y[0].square().mean())
    assert plan.budget_bytes == plan.resident_bytes + int(0.95 * plan.unplanned.peak_bytes)


def test_a_changed_budget_plans_anew_without_capturing():
    """One that fits everything recomputes nothing."""
    model = warm_up(planned("90%"), steps=3)
    before = get_plan(model)
    hiremate(model, "70%", verbose=False)
    after = get_plan(model)
    assert after.planned_peak_bytes < before.planned_peak_bytes
    hiremate(model, "100%", verbose=False)
    whole = get_plan(model)
    assert captured_count(model) == 1
    assert whole.predicted_overhead == 0
    masks_bytes = 3 * ROWS * WIDTH  # of three dropouts: booleans, where plain PyTorch saves numbers of four bytes
    assert whole.unplanned_peak_bytes - whole.planned_peak_bytes == 3 * masks_bytes


@pytest.mark.parametrize(
    ("budget", "error", "words"), [("10 bananas", ValueError, "bananas"), ("1 MiB", InfeasibleBudgetError, "too small")]
)
def test_a_budget_that_is_refused_changes_nothing(budget, error, words):
    model = warm_up(planned(), steps=5, rows=8 * MANY)
    plan, options = get_plan(model), session_of(model).options
    with pytest.raises(error, match=words):
        hiremate(model, budget)
    assert get_plan(model) is plan
    assert session_of(model).options is options


def two_signatures() -> tuple[nn.Module, int]:
    """Make a model with two step signatures; return the budget that the smaller one needs to recompute nothing too."""
    model = planned("90%")
    warm_up(model, steps=4, rows=MANY)
    small_bytes = get_plan(model).unplanned_peak_bytes
    warm_up(model, steps=4, rows=8 * MANY)
    assert len(plans(model)) == 2
    return model, small_bytes


@pytest.mark.parametrize(
    ("fails_at", "error"),
    [
        ("solving", InfeasibleBudgetError),
        ("solving, where the first one was to be dropped", InfeasibleBudgetError),
        ("building programs", MemoryError),
    ],
)
def test_a_budget_failing_at_the_second_plan_changes_nothing(fails_at, error, monkeypatch):
    """Listeners hear of a budget once all plans are made."""
    model, small_bytes = two_signatures()
    session, reported, seen, built = session_of(model), [], [], []
    before, options = session.plans, session.options

    def build_one(*arguments):
        built.append(arguments)
        if len(built) > 1:
            raise MemoryError
        return build(*arguments)

    def build_none(*arguments):
        raise SizesDifferError("A number is no expression of the sizes")

    build = offloading.program_of
    if fails_at != "solving":
        monkeypatch.setattr(offloading, "program_of", build_one if error is MemoryError else build_none)
    session.listeners.append(reported.append)
    session.listeners.append(lambda plan: seen.append(dict(session.plans)))
    with pytest.raises(error):  # a warning would be another error
        hiremate(model, "80%" if error is MemoryError else small_bytes, verbose=False)
    assert session.plans == before
    assert session.options is options
    assert reported == []
    monkeypatch.undo()
    hiremate(model, "80%", verbose=False)
    assert [plan.budget_bytes for plan in reported] == [plan.budget_bytes for plan in session.plans.values()]
    assert seen == [dict(session.plans)] * 2
    assert all(seen[0][signature] is not before[signature] for signature in before)


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


def test_a_share_waits_for_steps_that_run_the_whole_model():
    model = hiremate(TwoBodies(), "70%", verbose=False)
    sum_of_bodies(model, 0, trains_large=False)  # its share is too small for it
    for index in range(1, 5):
        sum_of_bodies(model, index, trains_large=True)
    plan = get_plan(model)
    assert plan.measured.peak_bytes <= plan.budget_bytes
    assert len(plan.graph.backward) > 10
    sum_of_bodies(model, 5, trains_large=False)


def test_a_share_that_no_step_fits_is_an_error_at_the_third():
    """It is of a step in which the large body keeps what no backward reads."""
    model = hiremate(TwoBodies(), "40%", verbose=False)
    sum_of_bodies(model, 0, trains_large=False)
    sum_of_bodies(model, 1, trains_large=False)
    with pytest.raises(InfeasibleBudgetError):
        sum_of_bodies(model, 2, trains_large=False)


def test_a_step_that_could_not_begin_is_dropped():
    model = hiremate(Net(), "10 KiB", verbose=False)
    with pytest.raises(InfeasibleBudgetError):
        warm_up(model, steps=3)
    assert session_of(model).steps.current is None
    hiremate(model, "10 MiB", verbose=False)
    warm_up(model, steps=3)
    assert get_plan(model).measured.peak_bytes <= 10 * 2**20


def test_accumulated_backwards_have_the_same_budget():
    model, budgets = planned("50%"), []
    for index in range(8):
        if index % 2 == 0:
            model.zero_grad()
        model(batch(index)).square().mean().backward()
        budgets.append(get_plan(model).budget_bytes if index else None)
    assert len(set(budgets[1:])) == 1


def test_gradients_living_through_some_forwards_leave_one_budget():
    """As in Lightning: its closure zeroes gradients after the forward, and a validation zeroes them before the next."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(8)]
    model, budgets = hiremate(nn.Sequential(*layers), "70%", verbose=False), []
    optimizer = torch.optim.AdamW(model.parameters())
    for index in range(16):
        loss = model(torch.randn(128, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if index % 2:
            optimizer.zero_grad()
        budgets.append(get_plan(model).budget_bytes if index > 1 else None)
    plan = get_plan(model)
    assert len(set(budgets[2:])) == 1
    assert plan.measured.peak_bytes <= plan.budget_bytes
    assert plan.measured.peak_bytes == pytest.approx(plan.compared_peak_bytes, rel=0.01)


def test_a_budget_too_small_trains_with_one_warning():
    """A step of another size warns again only if it needs clearly more."""

    def act(model):
        return [step(model, index, rows) for index, rows in enumerate((64, 64, 62, 62))]

    with recorded() as warned:
        assert_exact(act, budget="1%", on_infeasible="warn")
    assert len([text for text in warned if "Nothing fits the budget" in text]) == 1


def test_the_least_memory_is_warned_of_again_as_it_grows():
    model = planned("1%", on_infeasible="warn")
    with recorded() as warned:
        keeper, signature, plan = only_plan(warm_up(model, 4))
        resident = signature.recorded.resident
        more = replace(resident, size_bytes=resident.size_bytes + 2**20)
        keeper.adapt_plan(signature, more)  # an optimizer's state has appeared, say
        keeper.adapt_plan(signature, more)
        for added in (2**21, 2**20):  # outside code takes more than at first
            keeper.peak_measured(signature, plan.planned_peak_bytes + added, more)
    found = [text.rsplit(" found, ")[1] for text in warned if "Nothing fits" in text]
    assert found == [f"{format_bytes(plan.planned_peak_bytes + added)}." for added in (0, 2**20, 2**21)]


@pytest.mark.filterwarnings("ignore:Nothing fits")
def test_what_cannot_fit_is_not_planned_again(planning_log):
    model = warm_up(planned("1 KiB", on_infeasible="warn"))
    before = get_plan(model).resident_bytes
    optimizer = torch.optim.AdamW(model.parameters())
    for seed in range(4):
        step(model, seed)
        optimizer.step()
    plan = get_plan(model)
    assert plan.resident_bytes > before
    assert len(planning_log.of("planning")) == 1


def test_a_share_holds_beside_a_part_that_cannot_shrink():
    """After a graph break the loss is a graph of its own, and keeps all that it has."""

    @network(lambda: {"net": nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))})
    def breaks(self, x):
        y = self.net(x)
        torch._dynamo.graph_break()
        return F.cross_entropy(y, y.detach().argmax(dim=1))

    model = hiremate(breaks(), "70%", verbose=False)
    plan = take_steps(model, lambda _: torch.randn(512, WIDTH), 3, loss_of=lambda loss: loss, clears="end")
    assert captured_count(model) == 2
    assert plan.planned_peak_bytes <= plan.budget_bytes < plan.unplanned_peak_bytes


@pytest.mark.parametrize("steps_before", [0, 4])
def test_an_out_of_memory_error_says_what_was_planned(steps_before, monkeypatch):
    model = warm_up(planned(), steps=steps_before) if steps_before else planned()

    def run_out(module):
        def run(arguments):
            raise torch.OutOfMemoryError("CUDA out of memory.")

        return run

    if steps_before:
        session = session_of(model)
        for signature in session.model.history.planned:
            signature.programs = {place: replace(p, backward=run_out(p)) for place, p in signature.programs.items()}
    else:
        monkeypatch.setattr(TimedRun, "_run", lambda *arguments, **options: run_out(None)(arguments))
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        step(model, 0)
    note = "\n".join(getattr(caught.value, "__notes__", caught.value.args))
    assert ("planned for a peak of" if steps_before else "least memory found") in note
    assert ("Measured before" in note) == bool(steps_before)
