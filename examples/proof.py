"""Two trainings of the same seed, one of them inside a budget: what they share, and what each of them took.

`train_twice` runs them, `Recorder` writes each step down, `show` compares the two on the screen.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from hiremate_lightning.callbacks import HiRemateCallback
from hiremate_lightning.plan import Plan
from hiremate_lightning.profiling import MemoryMeter
from hiremate_lightning.units import format_bytes, format_ratio, format_time

WARM_UP_STEPS = 5  # the planned run plans in its first step and measures itself in the next ones


class Recorder(L.Callback):
    """Write down the loss and the time of every step, and the peak of the last one.

    Attributes:
        losses: Loss of each step.
        times_ms: Time of each step but the last, which is slowed down by watching the allocator.
        peak_bytes: Most bytes allocated during the last step, what was there before it included.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.times_ms: list[float] = []
        self.peak_bytes = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == trainer.num_training_batches - 1:
            self._resident_bytes = sum(storage_bytes(resident_tensors(trainer, module, batch)))
            self._meter = MemoryMeter(module.device)
            self._meter.start()
        self._start_s = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].item())  # waits for the device
        if batch_idx < trainer.num_training_batches - 1:
            self.times_ms.append(1000 * (time.perf_counter() - self._start_s))
        else:
            self._meter.stop()
            self.peak_bytes = self._resident_bytes + max(part.peak_bytes for part in self._meter.intervals)

    @property
    def step_ms(self) -> float:
        """Median time of a step, without the first ones."""
        return statistics.median(self.times_ms[WARM_UP_STEPS:] or self.times_ms)


def resident_tensors(trainer: L.Trainer, module: L.LightningModule, batch: Any) -> Iterator[torch.Tensor]:
    """List what lives before a step begins: parameters, their gradients, buffers, optimizer state, the batch."""
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    yield from batch if isinstance(batch, (list, tuple)) else [batch]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """Give the size of each storage under the tensors, once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    yield from storages.values()


@dataclass(frozen=True)
class Run:
    """One finished training."""

    record: Recorder
    weights: dict[str, torch.Tensor]
    plan: Plan | None = None


def train(
    make_model: Callable[[], L.LightningModule], make_data: Callable[[], DataLoader], steps: int, budget: str | None
) -> Run:
    """Train from one fixed seed, inside a budget or without."""
    L.seed_everything(0, verbose=False)
    record = Recorder()
    planned = [] if budget is None else [HiRemateCallback(budget=budget)]
    model = make_model()
    trainer = L.Trainer(
        max_epochs=1,
        limit_train_batches=steps,
        callbacks=[*planned, record],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, make_data())
    return Run(record, model.state_dict(), planned[0].plan if planned else None)


def train_twice(
    make_model: Callable[[], L.LightningModule], make_data: Callable[[], DataLoader], steps: int, budget: str
) -> bool:
    """Train plain, then inside the budget, and show the two side by side.

    Args:
        make_model: Builds the model, from the random state as it is then.
        make_data: Builds the batches, from the random state as it is then.
        steps: Training steps of each run.
        budget: Budget of the second run, as `HiRemateCallback` takes it.

    Returns:
        Whether both runs gave the same, and the second stayed inside the budget.
    """
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    console = Console()
    console.rule("plain")
    plain = train(make_model, make_data, steps, budget=None)
    console.rule(f"inside a budget of {budget}")
    planned = train(make_model, make_data, steps, budget=budget)
    console.rule("proof")
    return show(plain, planned, console)


def show(plain: Run, planned: Run, console: Console) -> bool:
    """Print what both runs share and what each of them took; tell whether the proof holds."""
    plan = planned.plan
    if plan is None:
        console.print("[bold red]The second run was not planned.")
        return False
    losses = [a == b for a, b in zip(plain.record.losses, planned.record.losses, strict=True)]
    weights = [torch.equal(plain.weights[name], planned.weights[name]) for name in plain.weights]
    slower = planned.record.step_ms / plain.record.step_ms - 1
    inside = planned.record.peak_bytes <= plan.budget_bytes

    steps = Table("step", "loss, plain", "loss, planned", "bit for bit", title="Loss of each step")
    for i, equal in enumerate(losses):
        a, b = plain.record.losses[i], planned.record.losses[i]
        steps.add_row(str(i), f"{a:.6f}  {a.hex()}", f"{b:.6f}  {b.hex()}", "equal" if equal else "[red]DIFFERENT")
    console.print(steps)

    runs = Table("", "plain", "planned", "", title="The two runs")
    runs.add_row("losses", "", "", f"{sum(losses)} of {len(losses)} equal, bit for bit")
    runs.add_row("weights and buffers", "", "", f"{sum(weights)} of {len(weights)} tensors equal, bit for bit")
    runs.add_row(
        "peak, by the allocator",
        format_bytes(plain.record.peak_bytes),
        format_bytes(planned.record.peak_bytes),
        f"{'within' if inside else '[red]OVER[/]'} the budget of {format_bytes(plan.budget_bytes)}",
    )
    runs.add_row(
        "step, median",
        format_time(plain.record.step_ms),
        format_time(planned.record.step_ms),
        f"{format_ratio(slower)}; predicted {format_ratio(plan.predicted_overhead)} for recomputing",
    )
    console.print(runs)

    holds = all(losses) and all(weights) and inside
    console.print("[bold green]The proof holds." if holds else "[bold red]The proof does not hold.")
    return holds
