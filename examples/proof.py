"""Two trainings of the same seed, one of them inside a budget: what they share, and what each of them took.

`train_twice` runs them, `Recorder` writes each step down, `SideBySide` times the two kinds of steps in turn, and `show`
prints all of it.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning.pytorch as L
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from hiremate_lightning import HiRemateWarning
from hiremate_lightning.callbacks import HiRemateCallback
from hiremate_lightning.memory.metering import MemoryMeter
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.reporting.terminal import plan_table
from hiremate_lightning.torch_private import hooks
from hiremate_lightning.units import format_bytes, format_ratio, format_time

PAIRS = 12  # of steps, plain and planned in turn, after those that are compared; the first pair warms up


class Recorder(L.Callback):
    """Write down the loss of every step, and the peak and the weights of the last one.

    The allocator is watched from one step earlier: it knows the size of what is freed only if it was watched when it
    allocated that, and a step frees the gradients of the one before.

    Args:
        steps: Steps to record; there may be more.

    Attributes:
        losses: Loss of each step.
        weights: Parameters and buffers after the last one.
        peak_bytes: Most bytes allocated during the last one, what was there before it included.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.losses: list[float] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.peak_bytes = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.steps - 2:
            self._meter = MemoryMeter(module.device)
            self._meter.start()
        elif batch_idx == self.steps - 1:
            self._resident_bytes = sum(storage_bytes(resident_tensors(trainer, module, batch)))
            self._meter.mark("last step")

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx < self.steps:
            self.losses.append(outputs["loss"].item())
        if batch_idx == self.steps - 1:
            self._meter.stop()
            step = self._meter.intervals[-1]
            self.peak_bytes = self._resident_bytes + step.peak_bytes - step.start_bytes
            self.weights = {name: value.clone() for name, value in module.state_dict().items()}


class SideBySide(L.Callback):
    """From some step on, leave the plan out of every other step, and time both kinds: other load then slows both.

    Args:
        first: The first step without the plan.

    Attributes:
        times_ms: Time of each step, in pairs: plain, planned.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.times_ms: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self._slots = {}
        if batch_idx >= self.first and (batch_idx - self.first) % 2 == 0:
            self._slots = {inner: hooks.get_call(inner) for inner in module.modules()}
            warnings.filterwarnings("ignore", ".* trains without its plan", HiRemateWarning)  # so it is meant here
        for inner in self._slots:
            hooks.set_call(inner, None)
        self._start_s = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        outputs["loss"].item()  # waits for the device
        if batch_idx >= self.first:
            self.times_ms.append(1000 * (time.perf_counter() - self._start_s))
        for inner, slot in self._slots.items():
            hooks.set_call(inner, slot)

    @property
    def pairs_ms(self) -> list[tuple[float, float]]:
        """Times of plain and planned steps that came one after the other, without the first pair."""
        return list(zip(self.times_ms[0::2], self.times_ms[1::2], strict=True))[1:]


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


def make_trainer(steps: int, *callbacks: L.Callback) -> L.Trainer:
    """Make a Trainer that leaves nothing behind."""
    return L.Trainer(
        max_epochs=1,
        limit_train_batches=steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def train_twice(
    make_model: Callable[[], L.LightningModule], make_data: Callable[[], DataLoader], steps: int, budget: str
) -> bool:
    """Train plain, then inside the budget, and show the two side by side.

    Args:
        make_model: Builds the model, from the random state as it is then.
        make_data: Builds the batches, from the random state as it is then; `2 * PAIRS` more than there are steps.
        steps: Training steps to compare.
        budget: Budget of the second run, as `HiRemateCallback` takes it.

    Returns:
        Whether both runs gave the same, and the second stayed inside the budget.
    """
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated.*")  # between Lightning and torch
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    console = Console()

    console.rule("plain")
    L.seed_everything(0, verbose=False)
    plain = Recorder(steps)
    make_trainer(steps, plain).fit(make_model(), make_data())

    console.rule(f"inside a budget of {budget}")
    L.seed_everything(0, verbose=False)
    hiremate, planned, times = HiRemateCallback(budget=budget), Recorder(steps), SideBySide(first=steps)
    make_trainer(steps + 2 * PAIRS, hiremate, planned, times).fit(make_model(), make_data())

    console.rule("proof")
    return show(plain, planned, times, hiremate.plan, console)


def show(plain: Recorder, planned: Recorder, times: SideBySide, plan: Plan, console: Console) -> bool:
    """Print what both runs share and what each of them took; tell whether the proof holds."""
    losses = [a == b for a, b in zip(plain.losses, planned.losses, strict=True)]
    weights = [torch.equal(plain.weights[name], planned.weights[name]) for name in plain.weights]
    inside = planned.peak_bytes <= plan.budget_bytes
    plain_ms, planned_ms = (statistics.median(kind) for kind in zip(*times.pairs_ms, strict=True))
    slower = [b / a - 1 for a, b in times.pairs_ms]
    low, median, high = statistics.quantiles(slower, n=4)  # a plan measures itself again in a step now and then

    steps = Table("step", "loss", "bits, plain", "bits, planned", "", title="Loss of each step")
    for i, equal in enumerate(losses):
        a, b = plain.losses[i], planned.losses[i]
        steps.add_row(str(i), f"{a:.6f}", as_bits(a), as_bits(b), "equal" if equal else "[red]DIFFERENT")
    console.print(steps)
    console.print(plan_table(plan))

    runs = Table("", "plain", "planned", "", title="The two runs, compared bit for bit")
    runs.add_row("losses", "", "", f"{sum(losses)} of {len(losses)} equal")
    runs.add_row("weights and buffers", "", "", f"{sum(weights)} of {len(weights)} tensors equal")
    runs.add_row(
        "peak, by the allocator",
        format_bytes(plain.peak_bytes),
        format_bytes(planned.peak_bytes),
        f"{'within' if inside else '[red]OVER[/]'} the budget, {format_bytes(plan.budget_bytes)}",
    )
    runs.add_row("step time, in turn", format_time(plain_ms), format_time(planned_ms), f"{len(slower)} pairs, medians")
    runs.add_row(
        "extra time", "", format_ratio(median), f"{format_ratio(low)} to {format_ratio(high)}, the middle half"
    )
    runs.add_row("extra time, predicted", "", format_ratio(plan.predicted_overhead), "of what is recomputed")
    console.print(runs)

    holds = all(losses) and all(weights) and inside
    console.print("[bold green]The proof holds." if holds else "[bold red]The proof does not hold.")
    return holds


def as_bits(loss: float) -> str:
    """Write a float32 exactly: its 24 bits in hexadecimal, and its exponent."""
    return loss.hex().replace("0000000p", "p")
