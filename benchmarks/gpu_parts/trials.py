"""Methods of `rival_worker` on one model: peak, reserved memory, times, and a digest of the gradients.

On a GPU two large models don't fit side by side, so methods run one after the other, each on an idle device.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rival_worker import HAIR, Setup, Trainer, is_planned, prepare, synchronize
from torch import nn

from hiremate_lightning import InfeasibleBudgetError, Plan, get_plan, hiremate
from hiremate_lightning.testing import changed_thresholds, session_of

from . import raw
from .records import PLANS
from .runner import Send, status_of, tail

INFEASIBLE = "infeasible"
LEAST_STEPS, MOST_STEPS = 3, 40
RIVAL_STEPS = 2  # until all is compiled and allocated
OUR_STEPS = 3  # the first runs at the least memory, the next ones are planned, measured and timed
SOLVE_S = 4.0  # for one plan
MOST_TRIES = 4  # to find the least memory: what exists when a plan is made differs by some blocks
ADDED = "added_mib"  # what a step adds at its peak: the budgets of others are made from it


@dataclass(frozen=True)
class Task:
    """What is measured of one model.

    Attributes:
        setup: Names model, method and device.
        units: Samples or tokens of a step.
        eager: What was measured of eager, None where this is eager.
        timed_s: Seconds of steps to time.
    """

    setup: Setup
    units: int = 1
    eager: Mapping[str, Any] | None = None
    timed_s: float = 2.5


@dataclass(frozen=True)
class Budget:
    """A budget of ours.

    Attributes:
        method: Its name.
        added_bytes: What a step may add to what exists before it; 0 for as much as it wants, or for the least that is
            found where the method is named so.
    """

    method: str
    added_bytes: int = 0


def event_ms(function: Callable[[], Any], repeats: int = 10) -> float:
    """Time a function by events on the device: median of its runs."""
    times = []
    for _ in range(repeats + 1):  # the first warms up
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        function()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after))
    return statistics.median(times[1:])


def settle(device: torch.device) -> None:
    """Let cuBLAS and autograd take the memory that they keep: it is no part of any step."""
    layer = nn.Linear(16, 16, device=device)
    layer(torch.ones(16, 16, device=device)).sum().backward()
    synchronize(device)


def measure(trainer: Trainer, task: Task) -> dict[str, Any]:
    """Take the first steps of a model that trains by its method already, then measure memory and times."""
    start = time.perf_counter()
    trainer.step()
    synchronize(trainer.device)
    first_s = time.perf_counter() - start
    for _ in range(OUR_STEPS if is_planned(task.setup) else RIVAL_STEPS):
        start = time.perf_counter()
        trainer.step()
        synchronize(trainer.device)
        step_s = time.perf_counter() - start
    resident = trainer.resident_bytes()
    added, reserved = trainer.peak()
    timing = trainer.timed(max(LEAST_STEPS, min(MOST_STEPS, math.ceil(task.timed_s / step_s))))
    values = {
        "peak_mib": (resident + added) / 2**20,
        ADDED: added / 2**20,
        "reserved_mib": None if reserved is None else reserved / 2**20,
        "ms": 1e3 * timing.device_s,
        "per_s": task.units / timing.device_s,
        "host_ms": 1e3 * timing.cpu_s,
        "wall_ms": 1e3 * timing.wall_s,
        "first_step_s": first_s,
    }
    return {**values, **beside(values, task.eager)}


def beside(values: Mapping[str, Any], eager: Mapping[str, Any] | None) -> dict[str, Any]:
    """Compute the ratios of peaks and time to eager's."""
    if eager is None:
        return {}
    return {
        "peak_of_eager": values["peak_mib"] / eager["peak_mib"],
        "added_of_eager": values[ADDED] / eager[ADDED],
        "time_of_eager": values["ms"] / eager["ms"],
    }


def run_method(send: Send, task: Task) -> None:
    """Measure eager or a rival."""
    as_users_run(task.setup)
    trainer = Trainer(task.setup)
    settle(trainer.device)
    prepare(trainer, task.setup)
    values = measure(trainer, task)
    send(task.setup.method, **values, **agreement(trainer, task.setup, is_reference=task.eager is None))


def as_users_run(setup: Setup) -> None:
    """Let cuDNN choose by its rules, the same for each method."""
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("high")
    if setup.device == "cpu":
        torch.set_num_threads(1)


def run_ours(send: Send, task: Task, budgets: Sequence[Budget], folder: Path, raw_of: str = "") -> None:
    """Measure ours at several budgets in one process: the model is captured, proved and profiled once.

    Args:
        send: Sends a record.
        task: What is measured.
        budgets: In the order in which they are measured.
        folder: Where raw numbers and plans go.
        raw_of: The method whose operations are written down one by one at the end, "" for none.
    """
    as_users_run(task.setup)
    trainer = Trainer(task.setup)
    settle(trainer.device)
    worst = raw.Worst(folder, task.setup.model)
    for budget in budgets:
        own = replace(task, setup=replace(task.setup, method=budget.method))
        try:
            values, plan = plan_and_measure(trainer, own, budget, folder / PLANS)
            send(budget.method, **values, **agreement(trainer, own.setup, is_reference=False))
            worst.see(plan, values["peak_mib"] * 2**20, trainer.step)
        except InfeasibleBudgetError as error:
            send(budget.method, INFEASIBLE, smallest_mib=error.smallest_bytes / 2**20)
        except Exception as error:  # the next budget may work
            send(budget.method, status_of(error), traceback=tail(error))
            trainer.module.zero_grad(set_to_none=True)
            gc.collect()
    if worst.found:
        send("worst plan", **worst.found)
    if raw_of and worst.found:
        found = raw.write_operations(folder, task.setup.model, trainer.module, trainer.step)
        send(f"{budgets[-1].method}, its operations", **found)


def plan_and_measure(trainer: Trainer, task: Task, budget: Budget, plans: Path) -> tuple[dict[str, Any], Plan]:
    """Plan at a budget, or change the budget of what is planned; then measure."""
    options: dict[str, Any] = {"compile": "inductor"} if budget.method.startswith("fused") else {}
    options |= {"time_limit_s": task.setup.time_limit_s, "cache_dir": plans, "verbose": False}
    if budget.method.endswith("offload"):
        options["offload"] = "auto"
    allowed = f"{trainer.resident_bytes() + budget.added_bytes} B"  # toy models have less than the least plain number
    if not budget.added_bytes:
        allowed = "1%" if budget.method.endswith("least") else "100%"
    start = time.perf_counter()
    with changed_thresholds(gives_back=False):  # `ours-100` shows what the execution itself costs
        if allowed == "1%":
            go_to_least(trainer, options)
        else:
            hiremate(trainer.module, allowed, **options)
        replanned_s = time.perf_counter() - start
        values = measure(trainer, task)
    plan = get_plan(trainer.module)
    assert plan is not None, "a plan is there after the second step"
    values["first_step_s"] += replanned_s
    graphs = len(session_of(trainer.module).model.runtimes.all)  # the same for all budgets: none is captured again
    return {**values, **of_plan(plan, values["peak_mib"] * 2**20), "graphs": graphs}, plan


def go_to_least(trainer: Trainer, options: Mapping[str, Any]) -> None:
    """Replace a budget that can't be met by the smallest one that the error names, until steps are planned in it."""
    allowed: int | str = "1%"
    for _ in range(MOST_TRIES):
        try:
            hiremate(trainer.module, allowed, **options)
            for _ in range(2):  # the first of a model captures, the second one plans
                trainer.step()
            return
        except InfeasibleBudgetError as error:
            allowed = math.ceil(error.smallest_bytes * HAIR)
        finally:
            trainer.module.zero_grad(set_to_none=True)


def of_plan(plan: Plan, peak_bytes: float) -> dict[str, Any]:
    """Find what a plan promised, beside what was measured."""
    seconds = plan.planning
    return {
        "budget_mib": plan.budget_bytes / 2**20,
        "predicted_mib": plan.planned_peak_bytes / 2**20,
        "over_budget_mib": max(0.0, peak_bytes - plan.budget_bytes) / 2**20,
        "predicted_overhead": plan.predicted_overhead,
        "measured_overhead": plan.measured.overhead,
        "bound_overhead": plan.bound_overhead,
        "away_mib": plan.planned.host_bytes / 2**20,
        "strategy": f"{plan.solution.strategy}, {plan.solution.status.value}",
        "planning_s": seconds.capture_s + seconds.profile_s + seconds.solve_s + seconds.compile_s,
        "profile_s": seconds.profile_s,
        "solve_s": seconds.solve_s,
        "proved": plan.proved,
    }


# -------------------------------------------------------------------- are the gradients eager's?


def agreement(trainer: Trainer, setup: Setup, is_reference: bool) -> dict[str, Any]:
    """Compare loss and gradients of one more step with those that eager left, by digests of their bits."""
    path = setup.folder / f"{setup.model}-digests.pt"
    found = digests_of_step(trainer)
    if is_reference:
        torch.save(found, path)
        found = digests_of_step(trainer)  # what differs here is chance, not method
    expected = torch.load(path) if path.exists() else []
    same = sum(a == b for a, b in zip(found, expected, strict=False))
    return {"equal_gradients": f"{same} of {len(found)}"}


def digests_of_step(trainer: Trainer) -> list[int]:
    """Take a step with fixed random numbers; compute a digest of the loss and of each gradient."""
    torch.manual_seed(3)
    loss = trainer.step()
    found = [digest(loss), *(digest(p.grad) for p in trainer.module.parameters() if p.grad is not None)]
    trainer.module.zero_grad(set_to_none=True)
    return found


CHUNK = 2**24
AS_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor) -> int:
    """Sum the bits of a tensor, each number weighted by its position; small parts at a time."""
    bits = tensor.detach().reshape(-1).view(AS_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].long()
        places = torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device)
        total += (part * (places % 65_521 + 1)).sum()
    return int(total)
