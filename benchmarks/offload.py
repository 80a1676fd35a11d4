"""Predict what the host's memory gives: plans with and without values that are offloaded, from estimated times.

    python benchmarks/offload.py [--models resnet101,mixer] [--limit 5] [--toy]

Each step is captured on fake tensors, and its operations are estimated from what a GPU computes and reads in a
millisecond at most: real ones take longer, so copies hide better than here. For each machine and budget: the fastest
plan that only recomputes, by the default strategy with so many seconds; the fastest one in which values may also go
away, by the second pass over all plans found for this step; both with what is proven about all others. Prints a table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import page_tables
import torch
from provenance import provenance
from zoo.cases import timm_model
from zoo.large import OTHERS, TOY_LLAMA, LlamaSize, llama

from hiremate_lightning.command_line.factory import Workload
from hiremate_lightning.command_line.offline import OfflineOptions, OfflineStep, capture_offline
from hiremate_lightning.command_line.without_device import rates_of
from hiremate_lightning.planning.solvers.base import (
    UNLIMITED,
    Problem,
    Solution,
    SolveOptions,
    get_strategy,
    replay_solution,
)
from hiremate_lightning.planning.solvers.least_memory import solve_least_memory
from hiremate_lightning.planning.solvers.model import StepModel
from hiremate_lightning.planning.solvers.offload import fastest_choice, least_bytes, offload_bound
from hiremate_lightning.records.costs import A100, Link, Machine
from hiremate_lightning.records.offload import Host
from hiremate_lightning.records.schedule import keep_all
from hiremate_lightning.records.simulation import simulate_eager
from hiremate_lightning.records.step import Decisions
from hiremate_lightning.units import format_bytes

CUDA = torch.device("cuda")
SHARES = (0.75, 0.5, 0.25, 0.15)
LATENCY_MS = 0.01
H100 = Machine(flops_per_ms=67e9, bytes_per_ms=3.35e9, half_flops_per_ms=989e9)  # NVIDIA's data sheet, SXM, dense
MACHINES = {
    "A100, PCIe 4": (replace(A100, half_flops_per_ms=312e9), 25),
    "H100, PCIe 5": (H100, 55),
    "GH200, NVLink-C2C": (H100, 350),
}  # with GB/s of a link in each direction
BOUND_LIMIT_S = 30.0


def _pictures(name: str, batch: int, is_toy: bool) -> tuple[Any, Any]:
    side = 64 if is_toy else 224
    options = {"img_size": side} if "mixer" in name else {}
    return timm_model(name, classes=1000, **options), (torch.randn(2 if is_toy else batch, 3, side, side),)


MODELS: dict[str, tuple[Callable[[bool], tuple[Any, Any]], torch.dtype | None]] = {
    "resnet101": (partial(_pictures, "resnet101", 64), torch.bfloat16),
    "mixer": (partial(_pictures, "mixer_b16_224", 64), torch.bfloat16),
    "stable_diffusion_unet": (partial(OTHERS["stable_diffusion_unet"], "cpu"), None),
    "llama_4k": (lambda is_toy: llama(TOY_LLAMA if is_toy else LlamaSize(), "cpu"), None),
    "llama_64k": (lambda is_toy: llama(replace(TOY_LLAMA if is_toy else LlamaSize(), length=65536), "cpu"), None),
}


@dataclass(frozen=True)
class Row:
    """A machine and a budget.

    Attributes:
        share: The budget, a share of the peak of plain PyTorch above what is resident.
        problem: The step with estimated times, under the budget.
        without: What was found that only recomputes.
        choice: What was found that may also put values offloaded, None where nothing fits.
        bound_ms: Proven least extra time of all such plans, None where none exists.
    """

    share: float
    problem: Problem
    without: Solution
    choice: Solution | None
    bound_ms: float | None

    def cells(self) -> list[str]:
        """Write its numbers."""
        step_ms, choice = self.problem.step_ms, self.choice

        def percent(extra_ms: float | None) -> str:
            return "none" if extra_ms is None else f"{100 * extra_ms / step_ms:.1f}"

        alone = percent(self.without.recompute_ms) if self.without.is_feasible else "none found"
        if choice is None:
            return [f"{100 * self.share:.0f}", alone, "none found", percent(self.bound_ms), ""]
        host = format_bytes(replay_solution(self.problem, choice).host_bytes) if choice.offloads else "declines"
        return [f"{100 * self.share:.0f}", alone, percent(choice.extra_ms), percent(self.bound_ms), host]


def capture(name: str, is_toy: bool) -> OfflineStep:
    """Capture a step of a model."""
    build, autocast = MODELS[name]
    return capture_offline(Workload(lambda: build(is_toy), name), OfflineOptions(device=CUDA, autocast=autocast))


def problem_of(step: OfflineStep, machine: Machine, gb_per_s: float, limit_s: float) -> Problem:
    """Estimate a step on a machine."""
    merged = step.estimated(replace(rates_of(CUDA), machine=machine))
    profile = replace(merged.profile, link=Link(gb_per_s * 1e6, gb_per_s * 1e6, LATENCY_MS))
    return Problem(merged.graph, profile, 0, SolveOptions(limit_s), Host(UNLIMITED))


def solved(whole: Problem, eager_bytes: int) -> tuple[dict[float, Solution], list[Decisions]]:
    """Solve all budgets; give what each found, and all schedules that values may be offloaded from."""
    found = {
        share: get_strategy("portfolio")(replace(whole, budget_bytes=int(share * eager_bytes))) for share in SHARES
    }
    smallest = solve_least_memory(replace(whole, budget_bytes=eager_bytes))
    schedules = [s.recompute for s in (*found.values(), smallest) if s.is_feasible]
    return found, list(dict.fromkeys([keep_all(whole.graph), *schedules]))


def rows(whole: Problem, found: dict[float, Solution], schedules: list[Decisions], eager_bytes: int) -> Iterator[Row]:
    """Offload what each budget asks for."""
    for share, without in found.items():
        problem = replace(whole, budget_bytes=int(share * eager_bytes))
        model = StepModel(replace(problem, options=SolveOptions(BOUND_LIMIT_S)))
        bound_ms = offload_bound(model, problem.budget_bytes, BOUND_LIMIT_S)
        yield Row(share, problem, without, fastest_choice(problem, schedules, without), bound_ms)


def write(name: str, is_toy: bool, limit_s: float) -> None:
    """Print the tables of a model."""
    step, known = capture(name, is_toy), dict[Machine, tuple[dict[float, Solution], list[Decisions]]]()
    columns = (
        "budget %",
        "recomputing only: extra %",
        "with values offloaded: extra %",
        "no plan below %",
        "on the host",
    )
    for label, (machine, gb_per_s) in MACHINES.items():
        whole = problem_of(step, machine, gb_per_s, limit_s)
        eager_bytes = simulate_eager(whole.graph, whole.profile).peak_bytes
        if not known:
            smallest = solve_least_memory(replace(whole, budget_bytes=eager_bytes)).peak_bytes / eager_bytes
            print(f"## {name}\n\nPlain: {format_bytes(eager_bytes)}. Smallest budget: {100 * smallest:.1f} %", end="")
        if machine not in known:
            known[machine] = solved(whole, eager_bytes)
        found, schedules = known[machine]
        if len(known) == 1 and machine is next(iter(known)):
            least = (least_bytes(whole, schedules) or 0) / eager_bytes
            print(f"; with values offloaded {100 * least:.1f} %.\n")
        print(f"{label}: a plain step takes {whole.step_ms:.1f} ms.\n\n{page_tables.head(*columns)}", end="")
        for row in rows(whole, found, schedules, eager_bytes):
            print(page_tables.row(*row.cells()), end="", flush=True)
        print(flush=True)


def main() -> None:
    """Print tables for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--limit", type=float, default=5.0, help="seconds to solve each budget")
    parser.add_argument("--toy", action="store_true", help="small models, to see that it runs")
    chosen = parser.parse_args()
    print(f"{provenance('timm')}\n")
    for name in chosen.models.split(","):
        write(name, chosen.toy, chosen.limit)


if __name__ == "__main__":
    main()
