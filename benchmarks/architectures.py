"""Train a small model of every architecture of transformers and of timm plain and inside half of the memory.

    python benchmarks/architectures.py [--only timm] [--jobs 2] [--write docs/architectures.md]

compatibility.py trains models that were chosen, in sizes that suit them; here nobody chooses (zoo/architectures.py).
Results that the page has already are kept, except of what `--only` names: a run that was stopped is gone on with.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import compatibility
import page_tables
from compatibility import Result
from provenance import processor, versions
from zoo.architectures import entries as every_architecture

INTRODUCTION = """# Architectures

A small model of each of {counts}, trained as on the page of
[compatibility](compatibility.md): some AdamW steps plain and with `hiremate(model, budget="50%")`, compared bit for
bit. Nobody chose these models or adjusted them: sizes are put into the default configuration of an architecture, and of
several such sets the first is taken with which plain PyTorch trains a step.

Made by `python benchmarks/architectures.py --write docs/architectures.md` on {date}: {versions};
{machine}, one thread; commit {commits}.

**Of {trained} that plain PyTorch trains, {exact} are exact and {within} within budget.** Plain PyTorch doesn't train
{untrained} others in any of these sizes. Measured peaks are {median} of the predicted ones in the median, {least} to
{most} in all.

{proofs}

*Not measured*: by chance (layers that are dropped, say) each step was of another kind; the first steps of a kind are
measured by the package itself. *Captured*: exact against the same captured graphs without recomputation, which add up
some sums in another order than eager PyTorch does ([limits](limits.md)).
"""

COLUMNS = ("architecture", "result", "budget", "measured / predicted peak", "graphs", "operations")


def verdict(result: Result) -> str:
    """Say what came out, in a word of the table."""
    if result.untrained:
        return "not trained"
    if result.error:
        return "**FAILED**"
    if not result.is_exact:
        return "**NOT EXACT**"
    if not result.measured_bytes:
        return "exact, not measured"
    if not result.is_within:
        return "**OVER BUDGET**"
    return "exact" if result.reference == "eager" else "exact, captured"


def page(results: list[Result]) -> str:
    """Write the results as Markdown: a table of counts, one of models, and what was said."""
    trained = [r for r in results if not r.untrained]
    ratios = sorted(r.measured_bytes / r.predicted_bytes for r in trained if r.measured_bytes) or [1.0]
    text = INTRODUCTION.format(
        counts=" and ".join(f"{n} architectures of {p}" for p, n in Counter(r.package for r in results).items()),
        date=time.strftime("%Y-%m-%d"),
        versions=versions("transformers", "timm"),
        machine=processor(),
        commits=compatibility.commits(results),
        trained=len(trained),
        exact=sum(r.is_exact for r in trained),
        within=sum(r.is_within for r in trained),
        untrained=len(results) - len(trained),
        median=f"{statistics.median(ratios):.4f}",
        least=f"{ratios[0]:.4f}",
        most=f"{ratios[-1]:.4f}",
        proofs=_proofs(trained),
    )
    counts = sorted(Counter((r.package, verdict(r)) for r in results).items())
    rows = [(package, word, count) for (package, word), count in counts]
    text += f"\n{page_tables.table(('package', 'result', 'architectures'), rows)}\n## Trained\n\n"
    text += page_tables.table(COLUMNS, map(_cells, trained))
    text += "\n## Notes\n\n" + "".join(f"{line}\n" for line in compatibility.notes(trained))
    text += "\n## Not trained by plain PyTorch in these sizes\n\n"
    return text + "".join(f"- `{r.name}`: {' '.join(r.untrained.split())}\n" for r in results if r.untrained)


def _proofs(results: list[Result]) -> str:
    """Add up what was proved at the first runs, in a sentence."""
    tried = [r for r in results if r.proved]
    counts = [[int(n) for n in re.findall(r"\d+(?= of)|(?<=of )\d+", r.proved)] for r in tried]
    forward, graphs, gradients = (sum(own[i] for own in counts) for i in (0, 1, 2))
    rounded = ", ".join(f"`{r.name}`" for r in tried if "rounding" in r.proved) or "none"
    shares = [r.prove_s / r.planning_s for r in tried if r.planning_s] or [0.0]
    return (
        f"Of {graphs} graphs of {len(tried)} models that ran since code is proved at its first run, the forward of\n"
        f"{forward} was proved against eager PyTorch, and the gradients of {gradients}; up to rounding: {rounded}.\n"
        f"That took {statistics.median(shares):.0%} of the seconds of planning in the median."
    )


def _cells(result: Result) -> tuple[object, ...]:
    ratio = f"{result.measured_bytes / result.predicted_bytes:.3f}" if result.measured_bytes else ""
    budget = result.budget.replace("%", " %")
    return f"`{result.name}`", verdict(result), budget, ratio, result.graphs, f"{result.nodes:,}"


def main() -> None:
    """Read the command line, check the architectures, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="packages, or architectures as package/name, with commas")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--write", type=Path, default=None, help="file for the page; its other results stay")
    options = parser.parse_args()
    entries, results = every_architecture(), compatibility.read(options.write)
    only = set(filter(None, options.only.split(",")))
    due = {n: e for n, e in entries.items() if (n in only or e.package in only if only else n not in results)}
    if not due and only:
        parser.error("--only names nothing that is installed")
    for name, result in compatibility.check_all(due, options.timeout, options.jobs):
        results[name] = result
        said = result.error or result.untrained or result.unequal
        ratio = result.measured_bytes / (result.predicted_bytes or 1)
        sys.stderr.write(f"{name}: {verdict(result)} {ratio:.4f} {said} [{result.seconds:.0f} s]\n")
        if options.write is not None:
            compatibility.write(options.write, [results[n] for n in entries if n in results], page)
    if options.write is None:
        sys.stdout.write(page([results[n] for n in entries if n in results]))


if __name__ == "__main__":
    main()
