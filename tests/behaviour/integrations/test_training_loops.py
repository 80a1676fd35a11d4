"""What people do around a fit: search a learning rate, stop it, accumulate by a schedule, anneal by a count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor

from tests.behaviour.integrations.test_callback import (
    CallsItself,
    assert_fits_alike,
    assert_left_alone,
    batches,
    fit,
    planned,
)
from tests.exact import assert_same
from tests.trainers import quiet_trainer


class LearnsItsRate(CallsItself):
    """A module whose learning rate can be searched."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("comes_first", [True, False])
@pytest.mark.parametrize("target", [None, "training_step"])
def test_a_learning_rate_is_found_as_without_a_plan(tmp_path, comes_first, target):
    def search(*callbacks: Callback) -> LearnsItsRate:
        finder = LearningRateFinder(num_training_steps=24, min_lr=1e-5, max_lr=1e-1)
        order = (finder, *callbacks) if comes_first else (*callbacks, finder)
        torch.manual_seed(5)
        module = LearnsItsRate()
        quiet_trainer(*order, default_root_dir=tmp_path).fit(module, batches(30))
        return module

    expected, callback = search(), planned(target=target)
    found = search(callback)

    assert found.lr == expected.lr != 1e-2
    assert_same(found.state_dict(), expected.state_dict())
    assert callback.plan is not None


@pytest.mark.parametrize("target", [None, "training_step"])
def test_gradients_may_be_accumulated_by_a_schedule(target):
    def schedule() -> list[Callback]:
        return [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]

    assert_fits_alike(CallsItself, planned(target=target, on_infeasible="warn"), others=schedule, max_epochs=3)


@pytest.mark.filterwarnings(
    "ignore:Another profiler is running",
    "ignore:Modules inside of planned ones have no names in the profile",
    "ignore:Nothing fits",
    "ignore:The PyTorch Profiler",
    "ignore:net was not captured as a whole",
)
def test_a_profiler_may_begin_in_the_middle_of_a_step(tmp_path):
    def profiled() -> dict[str, Any]:  # it begins when the first forward has ended
        return {"profiler": PyTorchProfiler(dirpath=tmp_path, filename="profile", export_to_chrome=False)}

    expected, expected_logs = fit(CallsItself, **profiled())
    found, logs = fit(CallsItself, planned(on_infeasible="warn"), **profiled())

    assert_same(found.state_dict(), expected.state_dict())
    assert logs == expected_logs


class Interrupts(Callback):
    """Presses Ctrl-C once, in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_stop_within_a_step_leaves_the_module_as_it_was(step):
    def stop(*callbacks: Callback) -> pl.LightningModule:
        torch.manual_seed(5)
        module = CallsItself()
        with pytest.raises(SystemExit) as stopped:
            quiet_trainer(*callbacks, Interrupts(step)).fit(module, batches())
        assert stopped.value.code == 1
        return module

    expected, callback = stop(), planned()
    found = stop(callback)

    assert_left_alone(found)
    assert_same(found.state_dict(), expected.state_dict())
    for module, others in ((expected, ()), (found, (callback,))):
        torch.manual_seed(6)
        quiet_trainer(*others).fit(module, batches())
    assert_same(found.state_dict(), expected.state_dict())
    assert callback.plan is not None


def by_the_batch(module: Annealed, x: Tensor, index: int) -> Tensor:
    return module(x).square().mean() * (1 + 0.1 * index)


def by_the_step(module: Annealed, x: Tensor, index: int) -> Tensor:
    return module(x).square().mean() * min(1.0, 0.1 + 0.1 * module.global_step)


def by_its_own_count(module: Annealed, x: Tensor, index: int) -> Tensor:
    module.count += 1
    return module(x).square().mean() / module.count


def by_the_epoch(module: Annealed, x: Tensor, index: int) -> Tensor:
    return module(x).square().mean() * (0.5 if module.current_epoch else 1.0)


class Annealed(CallsItself):
    """A module whose loss is weighted by how far training is."""

    weigh: Callable[[Annealed, Tensor, int], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.weigh(batch[0], index)


@pytest.mark.parametrize("target", [None, "training_step"])
@pytest.mark.parametrize("weigh", [by_the_batch, by_the_step, by_its_own_count, by_the_epoch])
def test_a_loss_that_is_annealed_is_captured_at_most_three_times(weigh, target):
    kind = type(f"Annealed{weigh.__name__}", (Annealed,), {"weigh": weigh})
    captured = []

    class Watch(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            captured.append(callback._targets.session.captured_count)

    callback = planned(target=target)
    assert_fits_alike(kind, callback, Watch(), max_epochs=2)
    assert callback.plan is not None
    assert captured[-1] <= 3
