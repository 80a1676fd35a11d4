"""Measure what the proof of captured code costs at its first run, and later: `verify="first"` beside `verify="off"`.

    python benchmarks/proof_cost.py [--models gpt2,resnet50,bert] [--repeats 5] [--budget 8GiB] [--threads 1]

Models are those of zoo/models.py and of zoo/packages.py. Each repeat is a process of its own, so that nothing is
captured or compiled before; processes with and without the proof run in turn, and each ratio is of two that ran one
after the other. The first step traces, proves and runs; later ones run by the plan. Ratios are of the process's CPU
time and of the clock; where other programs run, the former counts. A budget that is too small for a plain backward
leaves gradients unproved. Prints a Markdown table: medians, and the least and the most.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import page_tables
import torch
from overhead import build, make_step
from provenance import provenance

from hiremate_lightning import get_plan, hiremate

WARM_STEPS, LATER_STEPS = 3, 7
MODES = ("off", "first")


def measure(name: str, verify: str, budget: str) -> dict[str, Any]:
    """Train a model in this process; return seconds of the first and of later steps, by CPU time and by the clock."""
    torch.manual_seed(0)
    model, loss_of = build(name)
    hiremate(model, budget, verify=verify, verbose=False)
    step = make_step(model, loss_of)
    times = []
    for _ in range(1 + WARM_STEPS + LATER_STEPS):
        start = time.process_time(), time.perf_counter()
        step()
        times.append((time.process_time() - start[0], time.perf_counter() - start[1]))
        model.zero_grad()
    later = times[-LATER_STEPS:]
    plan = get_plan(model)
    assert plan is not None, "a plan is there after the second step"
    return {
        "first": times[0],
        "later": [statistics.median(step[clock] for step in later) for clock in (0, 1)],
        "proved": plan.proved,
        "prove_s": plan.planning.prove_s,
    }


def measure_apart(name: str, verify: str, budget: str) -> dict[str, Any]:
    """Measure in a process of its own, forked from one that has imported everything and run nothing."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(measure, (name, verify, budget))


def spread(ratios: Sequence[float]) -> str:
    """Write the median of some ratios, the least and the most."""
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


def show(name: str, pairs: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Write a row of the table, of pairs of what was measured without and with the proof."""
    ratios = (spread([on[key][c] / off[key][c] for off, on in pairs]) for key in ("first", "later") for c in (0, 1))
    seconds = (statistics.median(pair[which]["first"][0] for pair in pairs) for which in (0, 1))
    proving = f"{statistics.median(on['prove_s'] for _, on in pairs):.2f}"
    return page_tables.row(name, *(f"{taken:.2f}" for taken in seconds), proving, *ratios, pairs[-1][1]["proved"])


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2,resnet50,bert")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", default="8GiB")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sys.stdout.write(
        f"{provenance('transformers', 'timm')}; {options.threads} thread(s), {options.repeats} repeats\n\n"
    )
    columns = ("model", "first step without proof, CPU s", "with, CPU s", "proving, s")
    ratios = ("first step, CPU time ratio", "by the clock", "later steps, CPU time ratio", "by the clock")
    sys.stdout.write(page_tables.head(*columns, *ratios, "proved"))
    for name in options.models.split(","):
        pairs = [[measure_apart(name, verify, options.budget) for verify in MODES] for _ in range(options.repeats)]
        sys.stdout.write(show(name, pairs))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
