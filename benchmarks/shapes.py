"""Measure what another input shape costs: seconds of the first steps of each shape, and of the same shape later.

    python benchmarks/shapes.py [--model gpt2_12] [--budget 60%] [--lengths 128,96,112,128,96,112] [--max-plans 8]

The model reads tokens; its batch is cut to each length in turn, three steps each. The first step of a new length
captures it, from the fourth length on only traces it, and runs as was planned for another length where that fits, else
at the least memory. Prints a Markdown table of wall-clock seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from provenance import provenance

from hiremate_lightning import get_plan, hiremate
from models import MODELS


def cut(batch: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    """Cut a batch of tokens to a length."""
    return tuple(part[:, :length] if isinstance(part, torch.Tensor) else part for part in batch)


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2_12")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--lengths", default="128,96,112,128,96,112")
    parser.add_argument("--max-plans", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain, batch = MODELS[options.model]()
    planned = hiremate(plain, options.budget, max_plans=options.max_plans, verbose=False)
    sys.stdout.write(f"{provenance('transformers')}; 1 thread\n\n")
    sys.stdout.write("| length | first step s | second | third | capture + profile + solve | proven gap |\n")
    sys.stdout.write(f"|{'--|' * 6}\n")
    for length in map(int, options.lengths.split(",")):
        seconds, known = [], get_plan(planned)
        for _ in range(3):
            planned.zero_grad()
            start = time.perf_counter()
            planned(*cut(batch, length)).backward()
            seconds.append(f"{time.perf_counter() - start:.2f}")
        plan = get_plan(planned)
        stages, gap = "-", "-"
        if plan is not None and (known is None or plan.graph != known.graph):
            stages = " + ".join(
                f"{s:.2f}" for s in (plan.planning.capture_s, plan.planning.profile_s, plan.planning.solve_s)
            )
            gap = f"{100 * plan.gap:.1f} %"
        sys.stdout.write(f"| {length} | {' | '.join(seconds)} | {stages} | {gap} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
