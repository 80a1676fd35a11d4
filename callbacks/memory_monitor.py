"""The callback that compares the measured peaks of training steps with the predictions of their plans."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from hiremate_lightning.callbacks.planning import planner_of
from hiremate_lightning.errors import ConfigurationError
from hiremate_lightning.housekeeping import Once
from hiremate_lightning.measuring.resident_memory import WATCHED_STEPS, ResidentMemory
from hiremate_lightning.memory.metering import Interval, MemoryMeter
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.reporting.plan_summary import PREFIX
from hiremate_lightning.sessions.messages import warn
from hiremate_lightning.targets.modules import targets_of
from hiremate_lightning.torch_private.tensor_state import tensors_among
from hiremate_lightning.units import format_bytes

METRIC = f"{PREFIX}step_peak_bytes"
EVERY_ON_CPU = 50  # measure one of 50 steps, since a profiler records each allocation of this step and the one before
FORWARD, BACKWARD, AFTER, OPTIMIZER = "the forward", "the backward", "what follows the backward", "the optimizer's step"
IN_PLAN = "Something outside of the plan allocates there; a budget smaller by that much leaves room for it."
BEYOND_PLAN = "No plan reaches there. Optimizers take less with foreach=False."


class MemoryMonitor(Callback):
    """Measure the peak memory of whole training steps, and warn if a step takes more than its plan predicts.

    A step is measured from `on_train_batch_start` to `on_train_batch_end`, optimizer included. On CUDA all allocated
    bytes count; on a CPU the model, its optimizers, the batch, and the bytes that PyTorch allocates during the step.
    Steps that planning itself measures are skipped. Loggers get `hiremate/step_peak_bytes`. Without a plan, peaks are
    measured and logged only.

    Args:
        every_n_steps: Measure one of this many steps; by default each step on CUDA, and one of 50 on a CPU, where
            measuring takes time.
        tolerance: Warn if a step exceeds the predicted peak by more than this share of it.

    Attributes:
        peak_bytes: Peak of the latest measured step, None before the first.
        highest_bytes: The highest measured peak, None before the first.

    Raises:
        ConfigurationError: If an argument is out of its range.

    Example:
        >>> trainer = Trainer(callbacks=[HiRemateCallback(budget="10 GiB"), MemoryMonitor()])
    """

    def __init__(self, every_n_steps: int | None = None, tolerance: float = 0.02) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(f"every_n_steps must be at least 1, found {every_n_steps!r}")
        if tolerance < 0:
            raise ConfigurationError(f"tolerance must be at least 0, found {tolerance!r}")
        self.every_n_steps = every_n_steps
        self.tolerance = tolerance
        self.peak_bytes: int | None = None
        self.highest_bytes: int | None = None
        self._memory: ResidentMemory | None = None
        self._meter: MemoryMeter | None = None
        self._base_bytes = 0
        self._steps = 0  # steps begun in this fit
        self._counts = False  # whether to measure the step under way
        self._sees_frees = False  # whether the previous step was recorded: a CPU shows frees of recorded bytes only
        self._warn_once = Once(warn)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without that of a running fit, so that the callback can go to spawned processes."""
        return {**self.__dict__, "_memory": None, "_meter": None}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reset the count of steps and the measurements."""
        if stage == "fit":
            self._memory, self._warn_once = ResidentMemory(pl_module), Once(warn)
            self._steps, self._sees_frees = 0, False

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *_: Any) -> None:
        """Begin to measure if this step is one to measure."""
        step, self._steps = self._steps, self._steps + 1
        if self._memory is None:
            return
        every = self.every_n_steps or (1 if self._memory.device.type == "cuda" else EVERY_ON_CPU)
        self._counts = (step + 1) % every == 0
        is_next = self._memory.device.type != "cuda" and (step + 2) % every == 0
        if not (self._counts or is_next) or self._is_left_to_planning(trainer, pl_module):
            self._sees_frees = False
            return
        device = self._memory.device
        if not MemoryMeter.is_available(device):
            self._warn_once("Another profiler is running: MemoryMonitor can't measure meanwhile.")
            return
        for optimizer in trainer.optimizers:
            self._memory.optimizers.add(optimizer)
        self._memory.batch = tensors_among(batch)
        self._base_bytes = self._memory.count(()).size_bytes
        self._memory.batch = []
        self._meter = MemoryMeter(device)
        self._meter.start()

    def on_before_backward(self, *_: Any) -> None:
        """Mark where the backward begins."""
        self._mark(BACKWARD)

    def on_after_backward(self, *_: Any) -> None:
        """Mark where the backward has ended."""
        self._mark(AFTER)

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Mark where an optimizer takes over."""
        self._mark(OPTIMIZER)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """End the measurement, log it, and compare it with the plan."""
        intervals = self._stop()
        if not intervals or not self._counts:
            return
        highest = max(intervals, key=lambda interval: interval.peak_bytes)
        self.peak_bytes = self._base_bytes + highest.peak_bytes
        self.highest_bytes = max(self.peak_bytes, self.highest_bytes or 0)
        for logger in trainer.loggers:
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            logger.log_metrics({METRIC: float(self.peak_bytes)}, step=step)
        self._compare(self.peak_bytes, highest, _plans(trainer, pl_module))

    def on_exception(self, *_: Any) -> None:
        """Leave no measurement running."""
        self._stop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave no measurement running."""
        self._stop()
        self._memory = None

    def _is_left_to_planning(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        """Whether planning may measure this step, one of the first: a second measurement would slow it down."""
        is_planned = planner_of(trainer) is not None or targets_of(pl_module) is not None
        if self._steps > WATCHED_STEPS or not is_planned:
            return False
        plans = _plans(trainer, pl_module)
        return not plans or any(plan.measured.step_ms is None for plan in plans)

    def _mark(self, label: str) -> None:
        if self._meter is not None:
            self._meter.mark(label)

    def _stop(self) -> list[Interval]:
        """End the measurement; return its intervals, [] if it did not cover the whole step."""
        meter, self._meter = self._meter, None
        if meter is None or self._memory is None:
            return []
        meter.stop()
        saw_frees, self._sees_frees = self._sees_frees, not meter.was_interrupted
        is_whole = not meter.was_interrupted and (saw_frees or self._memory.device.type == "cuda")
        return meter.intervals if is_whole else []

    def _compare(self, peak_bytes: int, highest: Interval, plans: tuple[Plan, ...]) -> None:
        """Warn, once for each part of the step, if a step takes more than planned."""
        if not plans:
            return
        predicted = max(plan.planned_peak_bytes for plan in plans)
        budget = max(plan.budget_bytes for plan in plans)
        where = FORWARD if highest.label == "start" else highest.label
        text = f"The memory of a training step reached {format_bytes(peak_bytes)} in {where}"
        advice = BEYOND_PLAN if where in (AFTER, OPTIMIZER) else IN_PLAN
        if peak_bytes > budget:
            excess = format_bytes(peak_bytes - budget)
            self._warn_once(f"{text}, {excess} above the budget. {advice}", topic=f"budget in {where}")
        elif peak_bytes > (1 + self.tolerance) * predicted:
            excess = format_bytes(peak_bytes - predicted)
            words = f"{excess} above the plan and within the budget"
            self._warn_once(f"{text}, {words}. {advice}", topic=f"plan in {where}")


def _plans(trainer: pl.Trainer, pl_module: pl.LightningModule) -> tuple[Plan, ...]:
    """Return the plans of all step signatures, since the plan that ran may be unknown when a step ends."""
    if (planner := planner_of(trainer)) is not None:
        return planner.plans
    targets = targets_of(pl_module)
    return () if targets is None else tuple(targets.session.plans.values())
