"""The callback sets a size that has run within the budget, and fitting goes on as if no search had been."""

from __future__ import annotations

import copy
import inspect
import random
import warnings

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from hiremate_lightning import BudgetError, ConfigurationError, HiRemateWarning, InfeasibleBudgetError
from hiremate_lightning.callbacks import HiRemateBatchSizeFinder, HiRemateCallback
from hiremate_lightning.memory.metering import measure_peak
from tests.exact import assert_same
from tests.trainers import quiet_trainer

MiB = 2**20
WIDTH = 32
BUDGET = 3 * MiB


def random_rows(count: int) -> torch.Tensor:
    """Draw rows, the same each time."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(3))


class Module(pl.LightningModule):
    """A chain with dropout and batch norm, whose activations outweigh its weights."""

    def __init__(self, batch_size: int = 64, rows: int = 20_000) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.rows = rows
        block = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.2)]
        self.net = nn.Sequential(*(copy.deepcopy(layer) for _ in range(2) for layer in block), nn.Linear(WIDTH, 4))
        self.seen: list[int] = []
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.seen.append(len(batch))
        self.steps += 1
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(random_rows(self.rows), batch_size=self.batch_size, shuffle=True)


class Validates(Module):
    """The same with a validation that takes far more memory than training."""

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("validation", self(batch).repeat(1, 500).sum())

    def val_dataloader(self) -> DataLoader:
        return DataLoader(random_rows(self.rows), batch_size=self.batch_size)


class AtStart(Callback):
    """Looks at everything where training begins, then stops it after a few steps."""

    def __init__(self) -> None:
        self.found: dict[str, object] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = copy.deepcopy(
            {
                "weights": dict(pl_module.state_dict()),
                "optimizer": trainer.optimizers[0].state_dict(),
                "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
                "loops": trainer.fit_loop.state_dict(),
                "global_step": trainer.global_step,
                "epoch": trainer.current_epoch,
                "metrics": dict(trainer.callback_metrics),
                "steps": getattr(pl_module, "steps", None),
                "modes": [m.training for m in pl_module.modules()],
                "options": (trainer.max_steps, trainer.limit_train_batches, trainer.limit_val_batches),
                "should_stop": trainer.should_stop,
                "torch": torch.get_rng_state(),
                "numpy": torch.from_numpy(np.random.get_state()[1].astype("int64")),  # noqa: NPY002
                "python": random.getstate(),
            }
        )
        self.callbacks = [type(c) for c in trainer.callbacks]
        self.loggers = list(trainer.loggers)


def trainer(*callbacks: Callback, **options: object) -> pl.Trainer:
    few = {"max_epochs": 2, "limit_train_batches": 3, "num_sanity_val_steps": 0}
    return quiet_trainer(*callbacks, **{**few, **options})


def finder(**options: object) -> HiRemateBatchSizeFinder:
    return HiRemateBatchSizeFinder(**{"verbose": False, "time_limit_s": 0.3, "max_overhead": 9.0, **options})


def planned(budget: object = BUDGET, **options: object) -> HiRemateCallback:
    return HiRemateCallback(budget, **{"verbose": False, "time_limit_s": 1.0, **options})


def test_it_is_lightnings_finder_with_its_leading_arguments():
    theirs = list(inspect.signature(BatchSizeFinder.__init__).parameters)
    mine = list(inspect.signature(HiRemateBatchSizeFinder.__init__).parameters)

    assert issubclass(HiRemateBatchSizeFinder, BatchSizeFinder)
    assert mine[: len(theirs)] == theirs


def test_the_size_is_set_and_the_loop_starts_from_nothing(tmp_path):
    found, watch, plan, module = finder(), AtStart(), planned(), Module()
    logger = CSVLogger(tmp_path)
    seed()
    running = trainer(found, plan, watch, logger=logger, log_every_n_steps=1)
    running.fit(module)

    size = found.optimal_batch_size
    assert module.batch_size == size == int(found.result) > found.result.unplanned_size > 0
    assert found.result.trial.measured_peak_bytes <= BUDGET
    assert found.result.real_steps <= 6
    assert module.seen[-6:] == [size] * 6
    assert plan.plan.measured.peak_bytes <= BUDGET
    assert plan.plan.budget_bytes == BUDGET

    assert watch.found["global_step"] == watch.found["epoch"] == watch.found["steps"] == 0
    assert watch.found["metrics"] == {}
    assert running.global_step == module.steps == 6
    assert watch.loggers == [logger]
    assert HiRemateCallback in watch.callbacks


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002


def run(module: pl.LightningModule, *callbacks: Callback, **options: object) -> AtStart:
    watch = AtStart()
    seed()
    trainer(*callbacks, watch, **options).fit(module)
    return watch


def test_training_after_the_search_is_training_without_it():
    torch.manual_seed(1)
    searched = Module()
    plain = copy.deepcopy(searched)
    found = finder()

    watched = run(searched, found, planned())
    plain.batch_size = found.optimal_batch_size
    expected = run(plain)

    assert_same(watched.found, expected.found)
    assert_same(searched.state_dict(), plain.state_dict())


def test_the_size_is_at_most_the_length_of_the_data_set():
    module = Module(rows=150)

    found = finder()
    run(module, found, planned("64 MiB"))

    assert found.optimal_batch_size == module.batch_size == 150
    assert found.result.limited_by == "the largest size allowed"


def test_validation_that_would_not_fit_is_foreseen():
    alone, validated = finder(), finder()

    run(Module(), alone, planned("6 MiB"))
    module = Validates()
    run(module, validated, planned("6 MiB"))

    assert validated.optimal_batch_size < alone.optimal_batch_size
    assert validated.result.limited_by == "memory of validation"
    rows = torch.randn(validated.optimal_batch_size, WIDTH)
    with torch.no_grad():
        assert measure_peak(lambda: module(rows).repeat(1, 500)) <= 6 * MiB


def test_the_size_survives_resuming(tmp_path):
    module, found = Module(), finder()
    run(module, found, planned())
    running = trainer(finder(max_val=7), planned(), max_epochs=1)
    running.fit(Module())
    path = tmp_path / "some.ckpt"
    running.save_checkpoint(path)

    later, resumed = finder(), Module()
    trainer(later, planned(), max_epochs=2).fit(resumed, ckpt_path=path)

    assert resumed.batch_size == later.optimal_batch_size == 7
    assert later.result is None
    assert set(resumed.seen) == {7}


class HasLength(Module):
    """A module whose sequence length is a number in its hparams."""

    def __init__(self, length: int = 16) -> None:
        super().__init__()
        del self.batch_size
        self.save_hyperparameters()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.seen.append(batch.shape[1])
        return self(batch.flatten(0, 1)).square().mean()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(32, self.hparams.length, WIDTH), batch_size=4)


def test_any_number_in_the_hparams_can_be_searched():
    module, found = HasLength(), finder(batch_arg_name="length")

    run(module, found, planned())

    assert module.hparams.length == found.optimal_batch_size > 16
    assert set(module.seen[-6:]) == {found.optimal_batch_size}


def test_the_longest_batch_is_what_the_search_runs_on():
    plain, longest = finder(), finder(longest_batch=lambda n: torch.randn(n, 4, WIDTH))

    class Varies(Module):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self(batch.reshape(-1, WIDTH)).square().mean()

    run(Varies(), plain, planned())
    run(Varies(), longest, planned())

    assert 3 * longest.optimal_batch_size < plain.optimal_batch_size


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_message_names_what_the_new_size_changes(accumulate, caplog):
    module = Module(batch_size=8)
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        found = finder(max_val=24)
        run(module, found, planned("64 MiB"), accumulate_grad_batches=accumulate)

    assert (
        f"batch_size is now 24, it was 8: each step of the optimizer sees {24 * accumulate} instead of" in caplog.text
    )
    assert "learning rate was left as it is" in caplog.text
    assert ("accumulate_grad_batches=1 would keep" in caplog.text) == (accumulate > 1)


def test_without_a_plan_in_the_trainer_it_warns():
    with pytest.warns(HiRemateWarning, match="has no HiRemateCallback"):
        run(Module(), finder(budget=BUDGET, max_val=4))


def test_the_whole_training_step_can_be_the_target():
    class Silent(Module):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self(batch).square().mean()

    found = finder()

    run(Silent(), found, planned(target="training_step"))

    assert found.result.trial.measured_peak_bytes <= BUDGET


class Wide(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 20_000), nn.Linear(20_000, 4))


class Fixed(Module):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(random_rows(64), batch_size=16)


@pytest.mark.parametrize(
    ("kind", "options", "budget", "given", "error", "words"),
    [
        (Module, {}, BUDGET, {"train_dataloaders": [1]}, MisconfigurationException, "one was passed to fit"),
        (Module, {"batch_arg_name": "size_of_batch"}, BUDGET, {}, MisconfigurationException, "'size_of_batch'"),
        (Module, {}, "60%", {}, BudgetError, "no batch is the largest"),
        (Wide, {"init_val": 1}, "2 MiB", {}, InfeasibleBudgetError, "Not even size 1 fits"),
        (Fixed, {}, BUDGET, {}, ConfigurationError, "its tensors are the same"),
    ],
    ids=["a loader of fit", "an attribute that is nowhere", "a share", "below the weights", "one size"],
)
def test_what_can_not_be_searched_is_refused(kind, options, budget, given, error, words):
    module = kind()
    before, size = copy.deepcopy(module.state_dict()), module.batch_size

    with pytest.raises(error, match=words):
        trainer(finder(**options), planned(budget)).fit(module, **given)

    assert_same(module.state_dict(), before)
    assert module.batch_size == size


def test_two_attributes_of_the_name_cause_a_warning():
    class Both(Module):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"batch_size": 4})

    with pytest.warns(UserWarning, match="Both model.batch_size and model.hparams.batch_size exist"):
        trainer(finder(), planned()).fit(Both())


def test_a_fast_run_skips_the_search():
    with pytest.warns(UserWarning, match="HiRemateBatchSizeFinder is skipped: fast_dev_run is on"):
        trainer(finder(), planned(), fast_dev_run=True).fit(Module())


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_lightnings_modes_are_refused(mode):
    with pytest.raises(ValueError, match="mode"):
        HiRemateBatchSizeFinder(mode)


def test_it_goes_with_lightnings_learning_rate_finder():
    class Tuned(Module):
        lr = 1e-3

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    module, found = Tuned(), finder(max_val=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(found, LearningRateFinder(num_training_steps=4), planned("64 MiB"), max_epochs=1).fit(module)

    assert module.batch_size == 8
