"""Compare plans with every other way of saving memory: peaks, times, and whether gradients are eager's.

    python benchmarks/rivals.py [--models gpt,bert] [--methods checkpoint,ours-50] [--processes 3] [--rounds 7]
                                [--device cpu] [--inductor] [--strategies] [--quick]
                                [--write benchmarks/results/DATE-rivals]

Methods, beside eager:

    checkpoint, checkpoint2   torch.utils.checkpoint around each block, around every second block
    selective                 the same, but the outputs of attention and every second matrix product are kept
    library                   what the model's library has: transformers, diffusers, timm
    budget-0.5                torch.compile's aot_eager with activation_memory_budget 0.5
    inductor, inductor-0.5    torch.compile's Inductor, and the same with activation_memory_budget 0.5
    blocks, blocks-0.5        Inductor for each block alone, as torchtitan compiles, and the same with that budget
    ours-100                  planned with nothing to recompute: what the execution itself costs
    ours-50, ours-least       planned at 50 % of eager's peak, and at the smallest budget that is found
    fused-50                  the same with compile="inductor"
    ours-at-checkpoint        planned at the measured peak of that method; added by itself for each rival
    strategy-hilp             planned at 50 % with another strategy

Each method runs in a fresh process, started one after the other. Then the processes take turns, one at a time, several
rounds, each beside eager; the time of a method is the median of its ratios to the eager steps beside it. Where all
processes would take more memory than --memory, they run in groups, each with eager. One process differs from the next
by some per cent: with --processes, all that runs is started so many times anew, eager too, by the plan of the first
time, and takes as many rounds each time. Peaks are by the allocator's own
events. With --write, a page, all numbers and a plot are written after each model; --show FILE.json writes page and plot
again from the numbers. On the CPU the C library is told to keep the memory that it has: to hand it back and take it
again costs up to a fifth of a step, whatever the method.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from provenance import commit, processor, versions
from rival_plot import draw
from rival_tables import (
    ABSENT,
    AT,
    CLOCKS,
    EAGER,
    FAILED,
    READY,
    Row,
    Timing,
    grouped,
    is_rival,
    points_of,
    row_from_dict,
    summary,
    write_markdown,
)
from rival_worker import Setup, serve
from zoo.models import MODELS

from hiremate_lightning.planning.solvers.base import strategy_names

ALL_MODELS = "gpt,bert,vit,resnet50,convnext,unet,t5,llama,llama_words,mixer,regnet,fno,diffusion"
RIVALS = ("checkpoint", "checkpoint2", "library", "budget-0.8", "budget-0.5", "budget-0.2", "budget-0")
INDUCTOR = ("inductor", "inductor-0.5", "inductor-0.2", "fused-100", "fused-70", "fused-50", "fused-30")
OURS = ("ours-100", "ours-90", "ours-70", "ours-50", "ours-40", "ours-30", "ours-least")
QUICK = ("checkpoint", "budget-0.5", "ours-100", "ours-50", "ours-least")
ROUND_S = 0.5  # least seconds of a method in a round
MOST_STEPS = 200


@dataclass
class Worker:
    """A process that serves one method, and what it said of itself."""

    setup: Setup
    process: Any
    pipe: Any
    row: Row

    @classmethod
    def start(cls, setup: Setup, limit_s: float) -> Worker:
        """Start a process and wait until it is ready."""
        context = multiprocessing.get_context("spawn")
        pipe, other = context.Pipe()
        process = context.Process(target=serve, args=(setup, other), name=f"{setup.model} {setup.method}")
        process.start()
        other.close()
        worker = cls(setup, process, pipe, Row(setup.model, setup.method))
        worker.row = worker._receive(limit_s)
        if worker.row.status != READY:
            worker.stop()
        return worker

    def _receive(self, limit_s: float) -> Any:
        try:
            if self.pipe.poll(limit_s):
                return self.pipe.recv()
            reason = f"not ready after {limit_s:.0f} s"
        except EOFError:
            reason = "the process ended"
        return Row(self.setup.model, self.setup.method, FAILED, reason)

    def round(self, limit_s: float) -> Timing | None:
        """Take the steps of one round; None where the process failed."""
        steps = min(MOST_STEPS, math.ceil(ROUND_S / self.row.step_s))
        try:
            self.pipe.send(steps)
        except BrokenPipeError:
            return None
        found = self._receive(limit_s)
        return found if isinstance(found, Timing) else None

    def stop(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def stopped_at_end(workers: list[Worker]) -> Iterator[None]:
    """Leave no process behind."""
    try:
        yield
    finally:
        for worker in workers:
            worker.stop()


def run_rounds(workers: Sequence[Worker], rounds: int, limit_s: float) -> list[Row]:
    """Let the workers take turns, each beside eager, the first one; give their rows with times.

    Other load on the machine comes and goes within seconds: eager steps right before or after those of a method meet
    the same. Eager beside itself shows how much of that is left.
    """
    eager = workers[0]
    times: dict[str, list[tuple[Timing, Timing]]] = {worker.setup.method: [] for worker in workers}
    for index in range(rounds):
        for worker in workers:
            turns = [eager, worker] if index % 2 == 0 else [worker, eager]
            found = [turn.round(limit_s) for turn in turns]
            plain, own = found if index % 2 == 0 else reversed(found)
            if plain is not None and own is not None:
                times[worker.setup.method].append((plain, own))
    return [_with_times(worker.row, times[worker.setup.method], rounds) for worker in workers]


def _with_times(row: Row, pairs: Sequence[tuple[Timing, Timing]], rounds: int) -> Row:
    if len(pairs) < rounds:
        return replace(row, status=FAILED, detail="it stopped answering while it was timed")
    eager, own = zip(*pairs, strict=True)
    return replace(row, times=own, eager_times=eager)


def compare(model: str, methods: Sequence[str], options: argparse.Namespace, folder: Path) -> list[Row]:
    """Run all methods on one model, those that work in several processes one after the other."""
    rows = compare_once(model, methods, {}, options, folder)
    for _ in range(1, options.processes):
        ready = [method for method, row in rows.items() if row.status == READY]
        again = compare_once(model, ready, rows, options, folder)
        rows |= {method: _joined(rows[method], again[method]) for method in ready}
    return list(rows.values())


def _joined(row: Row, again: Row) -> Row:
    return row.together(again) if again.status == READY else replace(again, detail=f"another time: {again.detail}")


def compare_once(
    model: str, methods: Sequence[str], before: dict[str, Row], options: argparse.Namespace, folder: Path
) -> dict[str, Row]:
    """Run methods on one model, as many at once as memory allows; at the budgets of the time before, if any."""
    rows: dict[str, Row] = {}
    alive: list[Worker] = []
    limit_bytes = options.memory * 2**30

    def finish(kept: int) -> None:
        rows.update((row.method, row) for row in run_rounds(alive, options.rounds, options.limit))
        for worker in alive[kept:]:
            worker.stop()
        del alive[kept:]

    with stopped_at_end(alive):
        for method in methods:
            used = [worker.row.rss_bytes for worker in alive]
            if len(alive) > 1 and sum(used) + max(used) > limit_bytes:
                finish(kept=1)
            row, worker = start(model, method, before or rows, options, folder)
            rows[method] = row
            say(f"{model} {method}: {row.status} {row.detail} peak {row.peak_bytes / 2**20:.0f} MiB")
            if worker is not None:
                alive.append(worker)
            elif method == EAGER:
                break
        if alive:
            finish(kept=0)
    return rows


def start(
    model: str, method: str, rows: dict[str, Row], options: argparse.Namespace, folder: Path
) -> tuple[Row, Worker | None]:
    """Start one method, if it can be, at a budget that the measured rows tell; give its row and its process."""
    setup = Setup(model, method, folder, options.device, options.threads, options.batch, options.time_limit)
    if method.startswith(AT):
        rival = rows.get(method.removeprefix(AT))
        if rival is None or rival.status != READY:
            return Row(model, method, ABSENT, "no peak was measured"), None
        if rival.peak_bytes >= rows[EAGER].peak_bytes:
            return Row(model, method, ABSENT, "its peak is not below eager's"), None
        setup = replace(setup, peak_bytes=rival.peak_bytes)
    elif (share := method.removeprefix("ours-").removeprefix("fused-")).isdigit() and share != "100":
        setup = replace(setup, peak_bytes=int(share) * rows[EAGER].peak_bytes // 100)
    worker = Worker.start(setup, options.limit)
    return worker.row, worker if worker.row.status == READY else None


def say(text: str) -> None:
    """Tell how far it is."""
    sys.stderr.write(f"{datetime.datetime.now():%H:%M:%S} {text}\n")


# -------------------------------------------------------------------- what is written


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Describe the machine, the versions and the command."""
    on_gpu = options.device == "cuda"
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if on_gpu else f"{processor()}, {options.threads} thread(s)",
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "versions": versions("transformers", "timm", "diffusers"),
        "commit": commit(),
        "command": " ".join(["python", "benchmarks/rivals.py", *sys.argv[1:]]),
        "rounds": str(options.processes * options.rounds),
        "processes": str(options.processes),
        "clock": CLOCKS[options.device],
        "load": load,
    }


CLOCK_WORDS = {"cpu_s": "CPU time of the process", "device_s": "time between events on the device"}


def _processes(found: dict[str, str]) -> str:
    count = found.get("processes", "1")
    return "a process" if count == "1" else f"{count} processes, one after the other,"


def about(found: dict[str, str]) -> str:
    """Say how it was measured."""
    clock = CLOCK_WORDS[found["clock"]]
    return (
        f"`{found['command']}`, commit {found['commit']}. {found['device']}; {found['versions']}.\n\n"
        "Peaks are what a step adds to what is there before it, by the allocator's own events. Times are "
        f"{clock}, median of the ratios to eager steps right beside, {found['rounds']} rounds, quartiles in brackets; "
        "and the fastest round over the fastest of these eager steps, since other load only ever adds. "
        "Eager beside itself shows the noise. "
        f"Each method in {_processes(found)} of its own, one running at a time. "
        f"The system's load averages (1, 5, 15 minutes) were {found['load']} on {found['cores']} core(s) when this was "
        "written: above 1 it is other work, which disturbs times.\n"
    )


def write(path: Path, found: dict[str, str], rows: Sequence[Row]) -> None:
    """Write the page, the numbers and the plot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clock = found["clock"]
    picture = path.with_name(f"{path.name}.svg")
    picture.write_text(draw({name: points_of(own, clock) for name, own in grouped(rows).items()}))
    title = f"Rivals, {found['date']}"
    path.with_name(f"{path.name}.md").write_text(write_markdown(title, about(found), rows, clock, picture.name))
    numbers = {"environment": found, "rows": [asdict(row) for row in rows]}
    path.with_name(f"{path.name}.json").write_text(json.dumps(numbers, indent=1) + "\n")


def show_again(path: Path) -> None:
    """Write page and plot from the numbers."""
    numbers = json.loads(path.read_text())
    write(path.with_suffix(""), numbers["environment"], [row_from_dict(row) for row in numbers["rows"]])


def methods_of(options: argparse.Namespace) -> list[str]:
    """List the methods to run, eager first, each "ours-at-" after its rival."""
    default = QUICK if options.quick else (*RIVALS, *OURS)
    named = options.methods.split(",") if options.methods else list(default)
    named += INDUCTOR if options.inductor else ()
    named += [f"strategy-{name}" for name in strategy_names()] if options.strategies else ()
    named += [AT + name for name in named if is_rival(name)]
    return [EAGER, *(name for name in dict.fromkeys(named) if name != EAGER)]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--methods", default="", help="of those above")
    parser.add_argument("--processes", type=int, default=1, help="times that each method is started anew")
    parser.add_argument("--rounds", type=int, default=0, help="default 7")
    parser.add_argument("--device", choices=sorted(CLOCKS), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on the CPU")
    parser.add_argument("--batch", type=int, default=1, help="times that each batch is repeated, for large devices")
    parser.add_argument("--memory", type=float, default=10.0, help="GiB of all processes together")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds until a method counts as failed")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for solving one plan")
    parser.add_argument("--inductor", action="store_true", help=f"add {', '.join(INDUCTOR)}")
    parser.add_argument("--strategies", action="store_true", help="add all strategies of ours")
    parser.add_argument("--quick", action="store_true", help="two models, three rounds, few methods")
    parser.add_argument("--write", type=Path, help="path of the results, without suffix")
    parser.add_argument("--show", type=Path, help="numbers to write page and plot from, without measuring")
    options = parser.parse_args(arguments)
    options.models = options.models or ("gpt,unet" if options.quick else ALL_MODELS)
    options.rounds = options.rounds or (3 if options.quick else 7)
    return options


def main() -> None:
    """Compare, print the summary, and write the results."""
    options = parse()
    if options.show:
        show_again(options.show)
        return
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)
    os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rivals-") as folder:
        for model in options.models.split(","):
            rows += compare(model, methods_of(options), options, Path(folder))
            if options.write:
                write(options.write, environment(options), rows)
    sys.stdout.write(summary(grouped(rows), CLOCKS[options.device]))


if __name__ == "__main__":
    main()
