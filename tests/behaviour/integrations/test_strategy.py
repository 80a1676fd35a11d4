"""The strategy named "hiremate" fits as the callback does; and budgets from the command line and from YAML."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from hiremate_lightning import BudgetError, ConfigurationError
from hiremate_lightning.callbacks import HiRemateCallback
from hiremate_lightning.integrations.lightning_strategy import HiRemateStrategy
from tests.behaviour.integrations.test_callback import (
    CallsItself,
    CallsNet,
    assert_left_alone,
    batches,
    fit,
)
from tests.exact import assert_same
from tests.trainers import quiet_trainer

needs_cli = pytest.mark.skipif(
    importlib.util.find_spec("jsonargparse") is None, reason="not installed: jsonargparse, which LightningCLI needs"
)


def strategy(budget: int | float | str = "85%", **options) -> HiRemateStrategy:
    return HiRemateStrategy(budget, **{"verbose": False, **options})


@pytest.mark.parametrize(
    ("kind", "settings", "options"),
    [
        (CallsItself, {}, {}),
        (CallsItself, {"target": "training_step"}, {}),
        (CallsNet, {"target": "net"}, {}),
        (CallsItself, {"on_infeasible": "warn"}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
    ],
    ids=["forward", "training_step", "net", "bf16 and accumulation"],
)
def test_a_fit_under_the_strategy_is_a_plain_fit_bit_for_bit(kind, settings, options):
    expected, expected_logs = fit(kind, **options)
    chosen = strategy(**settings)

    found, logs = fit(kind, strategy=chosen, **options)

    assert_same(found.state_dict(), expected.state_dict())
    assert logs == expected_logs
    assert_left_alone(found)
    if not options:
        assert chosen.plan.planned_peak_bytes < chosen.plan.unplanned_peak_bytes
        assert chosen.plan.measured.peak_bytes <= chosen.plan.budget_bytes


def test_the_name_alone_is_enough():
    expected, _ = fit(CallsItself)

    runner = quiet_trainer(strategy="hiremate")
    torch.manual_seed(5)
    module = CallsItself()
    runner.fit(module, batches())

    assert "hiremate" in StrategyRegistry
    assert isinstance(runner.strategy, HiRemateStrategy)
    assert runner.strategy.plan.budget.is_auto
    assert_same(module.state_dict(), expected.state_dict())


def test_one_trainer_fits_twice_and_tests():
    """An exception leaves every module as it was."""

    class Tests(CallsItself):
        fails = False

        def test_step(self, batch, index):
            self.log("test", self(batch[0]).square().mean())

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.fails and batch_idx == 2:
                raise KeyError("the user's own")

    module, runner = Tests(), quiet_trainer(strategy=strategy())
    for _ in range(2):
        runner.fit(module, batches())
        assert sum(isinstance(c, HiRemateCallback) for c in runner.callbacks) == 1
        assert_left_alone(module)
    runner.test(module, batches(), verbose=False)
    assert_left_alone(module)
    module.fails = True
    with pytest.raises(KeyError, match="the user's own"):
        quiet_trainer(strategy=strategy()).fit(module, batches())
    assert_left_alone(module)


def test_checkpoints_are_saved_last_without_the_strategy(tmp_path):
    files = []
    for number, options in enumerate([{}, {"strategy": strategy()}]):
        folder = tmp_path / str(number)
        runner = quiet_trainer(ModelCheckpoint(folder, filename="last"), enable_checkpointing=True, **options)
        torch.manual_seed(5)
        runner.fit(CallsItself(), batches())
        assert isinstance(runner.callbacks[-1], ModelCheckpoint)
        files.append(torch.load(folder / "last.ckpt", weights_only=True))

    plain, planned = files
    assert list(planned["state_dict"]) == list(plain["state_dict"])
    assert len(planned["callbacks"]) == len(plain["callbacks"])


@pytest.mark.parametrize("chosen", ["hiremate", strategy()], ids=["name", "object"])
def test_two_devices_are_refused_with_the_callback_as_the_answer(chosen):
    with pytest.raises(MisconfigurationException) as caught:
        quiet_trainer(strategy=chosen, devices=2)

    assert str(caught.value) == (
        "strategy='hiremate' trains on one device, found 2. Pass devices=1, or plan on all of them by "
        "Trainer(strategy='ddp', callbacks=[HiRemateCallback(...)])."
    )


class BringsTheCallback(CallsItself):
    def configure_callbacks(self) -> list[Callback]:
        return [HiRemateCallback("85%", verbose=False)]


@pytest.mark.parametrize(
    ("kind", "callbacks"), [(CallsItself, [HiRemateCallback("85%")]), (BringsTheCallback, [])], ids=["trainer", "model"]
)
def test_the_callback_beside_the_strategy_is_refused(kind, callbacks):
    module = kind()
    with pytest.raises(MisconfigurationException, match="Keep one of the two"):
        quiet_trainer(*callbacks, strategy=strategy()).fit(module, batches())
    assert_left_alone(module)


def test_arguments_are_checked_when_the_strategy_is_made():
    with pytest.raises(BudgetError, match="'bananas' is not one of the units"):
        HiRemateStrategy("10 bananas")
    with pytest.raises(ConfigurationError, match="max_plans must be at least 1"):
        HiRemateStrategy(max_plans=0)
    with pytest.raises(TypeError, match="margin"):
        HiRemateStrategy(margin=0.1)


def test_the_device_is_the_one_that_the_trainer_chose():
    chosen = strategy()
    assert chosen.root_device == torch.device("cpu")

    chosen.parallel_devices = [torch.device("cuda:1")]

    assert chosen.root_device == torch.device("cuda:1")


@pytest.mark.gpu
def test_the_name_alone_trains_on_the_gpu():
    devices = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            devices.append(pl_module.device.type)

    runner = quiet_trainer(Watch(), strategy="hiremate", accelerator="gpu", devices=1)
    runner.fit(CallsItself(), batches())

    assert set(devices) == {"cuda"}
    assert runner.strategy.plan is not None


BUDGETS = [("10 GiB", "10 GiB"), ("0.5", 0.5), ("800000000", 800_000_000), ("60%", "60%"), ("auto", "auto")]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Parse a command line, without a run."""
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI calls what it deprecates

    def parse(*arguments: str) -> SimpleNamespace:
        fixed = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "enable_progress_bar": False}
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        defaults = {**fixed, "max_epochs": 1}
        made = LightningCLI(CallsItself, run=False, trainer_defaults=defaults, seed_everything_default=False)
        return SimpleNamespace(trainer=made.trainer, model=made.model)

    return parse


def callback_of(runner: pl.Trainer) -> HiRemateCallback:
    (found,) = (c for c in runner.callbacks if isinstance(c, HiRemateCallback))
    return found


YAML = """
trainer:
  callbacks:
    - class_path: hiremate_lightning.callbacks.HiRemateCallback
      init_args:
        budget: {}
        target: [net]
        verbose: false
"""


def by_flags(cli, text: str) -> HiRemateCallback:
    return callback_of(cli("--trainer.callbacks+=HiRemateCallback", f"--trainer.callbacks.budget={text}").trainer)


def by_yaml(cli, text: str) -> HiRemateCallback:
    Path("config.yaml").write_text(YAML.format(text), encoding="utf-8")
    return callback_of(cli("--config", "config.yaml").trainer)


def by_strategy(cli, text: str) -> HiRemateCallback:
    where = "hiremate_lightning.integrations.lightning_strategy.HiRemateStrategy"
    options = [f"--trainer.strategy.budget={text}", "--trainer.strategy.max_plans=3"]
    return cli(f"--trainer.strategy={where}", *options).trainer.strategy._callback


@needs_cli
@pytest.mark.parametrize(("text", "budget"), BUDGETS)
@pytest.mark.parametrize(
    ("read", "options"),
    [(by_flags, {}), (by_yaml, {"target": ["net"], "verbose": False}), (by_strategy, {"max_plans": 3})],
    ids=["command line", "YAML", "strategy"],
)
def test_a_budget_and_its_options_are_read(cli, read, options, text, budget):
    found, expected = read(cli, text), HiRemateCallback(budget, **options)
    assert (found.options, found.target) == (expected.options, expected.target)


@needs_cli
def test_a_budget_that_cannot_be_read_stops_the_command_line(cli):
    with pytest.raises(ValueError, match="'bananas' is not one of the units"):
        cli("--trainer.callbacks+=HiRemateCallback", "--trainer.callbacks.budget=10 bananas")


@needs_cli
def test_a_module_trains_from_the_command_line(cli):
    made = cli("--trainer.callbacks+=HiRemateCallback", "--trainer.callbacks.budget=85%")

    made.trainer.fit(made.model, batches())

    assert callback_of(made.trainer).plan is not None
