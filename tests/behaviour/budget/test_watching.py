"""Memory in later steps: loops that stay as they are keep their plan, and what grows is seen and planned for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.callbacks import HiRemateCallback
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.testing import session_of
from tests.exact import drawn, recorded
from tests.trainers import Squared, quiet_trainer

WIDTH, ROWS, STEPS = 64, 512, 36  # so many steps that looks come after 8, 16 and 32


def layers(depth: int = 6) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


batch = drawn(ROWS, WIDTH)

# -------------------------------------------------------------------- loops that stay as they are


def zeroing(place: str, to_none: bool, model: nn.Module) -> Iterator[None]:
    """Set gradients to zero before the forward, between it and the backward, or after the step."""
    optimizer = torch.optim.AdamW(model.parameters())
    for index in range(STEPS):
        if place == "before":
            optimizer.zero_grad(to_none)
        loss = model(batch(index)).square().mean()
        if place == "between":
            optimizer.zero_grad(to_none)
        loss.backward()
        optimizer.step()
        if place == "after":
            optimizer.zero_grad(to_none)
        yield


def accumulating(clips: bool, model: nn.Module) -> Iterator[None]:
    """Update the weights after each third backward."""
    optimizer = torch.optim.AdamW(model.parameters())
    for index in range(STEPS):
        (model(batch(index)).square().mean() / 3).backward()
        if index % 3 == 2:
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        yield


def two_optimizers(model: nn.Module) -> Iterator[None]:
    """Update the halves of a model in turn."""
    halves = [list(model.parameters())[:6], list(model.parameters())[6:]]
    optimizers = torch.optim.AdamW(halves[0]), torch.optim.SGD(halves[1], momentum=0.9)
    for index in range(STEPS):
        loss = model(batch(index)).square().mean()
        optimizers[index % 2].zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers[index % 2].step()
        yield


LOOPS: dict[str, Callable[[nn.Module], Iterator[None]]] = {
    "before": partial(zeroing, "before", True),
    "between": partial(zeroing, "between", True),
    "between-in-place": partial(zeroing, "between", False),
    "after-in-place": partial(zeroing, "after", False),
    "accumulating": partial(accumulating, False),
    "clipping": partial(accumulating, True),
    "two": two_optimizers,
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_loop_that_stays_as_it_is_keeps_its_plan(loop):
    """Nothing grows after the first steps, in whatever order gradients come and go: no look at a step finds more."""
    model, heard = layers(), list[Plan]()
    hiremate(model, "60%", verbose=False)
    session_of(model).listeners.append(heard.append)
    with recorded() as warned:
        settled = [get_plan(model) for _ in loop(model)][7]
    assert not warned
    assert {plan.solution for plan in heard[heard.index(settled) :]} == {settled.solution}
    assert all((plan.measured.peak_bytes or 0) <= plan.budget_bytes for plan in heard)
    assert 0.99 * settled.planned_peak_bytes <= get_plan(model).measured.peak_bytes <= settled.planned_peak_bytes


def test_lightnings_default_loop_keeps_its_plan():
    """The batches exist before training, as those of a small data set do."""
    callback = HiRemateCallback("55%", verbose=False)
    trainer = quiet_trainer(callback)
    solutions = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, *_: object) -> None:
            solutions.append(callback.plan and callback.plan.solution)

    trainer.callbacks.append(Looks())
    with recorded() as warned:
        trainer.fit(Squared(layers()), DataLoader([batch(index) for index in range(STEPS)], batch_size=None))
    assert not warned
    assert set(solutions[7:]) == {callback.plan.solution}
    assert callback.plan.measured.peak_bytes <= callback.plan.planned_peak_bytes <= callback.plan.budget_bytes


# -------------------------------------------------------------------- what grows


def teacher_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Pull outputs to those of a copy of the model, be it a planned one."""
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss_of(output: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
        return (output - target).abs().mean()

    return loss_of


def auxiliary_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Add a loss that saves as much as a layer does of some rows."""
    return lambda output, x: (output[:256].exp().sigmoid() - x[:256]).abs().mean()


def metric_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Compute distances that are freed at once."""

    def loss_of(output: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cdist(output, x[:96]).mean() * 0

    return loss_of


@pytest.mark.parametrize("more_of", [teacher_of, auxiliary_of, metric_of])
def test_code_that_grows_after_the_first_steps_is_planned_for(more_of):
    """It comes between the forward and the backward, where measured steps had next to nothing."""
    model = layers()
    hiremate(model, "60%", verbose=False)
    optimizer, more = torch.optim.AdamW(model.parameters()), more_of(model)

    def step(index: int, has_more: bool) -> None:
        optimizer.zero_grad()
        x = batch(index)
        output = model(x)
        loss = output[:8].square().mean()
        (loss + more(output, x) if has_more else loss).backward()
        optimizer.step()

    for index in range(12):
        step(index, has_more=False)
    before = get_plan(model)
    for index in range(12, 36):
        step(index, has_more=True)
    after = get_plan(model)
    assert before.measured.peak_bytes <= before.planned_peak_bytes
    assert after.unplanned_peak_bytes > before.unplanned_peak_bytes, "a share is of the larger step"
    assert after.measured.peak_bytes == pytest.approx(after.planned_peak_bytes, rel=0.01)
    assert after.measured.peak_bytes <= after.budget_bytes
