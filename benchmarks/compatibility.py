"""Train models of other packages plain and inside half of the memory, and compare the two runs bit for bit.

    python benchmarks/compatibility.py [--only gpt2,resnet50] [--write docs/compatibility.md] [--compile inductor]

Each model takes a few AdamW steps in a process of its own, with a new batch each, dropout and batch norm on, twice from
the same state: plain, and under a budget of 50 % of what a step adds to what is there before it, or the smallest that
is found where nothing fits half. Losses, all gradients of each step, buffers, the state of the random generator, and
the parameters at the end must be equal bit for bit. Peaks are the allocator's own events. Failures stay in the list,
with their reason.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import math
import multiprocessing
import os
import random
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import page_tables
from provenance import commit, processor, versions

if TYPE_CHECKING:
    from zoo.cases import Entry

COMPILE = "HIREMATE_COMPILE"  # variable that tells the processes of single models how to compile
STEPS = 5
MEASURED = (3, 4)  # the first steps capture, plan and measure
SEED = 11
ADDRESS_SPACE_BYTES = 12 * 2**30
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ("torch", "torch._dynamo", "transformers", "transformers.modeling_utils", "hiremate_lightning")
PACKAGES = {  # what is imported, and what is installed
    "transformers": "transformers",
    "timm": "timm",
    "diffusers": "diffusers",
    "monai": "monai",
    "neuralop": "neuraloperator",
    "torch_geometric": "torch_geometric",
    "x_transformers": "x-transformers",
    "peft": "peft",
}


@dataclass
class Result:
    """What was found for one model.

    Attributes:
        name: Name of its builder.
        package: Package that it is imported from.
        about: What it is.
        budget: The budget as asked for.
        reference: What was trained plain: the "eager" model, or the "captured" graph without recomputation.
        unequal: What differs from the plain run, in words; empty where all is equal bit for bit.
        graphs: Number of captured graphs.
        kinds: Number of kinds of steps that were planned.
        nodes: Number of operations of the planned step.
        resident_bytes: Bytes that exist before a step.
        plain_bytes: Measured peak of plain steps.
        budget_bytes: The budget.
        predicted_bytes: Predicted peak of planned steps.
        measured_bytes: Their measured peak, the highest of all that was measured; 0 where each was of another kind.
        overhead: Predicted extra time, a ratio.
        gap: Proven gap, a ratio.
        proved: How many of its graphs were proved at their first run, in the plan's words; "" where that is not known.
        prove_s: Seconds for that.
        planning_s: Seconds for tracing, profiling and solving.
        seconds: Seconds for everything.
        untrained: Why plain PyTorch has no result to compare with, "" where it has.
        error: Why there is no result, "" where there is one.
        warned: Warnings of the package under test.
        commit: The commit that was tried.
    """

    name: str
    package: str
    about: str
    budget: str = ""
    reference: str = "eager"
    unequal: str = ""
    graphs: int = 0
    kinds: int = 0
    nodes: int = 0
    resident_bytes: int = 0
    plain_bytes: int = 0
    budget_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    overhead: float = 0.0
    gap: float = 0.0
    proved: str = ""
    prove_s: float = 0.0
    planning_s: float = 0.0
    seconds: float = 0.0
    untrained: str = ""
    error: str = ""
    warned: list[str] = field(default_factory=list)
    commit: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether it ran, and all is equal bit for bit."""
        return not self.error and not self.untrained and not self.unequal

    @property
    def is_within(self) -> bool:
        """Whether it ran, and no measured peak passed the budget."""
        return not self.error and 0 < self.measured_bytes <= self.budget_bytes


# -------------------------------------------------------------------- one model, in this process


@dataclass
class _Training:
    """What a training run left."""

    steps: list[dict[str, Any]] = field(default_factory=list)  # name -> tensor or None, of each step
    peaks: list[int] = field(default_factory=list)


def _seed(seed: int) -> None:
    import numpy as np
    import torch

    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  models of other packages draw from it


def _resident_bytes(module: Any, optimizer: Any, batch: Any) -> int:
    """Add up what exists before a step, each storage once."""
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = [
        *module.parameters(),
        *module.buffers(),
        *tree_leaves(batch),
        *tree_leaves(list(optimizer.state.values())),
    ]
    storages = (t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor))
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _train(case: Any, steps: int = STEPS) -> _Training:
    """Take some AdamW steps, and keep all that must be equal."""
    import torch

    from hiremate_lightning.memory.metering import MemoryMeter

    module, run = case.module.train(), _Training()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    _seed(SEED)
    for index in range(steps):
        optimizer.zero_grad()
        batch, left = case.make_batch(index), {}

        def step(batch: Any = batch, left: dict[str, Any] = left) -> None:
            loss = case.loss_of(module(**batch), batch)
            loss.backward()
            left["loss"] = _copy(loss)

        if index in MEASURED:
            gc.collect()  # garbage that dies meanwhile would pass for memory that the step gave back
            resident_bytes = _resident_bytes(module, optimizer, batch)
            with MemoryMeter(torch.device("cpu")) as meter:
                step()
            if not meter.was_interrupted:  # by the package, which measures steps of a kind that is new to it
                run.peaks.append(resident_bytes + max(interval.peak_bytes for interval in meter.intervals))
        else:
            step()
        left["random state"] = _copy(torch.get_rng_state())
        left.update((f"gradient {n}", _copy(p.grad)) for n, p in module.named_parameters())
        optimizer.step()
        left.update((f"buffer {n}", _copy(b)) for n, b in module.named_buffers())
        run.steps.append(left)
    run.steps.append({f"parameter {n}": _copy(p) for n, p in module.named_parameters()})
    return run


def _copy(tensor: Any) -> Any:
    """Copy a tensor, None included, to where its bytes don't count: the session measures up to the optimizer's step."""
    if tensor is None:
        return None
    wide = tensor.detach().float() if tensor.dtype.itemsize == 2 and tensor.is_floating_point() else tensor.detach()
    return wide.numpy().copy()  # numpy has no bfloat16; every half is a float


def _difference(found: _Training, expected: _Training) -> str:
    """Describe what differs first and most, "" where all is equal bit for bit."""
    differing, worst = 0, 0.0
    first = ""
    for index, (mine, theirs) in enumerate(zip(found.steps, expected.steps, strict=True)):
        if mine.keys() != theirs.keys():
            return f"step {index + 1} left {sorted(mine.keys() ^ theirs.keys())[:4]} on one side only"
        for name, value in mine.items():
            other = theirs[name]
            if _same(value, other):
                continue
            differing += 1
            first = first or f"{name} of step {index + 1}"
            worst = max(worst, _relative(value, other))
    return (
        f"{differing} tensors differ, first {first}, by up to {worst:.1e} of their largest number" if differing else ""
    )


def _same(a: Any, b: Any) -> bool:
    """Compare two arrays bit for bit."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _relative(a: Any, b: Any) -> float:
    """Compute the largest difference over the largest number."""
    if a is None or b is None or a.shape != b.shape:
        return math.inf
    largest = abs(b).max()
    return float(abs(a - b).max() / largest) if largest else math.inf


def entry_of(name: str) -> Entry:
    """Find a model of the list, or an architecture as `timm/vision_transformer`."""
    from zoo import architectures, packages

    entry: Entry = architectures.entry_of(name) if "/" in name else packages.CASES[name]
    return entry


def _build(name: str) -> Any:
    _seed(7)
    return entry_of(name).build()


def _planned(name: str, budget: Any, **options: Any) -> tuple[_Training, Any, Any, float]:
    """Train a new copy of a model under a budget; give the run, its plan, its session, and seconds of planning."""
    from hiremate_lightning import get_plan, hiremate
    from hiremate_lightning.targets.modules import targets_of

    case = _build(name)
    planning_s = [0.0]
    hiremate(case.module, budget, time_limit_s=10, verbose=False, compile=os.environ.get(COMPILE), **options)
    targets = targets_of(case.module)
    assert targets is not None, "it was attached just now"

    def note(plan: Any) -> None:
        planning_s.append(sum(asdict(plan.planning).values()))  # of all plans so far

    targets.session.listeners.append(note)
    run = _train(case)
    return run, get_plan(case.module), targets.session, max(planning_s)


def _share_of(peak_bytes: int, plan: Any) -> str:
    """Compute the budget that a peak just fits, as a share rounded up to a tenth of a per cent."""
    share = (peak_bytes - plan.resident_bytes) / (plan.unplanned_peak_bytes - plan.resident_bytes)
    return f"{min(100.0, math.ceil(1000 * share + 5) / 10):.1f}%"


def _planned_at_least(name: str, result: Any) -> Any:
    """Train a model planned at the smallest budget that is found and holds as measured, and note that budget."""
    _, plan, _, _ = _planned(name, "0.1%", on_infeasible="warn")
    result.budget = _share_of(plan.planned_peak_bytes, plan)
    found, plan, session, planning_s = _planned(name, result.budget)
    measured = max([*found.peaks, plan.measured.peak_bytes or 0])
    if measured > plan.budget_bytes:
        result.budget = _share_of(measured, plan)
        found, plan, session, planning_s = _planned(name, result.budget)
    return found, plan, session, planning_s


def check(name: str, budget: str = "50%") -> Result:
    """Train one model plain and planned, in this process.

    Args:
        name: A name in `zoo.packages.CASES`.
        budget: A share.

    Returns:
        What was found; errors are not caught.
    """
    from zoo.architectures import UntrainableError

    from hiremate_lightning.errors import HiRemateWarning
    from hiremate_lightning.out_of_memory import InfeasibleBudgetError

    start, entry = time.perf_counter(), entry_of(name)
    result = Result(name, entry.package, entry.about, budget)
    try:
        expected = _train(_build(name))
    except UntrainableError as error:
        result.untrained = str(error)
        return result
    result.plain_bytes = max(expected.peaks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HiRemateWarning)
        try:
            found, plan, session, result.planning_s = _planned(name, budget)
        except InfeasibleBudgetError:
            found, plan, session, result.planning_s = _planned_at_least(name, result)
    result.warned = list(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, HiRemateWarning)))
    if plan is None:
        result.error = "no plan was made"
        return result
    result.graphs, result.kinds, result.nodes = session.captured_count, len(session.plans), len(plan.graph.nodes)
    result.resident_bytes, result.budget_bytes = plan.resident_bytes, plan.budget_bytes
    result.predicted_bytes = plan.planned_peak_bytes
    result.measured_bytes = max([*found.peaks, plan.measured.peak_bytes or 0])
    result.overhead, result.gap = plan.predicted_overhead, plan.gap
    result.proved, result.prove_s = plan.proved, plan.planning.prove_s
    result.unequal = _difference(found, expected)
    if result.unequal:
        captured, _, _, _ = _planned(name, "64 GiB")
        if not (other := _difference(found, captured)):
            result.reference = "captured"
            result.warned.append(f"Captured graph without recomputation against eager: {result.unequal}.")
        elif _difference(_train(_build(name)), expected):
            result.untrained = "two plain runs from the same state differ"
            other = ""
        result.unequal = other
    result.seconds = time.perf_counter() - start
    return result


# -------------------------------------------------------------------- all models, each in a process of its own


def check_apart(name: str, entry: Entry, timeout_s: float) -> Result:
    """Check one model in a process of its own; what goes wrong there becomes the result's error."""
    if importlib.util.find_spec(entry.package) is None:
        return Result(name, entry.package, entry.about, error=f"not installed: pip install {PACKAGES[entry.package]}")
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_send, args=(sender, name))
    process.start()
    sender.close()
    try:
        if receiver.poll(timeout_s):
            result: Result = receiver.recv()
            return result
        error = f"not done within {timeout_s:.0f} s"
    except EOFError:
        process.join()
        error = f"ended with code {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return Result(name, entry.package, entry.about, error=error)


def check_all(entries: dict[str, Entry], timeout_s: float, jobs: int) -> Iterator[tuple[str, Result]]:
    """Check models, some at a time, each in a process of its own; give the results as they come.

    The processes are forks of one that has imported what they need.
    """
    tried = commit()
    os.environ["OMP_NUM_THREADS"] = "1"
    CONTEXT.set_forkserver_preload([*filter(importlib.util.find_spec, PRELOADED)])
    with ThreadPoolExecutor(jobs) as pool:
        waited = {pool.submit(check_apart, name, entry, timeout_s): name for name, entry in entries.items()}
        for future in as_completed(waited):
            yield waited[future], replace(future.result(), commit=tried)


def _send(sender: Any, name: str) -> None:
    """Check one model, and send the result."""
    import torch
    from zoo import architectures

    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch._logging.set_logs(dynamo=logging.ERROR)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # other packages say much
    try:
        result = check(name)
    except architectures.UntrainableError as error:  # a plain step took too long the second time
        entry = entry_of(name)
        result = Result(name, entry.package, entry.about, untrained=str(error))
    except Exception as error:  # whatever goes wrong with a model is its result
        entry = entry_of(name)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        result = Result(name, entry.package, entry.about, error=text[:600])
    sender.send(result)


# -------------------------------------------------------------------- the page

INTRODUCTION = """# Compatibility

Models of other packages, small and with random weights, trained for {steps} AdamW steps with a new batch each: plain,
and planned with `hiremate(model, budget="50%")`, from the same state. *Exact* means that losses, all gradients of each
step, buffers, the state of the random generator and the final parameters are equal bit for bit; dropout, stochastic
depth and batch norm are on. *Within budget* means that no measured peak (of {measured} steps, and of the step that the
package measures by itself) is above the budget.

The budget is a share of what an unplanned step adds, at its peak, to what exists before it; a model for which nothing
fits 50 % has the smallest share that was found and held. Peaks are of the allocator's own events, with what exists
before the step. *Extra time* is predicted, on measured operations; *gap* is how far it can be from the best plan, as
proven by a bound, in per cent of a step. Models this small take milliseconds; for times that were measured, see
[benchmarks/results](../benchmarks/results). *Planning* is tracing, profiling and solving together, while other
programs ran on the machine.

Made by `python benchmarks/compatibility.py --write docs/compatibility.md` on {date}: {versions};
{machine}, one thread; commit {commits}.

**{exact} of {total} exact, {within} of {total} within budget.**
"""

COLUMNS = (
    *("model", "budget", "exact", "within budget", "plain peak", "planned peak", "predicted", "budget", "graphs"),
    *("operations", "extra time", "gap", "planning"),
)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f}"


def _cells(result: Result) -> tuple[str, ...]:
    name = f"{result.about} (`{result.name}`)"
    if result.error:
        return (name, "", "**no**", *[""] * (len(COLUMNS) - 3))
    exact = ("yes" if result.reference == "eager" else "yes, note") if result.is_exact else "**no**"
    return (
        name,
        result.budget.replace("%", " %"),
        exact,
        "yes" if result.is_within else "**no**",
        *(
            _mib(size)
            for size in (result.plain_bytes, result.measured_bytes, result.predicted_bytes, result.budget_bytes)
        ),
        str(result.graphs),
        f"{result.nodes:,}",
        f"{100 * result.overhead:+.1f} %",
        f"{100 * result.gap:.1f} %",
        f"{result.planning_s:.1f} s",
    )


def notes(results: Iterable[Result]) -> list[str]:
    lines = []
    for result in results:
        said = [f"Failed: {result.error}"] if result.error else []
        said += [f"Not exact: {result.unequal}."] if result.unequal else []
        if not result.error and not result.is_within:
            said.append("Over its budget.")
        said += result.warned
        lines += [f"- `{result.name}`: {' '.join(text.split())}" for text in said]
    return lines


def commits(results: Iterable[Result]) -> str:
    """Name the commits on which results were found, each with how many."""
    counts = Counter(result.commit or "not noted" for result in results).most_common()
    return ", ".join(f"{name} ({count})" for name, count in counts)


def page(results: list[Result]) -> str:
    """Write the results as Markdown: peaks in MiB."""
    installed = {PACKAGES[r.package] for r in results if importlib.util.find_spec(r.package)}
    text = INTRODUCTION.format(
        steps=STEPS,
        measured=len(MEASURED),
        date=time.strftime("%Y-%m-%d"),
        versions=versions(*sorted(installed)),
        machine=processor(),
        commits=commits(results),
        exact=sum(r.is_exact for r in results),
        within=sum(r.is_within for r in results),
        total=len(results),
    )
    for package, name in PACKAGES.items():
        rows = [_cells(r) for r in results if r.package == package]
        if rows:
            text += f"\n## {name}\n\nPeaks in MiB.\n\n{page_tables.table(COLUMNS, rows)}"
    lines = notes(results)
    quantized = (Path(__file__).parent / "quantized.md").read_text()
    return f"{text}\n{quantized}" + (f"\n## Notes\n\n{chr(10).join(lines)}\n" if lines else "")


def main() -> None:
    """Read the command line, check the models, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of models, or of packages, with commas")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for each model")
    parser.add_argument("--write", type=Path, default=None, help="file for the page; its other results stay")
    parser.add_argument("--compile", choices=["inductor"], help="fuse operations, and compare with the same kernels")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    options = parser.parse_args()
    if options.compile:
        os.environ[COMPILE] = options.compile
    from zoo.packages import CASES

    only = set(filter(None, options.only.split(",")))
    names = [n for n, entry in CASES.items() if not only or n in only or entry.package in only]
    if unknown := only - set(CASES) - {e.package for e in CASES.values()}:
        parser.error(f"no model or package named {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    results = read(options.write)
    for name, result in check_all({n: CASES[n] for n in names}, options.timeout, options.jobs):
        results[name] = result
        state = result.error or f"exact {result.is_exact} ({result.reference}), within {result.is_within}"
        sys.stderr.write(f"{name}: {state} {result.unequal} [{result.seconds:.0f} s]\n")
        if options.write is not None:
            write(options.write, [results[n] for n in CASES if n in results])
    if options.write is None:
        sys.stdout.write(page([results[n] for n in names]))


def read(path: Path | None) -> dict[str, Result]:
    """Read the results beside a page, by name."""
    if path is None or not path.with_suffix(".json").is_file():
        return {}
    return {row["name"]: Result(**row) for row in json.loads(path.with_suffix(".json").read_text())}


def write(path: Path, results: list[Result], make_page: Callable[[list[Result]], str] = page) -> None:
    """Write a page, and the results beside it, a line for each."""
    rows = ",\n".join(json.dumps(asdict(result)) for result in results)
    path.with_suffix(".json").write_text(f"[\n{rows}\n]\n")
    path.write_text(make_page(results))


if __name__ == "__main__":
    main()
