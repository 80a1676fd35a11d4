"""Peaks: measured, compared with the prediction, and corrected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hiremate_lightning import HiRemateWarning, Plan, get_plan, hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.sessions import planned as planning
from hiremate_lightning.sessions.planned import CORRECTIONS
from hiremate_lightning.testing import end_step, session_of
from tests.exact import assert_foreseen, recorded, take_steps
from tests.life import ROWS, WIDTH, batch, only_plan, planned, step, warm_up


def test_a_step_of_the_old_plan_does_not_measure_the_new_one():
    model = planned("60%")
    step(model)
    step(model)  # its measurement ends when the next step begins
    hiremate(model, "100%")
    step(model)
    step(model)
    measured = get_plan(model).measured.peak_bytes
    assert measured == pytest.approx(get_plan(model).planned_peak_bytes, rel=0.01)


def test_peak_and_overhead_are_measured_after_the_plan():
    """Listeners hear of the plan, and of its measurement."""
    model, heard = planned(), []
    session_of(model).listeners.append(heard.append)
    warm_up(model, steps=2)
    assert get_plan(model).measured.peak_bytes is None
    warm_up(model, steps=3)
    measured = get_plan(model).measured
    assert measured.peak_bytes > 0
    assert measured.step_ms > measured.recompute_ms > 0
    assert measured.overhead > 0
    assert heard[0].measured.peak_bytes is None
    assert heard[-1].measured.overhead is not None


def test_a_peak_is_measured_again_with_fewer_resident_bytes():
    model = planned("65%")
    optimizer = torch.optim.AdamW(model.parameters())
    for seed in range(5):
        step(model, seed)
        optimizer.step()
    before = get_plan(model)
    for state in optimizer.state.values():
        state.clear()
    step(model)
    assert get_plan(model).budget_bytes < before.measured.peak_bytes
    assert get_plan(model).measured == replace(before.measured, peak_bytes=None, predicted_bytes=None)
    step(model)
    after = get_plan(model)
    assert after.solution == before.solution
    freed = before.resident_bytes - after.resident_bytes
    assert before.measured.peak_bytes - after.measured.peak_bytes == pytest.approx(freed, abs=1024)


def test_a_prediction_above_a_budget_that_fell_is_forgotten():
    """The first plan counts an output of the step before, which is gone when later steps begin."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    hiremate(model, "60%", verbose=False)
    for index in range(9):
        output = model(batch(index, 4 * ROWS))
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = get_plan(model)
    assert plan.measured.predicted_bytes == plan.compared_peak_bytes <= plan.budget_bytes


def test_a_peak_is_measured_again_with_optimizer_state():
    model = planned("75%")
    optimizer = torch.optim.AdamW(model.parameters())
    for index in range(16):
        model(batch(index)).square().mean().backward()
        if index % 4 == 3:  # planned and measured in the first of accumulated backwards
            optimizer.step()
            optimizer.zero_grad()
    plan = get_plan(model)
    assert plan.measured.peak_bytes == plan.planned_peak_bytes


def test_a_step_in_which_cudnn_searches_is_not_measured(monkeypatch):
    """cuDNN takes memory for all that it tries: a plan that left room for this would be far too tight."""

    def steps_until_measured() -> int:
        model, count = planned("75%"), 0
        while get_plan(model) is None or get_plan(model).measured.peak_bytes is None:
            step(model, count)
            count += 1
        return count

    usual = steps_until_measured()
    monkeypatch.setattr(planning, "may_choose_anew", lambda ops, device: True)
    with recorded() as warned:
        assert steps_until_measured() == usual + 1
    assert len(warned) == 1


def test_the_measured_peak_is_near_the_prediction():
    """The plan says what its resident bytes are."""
    model = planned("75%")
    optimizer = torch.optim.AdamW(model.parameters())
    for index in range(4):
        step(model, index, rows=4 * ROWS)
        optimizer.step()
    plan = get_plan(model)
    parts = dict(plan.resident_parts)
    assert sum(parts.values()) == plan.resident_bytes
    assert parts["parameters"] >= sum(p.nbytes for p in model.parameters())
    assert parts["batch"] > 0
    model.zero_grad()
    end_step(model)
    state = [v for s in optimizer.state.values() for v in s.values()]
    x = batch(0, 4 * ROWS)
    resident = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *state, x))

    peak = resident + measure_peak(lambda: model(x).square().mean().backward())

    assert peak <= plan.budget_bytes
    assert abs(peak - plan.planned_peak_bytes) <= 0.01 * peak, f"{peak:,} measured, {plan.planned_peak_bytes:,} planned"


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
def test_a_plan_is_corrected_as_code_outside_takes_more(clears_late):
    def go(steps: int) -> Plan:
        clears = "middle" if clears_late else "before"
        return take_steps(
            model, lambda _: batch(), steps, loss_of=lambda loss: loss, optimizer=optimizer, clears=clears
        )

    torch.manual_seed(1)
    model = TakesMoreAndMore()
    optimizer = torch.optim.SGD(model.parameters())
    hiremate(model, "80%", optimizer=optimizer, verbose=False)
    before = go(6)
    model.times += (before.budget_bytes - before.measured.peak_bytes) // (ROWS * WIDTH * 4) + 1
    after = go(6)
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
def test_copies_of_gradients_with_other_strides_are_foreseen(make, loss_of):
    model, batch = make()
    hiremate(model, "100%", verbose=False)
    plan = take_steps(model, lambda _: batch, 4, loss_of=loss_of, clears="end")
    assert plan.measured.peak_bytes == plan.planned_peak_bytes <= plan.budget_bytes


def test_a_plan_is_corrected_three_times_at_most():
    model = warm_up(planned("90%"), 4)
    keeper, signature, plan = only_plan(model)
    resident = signature.recorded.resident
    for correction in range(1, CORRECTIONS + 1):
        peak_bytes = plan.budget_bytes + 1000  # what runs outside takes more, whatever is planned
        keeper.peak_measured(signature, peak_bytes, resident)
        margin_bytes = plan.budget_bytes + 1000 - plan.planned_peak_bytes
        assert signature.recorded.margin_bytes == margin_bytes
        assert signature.recorded.corrections == correction
        plan = only_plan(model)[2]
        assert plan.planned_peak_bytes <= plan.budget_bytes - margin_bytes
    with pytest.warns(HiRemateWarning, match="after planning with a margin"):
        keeper.peak_measured(signature, plan.budget_bytes + 1000, resident)
    assert only_plan(model)[2].planned_peak_bytes == plan.planned_peak_bytes


def test_a_margin_that_no_plan_leaves_stops_nothing():
    model = warm_up(planned("100%"), 4)
    keeper, signature, plan = only_plan(model)
    resident = signature.recorded.resident
    with pytest.warns(HiRemateWarning, match="no plan leaves that margin: the plan stays"):
        keeper.peak_measured(signature, 2 * plan.budget_bytes, resident)
    keeper.adapt_plan(signature, replace(resident, size_bytes=resident.size_bytes - 1024))
    assert only_plan(model)[2].solution == plan.solution


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_plain_peak_counts_masks_as_eager_saves_them(dtype):
    """Eager's dropout on the CPU saves its mask in the type of what it drops from; captured code saves booleans."""
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
    model, x = nn.Sequential(*layers).to(dtype), batch().to(dtype)
    model(x).square().mean().backward()
    eager_bytes = measure_peak(lambda: model(x).square().mean().backward())
    hiremate(model, "100%", verbose=False)
    plan = take_steps(model, lambda _: x, 3, loss_of=lambda y: y.square().mean(), clears="never")
    assert plan.unplanned_peak_bytes - plan.resident_bytes == pytest.approx(eager_bytes, abs=64)


class Small(nn.Module):
    """Few weights, and a loss of many values that is the peak of the step."""

    def __init__(self, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.loss_of = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8 * WIDTH), loss_of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss_of(self.head(self.body(x)))


def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


@pytest.mark.parametrize("loss_of", [cross_entropy, lambda y: y.square().mean(), lambda y: y.logsumexp(1).sum()])
def test_the_eager_peak_counts_what_autograd_keeps_for_a_moment(loss_of):
    """Results stand beside the gradients that die, and values of a function of autograd live to its end."""
    model, x = Small(loss_of), batch()
    model(x).backward()
    eager_bytes = measure_peak(lambda: model(x).backward())
    hiremate(model, "100%", verbose=False)
    plan = take_steps(model, lambda _: x, 3, loss_of=lambda loss: loss, clears="never")
    assert plan.planned.peak_bytes < plan.unplanned.peak_bytes == pytest.approx(eager_bytes, abs=64)


class Complex(nn.Module):
    """Complex layers, whose backward multiplies by a conjugated view: the kernel copies it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.complex(x, x.roll(1, -1))
        for layer in self.layers:
            y = torch.view_as_complex(F.gelu(torch.view_as_real(layer(y))))
        return y.abs()


class Rows(nn.Module):
    """Two tables with sparse gradients below a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = (
            nn.Embedding(50, WIDTH, sparse=True),
            nn.EmbeddingBag(50, WIDTH, mode="sum", sparse=True),
        )
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)])

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.body(self.words(words).mean(1) + self.bags(words))


@pytest.mark.parametrize(
    ("make", "make_batch", "budget"),
    [(Complex, lambda: torch.randn(1024, WIDTH), "45%"), (Rows, lambda: torch.arange(4096).view(-1, 8) % 50, "100%")],
)
def test_complex_and_sparse_gradients_are_counted(make, make_batch, budget):
    model, x = make(), make_batch()
    model(x).square().mean().backward()
    model.zero_grad()
    eager_bytes = measure_peak(lambda: model(x).square().mean().backward())
    hiremate(model, budget, verbose=False)
    plan = take_steps(model, lambda _: x, 8, loss_of=lambda y: y.square().mean())
    assert plan.unplanned_peak_bytes - plan.resident_bytes == pytest.approx(eager_bytes, rel=0.02)
    assert plan.measured.peak_bytes == pytest.approx(plan.planned_peak_bytes, abs=64)
    assert plan.planned_peak_bytes <= plan.budget_bytes


class Headed(nn.Module):
    """A chain with two more heads, which losses that begin later read."""

    def __init__(self) -> None:
        super().__init__()
        for name, depth in (("body", 5), ("first", 2), ("second", 2)):
            blocks = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth))
            setattr(self, name, nn.Sequential(*blocks))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        base = self.body(x)
        return base, self.first(base), self.second(base)


def test_terms_of_a_loss_that_begin_later_are_planned_for():
    """They bring gradients that had not come so far, and values between forward and backward."""
    model = Headed()
    optimizer = torch.optim.AdamW(model.parameters())
    hiremate(model, "41%", verbose=False, optimizer=optimizer)
    for index in range(40):
        x = torch.randn(1024, 64)
        base, first, second = model(x)
        loss = (base - x).square().mean()
        if index >= 5:
            loss = loss + first.abs().mean()
        if index >= 9:
            loss = loss + second.cos().mean()
        if index >= 12:
            loss = loss + (base * second).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = assert_foreseen(model, rel=0.01)
    assert plan.measured.peak_bytes <= plan.budget_bytes
