"""Steps of several signatures and sizes: each has its own plan, or runs by that of another."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch import nn

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.signatures import recorded_step
from hiremate_lightning.testing import is_eager, plans, session_of
from hiremate_lightning.torch_private import hooks
from tests.exact import assert_same, network, quiet, recorded
from tests.life import MANY, ROWS, WIDTH, Net, assert_exact, batch, gradients, planned, step, warm_up


def test_new_batch_sizes_do_not_merge_a_plan_again(monkeypatch):
    model, merged, merge = warm_up(planned(), steps=3, rows=MANY), [], recorded_step.merge
    for index in range(6):
        if index == 2:  # the first two of these sizes are captured
            monkeypatch.setattr(recorded_step, "merge", lambda *arguments: (merged.append(1), merge(*arguments))[1])
        step(model, index, rows=MANY // (2 + index))
    assert is_eager(model)
    assert not merged


def test_a_signature_that_was_not_foreseen_meets_what_has_grown():
    """Its plan was made before the optimizer had any state, and steps are counted seldom after the first ones."""
    torch.manual_seed(1)
    model = hiremate(nn.ModuleDict({"one": Net(), "other": Net()}), "1 GiB", verbose=False)
    optimizer = torch.optim.Adam(model.parameters())
    for index, name in enumerate(["one"] * 3 + ["other"] * 20 + ["one"]):
        model[name](batch(index)).square().mean().backward()
        if index > 2:
            optimizer.step()
    assert dict(get_plan(model).resident_parts)["optimizer state"] > 0


@pytest.mark.parametrize("steps_before", [1, 6])
def test_max_plans_is_announced_once(steps_before):
    model = warm_up(planned(max_plans=1), steps=steps_before)
    with recorded() as warned:
        for index in range(6):
            step(model, index, rows=2 * ROWS)
    assert len(plans(model)) == 1
    assert len([text for text in warned if "max_plans" in text]) == 1


def test_a_step_of_other_code_is_not_taken_for_another_size():
    """Of one step signature three outputs get no gradients; the other signature has a single output."""

    @network(lambda: {"one": Net(), "other": Net()})
    def two_signatures(self, x: torch.Tensor, first: bool) -> tuple[torch.Tensor, ...]:
        y = self.one(x) if first else self.other(x)
        return (y.relu(), y * 2, y.sigmoid(), y.tanh()) if first else (y,)

    model = hiremate(two_signatures(), "90%", verbose=False)
    for index in range(8):
        model.zero_grad()
        model(batch(index), index < 4)[0].square().mean().backward()
    assert len(plans(model)) == 2


@pytest.mark.usefixtures("_captures_all")
def test_sizes_without_a_plan_stay_exact_and_within_the_budget():
    budget = get_plan(warm_up(planned(), steps=3, rows=MANY)).budget_bytes
    rows = (MANY, MANY, MANY, MANY - 3, MANY - 9, MANY // 2, *[MANY - 9] * 6)

    def act(model):
        losses = [step(model, index, count) for index, count in enumerate(rows)]
        if get_plan(model) is not None:
            peaks = [plan.measured.peak_bytes for plan in plans(model)]
            assert len(peaks) == 1, "all other sizes run by the plan of the largest"
            assert all(peak <= budget for peak in peaks), peaks
        return [*losses, *gradients(model)]

    assert_exact(act, budget, warm=0)


def is_watched_step(model: nn.Module, seed: int, rows: int = ROWS) -> bool:
    """Do a step; return whether its memory was recorded."""
    step(model, seed, rows)
    return session_of(model).steps.current.measurement is not None


@pytest.mark.usefixtures("_captures_all", "without_made_code")
@pytest.mark.filterwarnings("ignore:torch.compile captured code again")
def test_other_sizes_are_measured_less_and_less_often():
    model = warm_up(planned(), steps=4, rows=MANY)
    budget = get_plan(model).budget_bytes
    model = planned(budget)
    warm_up(model, steps=2, rows=MANY)
    for index in range(4):
        step(model, index, MANY - 2 - index)
    assert get_plan(model).measured.peak_bytes is not None
    model = planned(budget)
    step(model, 0, MANY)
    count = sum(is_watched_step(model, index, MANY - 2 - index) for index in range(20))
    assert get_plan(model).measured.peak_bytes is None, "no step of that size came again"
    assert 4 <= count <= 7
    warm_up(model, steps=72, rows=MANY)  # the others used its looks up: the next one is after 64 of its steps
    assert get_plan(model).measured.peak_bytes <= budget


def test_an_epoch_is_not_measured_for_its_last_batch():
    model = warm_up(planned("90%"), steps=4)
    for _ in range(2):  # the first one runs by the plan there is
        warm_up(model, steps=5)
        step(model, rows=ROWS - 8)
    assert sum(is_watched_step(model, index) for index in range(20)) <= 4, (
        "now and then, since its loss is outside of the plan"
    )
    for _ in range(2):
        step(model, rows=ROWS - 8)
    assert len(plans(model)) == 2


def test_a_first_step_above_its_budget_is_announced_once():
    model = planned("70%")
    with recorded() as warned:
        for index in range(3):
            step(model, index)
        session = session_of(model)
        planned_signatures, history = session.planned, session.model.history
        (signature,) = history.planned
        planned_signatures.warn_of_first_step(signature, signature.plan.budget_bytes + 2**20)
        other = history.get_or_make((*signature.graphs, 1))
        history.record(other, signature.recorded)
        history.install(other, signature.plan, {})
        for excess in (2**10, 2**20, 2**21):
            planned_signatures.warn_of_first_step(other, signature.plan.budget_bytes + excess)
    (text,) = warned
    assert "The first step of another signature took" in text
    assert "1.00 MiB above its budget, since it had no plan yet" in text


@pytest.mark.usefixtures("_captures_all")
def test_two_signatures_in_turn_are_measured_and_then_left_alone():
    model = planned("80%")
    for index in range(20):  # ten of each; the ninth and tenth are measured once more
        step(model, index, rows=ROWS * (1 + index % 2))
    session = session_of(model)
    assert len(session.plans) == 2
    for plan in session.plans.values():
        assert plan.measured.peak_bytes <= plan.budget_bytes
        assert plan.measured.step_ms > 0
    step(model, 20)
    assert session.steps.current.measurement is None
    assert session.steps.current.timed is None


@network(
    lambda: {
        "body": Net(),
        "short": nn.Linear(WIDTH, WIDTH),
        "long": nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))),
    }
)
def turns(self, x: torch.Tensor) -> torch.Tensor:
    """Goes one of two ways after a common beginning, by data."""
    y = self.body(x)
    return self.long(y) if x[0, 0] < 0 else self.short(y)


def test_steps_that_begin_alike_stay_within_the_budget():
    def go(*signs: int) -> None:
        for sign in signs:
            x = batch()
            x[0, 0] = sign
            model.zero_grad()
            model(x).square().mean().backward()

    torch.manual_seed(1)
    model = hiremate(turns(), "1 GiB", verbose=False)
    go(1, 1, 1, 1, -1, -1, -1, -1)
    short, long = (session_of(model).plans[signature] for signature in ((0, 1), (0, 2)))
    assert long.unplanned_peak_bytes > short.unplanned_peak_bytes
    hiremate(model, f"{short.unplanned_peak_bytes + 12288} B")
    plan = session_of(model).plans[0, 2]
    assert plan.solution.recompute_ms > 0
    with recorded() as warned:
        for sign in (1, 1, 1, -1, -1, -1, 1, 1, -1, 1, -1, -1, 1, 1, -1, 1, 1, -1, 1, -1, -1, 1):
            gc.collect()
            assert measure_peak(lambda sign=sign: go(sign)) + plan.resident_bytes <= plan.budget_bytes
    assert not warned, "the first step that began by the wrong plan went on by one that fits"


@pytest.mark.parametrize("budget", ["75%", "100%"])
def test_a_peak_is_compared_with_what_existed_before_its_step(budget):
    model = planned(budget)
    with recorded() as warned:
        for index in range(12):
            step(model, index, ROWS - 8 if index % 4 == 3 else ROWS)  # the last batch of each epoch is smaller
    assert not warned
    assert all(signature.recorded.margin_bytes == 0 for signature in session_of(model).model.history.recorded)


@network(
    lambda make_layer, left_out: {
        **{name: nn.Linear(WIDTH, WIDTH) for name in ("first", "last")},
        "layers": nn.ModuleList(make_layer() for _ in range(6)),
        "left_out": left_out,
        "at_most": 6,
        "count": 0,
    }
)
def leaves_out(self, x: torch.Tensor) -> torch.Tensor:
    """Leaves out layers at random, as LayerDrop and LayerSkip do; counts those that the latest call ran."""
    x, self.count = self.first(x), 0
    for layer in self.layers[: self.at_most]:
        if random.random() > self.left_out:
            x, self.count = layer(x), self.count + 1
    return self.last(x)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


def train_leaving_out(budget: float | str | None, steps: int = 24) -> tuple[nn.Module, list[int], list[int], list]:
    """Train; return the model, how many layers each step ran, the peak of each step, and what was computed."""
    torch.manual_seed(1)
    random.seed(6)
    model, counts, peaks, log = leaves_out(wide, 0.3), [], [], []
    weights_bytes = sum(p.nbytes for p in model.parameters())
    if budget is not None:
        hiremate(model, budget, verbose=False)
    for index in range(steps):
        x = batch(index, 1024)
        model.zero_grad()
        added_bytes = measure_peak(lambda x=x: model(x).square().mean().backward())
        peaks.append(weights_bytes + x.nbytes + added_bytes)
        counts.append(model.count)
        log += gradients(model)
    return model, counts, peaks, log


@pytest.mark.parametrize("is_share", [False, True], ids=["bytes", "share"])
def test_steps_that_leave_out_layers_stay_within_the_budget(is_share):
    """So does the first step of a signature that runs no more than one before it, and all have one budget."""
    _, _, plain, expected = train_leaving_out(None)
    with recorded() as warned:
        model, counts, peaks, found = train_leaving_out("60%" if is_share else int(0.6 * max(plain)))
    assert_same(found, expected)
    (budget_bytes,) = {plan.budget_bytes for plan in plans(model)}
    known = [max(counts[:index], default=0) for index in range(len(counts))]
    over = [i for i, (peak, count) in enumerate(zip(peaks, counts, strict=True)) if peak > budget_bytes]
    assert all(counts[index] > known[index] for index in over), (over, counts)
    assert len(set(counts)) > 3
    assert min(counts[known.index(max(counts)) :]) < max(counts), "smaller ones come after the largest"
    assert max(peaks) > 0.87 * budget_bytes  # how much the fastest plan uses depends on measured times
    assert not over or any("began by the wrong plan" in text for text in warned)


@network(lambda: {"up": nn.Linear(WIDTH, 2 * WIDTH), "down": nn.Linear(2 * WIDTH, WIDTH)})
def block(self, x: torch.Tensor) -> torch.Tensor:
    """A layer as the code of a user: captured by itself."""
    return x + self.down(torch.nn.functional.gelu(self.up(x)))


def train_chosen(
    is_planned: bool, rows: list[int], left_out: float = 0.0
) -> tuple[nn.Module, list[torch.Tensor], list[int]]:
    """Train, with the last layer in later steps alone.

    Returns:
        The model, all gradients, and the number of parts before and after the last layer is called.
    """
    torch.manual_seed(1)
    random.seed(3)
    model, log, counts = leaves_out(block, left_out), [], []
    model.at_most = 5
    if is_planned:
        hiremate(model, "80%", verbose=False)
    for index, count in enumerate(rows):
        if index == len(rows) - 6:
            counts += [session_of(model).model.runtimes.count] if is_planned else []
            model.at_most, model.left_out = 6, 0.4
        model.zero_grad()
        with quiet():
            model(batch(index, count)).square().mean().backward()
        log += gradients(model)
    return model, log, [*counts, session_of(model).model.runtimes.count] if is_planned else []


@pytest.mark.parametrize("varies", [False, True], ids=["one size", "sizes"])
def test_a_layer_called_late_runs_as_the_equal_layers_do(varies):
    """Its code is captured when plans exist: it is neither traced at other sizes nor numbered apart."""
    rows = [ROWS + (8 * (index % 2) if varies else 0) for index in range(16)]
    _, expected, _ = train_chosen(False, rows)
    model, found, (before, after) = train_chosen(True, rows)
    assert_same(found, expected)
    assert session_of(model).plans
    assert after == before


def test_equal_layers_make_one_signature_of_step_whichever_run():
    """What counts is how many of them run, not which were captured before all others."""
    rows = [ROWS] * 16
    model, _, _ = train_chosen(True, rows, left_out=0.4)
    sequences = {signature.graphs for signature in session_of(model).model.history}
    assert len({len(graphs) for graphs in sequences}) == len(sequences)


@pytest.mark.filterwarnings("ignore:.*trains without its plan")
def test_plain_steps_in_between_do_not_raise_the_measured_peak():
    """Each plain step leaves gradients that nobody saw allocated, and the next planned step frees them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(512, 64)
    hiremate(model, "70%", optimizer=optimizer, verbose=False)

    for index in range(40):
        slots = {module: hooks.get_call(module) for module in model.modules()}
        for module in slots if index > 3 and index % 2 else ():
            hooks.set_call(module, None)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for module, slot in slots.items():
            hooks.set_call(module, slot)

    plan = get_plan(model)
    assert plan.measured.peak_bytes <= plan.planned_peak_bytes
