"""Fitting with the callback gives what fitting without it gives, and leaves the module as it was found."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hiremate_lightning import InfeasibleBudgetError
from hiremate_lightning.callbacks import HiRemateCallback
from hiremate_lightning.reporting.plan_summary import advice_lines
from hiremate_lightning.units import format_bytes
from tests.exact import assert_same, recorded
from tests.trainers import Squared, quiet_trainer

WIDTH, ROWS = 24, 512
SLOT = "_compiled_call_impl"


def layers(depth: int = 1, width: int = WIDTH) -> nn.Sequential:
    """A chain in which activations outweigh weights, with dropout and batch norm."""
    block = [nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2)]
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(depth) for layer in block), nn.Linear(width, width))


class CallsItself(pl.LightningModule):
    """A module whose training step calls its own forward."""

    def __init__(self, batch_size: int = ROWS) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.net = nn.Sequential(layers(), layers())
        self.rows_trained: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self.loss(batch[0])
        self.log("loss", loss)
        self.log_dict({"twice": 2 * loss}, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader:
        return batches(rows=self.batch_size)


class CallsSubmodules(CallsItself):
    """A module whose training step calls submodules, never its own forward."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.net:
            x = stage(x)
        return x.square().mean()


class CallsNet(CallsItself):
    """A module whose training step calls one submodule."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


class TrainsOnItsSlope(CallsItself):
    """A module with a penalty on the gradient of its loss with respect to its input."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        loss = super().loss(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


class TakesTheBatchAlone(CallsItself):
    """A module whose training step does not ask for the number of its batch."""

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return super().training_step(batch, 0)


class Validates(CallsItself):
    """A module with validation, which calls the same forward."""

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("validation", self(batch[0]).square().mean())

    def val_dataloader(self) -> DataLoader:
        return batches(2)


class Adversaries(pl.LightningModule):
    """Two networks with an optimizer each, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = layers(2), layers(2)

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        first.zero_grad()
        made = self.critic(self.generator(batch[0])).square().mean()
        self.manual_backward(made)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        fake = self.generator(batch[0]).detach()
        judged = (self.critic(batch[0]) - self.critic(fake)).square().mean()
        self.manual_backward(judged)
        second.step()
        self.untoggle_optimizer(second)
        self.log_dict({"made": made, "judged": judged})

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = (self.generator, self.critic)
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in parts]


@dataclass
class Ledger(Callback):
    """Writes down what every batch left behind."""

    logged: list[dict[str, float]] = field(default_factory=list)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.logged.append({name: value.item().hex() for name, value in trainer.callback_metrics.items()})


def batches(count: int = 4, rows: int = ROWS, width: int = WIDTH) -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count * rows, width, generator=generator)
    return DataLoader(TensorDataset(x), batch_size=rows)


def planned(budget: str = "85%", **options) -> HiRemateCallback:
    return HiRemateCallback(budget, **{"verbose": False, **options})


def fit(kind: type[pl.LightningModule], *callbacks: Callback, **options) -> tuple[pl.LightningModule, list]:
    torch.manual_seed(5)
    module, ledger = kind(), Ledger()
    quiet_trainer(ledger, *callbacks, **options).fit(module, batches())
    return module, ledger.logged


def assert_fits_alike(
    kind: type[pl.LightningModule], *callbacks: Callback, others: Callable[[], Sequence[Callback]] = tuple, **options
) -> pl.LightningModule:
    """Fit plainly and with a plan; fail where weights or logs differ.

    Args:
        kind: The module.
        *callbacks: Of the planned fit.
        others: Makes the callbacks of both fits.
        **options: Of the trainer.

    Returns:
        The module that was planned.
    """
    expected, expected_logs = fit(kind, *others(), **options)
    found, logs = fit(kind, *others(), *callbacks, **options)
    assert_same(found.state_dict(), expected.state_dict())
    assert logs == expected_logs
    return found


def assert_left_alone(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        taken = {SLOT, "forward", "training_step", "log", "log_dict"} & set(inner.__dict__)
        assert not taken, f"{name or 'the root'} still has {taken}"


STEP, WARN, HALF = {"target": "training_step"}, {"on_infeasible": "warn"}, {"precision": "bf16-mixed"}


@pytest.mark.parametrize(
    ("kind", "settings", "options"),
    [
        (CallsItself, {}, {}),
        (CallsSubmodules, {}, {}),
        (CallsItself, STEP, {}),
        (CallsSubmodules, STEP, {}),
        (TrainsOnItsSlope, STEP, {}),
        (TakesTheBatchAlone, STEP, {}),
        (CallsNet, {"target": "net"}, {}),
        (CallsItself, {"target": ["net"]}, {}),
        (CallsItself, WARN, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
        (CallsItself, WARN, HALF),
        (CallsItself, {**STEP, **WARN}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, **HALF}),
        pytest.param(
            *(Adversaries, {"budget": "95%", **WARN}, {}),
            marks=pytest.mark.filterwarnings("ignore:Nothing fits the budget", "ignore:The measured peak"),
        ),
    ],
)
def test_a_planned_fit_is_a_plain_fit_bit_for_bit(kind, settings, options):
    callback = planned(**settings)
    assert_left_alone(assert_fits_alike(kind, callback, **options))
    assert callback.plan is not None


def test_validation_runs_unplanned_and_changes_nothing():
    callback = planned()
    count_at_validation = []

    class Watch(Callback):
        def on_validation_end(self, trainer, pl_module):
            count_at_validation.append(callback._targets.session.runs)

    assert_fits_alike(Validates, callback, Watch())
    assert count_at_validation == [0, 4]


def test_one_callback_fits_twice():
    torch.manual_seed(5)
    module, callback = CallsItself(), planned()
    for _ in range(2):
        quiet_trainer(callback, max_epochs=1).fit(module, batches())
        assert callback.plan is not None
        assert_left_alone(module)


def test_checkpoints_have_the_same_keys_and_no_callback_state(tmp_path):
    files = []
    for number, callbacks in enumerate([(), (planned(),)]):
        torch.manual_seed(5)
        runner = quiet_trainer(*callbacks, max_epochs=1)
        runner.fit(CallsItself(), batches())
        runner.save_checkpoint(tmp_path / f"{number}.ckpt")
        files.append(torch.load(tmp_path / f"{number}.ckpt", weights_only=True))
    plain, under_plan = files
    assert list(under_plan["state_dict"]) == list(plain["state_dict"])
    assert under_plan["callbacks"] == plain["callbacks"]


@pytest.mark.parametrize("first_is_planned", [True, False])
def test_a_fit_resumes_with_or_without_a_plan(tmp_path, first_is_planned):
    def run(*callbacks_by_part):
        torch.manual_seed(5)
        first, second = CallsItself(), CallsItself()
        runner = quiet_trainer(*callbacks_by_part[0], max_epochs=1)
        runner.fit(first, batches())
        runner.save_checkpoint(tmp_path / "half.ckpt")
        torch.manual_seed(6)
        quiet_trainer(*callbacks_by_part[1], max_epochs=2).fit(second, batches(), ckpt_path=tmp_path / "half.ckpt")
        return second

    expected = run((), ())
    found = run((planned(),), ()) if first_is_planned else run((), (planned(),))
    assert_same(found.state_dict(), expected.state_dict())


@pytest.mark.parametrize("target", [None, "training_step"])
@pytest.mark.parametrize("failing_batch", [0, 2])
def test_an_exception_leaves_every_module_as_it_was(target, failing_batch):
    class Fails(CallsItself):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.fail(index)
            return loss

        @torch.compiler.disable
        def fail(self, index):
            if index == failing_batch:
                raise KeyError("the user's own")

    module = Fails()
    with pytest.raises(KeyError, match="the user's own"):
        quiet_trainer(planned(target=target, on_infeasible="warn")).fit(module, batches())
    assert_left_alone(module)


REFUSED = {
    "two callbacks": (CallsItself, (planned(), planned("50%")), MisconfigurationException, "two HiRemateCallbacks"),
    "the step of a manual optimization": (
        *(Adversaries, (planned(target="training_step"),)),
        *(MisconfigurationException, "needs automatic optimization"),
    ),
    "a target that does not exist": (CallsItself, (planned(target="nett"),), ValueError, "Did you mean 'net'"),
    "a budget too small": (CallsItself, (planned("100 KiB"),), InfeasibleBudgetError, "too small for CallsItself"),
}


@pytest.mark.parametrize(("kind", "callbacks", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_planned_is_refused(kind, callbacks, error, words):
    module = kind()
    with pytest.raises(error, match=words):
        quiet_trainer(*callbacks).fit(module, batches())
    assert_left_alone(module)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("FSDPStrategy", "FSDP1 flattens the parameters of each unit. Use ModelParallelStrategy or strategy='ddp'"),
        ("DeepSpeedStrategy", "DeepSpeed lays all weights into one flat tensor.*Use ModelParallelStrategy"),
        ("SingleDeviceXLAStrategy", "XLA decides on memory itself"),
    ],
)
def test_a_strategy_managing_memory_itself_is_refused_by_name(strategy, reason):
    module, callback = CallsItself(), planned()
    stand_in = SimpleNamespace(strategy=type(strategy, (), {})(), callbacks=[callback])
    with pytest.raises(MisconfigurationException, match=f"can't plan under {strategy}.*{reason}"):
        callback.setup(stand_in, module, "fit")
    assert_left_alone(module)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_lightning_module_is_refused():
    module = torch.compile(CallsItself())
    with pytest.raises((MisconfigurationException, ValueError), match="compiled"):
        quiet_trainer(planned()).fit(module, batches())


def test_other_stages_are_not_planned():
    class Tests(CallsItself):
        def test_step(self, batch, index):
            self.log("test", self(batch[0]).square().mean())

    callback = planned()
    runner = quiet_trainer(callback)
    runner.test(Tests(), batches(), verbose=False)
    assert callback._targets is None


def test_the_callback_pickles_before_during_and_after_a_fit():
    copies = []

    class Copies(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            copies.append(pickle.loads(pickle.dumps(callback)))

    callback = pickle.loads(pickle.dumps(planned(target="net")))
    fit(CallsNet, callback, Copies())
    for copied in (copies[0], pickle.loads(pickle.dumps(callback))):
        assert copied._targets is None
        assert copied.plan is not None


class WithoutBatchNorm(CallsItself):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(layer for stage in self.net for layer in stage if not isinstance(layer, nn.BatchNorm1d))
        )


@pytest.mark.parametrize(
    ("kind", "averaging_comes_first"),
    [(WithoutBatchNorm, True), (WithoutBatchNorm, False), (CallsItself, True)],
)
@pytest.mark.filterwarnings("ignore:A call of CallsItself could not be captured")
def test_averaged_weights_are_the_same(kind, averaging_comes_first):
    def averaging():
        return StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)

    expected, _ = fit(kind, averaging(), max_epochs=2)
    callbacks = [averaging(), planned()] if averaging_comes_first else [planned(), averaging()]
    found, _ = fit(kind, *callbacks, max_epochs=2)
    assert_same(found.state_dict(), expected.state_dict())


@pytest.mark.parametrize("target", [None, "training_step"])
@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_made_while_fitting_is_plain(target, copy_of):
    copies = []

    class Averages(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            copied = copy_of(pl_module)
            copied.log = copied.log_dict = lambda *_, **__: None
            runs = callback._targets.session.runs
            copied.training_step(batch, batch_idx).backward()
            assert callback._targets.session.runs == runs
            assert all(p.grad is not None for p in copied.parameters())
            copies.append(copied)

    callback = planned(target=target)
    fit(CallsItself, callback, Averages(), max_epochs=1)
    assert len(copies) == 4
    for copied in copies:
        assert all(module._compiled_call_impl is None for module in copied.modules())


class ValidatesByTraining(Validates):
    """A module whose validation is its training step, on larger batches."""

    def validation_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.training_step(batch, index)

    def val_dataloader(self) -> DataLoader:
        return batches(1, 4 * ROWS)


def test_a_validation_calling_the_training_step_is_not_planned():
    plain, callback = (planned(target="training_step") for _ in range(2))
    fit(CallsItself, plain)
    assert_fits_alike(ValidatesByTraining, callback)
    assert callback.plan.resident_bytes == plain.plan.resident_bytes
    difference = abs(callback.plan.measured.peak_bytes - callback.plan.planned_peak_bytes)
    assert difference <= 1024, "it was measured in a step, not in a validation"


def test_replacements_of_methods_by_users_are_called_and_stay():
    logged = []

    class Patched(CallsItself):
        def __init__(self) -> None:
            super().__init__()
            self.log = lambda name, value, **_: logged.append((name, value.item().hex()))
            self.training_step = self.doubled_step

        def doubled_step(self, batch, batch_idx):
            return 2 * CallsItself.training_step(self, batch, batch_idx)

    expected, _ = fit(Patched)
    expected_logs = [*logged]
    logged.clear()
    own = {name: expected.__dict__[name] for name in ("log", "training_step")}

    found, _ = fit(Patched, planned(target="training_step"))

    assert_same(found.state_dict(), expected.state_dict())
    assert logged == expected_logs
    assert {name: found.__dict__[name].__qualname__ for name in own} == {n: f.__qualname__ for n, f in own.items()}


def test_the_batch_size_finder_sees_the_planned_model():
    slots = []

    class Finds(BatchSizeFinder):
        def on_fit_start(self, trainer, pl_module):
            slots.append(SLOT in pl_module.__dict__)
            super().on_fit_start(trainer, pl_module)

    class Watched(CallsItself):
        def training_step(self, batch, index):
            slots.append(SLOT in self.__dict__)
            return super().training_step(batch, index)

    torch.manual_seed(5)
    module = Watched(batch_size=64)
    finder = Finds(mode="power", steps_per_trial=3, init_val=64, max_trials=2)
    quiet_trainer(finder, planned("95%", on_infeasible="warn"), max_epochs=1).fit(module)
    assert all(slots)


def test_the_batch_size_finder_backs_off_from_a_small_budget():
    torch.manual_seed(5)
    module = CallsItself(batch_size=256)
    finder = BatchSizeFinder(mode="power", steps_per_trial=3, init_val=256, max_trials=6)
    quiet_trainer(finder, planned("1 MiB"), max_epochs=1).fit(module)
    assert 256 <= module.batch_size < 256 * 2**6


def test_with_warn_an_infeasible_budget_trains_on_and_warns_once():
    callback = planned("100 KiB", on_infeasible="warn")
    with recorded() as warned:
        fit(CallsItself, callback)
    assert ["Nothing fits" in text for text in warned] == [True]
    assert callback.plan.planned_peak_bytes > callback.plan.budget_bytes


class Deep(CallsItself):
    """A module whose peak is within its layers, not in its loss."""

    width = 32

    def __init__(self) -> None:
        super().__init__()
        self.net = self.make_net()

    def make_net(self) -> nn.Sequential:
        return nn.Sequential(layers(depth=4, width=self.width), nn.Linear(self.width, 1))

    def train_dataloader(self) -> DataLoader:
        return batches(rows=2048, width=self.width)


class DeepWithHeavyLoss(Deep):
    """A module whose peak is in its loss."""

    width = 64

    def make_net(self) -> nn.Sequential:
        return layers(depth=6, width=self.width)


def test_what_planned_modules_do_not_receive_of_a_batch_counts():
    torch.manual_seed(5)
    resident = []
    for with_labels in (False, True):
        x, labels = torch.randn(2048, 32), torch.randn(2048, 64)
        callback = planned("100%")
        data = TensorDataset(x, labels) if with_labels else TensorDataset(x)
        quiet_trainer(callback).fit(Deep(), DataLoader(data, batch_size=512))
        resident.append(callback.plan.resident_bytes)
    assert resident[1] - resident[0] == 512 * 64 * 4


@pytest.mark.parametrize(
    ("kind", "target"), [(Deep, None), (Deep, "training_step"), (DeepWithHeavyLoss, None)], ids=str
)
def test_the_peak_is_within_the_budget_and_near_the_prediction(kind, target):
    torch.manual_seed(5)
    callback = planned("60%", target=target)
    quiet_trainer(callback).fit(kind())
    plan = callback.plan
    assert plan.planned_peak_bytes < plan.unplanned_peak_bytes
    assert plan.measured.peak_bytes <= plan.budget_bytes
    assert plan.measured.peak_bytes == pytest.approx(plan.planned_peak_bytes, rel=0.01)
    assert plan.measured.overhead is not None


def test_many_fits_in_one_process_are_all_planned():
    class Small(CallsItself):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    for _ in range(10):
        callback = planned("100%", target="training_step")
        quiet_trainer(callback, max_steps=3).fit(Small(), batches(3, 64, 8))
        assert callback.plan is not None


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar, None])
def test_a_fit_prints_three_lines_and_writes_a_page(bar, tmp_path, shared_console):
    """Each line starts at the left edge, whichever progress bar of Lightning is on the screen."""
    screen = io.StringIO()
    screen.isatty = lambda: True
    shared_console(file=screen, width=200, force_terminal=True, color_system=None)
    bars = [] if bar is None else [bar(refresh_rate=1)]
    logger = CSVLogger(tmp_path)
    fitting = quiet_trainer(
        *bars, planned(verbose=True), logger=logger, enable_progress_bar=bar is not None, log_every_n_steps=1
    )
    with redirect_stdout(screen), redirect_stderr(screen):
        fitting.fit(CallsItself(), batches(6))

    page = Path(logger.log_dir) / "hiremate_plan.html"
    text = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", screen.getvalue())
    lines = [line.split("\r")[-1] for line in text.split("\n")]
    printed = [line.rstrip() for line in lines if line.startswith("HiRemate plan of CallsItself")]
    assert [line.split(":")[0] for line in printed] == [
        f"HiRemate plan of CallsItself{ending}" for ending in ("", ", measured", ", more")
    ]
    assert str(page) in printed[2]
    assert page.is_file()
    assert text.count("HiRemate plan of") == 3


def test_the_advice_on_gradients_saves_in_lightning_what_it_says():
    """Gradients take more than activations."""

    class Early(Squared):
        def on_train_batch_start(self, batch: torch.Tensor, index: int) -> None:
            self.zero_grad()

    plans = []
    for kind in (Squared, Early):
        callback = planned("100%")
        net = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4)))
        quiet_trainer(callback).fit(kind(net), DataLoader(torch.randn(512, 128), 128))
        plans.append(callback.plan)
    late, early = plans
    (line,) = (line for line in advice_lines(late) if "zero_grad" in line)
    saved = format_bytes(late.planned_peak_bytes - early.planned_peak_bytes)
    assert line.startswith(f"Gradients of the step before live through the forward. {saved} less are needed where")
    assert "in Lightning, self.zero_grad() in on_train_batch_start does, unless gradients are accumulated" in line
    assert not any("zero_grad" in line for line in advice_lines(early))


def test_what_writes_a_page_names_the_plan_at_hand(tmp_path, monkeypatch, capsys):
    """Without a logger that has a folder the third line says what to write: with the callback, its own plan."""
    monkeypatch.chdir(tmp_path)
    callback = HiRemateCallback("100%")
    quiet_trainer(callback).fit(CallsItself(), batches(5))
    printed = re.search(r"more: .* shows a table; (.*) writes a page", capsys.readouterr().err)
    assert printed is not None
    assert "get_plan" not in printed[1]
    exec(printed[1], {"callback": callback})
    assert (tmp_path / "plan.html").stat().st_size
