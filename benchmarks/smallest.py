"""Find the smallest budget of the captured steps of real models, beside a proven bound and one checkpoint per block.

    python benchmarks/graphs.py FOLDER
    python benchmarks/smallest.py FOLDER [--models bert,t5] [--limit 5]

All in per cent of the peak of the unplanned step, by replay: the least memory that the heuristic finds, which is what
errors and the first step use; the smallest budget for which the default strategy finds a schedule, by bisection to half
a point, with so many seconds for each budget; the largest budget that a relaxation proves too small; and what
torch.utils.checkpoint around each block takes at least: what crosses the borders of blocks is kept, and the rest is
recomputed value by value, where torch.utils.checkpoint recomputes and holds a whole block. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import page_tables
from provenance import provenance
from solvers import load, names_of

from hiremate_lightning.planning.solvers.base import Problem, SolveOptions, get_strategy
from hiremate_lightning.planning.solvers.choices import Policy
from hiremate_lightning.planning.solvers.least_memory import solve_least_memory
from hiremate_lightning.planning.solvers.model import StepModel
from hiremate_lightning.planning.solvers.turn_point import lower_bound

BLOCKS = {  # pattern of the paths of the blocks, where it isn't the first list of modules
    "convnext": r".*stages\.\d+\.blocks\.\d+",
    "regnet": r".*s\d+\.b\d+",
    "resnet50": r".*layer\d+\.\d+",
    "resnet101": r".*layer\d+\.\d+",
    "unet": r".*(?:down|up|merge)\.\d+",
}
FIRST_LIST = r".*?\.\d+(?=\.|$)"
RESOLUTION = 0.005


def checkpoint_per_block(model: StepModel, pattern: str) -> int:
    """Give the peak where only what crosses the borders of blocks is kept."""
    graph = model.graph

    def block(node: int) -> str:
        match = re.match(pattern, graph.nodes[node].module)
        return match.group(0) if match else ""

    kept = set()
    for node in graph.forward:
        here = block(node)
        kept.update(s for s in graph.allocates[node] if not here)
        for tensor in graph.nodes[node].inputs:
            storage = model.storage_of[tensor]
            if storage in model.made_at and block(graph.forward[model.made_at[storage]]) != here:
                kept.add(storage)
    return model.replay(Policy(frozenset(kept & set(model.choices)) | model.fixed)).peak_bytes


def smallest_solved(whole: Problem, low: int, high: int, limit_s: float) -> int:
    """Find the smallest budget that the default strategy meets, between one that can't be and one that is met."""
    while high - low > RESOLUTION * whole.budget_bytes:
        budget = (low + high) // 2
        found = get_strategy("portfolio")(replace(whole, budget_bytes=budget, options=SolveOptions(limit_s)))
        if found.is_feasible:
            high = found.peak_bytes
        else:
            low = budget
    return high


def proven_bytes(model: StepModel, most: int) -> int:
    """Find the largest budget that the relaxations prove too small, to a thousandth of the unplanned peak."""
    low, high = 0, most
    while high - low > model.keep_all_bytes // 1000:
        middle = (low + high) // 2
        if lower_bound(model, middle, time.monotonic() + 30) is None:
            low = middle
        else:
            high = middle
    return low


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default="")
    parser.add_argument("--limit", type=float, default=5.0)
    options = parser.parse_args()
    names = names_of(options.folder, options.models)
    sys.stdout.write(f"{provenance('mip', 'highsbox')}; limit {options.limit:g} s\n\n")
    columns = ("model", "heuristic %", "smallest solved %", "proven too small %", "checkpoint per block %")
    sys.stdout.write(page_tables.head(*columns))
    for name in names:
        whole = load(options.folder, name)
        model = StepModel(whole)
        heuristic = solve_least_memory(replace(whole, budget_bytes=0)).peak_bytes
        too_small = proven_bytes(model, heuristic)
        solved = smallest_solved(whole, too_small, heuristic, options.limit)
        checkpointed = checkpoint_per_block(model, BLOCKS.get(name, FIRST_LIST))
        found = (heuristic, solved, too_small, checkpointed)
        cells = (f"{100 * size_bytes / whole.budget_bytes:.1f}" for size_bytes in found)
        sys.stdout.write(page_tables.row(name, *cells))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
