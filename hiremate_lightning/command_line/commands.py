"""The commands that build a model: each takes what the command line asked for, and gives its exit code."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.text import Text

from ..errors import ConfigurationError
from ..measuring.profiling import CostCache
from ..memory.allocator import allocated_bytes, free_host_bytes
from ..options import Objective
from ..out_of_memory import InfeasibleBudgetError
from ..planning.comparing import Comparison, Outcome, proven_ms
from ..planning.comparing import compare as solve_by_each
from ..planning.plan import Plan, PlanningTime, PlanOptions
from ..planning.planner import guard_bytes, make_plan, resolve
from ..planning.solvers import Problem, SolveOptions, smallest_budget
from ..planning.solvers.curve import curve as solve_curve
from ..planning.solvers.worker import apart, check_strategy
from ..records.away import Host
from ..records.costs import step_time_ms
from ..records.expressions import NoTemplateError
from ..records.sized_numbers import Line
from ..records.step import Step
from ..reporting.budget_svg import comparison_svg, panel_of
from ..reporting.html_report import write_html
from ..reporting.plan_summary import all_numbers
from ..reporting.report import Reporter
from ..reporting.svg_report import write_svg
from ..reporting.terminal import Output, plan_table
from ..sizes.size_result import BatchSizeResult, result_table
from ..sizes.size_search import Forecast, search
from ..units import Budget, format_bytes, format_time, parse_budget
from .arguments import read_counts, read_overhead
from .comparisons import (
    budget_line,
    comparison_numbers,
    comparison_table,
    finished_words,
    method_notes,
    parse_budgets,
    parse_methods,
    spread,
)
from .counts import Count, answer, count_line, count_of, counts_table, look_at
from .curve_table import CurvePoint, curve_table, points_of
from .doctor import Grade, examine
from .factory import Workload, find_factory, parse_inputs
from .host import host_use
from .offline import OfflineOptions, OfflineStep, capture_offline
from .rates import Rates, rates_of
from .sharded import Layout

LOOPS = {
    "before": (
        "Gradients, {}, are freed before the forward; Lightning frees them after it: --zero-grad after-forward plans "
        "that, --zero-grad accumulate a step that adds to them."
    ),
    "after-forward": (
        "Gradients of the step before, {}, live until the backward, as in Lightning; most other loops free them before "
        "the forward: --zero-grad before plans that."
    ),
    "accumulate": "Gradients, {}, exist before the step, which adds to them (--zero-grad accumulate).",
}
FIT_SIZES = (4, 8)  # batch sizes that `fit` captures: 1 and 2 are special to many operators
FIT_PLANS = 12  # most sizes that `fit` plans


def _type_of(name: str | None) -> torch.dtype | None:
    """Return the type of mixed precision that was named and checked."""
    return None if name is None else getattr(torch, name)


class _Work:
    """The step that a command asked for, captured and costed on demand.

    Args:
        asked: The arguments, which `arguments.check` has checked.

    Raises:
        ConfigurationError: If the model's code can't be used.
    """

    def __init__(self, asked: argparse.Namespace) -> None:
        check_strategy(asked.solver)
        self.asked, self.host_notes = asked, list[str]()
        self.counts = read_counts(asked.fsdp)
        units = tuple(name.strip() for name in (asked.units or "").split(",") if name.strip())
        layout = Layout(self.counts[0] if self.counts else 1, asked.tp, units, _type_of(asked.param_dtype))
        device, autocast = torch.device(asked.device), _type_of(asked.autocast)
        self.options = OfflineOptions(device, asked.loss, asked.optimizer, autocast, layout, asked.zero_grad)
        self.reporter = Reporter(console=Console(stderr=True))
        inputs = parse_inputs(asked.input) if asked.input else ()
        with self.reporter.stage("loading the model's code"):
            self.workload = Workload(find_factory(asked.factory), asked.factory, inputs)

    @cached_property
    def rates(self) -> Rates:
        """The rates that times are estimated from."""
        return rates_of(self.options.device, self.asked.tflops, self.asked.bandwidth, self.asked.link)

    def capture(self, size: int | None = None, shards: int | None = None) -> tuple[OfflineStep, Step]:
        """Capture the step, at a batch size and sharded over a number of GPUs where these are given, and cost it."""
        options = self.options
        if shards is not None:
            options = replace(options, layout=replace(options.layout, shards=shards))
        with self.reporter.stage("tracing"):
            captured = capture_offline(self.workload, options, size)
        if not self.asked.measure:
            return captured, captured.estimated(self.rates)
        with self.reporter.stage("profiling"):
            told = self.reporter.progress
            return captured, captured.measured(CostCache(), lambda done, total: told("operations", done, total))

    def budget_bytes(self, budget: Budget, resident_bytes: int, unplanned_bytes: int) -> int:
        """Turn a budget into bytes.

        Raises:
            ConfigurationError: If it is "auto" and the device is not there.
        """
        if not budget.is_auto:
            return resolve(budget, resident_bytes, unplanned_bytes, 0)
        if self.options.device.type != "cuda":
            return resolve(budget, 0, 0, free_host_bytes())
        if not torch.cuda.is_available():
            raise ConfigurationError('A budget of "auto" needs the device, and there is no CUDA device here.')
        return resolve(budget, 0, 0, torch.cuda.mem_get_info(self.options.device)[0])

    def notes(self, captured: OfflineStep) -> list[str]:
        """Describe what the numbers rest on."""
        costs = "Times and workspaces of operations are measured one by one on this device."
        if not self.asked.measure:
            costs = (
                f"Times are estimates from operation counts ({self.rates}). Workspaces, which operations take while "
                "they run, are not known without the device and taken as 0."
            )
        parts = len(captured.captured)
        graphs = "one graph" if parts == 1 else f"{parts} graphs"
        resident = ", ".join(f"{name} {format_bytes(size)}" for name, size in captured.resident if size)
        ends = ""
        if captured.breaks:
            ends = (
                f" torch.compile ends graphs, and what runs between them is not planned: {'; '.join(captured.breaks)}."
            )
        notes = [
            costs,
            f"Captured as {graphs} at batch size {captured.size}, without memory.{ends}",
            f"Resident: {resident} (optimizer: {self.options.optimizer}). "
            f"{LOOPS[captured.zero_grad].format(format_bytes(captured.gradients_bytes))}",
        ]
        layout = captured.options.layout
        if layout.count > 1:
            sending = format_time(captured.sent_bytes / self.rates.link_bytes_per_ms)
            is_cuda = self.options.device.type == "cuda"
            devices = "GPUs" if is_cuda else "CPU processes (--device cuda plans for GPUs)"
            batch = f"Each of {layout.count} {devices} has a batch of its own"
            if layout.parts > 1:
                batch = f"Each group of {layout.parts} of the {layout.count} {devices} shares one batch"
            notes.append(
                f"{batch}. Each sends "
                f"{format_bytes(captured.sent_bytes)} to the others in a step, {sending} at "
                f"{self.rates.link_bytes_per_ms / 1e6:g} GB/s if none of it overlaps with computation."
            )
        if captured.options.is_stand_in:
            why = "Steps for several GPUs are" if layout.count > 1 else "There is no CUDA device here: the step is"
            notes.append(f"{why} captured on CPU tensors and accounted as on a GPU.")
        return notes


# ---------------------------------------------------------------- plan


def plan(asked: argparse.Namespace) -> int:
    """Plan a model under a budget, on one number of GPUs or on several."""
    budget = parse_budget(asked.budget)
    work = _Work(asked)
    if len(work.counts) != 1:
        return _plan_on_several(work, budget)
    made, captured = _plan_on(work, budget, work.counts[0])
    if asked.html is not None:
        with work.reporter.stage("solving other budgets"):
            write_html(made, asked.html)
    if asked.svg is not None:
        write_svg(made, asked.svg)
    notes = [*work.notes(captured), *work.host_notes]
    if not _write_json(asked.json, _plan_numbers(work, made, captured, notes)):
        _show(plan_table(made), notes)
    return 0


def _plan_on(work: _Work, budget: Budget, shards: int, on_infeasible: str = "raise") -> tuple[Plan, OfflineStep]:
    """Plan on a number of GPUs that parameters are sharded over."""
    captured, step = work.capture(shards=shards)
    budget_bytes = work.budget_bytes(budget, captured.resident_bytes, step.plain_bytes)
    use = host_use(captured, step, work.asked)

    def solve(step: Step, on_infeasible: str, host: Host | None = None) -> Plan:
        return make_plan(
            step,
            budget,
            budget_bytes,
            captured.resident_bytes,
            PlanOptions(work.asked.solver, work.asked.time_limit, on_infeasible),
            target=captured.name,
            planning=PlanningTime(capture_s=captured.capture_s),
            progress=work.reporter.solving(step_time_ms(step.graph, step.profile)),
            host=host,
        )

    with work.reporter.stage("solving"):
        if use is None:
            made = solve(step, on_infeasible)
        else:
            made = solve(use.step, on_infeasible, use.host)
            work.host_notes = [use.words(made, lambda: solve(step, "warn"))]
    return replace(made, resident_parts=captured.resident), captured


def _plan_on_several(work: _Work, budget: Budget) -> int:
    """Plan on several numbers of GPUs; 1 where the budget is met on none of them."""
    captured: list[OfflineStep] = []

    def look(shards: int) -> Count:
        made, found = _plan_on(work, budget, shards, on_infeasible="warn")
        captured.append(found)
        count = count_of(made, found, work.rates)
        work.reporter.note(f"HiRemate: {count_line(count)}")
        return count

    found = list(look_at(work.counts, look))
    last = captured[-1]
    notes = work.notes(last)
    numbers = {"target": last.name, "batch_size": last.size, "counts": [asdict(count) for count in found]}
    if not _write_json(work.asked.json, {**numbers, "answer": answer(found), "notes": notes}):
        console = Output()
        _say(console, [f"{last.name}, budget {budget} on each GPU, batch size {last.size} on each: {answer(found)}"])
        console.print(counts_table(found))
        _say_notes(console, ["The notes below are about the largest number of GPUs.", *notes])
    return 0 if any(count.fits for count in found) else 1


def _plan_numbers(work: _Work, made: Plan, captured: OfflineStep, notes: list[str]) -> dict[str, Any]:
    numbers = asdict(count_of(made, captured, work.rates))
    return {
        **{name: numbers[name] for name in ("gpus", "fsdp", "tp", "fits", "peak_parts", "sent_bytes", "sending_ms")},
        **all_numbers(made),
        "device": str(captured.options.device),
        "batch_size": captured.size,
        "resident": dict(captured.resident),
        "notes": notes,
    }


# ---------------------------------------------------------------- curve


def curve(asked: argparse.Namespace) -> int:
    """Show the extra time of many budgets."""
    work = _Work(asked)
    captured, step = work.capture()
    problem = Problem(step.graph, step.profile, step.plain_bytes, SolveOptions(asked.time_limit))
    with work.reporter.stage("solving"):
        least, most = smallest_budget(replace(problem, budget_bytes=0)).peak_bytes, problem.budget_bytes
        budgets = [least + (most - least) * i // asked.points for i in range(asked.points)]
        points = points_of(solve_curve(problem, budgets, apart(asked.solver)), captured.resident_bytes)
        points.append(CurvePoint(captured.resident_bytes + most, problem.step_ms, 0.0, 0.0, "plain training"))
    notes = work.notes(captured)
    numbers = {
        "target": captured.name,
        "resident_bytes": captured.resident_bytes,
        "points": [asdict(point) for point in points],
        "notes": notes,
    }
    if not _write_json(asked.json, numbers):
        console = Output()
        _say(console, [f"{captured.name}: peak memory against time; the last line is plain training"])
        console.print(curve_table(points))
        _say_notes(console, notes)
    return 0


# ---------------------------------------------------------------- compare


def compare(asked: argparse.Namespace) -> int:
    """Solve by several methods under the same budgets; 1 where none of them fits any. Ctrl-C keeps what is done."""
    budgets, methods = parse_budgets(asked.budget), parse_methods(asked.methods)
    work = _Work(asked)
    captured, step = work.capture()
    named = _budgets_in_words(work, budgets, captured.resident_bytes, step.plain_bytes)
    problem = Problem(step.graph, step.profile, step.plain_bytes, SolveOptions(asked.time_limit))
    found = _solved_by_each(work, problem, named, methods)
    if asked.svg is not None:
        panel = panel_of(found, methods, captured.name, captured.resident_bytes, step.plain_bytes)
        asked.svg.write_text(comparison_svg(panel), encoding="utf-8")
    notes = [
        *finished_words(len(found.outcomes), len(named) * len(methods)),
        f"Each method did at most the work of {asked.time_limit:g} s of an idle core for each budget. Seconds are by "
        "the clock of this machine as it is now.",
        *work.notes(captured),
    ]
    numbers = comparison_numbers(found, named, captured.resident_bytes, step.plain_bytes)
    if not _write_json(asked.json, {"target": captured.name, **numbers, "notes": notes}):
        _show_comparison(found, named, captured, step.plain_bytes)
        _say_notes(Output(), notes)
    return 0 if any(outcome.fits for outcome in found.outcomes) else 1


def _show_comparison(found: Comparison, named: dict[int, str], captured: OfflineStep, plain_bytes: int) -> None:
    console, resident = Output(), captured.resident_bytes
    plain = f"{format_bytes(resident + plain_bytes, up=True)}, {format_time(found.step_ms)}"
    _say(console, [f"{captured.name}: plain training takes {plain}"])
    for budget_bytes in found.budgets:
        _say(console, ["", budget_line(found, budget_bytes, named[budget_bytes], resident)])
        console.print(comparison_table(found, budget_bytes, resident))
        _say_notes(console, method_notes(found, budget_bytes))
    _say(console, [""])


def _budgets_in_words(work: _Work, budgets: Sequence[Budget], resident_bytes: int, plain_bytes: int) -> dict[int, str]:
    """Return the bytes that the step may add under each budget, largest first; a picture has more than one budget."""
    named = {}
    for budget in budgets:
        room = max(0, work.budget_bytes(budget, resident_bytes, plain_bytes) - resident_bytes)
        named[room - guard_bytes(room) if room < plain_bytes else room] = str(budget)  # as `plan` solves it
    if work.asked.svg is not None and len(named) == 1 and min(named) < plain_bytes:
        more = spread(min(named), plain_bytes)
        named |= {budget: format_bytes(resident_bytes + budget) for budget in more if budget not in named}
    return named


def _solved_by_each(work: _Work, problem: Problem, named: dict[int, str], methods: Sequence[str]) -> Comparison:
    """Solve until all is done or Ctrl-C is pressed, the budgets that were asked for first.

    Raises:
        KeyboardInterrupt: If nothing was done until then.
    """
    outcomes: list[Outcome] = []
    bounds: list[tuple[int, float | None]] = []
    told = work.reporter.solving(problem.step_ms)
    options = replace(problem.options, progress=told)
    try:
        for budget_bytes, words in named.items():
            asked = replace(problem, budget_bytes=budget_bytes, options=options)
            with work.reporter.stage(f"proving a bound for {words}"):
                bounds.append((budget_bytes, proven_ms(asked)))
            for method in methods:
                with work.reporter.stage(f"solving {words} by {method}"):
                    outcomes += solve_by_each(asked, [method])
    except KeyboardInterrupt:
        if not outcomes:
            raise
    return Comparison(problem.step_ms, tuple(outcomes), tuple(bounds))


# ---------------------------------------------------------------- fit


def fit(asked: argparse.Namespace) -> int:
    """Find the largest batch within a budget, from the step at two sizes."""
    start = time.perf_counter()
    budget, accepted = parse_budget(asked.budget), read_overhead(asked.max_overhead)
    work = _Work(asked)
    seen = [work.capture(size) for size in FIT_SIZES]
    limit_bytes = work.budget_bytes(budget, 0, 0)
    forecast = _forecast(work, seen, limit_bytes)
    with work.reporter.stage("solving"):
        found = search(forecast, asked.max_batch, accepted, Objective.LARGEST, FIT_PLANS)
        if not found.size:
            raise _nothing_fits(forecast, accepted)
        forecast.trial(found.size)
    result = BatchSizeResult(
        size=found.size,
        limited_by=found.limit.value,
        unplanned_size=found.unplanned_size,
        objective=Objective.LARGEST.value,
        budget_bytes=limit_bytes,
        max_overhead=accepted,
        margin=0.0,
        trials=tuple(forecast.trials[size] for size in sorted(forecast.trials)),
        real_steps=0,
        seconds=time.perf_counter() - start,
    )
    sizes = " and ".join(map(str, FIT_SIZES))
    notes = [f"Predicted from the step at batch sizes {sizes}; nothing ran.", *work.notes(seen[-1][0])]
    if not _write_json(asked.json, {**result.to_dict(), "notes": notes}):
        _show(result_table(result), notes)
    return 0


def _forecast(work: _Work, seen: Sequence[tuple[OfflineStep, Step]], limit_bytes: int) -> Forecast:
    """Make a forecast of all sizes.

    Raises:
        ConfigurationError: If the step is not the same at both sizes.
    """
    samples = {captured.size: step for captured, step in seen}
    resident = Line(list(samples), [captured.resident_bytes for captured, _ in seen])
    options = PlanOptions(work.asked.solver, max(1.0, work.asked.time_limit / FIT_PLANS), on_infeasible="warn")
    try:
        return Forecast(samples, allocated_bytes(1, work.options.device), resident, limit_bytes, options)
    except NoTemplateError as error:
        raise ConfigurationError(f"The batch can't be scaled. {error}") from error


def _nothing_fits(forecast: Forecast, accepted: float) -> InfeasibleBudgetError:
    needed, limit = forecast.enough_bytes(1, accepted), forecast.limit_bytes
    return InfeasibleBudgetError(
        f"Not even batch size 1 fits {format_bytes(limit)} with at most {accepted:.0%} more time: that needs "
        f"{format_bytes(needed, up=True)} ({needed:,} bytes). Raise the budget or --max-overhead.",
        budget_bytes=limit,
        smallest_bytes=needed,
    )


# ---------------------------------------------------------------- doctor


def doctor(asked: argparse.Namespace) -> int:
    """Check the installation; 1 where something is wrong."""
    findings = examine(asked.factory, asked.script)
    is_bad = any(finding.verdict is Grade.BAD for finding in findings)
    if not _write_json(asked.json, {"ok": not is_bad, "findings": [asdict(finding) for finding in findings]}):
        console = Output()
        styles = {Grade.GOOD: "green", Grade.KNOW: "magenta", Grade.BAD: "bold red"}
        for finding in findings:
            line = Text.assemble((f"{finding.verdict.value:<5}", styles[finding.verdict]), finding.name, ": ")
            console.print(line.append(finding.words), soft_wrap=True)
    return int(is_bad)


# ---------------------------------------------------------------- output


def _write_json(target: str | None, numbers: dict[str, Any]) -> bool:
    """Write JSON where it was asked for; whether it went to the output, which is then all that goes there."""
    if target is None:
        return False
    text = json.dumps(numbers, indent=2) + "\n"
    if target == "-":
        Output().write(text)
        return True
    Path(target).write_text(text, encoding="utf-8")
    return False


def _say(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _show(table: RenderableType, notes: Sequence[str]) -> None:
    console = Output()
    console.print(table)
    _say_notes(console, notes)


def _say_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(Text(note, "dim"))
