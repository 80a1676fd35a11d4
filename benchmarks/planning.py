"""Plan the recorded steps of models, large ones above all, and print what that takes: CPU time from a step to its plan.

    python benchmarks/graphs.py FOLDER small-t5:24 small-t5:29 small-gpt2:48
    python benchmarks/planning.py FOLDER [--models small-t5:29] [--budgets 50,60,70,80] [--repeats 3]

It is all that happens between a recorded step and its plan: the arrays of the step, bounds, starts, programs, lowering,
and the replays that check the result; in this process, one thread. Nothing is remembered from one plan to the next.
Budgets are per cent of the peak of the plain step. Prints a Markdown table: medians, with the least and the most. A
plan with a gap below 2 % is at hand after "gap < 2 %" seconds; the last columns are the first search for the least
memory, and its peak.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import page_tables
from first_plan import spread
from provenance import provenance
from solvers import load, names_of

from hiremate_lightning.options import SessionOptions
from hiremate_lightning.planning import solutions
from hiremate_lightning.planning.headroom import Room, unless_short
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.planning.planner import make_plan
from hiremate_lightning.planning.solvers.base import UNLIMITED, Problem, get_strategy
from hiremate_lightning.planning.solvers.least_memory import solve_least_memory
from hiremate_lightning.records.simulation import simulate_eager
from hiremate_lightning.records.step import Call, MergedStep, merge
from hiremate_lightning.units import Budget

CLOSE = 0.02  # of the step's time
COLUMNS = ("model", "nodes", "budget", "overhead %", "gap %", "status", "gap < 2 %, CPU s", "plan, CPU s")
LEAST_COLUMNS = ("model", "nodes", "least memory, % of plain", "its overhead %", "CPU s")


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the CPU seconds until one was close to the best, and until it was there."""

    plan: Plan
    close_s: float
    seconds: float


def plan_once(step: MergedStep, share: float) -> Planned:
    """Plan a step for a share of what it takes without a plan."""
    solutions.forget()
    close, step_ms, start = list[float](), Problem(step.graph, step.profile, 0).step_ms, time.process_time()

    def note(best_ms: float, bound_ms: float) -> None:
        if best_ms < math.inf and best_ms - bound_ms < CLOSE * step_ms:
            close.append(time.process_time() - start)

    room = Room(Budget(share=share), int(share * simulate_eager(step.graph, step.profile).peak_bytes))
    options = SessionOptions(on_infeasible="warn")
    solve = get_strategy(options.solver)
    plan = unless_short(make_plan(step, room, options, solve=solve, progress=note))
    assert plan.planned.peak_bytes <= room.step_bytes or not plan.solution.is_feasible
    seconds = time.process_time() - start
    return Planned(plan, close[0] if close else seconds, seconds)


def row(name: str, step: MergedStep, percent: int, repeats: int) -> str:
    """Plan a step several times and write a row of the table."""
    taken = [plan_once(step, percent / 100) for _ in range(repeats)]
    plan, nodes = taken[0].plan, len(step.graph.forward) + len(step.graph.backward)
    assert all(other.plan.solution.recompute == plan.solution.recompute for other in taken), "the same plan every time"
    numbers = f"{100 * plan.predicted_overhead:.2f}", f"{100 * plan.gap:.2f}", plan.solution.status.value
    seconds = spread([t.close_s for t in taken]), spread([t.seconds for t in taken])
    return page_tables.row(name, f"{nodes:,}", f"{percent} %", *numbers, *seconds)


def least_row(name: str, step: MergedStep, repeats: int) -> str:
    """Search for the least memory as the first step does, several times, and write a row of the second table."""
    problem, seconds = Problem(step.graph, step.profile, UNLIMITED), list[float]()
    for _ in range(repeats):
        start = time.process_time()
        smallest = solve_least_memory(problem)
        seconds.append(time.process_time() - start)
    share = smallest.peak_bytes / simulate_eager(step.graph, step.profile).peak_bytes
    nodes = len(step.graph.forward) + len(step.graph.backward)
    numbers = f"{100 * share:.2f}", f"{100 * smallest.recompute_ms / problem.step_ms:.1f}"
    return page_tables.row(name, f"{nodes:,}", *numbers, spread(seconds))


def show(names: Sequence[str], steps: Sequence[MergedStep], options: argparse.Namespace) -> None:
    """Print both tables."""
    sys.stdout.write(page_tables.head(*COLUMNS))
    for name, step in zip(names, steps, strict=True):
        for percent in map(int, options.budgets.split(",")):
            sys.stdout.write(row(name, step, percent, options.repeats))
            sys.stdout.flush()
    sys.stdout.write("\n" + page_tables.head(*LEAST_COLUMNS))
    for name, step in zip(names, steps, strict=True):
        sys.stdout.write(least_row(name, step, options.repeats))
        sys.stdout.flush()


def main() -> None:
    """Read the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default="")
    parser.add_argument("--budgets", default="50,60,70,80")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    names = names_of(options.folder, options.models)
    sys.stdout.write(f"{provenance('mip', 'highsbox')}; {options.repeats} repeats\n\n")
    problems = [load(options.folder, name) for name in names]
    show(names, [merge([Call(problem.graph, problem.profile)], [0]) for problem in problems], options)


if __name__ == "__main__":
    main()
