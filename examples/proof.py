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
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from hiremate_lightning import HiRemateWarning, write_html
from hiremate_lightning.callbacks import HiRemateCallback
from hiremate_lightning.memory.metering import MemoryMeter
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.reporting.terminal import plan_table
from hiremate_lightning.torch_private import hooks
from hiremate_lightning.units import format_bytes, format_ratio, format_time

PAIRS = 7  # of steps, plain and planned in turn, after those that are compared; the first pair warms up
IN_TURN = 3  # steps for each pair: one without the plan, one by it that is not timed, one by it
WIDE = 0.1  # ratio: where the middle half of the pairs is wider, other load decides, not the plan
STEP = "step"
UNWATCHED = 4  # first steps, in which the plan is made and measures itself
NEXT = """Next, in code of yours:
  Lightning   Trainer(callbacks=[HiRemateCallback(budget="{budget}")])   # from hiremate_lightning.callbacks
  plain loop  hiremate(model, budget="{budget}", optimizer=optimizer)    # from hiremate_lightning
The plan of this demo as a page: {page}"""


class Recorder(L.Callback):
    """Write down the loss and the peak of every step, and the weights after the last one.

    The allocator is watched from the fourth step on, beside what a plan measures of itself before. The peak of the step
    with which that begins is left out: the size of what is freed is known only if the allocator was watched when it
    allocated that, and a step frees the gradients of the one before.

    Args:
        steps: Steps to record; there may be more.

    Attributes:
        losses: Loss of each step.
        weights: Parameters and buffers after the last one.
        peaks_bytes: Most bytes allocated during each step that was watched, what was there before it included.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.losses: list[float] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.peaks_bytes: list[int] = []
        self._resident_bytes: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == UNWATCHED - 1:
            self._meter = MemoryMeter(module.device)
            self._meter.start()
        elif UNWATCHED <= batch_idx < self.steps:
            self._resident_bytes.append(sum(storage_bytes(resident_tensors(trainer, module, batch))))
            self._meter.mark(STEP)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx < self.steps:
            self.losses.append(outputs["loss"].item())
        if UNWATCHED <= batch_idx < self.steps:
            self._meter.mark("between steps")
        if batch_idx == self.steps - 1:
            self._meter.stop()
            assert not self._meter.was_interrupted, "a plan measures itself in its first steps only"
            watched = [interval for interval in self._meter.intervals if interval.label == STEP]
            pairs = zip(self._resident_bytes, watched, strict=True)
            self.peaks_bytes = [resident + step.peak_bytes - step.start_bytes for resident, step in pairs]
            self.weights = {name: value.clone() for name, value in module.state_dict().items()}


class SideBySide(L.Callback):
    """From some step on, leave the plan out of every third step, and time both kinds: other load then slows both.

    The first planned step after one without the plan is not timed: such a step counts the memory that exists once more.

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
        if batch_idx >= self.first and (batch_idx - self.first) % IN_TURN == 0:
            self._slots = {inner: hooks.get_call(inner) for inner in module.modules()}
            warnings.filterwarnings("ignore", ".* trains without its plan", HiRemateWarning)  # so it is meant here
        for inner in self._slots:
            hooks.set_call(inner, None)
        self._start_s = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        outputs["loss"].item()  # waits for the device
        if batch_idx >= self.first and (batch_idx - self.first) % IN_TURN != 1:
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
    make_model: Callable[[], L.LightningModule],
    make_data: Callable[[], DataLoader],
    steps: int,
    budget: str,
    show_losses: bool = False,
) -> bool:
    """Train plain, then inside the budget, and show the two side by side.

    Args:
        make_model: Builds the model, from the random state as it is then.
        make_data: Builds the batches, from the random state as it is then; `IN_TURN * PAIRS` more than there are steps.
        steps: Training steps to compare, at least 6.
        budget: Budget of the second run, as `HiRemateCallback` takes it.
        show_losses: Whether to show the loss of each step, bit by bit.

    Returns:
        Whether both runs gave the same, and each step that was watched in the second one stayed inside the budget.
    """
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated.*")  # between Lightning and torch
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    console = Console()

    console.rule("1 of 3: plain")
    L.seed_everything(0, verbose=False)
    plain = Recorder(steps)
    make_trainer(steps, plain).fit(make_model(), make_data())

    console.rule(f"2 of 3: inside a budget of {budget}, then {PAIRS} pairs of steps")
    L.seed_everything(0, verbose=False)
    hiremate = HiRemateCallback(budget=budget, verbose=False)  # the plan is shown below, with one extra time
    planned, times = Recorder(steps), SideBySide(first=steps)
    make_trainer(steps + IN_TURN * PAIRS, hiremate, planned, times).fit(make_model(), make_data())

    console.rule("3 of 3: proof")
    if show_losses:
        console.print(losses_table(plain, planned))
    plan = timed(hiremate.plan, times.pairs_ms)
    holds = show(plain, planned, times, plan, console)
    page = Path("hiremate_plan.html").resolve()
    console.print("Writing the page: other budgets are solved for it, for up to 10 seconds")
    write_html(plan, page)
    console.print(NEXT.format(budget=budget, page=page), soft_wrap=True, markup=False, highlight=False)
    return holds


def losses_table(plain: Recorder, planned: Recorder) -> Table:
    """Set the losses of both runs side by side, as exact numbers."""
    table = Table("step", "loss", "bits, plain", "bits, planned", "", title="Loss of each step")
    for step, (a, b) in enumerate(zip(plain.losses, planned.losses, strict=True)):
        table.add_row(str(step), f"{a:.6f}", as_bits(a), as_bits(b), "equal" if a == b else "[red]DIFFERENT")
    return table


def show(plain: Recorder, planned: Recorder, times: SideBySide, plan: Plan, console: Console) -> bool:
    """Print what both runs share and what each of them took; return whether the proof holds."""
    losses = [a == b for a, b in zip(plain.losses, planned.losses, strict=True)]
    weights = [torch.equal(plain.weights[name], planned.weights[name]) for name in plain.weights]
    peaks = [*planned.peaks_bytes, plan.measured.peak_bytes or 0]
    inside = sum(peak <= plan.budget_bytes for peak in peaks)

    console.print(plan_table(plan))
    runs = Table("", "plain", "planned", "", title="The two runs, compared bit for bit")
    runs.add_row("losses", "", "", f"{sum(losses)} of {len(losses)} losses equal")
    runs.add_row("weights and buffers", "", "", f"{sum(weights)} of {len(weights)} tensors equal")
    runs.add_row(
        "largest peak, by the allocator",
        format_bytes(max(plain.peaks_bytes)),
        format_bytes(max(peaks)),
        f"{inside} of {len(peaks)} measured steps within the budget, {format_bytes(plan.budget_bytes)}",
    )
    runs.add_row("step time", *time_cells(times.pairs_ms, plan.predicted_overhead))
    console.print(runs)

    holds = all(losses) and all(weights) and inside == len(peaks)
    console.print("[bold green]The proof holds." if holds else "[bold red]The proof does not hold.")
    return holds


def time_cells(pairs_ms: list[tuple[float, float]], predicted: float) -> tuple[str, str, str]:
    """Write the time of plain steps, the extra time of planned ones, and how sure that is.

    Args:
        pairs_ms: Times of a plain and a planned step that came one after the other.
        predicted: Extra time that the plan predicts, a ratio; it stands for the measured one where steps differ widely.
    """
    plain = format_time(statistics.median(plain_ms for plain_ms, _ in pairs_ms))
    extra, spread = extra_time(pairs_ms)
    if spread > WIDE:
        why = f"too busy a machine to tell: pairs differ by {100 * spread:.0f} points"
        return plain, f"{format_ratio(predicted)}, predicted", why
    return plain, format_ratio(extra), f"median of {len(pairs_ms)} pairs, one after the other"


def extra_time(pairs_ms: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the median extra time of planned steps and the width of its middle half, over the time of plain steps."""
    low, median, high = statistics.quantiles([planned_ms / plain_ms - 1 for plain_ms, planned_ms in pairs_ms], n=4)
    return median, high - low


def timed(plan: Plan, pairs_ms: list[tuple[float, float]]) -> Plan:
    """Return the plan with the extra time of the pairs as measured, or with none where the pairs differ widely."""
    extra, spread = extra_time(pairs_ms)
    step_ms = statistics.median(plain_ms for plain_ms, _ in pairs_ms)
    if spread > WIDE:
        return plan.with_measured(step_ms=None, recompute_ms=None)
    return plan.with_measured(step_ms=step_ms * (1 + extra), recompute_ms=step_ms * extra)


def as_bits(loss: float) -> str:
    """Write a float32 exactly: its 24 bits in hexadecimal, and its exponent."""
    return loss.hex().replace("0000000p", "p")
