"""Compare ways of partitioning: the hierarchical program on the same steps, with clusters cut by each.

    python benchmarks/graphs.py FOLDER
    python benchmarks/partitions.py FOLDER [--models bert,t5] [--budgets 50] [--limit 10]

Only the hierarchical program runs, from the same start; the whole-graph search that would hide a bad partition is left
out. Overheads are in per cent of the step, seconds are wall-clock, of one run. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from solvers import load

from hiremate_lightning.planning.partition import PartitionOptions, partition
from hiremate_lightning.planning.solvers import Problem, SolveOptions
from hiremate_lightning.planning.solvers.hilp import merge
from hiremate_lightning.planning.solvers.incumbent import begin
from hiremate_lightning.planning.solvers.refine import polish
from hiremate_lightning.planning.solvers.turn_point import try_segments

WAYS = {
    "cuts, modules": PartitionOptions("cuts"),
    "cuts": PartitionOptions("cuts", module_weight=1.0),
    "groups": PartitionOptions("groups"),
}


def row(name: str, whole: Problem, percent: int, limit_s: float) -> str:
    """Solve once for each way and write a row of the table."""
    cells = [name, f"{percent} %"]
    for options in WAYS.values():
        budget = whole.budget_bytes * percent // 100
        search = begin(Problem(whole.graph, whole.profile, budget, SolveOptions(time_limit_s=limit_s)))
        try_segments(search, search.within(0.15))
        merge(search, options)
        polish(search)
        solution = search.answer("hilp")
        leaves = partition(whole.graph, options).leaves
        found = f"{100 * solution.recompute_ms / whole.step_ms:.2f}" if solution.is_feasible else "-"
        cells += [f"{len(leaves)} ({len({leaf.key for leaf in leaves})})", found, f"{solution.solve_s:.1f}"]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default="bert,vit,convnext,unet,mixer,fno,regnet,gpt2_12")
    parser.add_argument("--budgets", default="50")
    parser.add_argument("--limit", type=float, default=10.0)
    options = parser.parse_args()
    ways = "".join(f" {way}: leaves (distinct) | overhead % | s |" for way in WAYS)
    sys.stdout.write(f"| model | budget |{ways}\n|{'--|' * (2 + 3 * len(WAYS))}\n")
    for name in options.models.split(","):
        whole = load(options.folder, name)
        for percent in map(int, options.budgets.split(",")):
            sys.stdout.write(row(name, whole, percent, options.limit))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
