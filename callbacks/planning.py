"""The callback that plans a LightningModule's training steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from hiremate_lightning.calls.refused import STRATEGIES
from hiremate_lightning.options import OPTIONS, SizeRanges
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.planning.planner import make_options
from hiremate_lightning.reporting.plan_summary import plan_metrics
from hiremate_lightning.reporting.report import calls_for
from hiremate_lightning.sessions.session import Session
from hiremate_lightning.targets.candidates import Target
from hiremate_lightning.targets.modules import Targets, give_way
from hiremate_lightning.targets.training_step import TrainingStepTarget


class HiRemateCallback(Callback):
    """Train within a budget of bytes, with the same numbers.

    The model's calls are taken over in `setup("fit")` and given back when fitting ends, also by an exception. Its first
    training step is captured and runs at the least memory; the next one runs by a plan of the whole step. State dict,
    checkpoints, optimizers and logs stay what they are. Validation, test and prediction are not planned.

    Every logger of the Trainer gets the numbers of each plan, and what was measured of it, as `hiremate/...` metrics.
    A logger with a folder of its own (TensorBoardLogger, CSVLogger) gets the plan as a page, hiremate_plan.html.

    Args:
        budget: Bytes ("12 GiB", "800 MB", an int) that must not be passed at any moment of a training step, all that is
            allocated on the device included; or a share ("60%", a float in (0, 1]) of what the unplanned step adds to
            what exists before it, the largest so far; or "auto" for what the device has free.
        target: Paths of the submodules to plan; "training_step" for the whole step, loss included; None for the
            module's `forward` where `training_step` calls it, else for the outermost submodules that it calls.
        time_limit_s: Seconds for solving one plan, counted as the work of an idle core: a busy machine takes longer and
            finds the same. The clock ends it after 10 s and four times as long, with a warning.
        max_plans: Most plans to make, one for each step signature (input shapes, for example). After that, a step runs
            by the plan of another input shape if it fits, else at the least memory.
        on_infeasible: "raise" if nothing fits the budget, or "warn" to train on with the least memory found.
        cache_dir: Folder for measured costs and plans, reused by later runs; None for no files.
        solver: Leave it at the default, "portfolio", the best of several strategies. The others are for comparison:
            "segments", without a MIP solver; "none"; or a method of a paper: "hilp", "rockmate", "rotor", "pofo",
            "min_memory", "twremat", "checkmate", "checkmate_lp", "chen", "dtr"; see docs/formulation.md.
        compile: "inductor" to fuse operations into kernels that Inductor makes, None for PyTorch's own; see
            docs/compiled.md.
        offload: "auto" to let plans put values into the host's memory between forward and backward if that is faster
            than to compute them again, or if nothing else fits, in up to half of what the host has free; "always
            allowed" for as much as host_budget names; "off" for never. See docs/offloading.md.
        host_budget: Most bytes of the host's memory for offloaded values, of this process ("64 GiB", an int); "auto"
            for half of what is free as planning begins, shared by the processes of a machine.
        verify: "first" to prove captured code against eager PyTorch at its first run, a number of steps to prove it at
            as many runs, "off" to believe it; see docs/limits.md.
        sizes: Smallest and largest size of a dimension of an argument, such as `{"input_ids": {1: (1, 4096)}}`.
            Dimensions of the same size, those of masks for example, follow. The largest sizes are planned in the first
            steps: a budget that is too small for them is refused then, and shares are of them.
            `torch._dynamo.mark_dynamic(tensor, dim, min=, max=)` on what the call is given asks for the same.
        recomputable_operators: Custom operators with Python code that give the same numbers when they run again, by
            name ("mylibrary::attention"). Others with Python code run once in a step, and their results are kept.
        verbose: Whether to report, on rank zero: a line when a plan is made, one when it was measured, one that says
            how to see more or where its page is; "full" for the whole table of the plan.

    Attributes:
        options: The options as the user gave them.
        target: The argument `target`.
        plan: The latest plan, None before there is one; it stays after fitting.

    Raises:
        BudgetError: If the budget can't be read.
        ConfigurationError: If another argument is out of its range.

    Example:
        >>> trainer = Trainer(callbacks=[HiRemateCallback(budget="10 GiB")])
    """

    def __init__(
        self,
        budget: int | float | str = "auto",
        *,
        target: str | Sequence[str] | None = None,
        time_limit_s: float = 30.0,
        max_plans: int = 8,
        on_infeasible: str = "raise",
        cache_dir: str | Path | None = None,
        solver: str = "portfolio",
        compile: str | None = None,
        offload: str = "off",
        host_budget: int | str = "auto",
        verify: str | int = "first",
        sizes: SizeRanges | None = None,
        recomputable_operators: Sequence[str] = (),
        verbose: bool | Literal["full"] = True,
    ) -> None:
        # `locals()` holds nothing but the arguments here.
        self.options = make_options(**{name: value for name, value in locals().items() if name in OPTIONS})
        self.target = target
        self._targets: Targets | TrainingStepTarget | None = None
        self._unlogged: Plan | None = None  # a plan that was not logged yet, or not with its measurements
        self.plan: Plan | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without that of a running fit, so that the callback can go to spawned processes."""
        return {**self.__dict__, "_targets": None}

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of all step signatures so far; after fitting, the latest one."""
        if self._targets is not None:
            return tuple(self._targets.session.plans.values())
        return () if self.plan is None else (self.plan,)

    @contextmanager
    def paused(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Iterator[None]:
        """Detach from the model during the block; afterwards plan its calls again."""
        self._detach()
        yield
        self.setup(trainer, pl_module, "fit")
        self.on_fit_start(trainer, pl_module)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace the model's calls by planned calls."""
        if stage != "fit":
            return
        self._refuse(trainer, pl_module)
        give_way(pl_module)
        session = Session(pl_module, self.options)

        def note(plan: Plan) -> None:
            self.plan = self._unlogged = plan

        session.listeners.append(note)
        folders = [getattr(logger, "log_dir", None) for logger in trainer.loggers]
        session.reporter.more = calls_for(plan="callback.plan")
        session.reporter.folder = next((Path(f) for f in folders if isinstance(f, str)), None)
        self._targets = targets_for(pl_module, session, self.target)
        self._targets.attach()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the calls of modules that `configure_model` added, and watch the optimizers."""
        if self._targets is not None:
            self._targets.attach()
            for optimizer in trainer.optimizers:
                self._targets.session.watch_optimizer(optimizer)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *_: Any) -> None:
        """Count the bytes of the whole batch: the planned modules may receive only a part."""
        if self._targets is not None:
            self._targets.session.expect_batch(batch)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """End the step before validation, checkpoints and the next batch, which are not measured; log new plans."""
        if self._targets is None:
            return
        self._targets.session.end_step()
        if self._unlogged is not None:
            metrics = plan_metrics(self._unlogged, len(self.plans))
            self._unlogged = None
            for logger in trainer.loggers:  # they write on rank zero only
                logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Detach from the model."""
        self._detach()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Detach from the model."""
        if stage == "fit":
            self._detach()

    def _detach(self) -> None:
        if self._targets is not None:
            self._targets.session.close()
            self._targets = None

    def _refuse(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        others = [c for c in trainer.callbacks if isinstance(c, HiRemateCallback) and c is not self]  # type: ignore[attr-defined]
        if others:
            raise MisconfigurationException("There are two HiRemateCallbacks in this Trainer. Keep one of them.")
        strategy = type(trainer.strategy).__name__
        if strategy in STRATEGIES:
            reason = STRATEGIES[strategy]
            raise MisconfigurationException(f"HiRemateCallback can't plan under {strategy}: {reason}")
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            raise MisconfigurationException(
                "HiRemateCallback can't plan a compiled LightningModule. Pass the module itself, without torch.compile."
            )
        if self.target == TrainingStepTarget.METHOD and not pl_module.automatic_optimization:
            raise MisconfigurationException(
                "target='training_step' needs automatic optimization: with manual optimization the backward is "
                "inside of it. Leave target out to plan the submodules."
            )


def targets_for(module: pl.LightningModule, session: Session, target: Target) -> Targets | TrainingStepTarget:
    """Return the target that takes over a module's training step, or its calls."""
    return (
        TrainingStepTarget(module, session) if target == TrainingStepTarget.METHOD else Targets(module, session, target)
    )


def planner_of(trainer: pl.Trainer) -> HiRemateCallback | None:
    """Return the planning callback of a Trainer."""
    return next((c for c in trainer.callbacks if isinstance(c, HiRemateCallback)), None)  # type: ignore[attr-defined]
