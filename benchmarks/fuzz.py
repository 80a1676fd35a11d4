"""Train random small networks plainly and under random budgets, and compare bit for bit.

    python benchmarks/fuzz.py [--count 500] [--seed 0] [--longest 9]

Each network is drawn from its number, so a failure is repeated by `--seed NUMBER --count 1`. A network that plain
PyTorch refuses to train is drawn anew, from the next number. Prints a Markdown table, and the recipe of each failure.
"""

from __future__ import annotations

import argparse
import logging
import platform
import random
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from hiremate_lightning import CaptureError
from tests.fuzz_models import MiscompiledError, Outcome, RejectedError, compare, draw


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


def run(seed: int, longest: int) -> tuple[str, str, Outcome | None]:
    """Try the network of a number: what came out, and a line about it where that is a failure."""
    rng = random.Random(seed)
    recipe = draw(lambda values: rng.choice(list(values)), longest)
    try:
        outcome = compare(recipe)
    except RejectedError:
        return "rejected", "", None
    except MiscompiledError:
        return "torch.compile fails, with its own aot_eager too", "", None
    except CaptureError:
        return "refused, with an error that says what to change", "", None
    except Exception as error:  # whatever it is, it is a finding
        return "CRASHED", f"{seed}: {type(error).__name__}: {str(error).splitlines()[0]}; {recipe}", None
    result = describe(outcome)
    details = (
        f"{seed}: {outcome.differences[:3]}, {outcome.deviation:.0e}, peaks {outcome.peaks}; {recipe}"
        if result.isupper()
        else ""
    )
    return result, details, outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="networks to train")
    parser.add_argument("--seed", type=int, default=0, help="number of the first one")
    parser.add_argument("--longest", type=int, default=9, help="most operations of a network")
    options = parser.parse_args()
    torch._logging.set_logs(dynamo=logging.ERROR)
    results: Counter[str] = Counter()
    operations, graphs, saved, findings = 0, Counter[int](), [], []
    start, seed = time.perf_counter(), options.seed
    while sum(results.values()) - results["rejected"] < options.count:
        result, details, outcome = run(seed, options.longest)
        results[result] += 1
        seed += 1
        if details:
            findings.append(details)
            print(details, file=sys.stderr, flush=True)
        if sum(results.values()) % 25 == 0:
            print(f"{seed - options.seed} drawn: {dict(results)}", file=sys.stderr, flush=True)
        if outcome is not None:
            operations += len(outcome.recipe.operations)
            graphs[min(outcome.graphs, 3)] += 1
            if outcome.plan is not None:
                saved.append(1 - outcome.plan.planned_peak_bytes / outcome.plan.unplanned_peak_bytes)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} thread(s)\n")
    print("| result | networks |\n|--|--|")
    for result, count in sorted(results.items()):
        print(f"| {result} | {count} |")
    several = graphs[2] + graphs[3]
    print(f"\n{operations} operations; {several} networks in several graphs; numbers {options.seed} to {seed - 1}; ")
    print(f"peaks lowered by up to {max(saved, default=0):.0%}; {time.perf_counter() - start:.0f} s")
    if findings:
        print("\n" + "\n".join(f"- {finding}" for finding in findings))


if __name__ == "__main__":
    main()
