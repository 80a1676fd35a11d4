"""Solve the captured steps of real models with every strategy, and print what each found, proved and took.

    python benchmarks/graphs.py FOLDER
    python benchmarks/solvers.py FOLDER [--models bert,t5] [--budgets 50,30] [--strategies portfolio,hilp] [--limit 30]
                                        [--different] [--backend CBC]

Budgets are per cent of the peak of the unplanned step. Times are in per cent of the step without recomputation, the gap
in points of that; seconds are wall-clock, of one run: until the first schedule, until the proven gap was below two
points, and until the end. With --different, times and bytes of all nodes are scaled at random, so that no two blocks
are equal. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import page_tables
from graph_files import read_step
from provenance import provenance

from hiremate_lightning.planning.solvers.base import Problem, SolveOptions, get_strategy, strategy_names
from hiremate_lightning.planning.solvers.least_memory import solve_least_memory
from hiremate_lightning.planning.solvers.model import StepModel


def load(folder: Path, name: str) -> Problem:
    """Read a step; its budget is what keeping everything takes."""
    graph, profile = read_step(folder, name)
    return Problem(graph, profile, StepModel(Problem(graph, profile, 0)).keep_all_bytes)


def names_of(folder: Path, asked: str) -> list[str]:
    """List the steps that are asked for, with commas, or all of a folder."""
    found = sorted(path.name.removesuffix(".graph.json") for path in folder.glob("*.graph.json"))
    return asked.split(",") if asked else found


def make_different(problem: Problem) -> Problem:
    """Scale times and bytes of all nodes by up to a third, the same in every run."""
    draw = random.Random(0)
    storages = [replace(s, size_bytes=int(s.size_bytes * draw.uniform(0.75, 1.33))) for s in problem.graph.storages]
    graph = replace(problem.graph, storages=tuple(storages))
    times = tuple(time_ms * draw.uniform(0.75, 1.33) for time_ms in problem.profile.time_ms)
    profile = replace(problem.profile, time_ms=times)
    return Problem(graph, profile, StepModel(Problem(graph, profile, 0)).keep_all_bytes)


def row(name: str, whole: Problem, percent: int, strategy: str, limits: SolveOptions) -> str:
    """Solve once and write a row of the table."""
    budget = whole.budget_bytes * percent // 100
    reached = dict[str, float]()
    start = time.monotonic()

    def note(best_ms: float, bound_ms: float) -> None:
        if best_ms < math.inf:
            reached.setdefault("first", time.monotonic() - start)
        if best_ms - bound_ms < 0.02 * whole.step_ms:
            reached.setdefault("close", time.monotonic() - start)

    options = replace(limits, progress=note)
    solution = get_strategy(strategy)(Problem(whole.graph, whole.profile, budget, options))
    nodes = f"{len(whole.graph.forward)}+{len(whole.graph.backward)}"
    overhead, gap = "-", "-"
    if solution.is_feasible:
        overhead = f"{100 * solution.recompute_ms / whole.step_ms:.2f}"
        gap = f"{100 * (solution.recompute_ms - solution.bound_ms) / whole.step_ms:.2f}"
    bound = f"{100 * solution.bound_ms / whole.step_ms:.2f}"
    cells = (name, nodes, f"{percent} %", strategy, overhead, bound, gap, solution.status.value, solution.stopped_by)
    seconds = (f"{reached[key]:.1f}" if key in reached else "-" for key in ("first", "close"))
    return page_tables.row(*cells, *seconds, f"{solution.solve_s:.1f}")


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default="")
    parser.add_argument("--budgets", default="50,30")
    parser.add_argument("--strategies", default=",".join(strategy_names()))
    parser.add_argument("--limit", type=float, default=30.0)
    parser.add_argument("--different", action="store_true")
    parser.add_argument("--backend", default="", help="HIGHS or CBC (default: the first that works)")
    options = parser.parse_args()
    names = names_of(options.folder, options.models)
    sys.stdout.write(f"{provenance('mip', 'highsbox')}; limit {options.limit:g} s\n\n")
    columns = ("model", "nodes", "budget", "strategy", "overhead %", "bound %", "gap", "status", "stopped by")
    sys.stdout.write(page_tables.head(*columns, "first s", "gap < 2 s", "s"))
    limits = SolveOptions(options.limit, backend=options.backend)
    for name in names:
        whole = make_different(load(options.folder, name)) if options.different else load(options.folder, name)
        smallest = solve_least_memory(replace(whole, budget_bytes=0))
        share = 100 * smallest.peak_bytes / whole.budget_bytes
        least = (name, "", f"{share:.1f} %", "least memory", *[""] * 7, f"{smallest.solve_s:.1f}")
        sys.stdout.write(page_tables.row(*least))
        for percent in map(int, options.budgets.split(",")):
            for strategy in options.strategies.split(","):
                sys.stdout.write(row(name, whole, percent, strategy, limits))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
