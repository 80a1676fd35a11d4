"""Measure the way to the first plan: the first step of planned training beside torch.compile's and eager PyTorch's.

    python benchmarks/first_plan.py [--models gpt2,llama,vit,t5] [--depths 6,12,24,48] [--repeats 3] [--budget 50%]
                                    [--where | --dynamo]

Each first step is taken in a process of its own, which has imported everything and compiled nothing: of
eager PyTorch, of `torch.compile(backend="aot_eager")`, and planned. These run in turn, in one thread, and each ratio is
of processes that ran one after the other. Times are CPU time of the process. The first step captures, proves, searches
for the least memory and runs; the second one makes the plan. Prints a Markdown table: medians, and the least and the
most. The models small-gpt2, small-llama, small-vit and small-t5 have a width of 128 and little data: what they take is
the way to the plan, not computing.

With --where, it prints instead where the CPU time of both planned steps goes, by stage: each stage without those within
it. The timers stand around whole stages, so they slow nothing down. With --dynamo, it prints the CPU time of
torch.compile's front end alone, in processes of its own: each layer traced, and those that are alike traced once.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import page_tables
import torch
import torch._dynamo  # before anything is measured, as all that compilers import
from provenance import provenance
from zoo.models import Built, gpt2_of, llama_of, t5_of, vit_of

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.torch_private import dynamo
from hiremate_lightning.torch_private.regions import module_traces

OF_DEPTH: dict[str, Callable[..., Built]] = {"gpt2": gpt2_of, "llama": llama_of, "vit": vit_of, "t5": t5_of}
TEXTS, PICTURES = {"batch": 2, "width": 128, "length": 64}, {"batch": 2, "width": 128, "size": 128}
OF_DEPTH |= {
    f"small-{name}": functools.partial(build, **(PICTURES if name == "vit" else TEXTS))
    for name, build in OF_DEPTH.items()
}
WAYS = ("eager", "aot_eager", "planned")
COLUMNS = (
    *("model", "layers", "eager, CPU s", "aot_eager, CPU s", "planned, CPU s"),
    *("planned over aot_eager", "over eager", "the first two steps, over aot_eager"),
)
STAGES = (  # each with the functions that it is spent in: module, owner if any, and name
    ("Dynamo", "hiremate_lightning.torch_private.dynamo", "_capture_with"),
    ("AOTAutograd", "hiremate_lightning.capturing.backend", "_Compilation.compile"),
    ("passes and records", "hiremate_lightning.capturing.backend", "_Compilation._partition"),
    ("measuring operations", "hiremate_lightning.sessions.graph_runtimes", "GraphRuntimes.measure_once"),
    ("least memory", "hiremate_lightning.sessions.graph_programs", "first_solution"),
    ("programs", "hiremate_lightning.sessions.offloading", "program_of"),
    ("proof", "hiremate_lightning.proofs.proving", "Prover.prove"),
    ("planning", "hiremate_lightning.sessions.planned", "PlannedSignatures.plan_and_adapt"),
)
RUNNING = "running, and all else"


def take_steps(name: str, depth: int, way: str, budget: str, begin: Callable[[], None] = lambda: None) -> list[float]:
    """Take two steps in this process; return the CPU seconds of each. A function is called once the model is built."""
    torch.manual_seed(0)
    module, batch = OF_DEPTH[name](depth)
    call: Callable[..., Any] = module
    if way == "planned":
        hiremate(module, budget, verbose=False)
    elif way == "aot_eager":
        call = torch.compile(module, backend="aot_eager")
    times = []
    begin()
    for _ in range(2):
        start = time.process_time()
        call(*batch).backward()
        times.append(time.process_time() - start)
        module.zero_grad()
    assert way != "planned" or get_plan(module) is not None, "a plan is there after the second step"
    return times


def find_stages(name: str, depth: int, budget: str) -> dict[str, float]:
    """Take two planned steps in this process; return the CPU seconds of each stage, those within it left out."""
    spent, begun = Counter[str](), [(RUNNING, 0.0)]

    def switch(stage: str) -> None:
        now = time.process_time()
        spent[begun[-1][0]] += now - begun[-1][1]
        begun[-1] = stage, now

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            outer = begun[-1][0]
            switch(stage)
            try:
                return function(*arguments, **options)
            finally:
                switch(outer)

        return run

    for stage, module, path in STAGES:
        owner: Any = importlib.import_module(module)
        *owners, attribute = path.split(".")
        for step in owners:
            owner = getattr(owner, step)
        setattr(owner, attribute, timed(stage, getattr(owner, attribute)))

    def begin() -> None:
        begun[-1] = RUNNING, time.process_time()

    take_steps(name, depth, "planned", budget, begin)
    switch(RUNNING)
    return dict(spent)


def trace(name: str, depth: int, once: bool) -> tuple[float, int]:
    """Have Dynamo trace a model in this process; return the CPU seconds, and how many modules were copied."""
    torch.manual_seed(0)
    module, batch = OF_DEPTH[name](depth)
    copies, make = Counter[str](), module_traces.Copy.make
    if not once:
        module_traces.FEWEST_NODES = sys.maxsize  # no module is worth a copy then

    def counted(copy: Any) -> Any:
        copies["made"] += 1
        return make(copy)

    module_traces.Copy.make = counted  # type: ignore[method-assign]
    seconds = Counter[str]()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seconds["traced"] = time.process_time()
        return graph.forward

    start = time.process_time()
    with dynamo.capturing_for_plans():
        torch.compile(module, backend=backend)(*batch)
    return seconds["traced"] - start, copies["made"]


def show_dynamo(options: argparse.Namespace) -> None:
    """Print the table of Dynamo's times up to its graph: the guards are made after that, the same ones in both ways."""
    sys.stdout.write(page_tables.head("model", "layers", "each traced, CPU s", "once, CPU s", "ratio", "copies"))
    for name in options.models.split(","):
        for depth in map(int, options.depths.split(",")):
            rounds = [
                {once: apart(trace, name, depth, once) for once in ((False, True), (True, False))[index % 2]}
                for index in range(options.repeats)
            ]
            medians = [statistics.median(taken[once][0] for taken in rounds) for once in (False, True)]
            ratio = spread([taken[True][0] / taken[False][0] for taken in rounds])
            cells = *(f"{seconds:.2f}" for seconds in medians), ratio, rounds[0][True][1]
            sys.stdout.write(page_tables.row(name, depth, *cells))
            sys.stdout.flush()


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own, which imports everything first: a fork would copy memory as it runs."""
    context = multiprocessing.get_context("spawn")
    results, end = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(end, function, arguments))
    process.start()
    end.close()
    taken = results.recv()  # EOFError where the process fails, which has said why
    process.join()
    return taken


def send(end: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Send what a function returns."""
    end.send(function(*arguments))


def spread(values: Sequence[float]) -> str:
    """Write the median of some values, the least and the most."""
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def row(name: str, depth: int, rounds: Sequence[dict[str, list[float]]]) -> str:
    """Write a row of the table, of what was measured in each round."""
    seconds = (f"{statistics.median(taken[way][0] for taken in rounds):.1f}" for way in WAYS)
    ratios = (spread([taken["planned"][0] / taken[way][0] for taken in rounds]) for way in ("aot_eager", "eager"))
    both = spread([sum(taken["planned"]) / sum(taken["aot_eager"]) for taken in rounds])
    return page_tables.row(name, depth, *seconds, *ratios, both)


def show_steps(options: argparse.Namespace) -> None:
    """Print the table of first steps."""
    sys.stdout.write(page_tables.head(*COLUMNS))
    for name in options.models.split(","):
        for depth in map(int, options.depths.split(",")):
            rounds = [
                {way: apart(take_steps, name, depth, way, options.budget) for way in (WAYS, WAYS[::-1])[index % 2]}
                for index in range(options.repeats)
            ]
            sys.stdout.write(row(name, depth, rounds))
            sys.stdout.flush()


def show_stages(options: argparse.Namespace) -> None:
    """Print the table of stages: medians of the seconds, and their share."""
    names = [*dict.fromkeys(stage for stage, *_ in STAGES), RUNNING]
    sys.stdout.write(page_tables.head("model", "layers", "CPU s", *names))
    for name in options.models.split(","):
        for depth in map(int, options.depths.split(",")):
            rounds = [apart(find_stages, name, depth, options.budget) for _ in range(options.repeats)]
            medians = {stage: statistics.median(taken.get(stage, 0.0) for taken in rounds) for stage in names}
            total = sum(medians.values())
            cells = (f"{seconds:.2f} ({seconds / total:.0%})" for seconds in medians.values())
            sys.stdout.write(page_tables.row(name, depth, f"{total:.1f}", *cells))
            sys.stdout.flush()


def main() -> None:
    """Read the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2,llama,vit,t5")
    parser.add_argument("--depths", default="6,12,24,48")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--dynamo", action="store_true", help="print the times of Dynamo alone")
    parser.add_argument("--where", action="store_true", help="print the stages of the planned steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write(f"{provenance('transformers', 'timm')}; 1 thread, {options.repeats} repeats\n\n")
    show = show_dynamo if options.dynamo else show_stages if options.where else show_steps
    show(options)


if __name__ == "__main__":
    main()
