"""Measure what a budget costs: plain and planned steps in turn, their peaks, and whether they agree bit for bit.

    python benchmarks/overhead.py [--models gpt,bert] [--budgets 50%,30%] [--rounds 15] [--threads 1]
    python benchmarks/overhead.py --models tiny_gpt2,tiny_llama --budgets 100% --rounds 200

Models are those of zoo/models.py and of zoo/packages.py; all of the latter with `--models packages`. The tiny ones have
tensors that take no time: what is measured of them is what the host does in a step, which a GPU's host does too.
Both kinds of steps run in one process, in alternating order, on copies of one model. Ratios are of the process's CPU
time, which other load disturbs less than the clock does; medians with quartiles over the rounds. Peaks are the
allocator's own events, above what is resident before the step. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import page_tables
import torch
from provenance import provenance
from torch import Tensor, nn
from zoo.models import MODELS, gpt2_of, llama_of
from zoo.packages import CASES

from hiremate_lightning import Plan, get_plan, hiremate
from hiremate_lightning.memory.metering import MemoryMeter
from hiremate_lightning.units import format_bytes

WARM_STEPS = 34  # capture, plan, peak, time, and those that are measured again: the next one is the 65th
TINY = {  # 12 layers of width 32, one text of 16 tokens
    "tiny_gpt2": partial(gpt2_of, 12, batch=1, width=32, length=16),
    "tiny_llama": partial(llama_of, 12, batch=1, width=32, length=16),
}


@dataclass(frozen=True)
class Row:
    """One model under one budget."""

    model: str
    budget: str
    plain_peak: int
    planned_peak: int
    plan: Plan
    ratios: list[float]
    equal: bool


def build(name: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Build a model, with a function that gives its loss on a batch."""
    if name in MODELS or name in TINY:
        module, inputs = {**MODELS, **TINY}[name]()
        return module, lambda module: module(*inputs)
    case = CASES[name].build()
    batch = case.make_batch(0)
    return case.module.train(), lambda module: case.loss_of(module(**batch), batch)


def make_step(module: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Callable[[], None]:
    """Return a function that takes one training step, from no gradients to gradients."""

    def step() -> None:
        torch.manual_seed(3)
        loss_of(module).backward()

    return step


def peak_of(step: Callable[[], None], module: nn.Module) -> int:
    """Measure the second of two steps: the allocator must have been watched when what a step frees was allocated."""
    gc.collect()
    with MemoryMeter(torch.device("cpu")) as meter:
        step()
        module.zero_grad()
        meter.mark("second")
        step()
    module.zero_grad()
    last = meter.intervals[-1]
    return last.peak_bytes - last.start_bytes


def compare(name: str, budget: str, rounds: int) -> Row:
    """Train a model plain and planned, in turn."""
    torch.manual_seed(0)
    plain, loss_of = build(name)
    planned = hiremate(copy.deepcopy(plain), budget, verbose=False)
    steps = (make_step(plain, loss_of), make_step(planned, loss_of))
    for _ in range(WARM_STEPS):
        planned.zero_grad()
        steps[1]()
    steps[0]()
    plan = get_plan(planned)
    assert plan is not None, "a plan is there after the second step"
    pairs = zip(plain.parameters(), planned.parameters(), strict=True)
    equal = all(a.grad is None or torch.equal(a.grad, b.grad) for a, b in pairs)
    plain.zero_grad()
    planned.zero_grad()
    ratios = []
    for index in range(rounds):
        seconds = [0.0, 0.0]
        for which in (0, 1) if index % 2 else (1, 0):
            start = time.process_time()
            steps[which]()
            seconds[which] = time.process_time() - start
            (plain, planned)[which].zero_grad()
        ratios.append(seconds[1] / seconds[0])
    return Row(name, budget, peak_of(steps[0], plain), peak_of(steps[1], planned), plan, ratios, equal)


def show(row: Row) -> str:
    """Write a row of the table."""
    low, middle, high = statistics.quantiles(row.ratios, n=4)
    plan = row.plan
    measured = plan.measured.overhead
    return page_tables.row(
        row.model,
        row.budget,
        format_bytes(row.plain_peak),
        f"{format_bytes(row.planned_peak)} ({row.planned_peak / row.plain_peak:.3f})",
        format_bytes(plan.planned.peak_bytes),
        f"{100 * (middle - 1):+.1f} % [{100 * (low - 1):+.1f}, {100 * (high - 1):+.1f}]",
        f"{100 * plan.predicted_overhead:+.1f} %",
        "-" if measured is None else f"{100 * measured:+.1f} %",
        f"{100 * plan.bound_overhead:+.1f} %",
        f"{plan.planning.profile_s:.1f} + {plan.planning.solve_s:.1f} s",
        "equal" if row.equal else "DIFFERENT",
    )


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt,bert")
    parser.add_argument("--budgets", default="50%")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sys.stdout.write(f"{provenance()}; {options.threads} thread(s), {options.rounds} rounds\n\n")
    columns = ("model", "budget", "plain peak", "planned peak (ratio)", "predicted", "time over plain [quartiles]")
    more = ("predicted", "recompute in situ", "bound", "profile + solve", "gradients")
    sys.stdout.write(page_tables.head(*columns, *more))
    names = [n for word in options.models.split(",") for n in (CASES if word == "packages" else [word])]
    for name in names:
        for budget in options.budgets.split(","):
            sys.stdout.write(show(compare(name, budget, options.rounds)))
            sys.stdout.flush()
            torch.compiler.reset()


if __name__ == "__main__":
    main()
