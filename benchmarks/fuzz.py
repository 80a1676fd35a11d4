"""Train random small networks plainly and under random budgets, and compare bit for bit.

    python benchmarks/fuzz.py [--count 500] [--seed 0] [--longest 9] [--jobs 1] [--loops]

Each network is drawn from its number, so a failure is repeated by `--seed NUMBER --count 1`. A network that plain
PyTorch refuses to train is drawn anew, from the next number. With `--loops` it is training loops that are drawn: two
small networks, forwards and backwards in random order (kinds of steps in cycles or by chance, graphs that wait or are
retained, micro-batches), and how many of their steps were measured or timed is counted too. Prints a Markdown table,
and the recipe of each failure. Networks are trained in processes of their own, some in each: what torch.compile
remembers makes it slower and slower.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import page_tables
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from provenance import provenance

from hiremate_lightning import CaptureError
from tests.fuzz_loops import SLACK_BYTES, compare_loop, draw_loop
from tests.fuzz_models import MiscompiledError, Outcome, RejectedError, compare, draw

REJECTED = "rejected by plain PyTorch"
NETWORKS_PER_PROCESS = 25
WATCHING = 0.01  # most of a long loop's time that watching its steps may take


def describe(outcome: Outcome) -> str:
    """Say what came out, in one of the words of the table."""
    if outcome.is_wrong:
        return "WRONG"
    if outcome.is_over_budget:
        return "OVER BUDGET"
    exact = (
        "exact" if not outcome.deviation else "exact to the captured graphs; these add up in another order than eager"
    )
    if outcome.plan is None:
        return f"{exact}, nothing to plan"
    if outcome.excess_bytes > 0:
        return f"{exact}; over budget, announced: no plan takes less"
    return f"{exact}; within budget{', after one correction' if outcome.corrected_bytes else ''}"


@dataclass(frozen=True)
class Trial:
    """What came of one number.

    Attributes:
        result: In one of the words of the table.
        finding: A line about a failure, "" for none.
        operations: Number of operations of the network, or of steps of a loop.
        graphs: Number of captured graphs, 0 where none ran, or of kinds of steps that have plans.
        saved: By how much its peak was lowered, as a share.
        watched: Steps of a loop that were measured or timed.
        watching: Share of the time of a long loop's last steps that this took.
    """

    result: str
    finding: str = ""
    operations: int = 0
    graphs: int = 0
    saved: float = 0.0
    watched: int = 0
    watching: float = 0.0


def run_loop(seed: int, longest: int) -> Trial:
    """Try the loop of a number, whose longest operation plays no part."""
    torch.set_num_threads(1)
    torch._logging.set_logs(dynamo=logging.ERROR)
    torch.compiler.reset()
    gc.collect()
    gc.freeze()  # a planned step collects garbage: let it pass over what stays of imported packages and past loops
    recipe = draw_loop(seed)
    try:
        outcome = compare_loop(recipe)
    except Exception as error:  # whatever it is, it is a finding
        return Trial("CRASHED", f"{seed}: {type(error).__name__}: {str(error).splitlines()[0]}; {recipe}")
    finding = (
        f"{seed}: {outcome.differences} differ, peaks {outcome.peaks} of {outcome.budget_bytes}, watching "
        f"{outcome.watching:.2%}; {recipe.iterations}, kinds {recipe.order[:8]}"
    )
    counts = {
        "operations": outcome.iterations,
        "graphs": outcome.kinds,
        "saved": 1 - max(outcome.peaks) / max(outcome.plain_peaks),
        "watched": outcome.watched,
        "watching": outcome.watching,
    }
    if outcome.differences:
        return Trial("WRONG", finding, **counts)
    if outcome.is_over_budget:
        return Trial("OVER BUDGET", finding, **counts)
    if outcome.watching > WATCHING:
        return Trial("WATCHED TOO OFTEN", finding, **counts)
    if max(outcome.peaks) > outcome.budget_bytes + SLACK_BYTES:
        return Trial("exact; over budget, announced", "", **counts)
    return Trial("exact; within budget", "", **counts)


def run(seed: int, longest: int) -> Trial:
    """Try the network of a number."""
    torch.set_num_threads(1)
    torch._logging.set_logs(dynamo=logging.ERROR)
    gc.collect()
    gc.freeze()  # a planned step collects garbage: let it pass over what stays of imported packages and past networks
    rng = random.Random(seed)
    recipe = draw(lambda values: rng.choice(list(values)), longest)
    try:
        outcome = compare(recipe)
    except RejectedError:
        return Trial(REJECTED)
    except MiscompiledError:
        return Trial("torch.compile fails, with its own aot_eager too")
    except CaptureError:
        return Trial("refused, with an error that says what to change")
    except Exception as error:  # whatever it is, it is a finding
        return Trial("CRASHED", f"{seed}: {type(error).__name__}: {str(error).splitlines()[0]}; {recipe}")
    if any("torch.compile could not capture" in text for text in outcome.warnings) and not outcome.is_wrong:
        return Trial("exact; torch.compile fails on a part, which runs without a plan")
    result, plan = describe(outcome), outcome.plan
    finding = f"{seed}: {outcome.differences[:3]}, {outcome.deviation:.0e}, peaks {outcome.peaks}; {recipe}"
    return Trial(
        result,
        finding if result.isupper() else "",
        len(recipe.operations),
        outcome.graphs,
        1 - plan.planned_peak_bytes / plan.unplanned_peak_bytes if plan is not None else 0.0,
    )


def try_all(seed: int, count: int, longest: int, jobs: int, attempt: Callable[..., Trial] = run) -> list[Trial]:
    """Try the networks, or loops, of consecutive numbers until so many were not rejected."""
    trials: list[Trial] = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, maxtasksperchild=NETWORKS_PER_PROCESS) as pool:
        while missing := count - sum(trial.result != REJECTED for trial in trials):
            first = seed + len(trials)
            for trial in pool.imap(partial(attempt, longest=longest), range(first, first + missing)):
                trials.append(trial)
                if trial.finding:
                    print(trial.finding, file=sys.stderr, flush=True)
                if len(trials) % 25 == 0:
                    print(
                        f"{len(trials)} drawn: {dict(Counter(t.result for t in trials))}", file=sys.stderr, flush=True
                    )
    return trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="networks to train")
    parser.add_argument("--seed", type=int, default=0, help="number of the first one")
    parser.add_argument("--longest", type=int, default=9, help="most operations of a network")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--loops", action="store_true", help="draw training loops")
    options = parser.parse_args()
    start = time.perf_counter()
    trials = try_all(options.seed, options.count, options.longest, options.jobs, run_loop if options.loops else run)
    print(f"{provenance()}; 1 thread, {options.jobs} at a time\n")
    counts = sorted(Counter(trial.result for trial in trials).items())
    print(page_tables.table(("result", "networks"), counts), end="")
    operations, several = sum(t.operations for t in trials), sum(t.graphs > 1 for t in trials)
    numbers = f"numbers {options.seed} to {options.seed + len(trials) - 1};"
    if options.loops:
        watched = sum(t.watched for t in trials)
        print(f"\n{operations} iterations, {watched} steps watched; {several} loops of several kinds; {numbers}")
        shares = [t.watching for t in trials if t.watching]
        print(f"{len(shares)} long loops, whose watching took up to {max(shares, default=0.0):.2%} of their time;")
    else:
        print(f"\n{operations} operations; {several} networks in several graphs; {numbers}")
    print(f"peaks lowered by up to {max(t.saved for t in trials):.0%}; {time.perf_counter() - start:.0f} s")
    for trial in trials:
        if trial.finding:
            print(f"- {trial.finding}")


if __name__ == "__main__":
    main()
