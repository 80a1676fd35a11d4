"""The callback that finds the batch size of a LightningModule by planning, before fitting starts."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LambdaCallback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities.exceptions import MisconfigurationException, _TunerExitException
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch.utils.data import DataLoader

from hiremate_lightning.callbacks.planning import planner_of, targets_for
from hiremate_lightning.errors import HiRemateWarning
from hiremate_lightning.options import SIZE_OPTIONS, SessionOptions, make_size_options
from hiremate_lightning.planning.planner import make_options
from hiremate_lightning.sizes.batch_size import SizeFinder
from hiremate_lightning.sizes.size_search import BatchSizeResult
from hiremate_lightning.sizes.size_trials import SizeRunner, TrainingState, TrialSteps
from hiremate_lightning.targets.candidates import Target
from hiremate_lightning.torch_private.hacks import replaced
from hiremate_lightning.units import Budget, parse_budget

MODE = "plan"
UNPLANNED = (
    "This Trainer has no HiRemateCallback: the size that HiRemateBatchSizeFinder finds fits under a plan only. "
    "Add HiRemateCallback with the same budget."
)


class HiRemateBatchSizeFinder(BatchSizeFinder):
    """Find the batch size that trains within a budget, by planning instead of running out of memory.

    The search runs when fitting starts, in at most six training steps. Then weights, optimizers, schedulers, loops,
    loggers and random generators are restored, the size is set, and fitting goes on. A size from a checkpoint is set
    without a search. Learning rate and `accumulate_grad_batches` don't change.

    The size fits under a plan: use it in a Trainer that has a `HiRemateCallback` (or strategy="hiremate").

    Args:
        mode: "plan".
        steps_per_trial: Accepted for the signature's sake: a size is proven by the two steps that a plan takes.
        init_val: Size of the first real step; small.
        max_trials: Most sizes to plan in one search.
        batch_arg_name: Name of the attribute of the module, the data module, or their hparams that holds the size: the
            batch size, a sequence length, any whole number that the batch grows with.
        margin: Share of what the budget leaves beside weights and optimizer that predictions must leave free.
        max_val: Largest size to find: the length of the data set, say, at which HiRemateBatchSizeFinder stops by
            itself.
        budget: Bytes ("12 GiB", an int) or "auto"; None for that of the HiRemateCallback, else "auto".
        max_overhead: Most predicted overhead to accept, a ratio.
        objective: "largest", or "throughput" for the most samples per second.
        longest_batch: Takes a size and gives a batch of it on the host, of the longest samples; None for the first
            batch that the loader gives.
        target: As for `HiRemateCallback`; None for that of the HiRemateCallback.
        time_limit_s: Seconds for solving one plan, counted as the work of an idle core; training may take longer and
            gets a plan at least as fast.
        solver: Leave it at the default, "portfolio", the best of several strategies. The others are for comparison:
            "segments", without a MIP solver; "none"; or a method of a paper: "hilp", "rockmate", "rotor", "pofo",
            "min_memory", "twremat", "checkmate", "checkmate_lp", "chen", "dtr"; see docs/formulation.md.
        verbose: Whether to report the search, on rank zero.

    Attributes:
        optimal_batch_size: The size; before a search `init_val`.
        result: The result of the search; None before a search, and if the size came from a checkpoint.

    Raises:
        BudgetError: If the budget can't be read, or is a share.
        ConfigurationError: If another argument is out of its range.
        ValueError: If the mode is another one.

    Example:
        >>> callbacks = [HiRemateCallback("10 GiB"), HiRemateBatchSizeFinder()]
        >>> Trainer(callbacks=callbacks).fit(module)
    """

    SUPPORTED_MODES = (MODE,)  # type: ignore[assignment]

    def __init__(
        self,
        mode: str = MODE,
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
        *,
        budget: int | float | str | None = None,
        max_overhead: float = 0.3,
        objective: str = "largest",
        longest_batch: Callable[[int], Any] | None = None,
        target: Target = None,
        time_limit_s: float = 3.0,
        solver: str = "portfolio",
        verbose: bool = True,
    ) -> None:
        # Here `locals()` has only the arguments.
        self._sizes = make_size_options(**{name: value for name, value in locals().items() if name in SIZE_OPTIONS})
        super().__init__(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        self._budget = None if budget is None else parse_budget(budget)
        asked_budget = Budget() if self._budget is None else self._budget
        self._asked = make_options(asked_budget, time_limit_s=time_limit_s, solver=solver, verbose=verbose)
        self._longest_batch = longest_batch
        self._target = target
        self._restored: int | None = None
        self.result: BatchSizeResult | None = None

    @property
    def state_key(self) -> str:
        """The key of this callback's state in checkpoints: there may be one finder per attribute."""
        return self._generate_state_key(batch_arg_name=self._batch_arg_name)

    def state_dict(self) -> dict[str, Any]:
        """Return the size for a checkpoint; {} before a search."""
        size = self._restored if self.result is None else self.result.size
        return {} if size is None else {"size": size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the size from a checkpoint."""
        self._restored = state_dict.get("size")

    # ---------------------------------------------------------------- hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str | None = None) -> None:
        """Check what the search needs.

        Raises:
            MisconfigurationException: If there is no such attribute, or a data loader was passed to `fit`.
        """
        if stage != "fit":
            return
        if not trainer.fit_loop._data_source.is_module():
            raise MisconfigurationException(
                "HiRemateBatchSizeFinder needs to make data loaders of other sizes, but one was passed to fit(). "
                "Define train_dataloader() in the LightningModule or in a LightningDataModule."
            )
        name = self._batch_arg_name
        if not lightning_hasattr(pl_module, name):
            raise MisconfigurationException(
                f"HiRemateBatchSizeFinder found no attribute {name!r} in the model, the data module, or their hparams. "
                "Let train_dataloader() use such an attribute, and name it with batch_arg_name."
            )
        if hasattr(pl_module, name) and name in getattr(pl_module, "hparams", {}):
            rank_zero_warn(
                f"Both model.{name} and model.hparams.{name} exist, and HiRemateBatchSizeFinder sets both. Keep one."
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Search for the size, or set the size from a checkpoint."""
        if self._restored is not None:
            self.optimal_batch_size = self._restored
            _set_size(trainer, pl_module, self._batch_arg_name, self._restored)
        elif trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn("HiRemateBatchSizeFinder is skipped: fast_dev_run is on.")
        else:
            self.scale_batch_size(trainer, pl_module)

    # Only training is planned: the base class would also search before these stages.
    on_validation_start = Callback.on_validation_start
    on_test_start = Callback.on_test_start
    on_predict_start = Callback.on_predict_start

    def scale_batch_size(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Search for the size, restore the training state, and set the size.

        Raises:
            BudgetError: If the budget is a share.
            ConfigurationError: If the step can't be scaled.
            InfeasibleBudgetError: If not even size 1 fits.
        """
        planner = planner_of(trainer)
        trials = _Trials(trainer, pl_module, self._batch_arg_name, self._longest_batch)
        asked, target = self._asked, self._target
        if planner is not None:
            asked = replace(asked, budget=self._budget or planner.options.budget)
            target = planner.target if target is None else target
        before = int(lightning_getattr(pl_module, self._batch_arg_name) or 0)
        with ExitStack() as stack:
            if planner is not None:
                stack.enter_context(planner.paused(trainer, pl_module))
            else:
                warnings.warn(UNPLANNED, HiRemateWarning, stacklevel=3)
            stack.enter_context(trials)
            self.result = self._search(trials, asked, target)
        self.optimal_batch_size = self.result.size
        _set_size(trainer, pl_module, self._batch_arg_name, self.result.size)
        self._say_what_changes(trainer, before, self.result.size)
        if self._early_exit:
            raise _TunerExitException

    def _search(self, trials: _Trials, asked: SessionOptions, target: Target) -> BatchSizeResult:
        longest = min(self._sizes.max_val, trials.dataset_length(self._sizes.init_val))
        options = replace(self._sizes, init_val=min(self._sizes.init_val, longest), max_val=longest)
        runner = SizeRunner(
            trials.module,
            asked,
            trials.state,
            trials.train,
            lambda session: targets_for(trials.module, session, target),
            trials.validate if trials.has_validation else None,
        )
        return SizeFinder(runner, options).find()

    def _say_what_changes(self, trainer: pl.Trainer, before: int, size: int) -> None:
        if size == before:
            return
        name, accumulated = self._batch_arg_name, trainer.accumulate_grad_batches
        parts, advice = trainer.world_size * accumulated, ""
        if before and (before % size == 0 or (size > before and accumulated > 1)):
            kept, near = max(1, accumulated * before // size), "at" if before % size == 0 else "near"
            advice = f" accumulate_grad_batches={kept} would keep the effective size {near} {before * parts}."
        rank_zero_info(
            f"{name} is now {size}, it was {before}: each step of the optimizer sees {size * parts} instead of "
            f"{before * parts} (devices x accumulate_grad_batches x {name}). The learning rate was left as it is; it "
            f"may have to be changed with the effective size.{advice}"
        )


def _set_size(trainer: pl.Trainer, module: pl.LightningModule, name: str, size: Any) -> None:
    """Set the attribute that holds the size, and make the loops rebuild their data loaders."""
    lightning_setattr(module, name, size)
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
        loop._combined_loader = None
        loop._data_fetcher = None


class _Trials:
    """Runs the Trainer's own loops for one batch at a time; on exit restores the Trainer and the state of training."""

    def __init__(
        self, trainer: pl.Trainer, module: pl.LightningModule, name: str, longest_batch: Callable[[int], Any] | None
    ) -> None:
        self.module, self.has_validation = module, trainer.enable_validation
        self._trainer, self._name, self._longest_batch = trainer, name, longest_batch
        loop, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        parts = (trainer, loop, epoch, epoch.val_loop, epoch.automatic_optimization, epoch.manual_optimization)
        self._attributes = [(part, dict(part.__dict__)) for part in parts]
        self._progress = copy.deepcopy(loop.state_dict())
        self._plain = {k: v for k, v in module.__dict__.items() if isinstance(v, (bool, int, float, str, type(None)))}
        self._size = lightning_getattr(module, name)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.state = TrainingState(module, trainer.optimizers, [*schedulers, trainer.precision_plugin])

    def __enter__(self) -> None:
        trainer = self._trainer
        trainer.logger = DummyLogger() if trainer.logger is not None else None
        trainer.limit_train_batches = 1
        trainer.limit_val_batches = 0

    def __exit__(self, *_: object) -> None:
        self.state.restore()  # also where no step ran, since making a loader draws random numbers
        for part, attributes in self._attributes:
            part.__dict__.clear()
            part.__dict__.update(attributes)
        self._restart()
        self.module.__dict__.update(self._plain)
        self._trainer._logger_connector.reset_results()
        self._trainer._logger_connector.reset_metrics()
        self._set(self._size)

    def _restart(self) -> None:
        loop = self._trainer.fit_loop
        loop.load_state_dict(copy.deepcopy(self._progress))
        loop.restarting = False

    def dataset_length(self, size: int) -> int:
        """Return the number of training samples per device, a large number if it is unknown."""
        self._set(size)
        self._trainer.fit_loop.setup_data()
        loader = self._trainer.fit_loop._combined_loader
        assert loader is not None, "setup_data has made it"
        try:
            length = int(loader._dataset_length())
        except NotImplementedError:  # an iterable data set has no length
            return 2**62
        return max(1, length // self._trainer.world_size)

    def _set(self, size: Any) -> None:
        _set_size(self._trainer, self.module, self._name, size)

    def train(self, size: int, trial: TrialSteps) -> None:
        """Run one training step, on the batch of `longest_batch` if that is set."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        self._set(size)
        self._restart()
        probe = LambdaCallback(
            on_train_batch_start=lambda trainer, module, batch, *_: trial.step_begins(batch),
            on_train_batch_end=lambda trainer, module, outputs, batch, *_: trial.step_ends(batch),
        )
        trainer.callbacks = [probe]  # type: ignore[attr-defined]
        loop.epoch_loop.max_steps = trainer.global_step + 1
        if self._longest_batch is not None:
            data: DataLoader[Any] = DataLoader([self._longest_batch(size)], batch_size=None)  # type: ignore[arg-type]
            loop._data_source = _DataLoaderSource(data, loop._data_source.name)
        with _quiet():
            loop.run()

    def validate(self, size: int) -> None:
        """Run one validation step."""
        trainer = self._trainer
        self._set(size)
        trainer.callbacks = []  # type: ignore[attr-defined]
        trainer.limit_val_batches = 1
        trainer.validating = True
        try:
            with _quiet():
                trainer.fit_loop.epoch_loop.val_loop.run()
        finally:
            trainer.training = True
            trainer.limit_val_batches = 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's messages about loops of one step."""
    lines = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with replaced((lines, "disabled", True)), warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        yield
