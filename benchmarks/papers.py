"""Solve the papers' own networks by every method, under the budgets that the papers report.

    python benchmarks/papers.py capture FOLDER [--networks gpt2,unet]
    python benchmarks/papers.py solve FOLDER ROWS.jsonl [--networks ...] [--methods ...] [--limit 15]
    python benchmarks/papers.py page ROWS.jsonl TABLES.md PICTURE.svg

`capture` traces a training step of each network of `zoo.papers.PAPERS` at its own size, without the memory that it
takes, and writes it to a folder: what the command line plans, for a GPU. Times are estimates from operation counts by
the data sheet of the GPU that HiRemate's authors used, the Quadro RTX 8000; workspaces count as 0.

`solve` gives each method each budget, 70, 50 and 30 % of what a plain step adds at its peak, then looks for the
smallest budget that the method meets. Each result is a line of the file as soon as it is known; what is there already
is not solved again. Peaks and times are those of the independent simulator. Seconds are wall-clock.

`page` writes the tables and the picture.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from graph_files import read_step, write_step
from papers_page import BOUND, PERCENTS, SMALLEST, Network, Row, picture, tables
from provenance import commit, processor, versions
from torch import Tensor, nn
from zoo.cases import Case
from zoo.papers import PAPERS

from hiremate_lightning.planning.comparing import Outcome, methods_to_compare, outcome_of, proven_ms
from hiremate_lightning.planning.solvers.base import Problem, SolveOptions
from hiremate_lightning.planning.solvers.least_memory import solve_least_memory
from hiremate_lightning.records.costs import step_time_ms

TFLOPS, GB_PER_S = 16.3, 672  # Quadro RTX 8000, single precision, by its data sheet
RESOLUTION = 0.01  # of the plain peak, at which the search for the smallest budget ends
SMALLEST_SHARE = 0.5  # of the time limit, for each budget that is looked at in that search
PROBES = 3  # budgets at most between one that a method meets and one that it does not
LOWER = 0.95  # of a budget that a method meets, to be tried below the least memory that the heuristic finds
LOWER_PROBES = 2


class WithLoss(nn.Module):
    """A network and its loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = case.module
        self.loss_of = case.loss_of

    def forward(self, **batch: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return self.loss_of(self.net(**batch), batch)


# -------------------------------------------------------------------- capture


def capture(name: str, folder: Path) -> Network:
    """Trace a network's step and write its graph, its costs and its facts."""
    from hiremate_lightning.command_line.factory import Workload
    from hiremate_lightning.command_line.offline import OfflineOptions, capture_offline
    from hiremate_lightning.command_line.without_device import rates_of

    def build() -> tuple[nn.Module, dict[str, Any]]:
        case = PAPERS[name].build()
        return WithLoss(case), case.make_batch(0)

    device = torch.device("cuda")
    captured = capture_offline(Workload(build, name), OfflineOptions(device, loss="model"))
    step = captured.estimated(rates_of(device, TFLOPS, GB_PER_S))
    least = solve_least_memory(Problem(step.graph, step.profile, 0))
    network = Network(
        name,
        PAPERS[name].about,
        PAPERS[name].package,
        (len(step.graph.forward), len(step.graph.backward)),
        step_time_ms(step.graph, step.profile),
        captured.resident_bytes,
        step.eager_bytes,
        least.peak_bytes,
    )
    write_step(folder, name, step.graph, step.profile)
    (folder / f"{name}.json").write_text(json.dumps(asdict(network)))
    return network


def load(name: str, folder: Path, limit_s: float) -> tuple[Network, Problem]:
    """Read a captured step."""
    facts = json.loads((folder / f"{name}.json").read_text())
    graph, profile = read_step(folder, name)
    network = Network(**{**facts, "nodes": tuple(facts["nodes"])})
    return network, Problem(graph, profile, network.plain_bytes, SolveOptions(limit_s))


# -------------------------------------------------------------------- solve


class Rows:
    """The lines of a file: networks and rows; what is added is written at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.commit = commit()
        lines = path.read_text().splitlines() if path.exists() else []
        entries = [json.loads(line) for line in lines]
        self.networks = {e["name"]: Network(**{**e, "nodes": tuple(e["nodes"])}) for e in entries if "name" in e}
        self.rows = [Row(**entry) for entry in entries if "method" in entry]

    def knows(self, network: Network, percent: int | str, method: str) -> bool:
        """Whether there is a row."""
        return any((r.network, r.percent, r.method) == (network.name, percent, method) for r in self.rows)

    def met(self, network: Network, method: str) -> Row | None:
        """Return the row of the smallest peak that a method has reached."""
        rows = [r for r in self.rows if (r.network, r.method) == (network.name, method) and r.fits]
        return min(rows, key=lambda r: r.peak_bytes, default=None)

    def add_network(self, network: Network) -> None:
        """Note a network, once."""
        if network.name not in self.networks:
            self.networks[network.name] = network
            self._write(asdict(network))

    def add(self, row: Row) -> None:
        """Note a row."""
        self.rows.append(row)
        self._write(asdict(row))
        plain_bytes = self.networks[row.network].plain_bytes
        sys.stdout.write(
            f"{time.strftime('%H:%M:%S')} {row.network} {row.percent} {row.method}: {'fits' if row.fits else 'no'}, "
            f"+{100 * row.overhead:.1f} %, peak {100 * row.peak_bytes / plain_bytes:.1f} %, {row.solve_s:.1f} s, "
            f"{row.ended}\n"
        )
        sys.stdout.flush()

    def _write(self, entry: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def row_of(self, network: Network, percent: int | str, outcome: Outcome) -> Row:
        """Describe what a method found."""
        return Row(
            network=network.name,
            percent=percent,
            method=outcome.method,
            budget_bytes=outcome.budget_bytes,
            fits=outcome.fits,
            overhead=outcome.recompute_ms / network.step_ms,
            peak_bytes=outcome.peak_bytes,
            bound=outcome.bound_ms / network.step_ms,
            solve_s=round(outcome.solve_s, 3),
            ended=f"{outcome.status.value}: {outcome.stopped_by}",
            commit=self.commit,
            own_overhead=outcome.proposed_ms / network.step_ms,
            own_bytes=outcome.proposed_bytes,
            note=outcome.note,
        )


def prove(network: Network, percent: int, problem: Problem, rows: Rows) -> None:
    """Note the bound on all schedules within a budget; its row does not fit where nothing does."""
    start = time.monotonic()
    bound_ms = proven_ms(problem)
    bound = (bound_ms or 0.0) / network.step_ms
    seconds = round(time.monotonic() - start, 3)
    fits = bound_ms is not None
    rows.add(Row(network.name, percent, BOUND, problem.budget_bytes, fits, bound, 0, bound, seconds, "", rows.commit))


def solve_budget(network: Network, problem: Problem, percent: int, methods: list[str], rows: Rows) -> None:
    """Solve a network under a budget by each method that has no row yet."""
    asked = replace(problem, budget_bytes=network.plain_bytes * percent // 100)
    if not rows.knows(network, percent, BOUND):
        prove(network, percent, asked, rows)
    for method in methods:
        if not rows.knows(network, percent, method):
            rows.add(rows.row_of(network, percent, outcome_of(asked, method)))


def solve_smallest(network: Network, problem: Problem, method: str, rows: Rows) -> None:
    """Look for the smallest budget that a method meets, and note what it found there."""
    start, best = time.monotonic(), rows.met(network, method)

    def is_met(budget_bytes: int) -> bool:
        nonlocal best
        outcome = outcome_of(replace(problem, budget_bytes=budget_bytes), method)
        row = rows.row_of(network, SMALLEST, outcome)
        if row.fits and (best is None or row.peak_bytes < best.peak_bytes):
            best = row
        return row.fits

    low = network.least_bytes
    if is_met(low):
        for _ in range(LOWER_PROBES):
            if best is None or not is_met(int(LOWER * best.peak_bytes)):
                break
    else:
        for _ in range(PROBES):
            high = network.plain_bytes if best is None else best.peak_bytes
            if high - low <= RESOLUTION * network.plain_bytes:
                break
            middle = (low + high) // 2
            if not is_met(middle):
                low = middle
    if best is not None:
        seconds = round(time.monotonic() - start, 3)
        rows.add(replace(best, percent=SMALLEST, budget_bytes=best.peak_bytes, solve_s=seconds))


def solve(networks: list[str], methods: list[str], folder: Path, limit_s: float, rows: Rows) -> None:
    """Solve everything that has no row yet: each budget of all networks, then the smallest ones."""
    for percent in PERCENTS:
        for name in networks:
            network, problem = load(name, folder, limit_s)
            rows.add_network(network)
            solve_budget(network, problem, percent, methods, rows)
    for name in networks:
        network, problem = load(name, folder, limit_s * SMALLEST_SHARE)
        for method in methods:
            if not rows.knows(network, SMALLEST, method):
                solve_smallest(network, problem, method, rows)


# -------------------------------------------------------------------- command line


def main() -> None:
    """Read the command line and do what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command, paths in (("capture", ["folder"]), ("solve", ["folder", "rows"]), ("page", ["rows", "page", "svg"])):
        sub = commands.add_parser(command)
        for path in paths:
            sub.add_argument(path, type=Path)
        if command != "page":
            sub.add_argument("--networks", help=f"of {', '.join(PAPERS)} (default: all)")
    sub = commands.choices["solve"]
    sub.add_argument("--methods", help="names of strategies (default: all)")
    sub.add_argument("--limit", type=float, default=15.0, help="seconds for each solve (default: %(default)s)")
    options = parser.parse_args()
    if options.command == "page":
        rows = Rows(options.rows)
        options.svg.write_text(picture(rows.networks, rows.rows))
        where = f"{processor()}; {versions('mip', 'highsbox')}"
        options.page.write_text(tables(rows.networks, rows.rows, where))
        return
    torch.set_num_threads(1)
    names = options.networks.split(",") if options.networks else list(PAPERS)
    if options.command == "solve":
        methods = options.methods.split(",") if options.methods else list(methods_to_compare())
        solve(names, methods, options.folder, options.limit, Rows(options.rows))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (options.folder / f"{name}.json").exists():
            sys.stdout.write(f"{time.strftime('%H:%M:%S')} {capture(name, options.folder)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
