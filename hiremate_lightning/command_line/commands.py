"""The commands that build a model: each takes the parsed arguments, and returns its exit code."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.text import Text

from ..errors import ConfigurationError
from ..measuring.profiling import measure_link
from ..memory.allocator import allocated_bytes, free_bytes
from ..options import SessionOptions, SizeOptions
from ..out_of_memory import InfeasibleBudgetError
from ..planning.comparing import Comparison, Outcome, methods_to_compare, outcome_of, proven_ms
from ..planning.comparing import curve as solve_curve
from ..planning.headroom import Room, least_need, resolve, unless_short
from ..planning.plan import Plan
from ..planning.planner import make_plan
from ..planning.solvers.base import UNLIMITED, Problem, SolveOptions
from ..planning.solvers.worker import apart, check_strategy
from ..records.costs import Link
from ..records.expressions import Line, SizesDifferError
from ..records.offload import Host, storages_in
from ..records.step import MergedStep
from ..reporting.html_report import write_html
from ..reporting.plan_summary import all_numbers
from ..reporting.report import Reporter
from ..reporting.svg_report import panel_of, panel_svg, write_svg
from ..reporting.terminal import Output, plan_table, write_json
from ..running.copies import pinned_storages
from ..sizes.size_search import Forecast, result_table, search
from ..units import Budget, format_bytes, format_ratio, format_time
from . import comparisons
from .doctor import Grade, examine
from .factory import Workload
from .offline import OfflineOptions, OfflineStep, capture_offline
from .user_code import find_factory
from .without_device import Layout, rates_of

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
FIT_SIZES = (4, 8)  # batch sizes that `fit` captures, since many operators treat 1 and 2 specially
FIT_PLANS = 12  # most sizes for which `fit` makes a plan
LINK_GB_PER_S, LINK_LATENCY_MS = 25.0, 0.01  # link to the host: PCIe 4 with 16 lanes, one direction


class _Work:
    """The step of a command, captured and costed on demand, from arguments parsed by `arguments.read`."""

    def __init__(self, asked: argparse.Namespace) -> None:
        check_strategy(asked.solver)
        self.asked = asked
        units = tuple(name.strip() for name in (asked.units or "").split(",") if name.strip())
        param_dtype, autocast = (name and getattr(torch, name) for name in (asked.param_dtype, asked.autocast))
        layout = Layout(asked.fsdp[0] if asked.fsdp else 1, asked.tp, units, param_dtype)
        device = torch.device(asked.device)
        self.options = OfflineOptions(device, asked.loss, asked.optimizer, autocast, layout, asked.zero_grad)
        self.rates = rates_of(device, asked.tflops, asked.bandwidth, asked.link)
        self.reporter = Reporter(console=Console(stderr=True))
        with self.reporter.stage("loading the model's code"):
            self.workload = Workload(find_factory(asked.factory), asked.factory, asked.input)

    def capture(self, size: int | None = None, shards: int | None = None) -> tuple[OfflineStep, MergedStep]:
        """Capture the step and cost it, at the given batch size and number of GPUs to shard over, if any."""
        options = self.options
        if shards is not None:
            options = replace(options, layout=replace(options.layout, shards=shards))
        with self.reporter.stage("tracing"):
            captured = capture_offline(self.workload, options, size)
        if not self.asked.measure:
            return captured, captured.estimated(self.rates)
        with self.reporter.stage("profiling"):
            progress = partial(self.reporter.progress, "operations")
            return captured, captured.measured(progress)

    def room(self, budget: Budget, resident_bytes: int = 0, eager_bytes: int = 0) -> Room:
        """Return the bytes that a step has within a budget; the eager step adds `eager_bytes` to resident ones."""
        if not budget.is_auto:
            return Room(budget, resolve(budget, resident_bytes, eager_bytes, 0), resident_bytes)
        device = self.options.device
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigurationError('A budget of "auto" needs the device, and there is no CUDA device here.')
        return Room(budget, resolve(budget, 0, 0, free_bytes(device)), resident_bytes)

    def notes(self, captured: OfflineStep) -> list[str]:
        """Describe the assumptions behind the numbers."""
        costs = "Times and workspaces of operations are measured one by one on this device."
        if not self.asked.measure:
            costs = (
                f"Times are estimates from operation counts ({self.rates}). Workspaces, which operations take while "
                "they run, are not known without the device and taken as 0."
            )
        parts = len(captured.captured)
        graphs = "one graph" if parts == 1 else f"{parts} graphs"
        resident = ", ".join(f"{name} {format_bytes(size)}" for name, size in captured.resident.items() if size)
        breaks = "; ".join(captured.breaks)
        ends = f" torch.compile ends graphs, and what runs between them is not planned: {breaks}." if breaks else ""
        notes = [
            costs,
            f"Captured as {graphs} at batch size {captured.size}, without memory.{ends}",
            f"Resident: {resident} (optimizer: {self.options.optimizer}). "
            f"{LOOPS[captured.zero_grad].format(format_bytes(captured.gradients_bytes))}",
        ]
        layout = captured.options.layout
        if layout.count > 1:
            notes.append(self._several(layout, captured.sent_bytes))
        if captured.options.is_stand_in:
            why = "Steps for several GPUs are" if layout.count > 1 else "There is no CUDA device here: the step is"
            notes.append(f"{why} captured on CPU tensors and accounted as on a GPU.")
        return notes

    def _several(self, layout: Layout, sent_bytes: int) -> str:
        """Describe what is split over several GPUs, and what they send."""
        is_cuda, link = self.options.device.type == "cuda", self.rates.link_bytes_per_ms
        devices = f"{layout.count} {'GPUs' if is_cuda else 'CPU processes (--device cuda plans for GPUs)'}"
        batch = f"Each of {devices} has a batch of its own"
        if layout.parts > 1:
            batch = f"Each group of {layout.parts} of the {devices} shares one batch"
        return (
            f"{batch}. Each sends {format_bytes(sent_bytes)} to the others in a step, "
            f"{format_time(sent_bytes / link)} at {link / 1e6:g} GB/s if none of it overlaps with computation."
        )


def plan(asked: argparse.Namespace) -> int:
    """Plan a model under a budget, on one number of GPUs or on several."""
    work = _Work(asked)
    if len(asked.fsdp) != 1:
        return _plan_on_several(work)
    captured, made, host_notes = _plan_on(work, asked.fsdp[0])
    if asked.html is not None:
        with work.reporter.stage("solving other budgets"):
            write_html(made, asked.html)
    if asked.svg is not None:
        write_svg(made, asked.svg)
    count = comparisons.count_of(made, captured, work.rates)
    numbers = {
        **{name: count[name] for name in ("gpus", "fsdp", "tp", "fits", "peak_parts", "sent_bytes", "sending_ms")},
        **all_numbers(made),
        "device": str(captured.options.device),
        "batch_size": captured.size,
        "resident": captured.resident,
        "notes": [*work.notes(captured), *host_notes],
    }
    _answer(asked, numbers, plan_table(made))
    return 0


def _plan_on(work: _Work, shards: int, on_infeasible: str = "raise") -> tuple[OfflineStep, Plan, list[str]]:
    """Plan a model sharded over a number of GPUs; return its captured step, the plan, and notes on offloading."""
    asked, (captured, step) = work.asked, work.capture(shards=shards)
    room = work.room(asked.budget, captured.resident_bytes, step.eager_bytes)

    def solve(step: MergedStep, on_infeasible: str, host: Host = Host(0)) -> Plan:
        options = SessionOptions(time_limit_s=asked.time_limit_s, on_infeasible=on_infeasible, solver=asked.solver)
        progress = work.reporter.solving(step.graph, step.profile)
        made = unless_short(make_plan(step, room, options, captured.name, progress=progress, host=host))
        planning = replace(made.planning, capture_s=captured.capture_s)
        return replace(made, planning=planning, resident_parts=tuple(captured.resident.items()))

    with work.reporter.stage("solving"):
        if not asked.offload:
            return captured, solve(step, on_infeasible), []
        bytes_per_ms = 1e6 * (asked.host_link or LINK_GB_PER_S)
        link = Link(bytes_per_ms, bytes_per_ms, LINK_LATENCY_MS)
        if asked.measure and asked.host_link is None:
            link = measure_link(captured.options.device)
        pinned = storages_in(step, [pinned_storages(run.runtime.captured) for run in captured.measurement.planned])
        size_bytes = UNLIMITED if asked.host_budget is None else asked.host_budget
        host = Host(size_bytes, pinned, has_round_blocks=True)
        linked = replace(step, profile=replace(step.profile, link=link))
        made = solve(linked, on_infeasible, host)
        return captured, made, [_host_words(linked, link, host, made, solve(step, "warn"))]


def _host_words(step: MergedStep, link: Link, host: Host, made: Plan, without: Plan) -> str:
    """Compare a plan with offloading (`made`) with one without, which takes the least memory if nothing fits."""
    problem = Problem(step.graph, step.profile, 0, SolveOptions())
    needs = (least_need(each, made.resident_bytes) for each in (problem, replace(problem, host=host)))
    least, offloaded = (need.peak_bytes for need in needs)
    least = min(least, without.planned_peak_bytes)
    offloaded = min(offloaded, made.planned_peak_bytes, least)
    use = "nothing goes there, since that would not be faster"
    if made.solution.offloads:
        size, cost = format_bytes(made.planned.host_bytes), format_ratio(made.predicted_overhead)
        use = f"{size} go there in a step, which takes {cost} more time than a plain one"
    more_time = f"takes {format_ratio(without.predicted_overhead)} more time"
    other = "is not possible" if without.exceeds_budget else more_time
    return (
        f"The host's memory, {link.out_bytes_per_ms / 1e6:.3g} GB/s there and "
        f"{link.in_bytes_per_ms / 1e6:.3g} GB/s back: {use}; without it, this budget {other}. "
        f"The smallest budget found is {format_bytes(offloaded, up=True)} with it, "
        f"{format_bytes(least, up=True)} without."
    )


def _plan_on_several(work: _Work) -> int:
    """Plan on several numbers of GPUs; return 1 if no plan meets the budget."""
    counts: list[comparisons.Count] = []
    for shards in work.asked.fsdp or comparisons.POWERS:
        last, made, _ = _plan_on(work, shards, on_infeasible="warn")
        counts.append(comparisons.count_of(made, last, work.rates))
        work.reporter.report(f"HiRemate: {comparisons.count_line(counts[-1])}")
        if not work.asked.fsdp and comparisons.ends_auto(counts):
            break
    words = comparisons.answer(counts)
    numbers = {"target": last.name, "batch_size": last.size, "counts": counts, "answer": words}
    title = f"{last.name}, budget {work.asked.budget} on each GPU, batch size {last.size} on each: {words}"
    scope = comparisons.wrapped(["The notes below are about the largest number of GPUs."])
    _answer(work.asked, {**numbers, "notes": work.notes(last)}, Text(title), comparisons.counts_table(counts), scope)
    return 0 if any(count["fits"] for count in counts) else 1


def curve(asked: argparse.Namespace) -> int:
    """Show the extra time of many budgets."""
    work = _Work(asked)
    captured, step = work.capture()
    problem = Problem(step.graph, step.profile, 0, SolveOptions(asked.time_limit_s))
    with work.reporter.stage("solving"):
        solved = solve_curve(problem, asked.points, apart(asked.solver))
    points = comparisons.curve_points(solved, captured.resident_bytes, step.eager_bytes)
    numbers = {"target": captured.name, "resident_bytes": captured.resident_bytes, "points": points}
    title = f"{captured.name}: peak memory against time; the last line is plain training"
    _answer(asked, {**numbers, "notes": work.notes(captured)}, Text(title), comparisons.curve_table(points))
    return 0


def compare(asked: argparse.Namespace) -> int:
    """Solve by several methods under the same budgets; return 1 if nothing fits. Ctrl-C keeps finished outcomes."""
    for name in asked.methods:
        check_strategy(name)
    methods = asked.methods or methods_to_compare()
    work = _Work(asked)
    captured, step = work.capture()
    resident_bytes = captured.resident_bytes
    named = _budgets_in_words(work, captured, step)
    problem = Problem(step.graph, step.profile, step.eager_bytes, SolveOptions(asked.time_limit_s))
    comparison = _solved_by_each(work, problem, named, methods)
    if asked.svg is not None:
        panel = panel_of(comparison, methods, captured.name, resident_bytes, step.eager_bytes)
        picture = panel_svg(panel, f"{panel.title}: extra time over budget")
        asked.svg.write_text(picture, encoding="utf-8")
    done, count = len(comparison.outcomes), len(named) * len(methods)
    notes = [
        *([f"Interrupted: {done} of {count} solves are done. The rest is left out."] if done < count else []),
        f"Each method did at most the work of {asked.time_limit_s:g} s of an idle core for each budget. Seconds are by "
        "the clock of this machine as it is now.",
        *work.notes(captured),
    ]
    numbers = comparisons.method_numbers(comparison, named, resident_bytes, step.eager_bytes)
    numbers = {"target": captured.name, **numbers, "notes": notes}
    plain = f"{format_bytes(resident_bytes + step.eager_bytes, up=True)}, {format_time(comparison.step_ms)}"
    title = Text(f"{captured.name}: plain training takes {plain}")
    _answer(asked, numbers, title, *comparisons.method_tables(numbers), Text())
    return 0 if any(outcome.fits for outcome in comparison.outcomes) else 1


def _budgets_in_words(work: _Work, captured: OfflineStep, step: MergedStep) -> dict[int, str]:
    """Return {bytes that the step may add: budget in words}, largest first; add budgets if a picture needs several."""
    named, eager_bytes, resident_bytes = {}, step.eager_bytes, captured.resident_bytes
    for budget in work.asked.budgets:
        room = work.room(budget, resident_bytes, eager_bytes)
        named[room.solved_bytes if room.step_bytes < eager_bytes else room.step_bytes] = str(budget)  # as `plan` solves
    if work.asked.svg is not None and len(named) == 1 and min(named) < eager_bytes:
        more = comparisons.spread(min(named), eager_bytes)
        named |= {budget: format_bytes(resident_bytes + budget) for budget in more if budget not in named}
    return named


def _solved_by_each(work: _Work, problem: Problem, named: dict[int, str], methods: Sequence[str]) -> Comparison:
    """Solve under the user's budgets first; Ctrl-C ends the solves once there is an outcome."""
    outcomes: list[Outcome] = []
    bounds: list[tuple[int, float | None]] = []
    options = replace(problem.options, progress=work.reporter.solving(problem.graph, problem.profile))
    try:
        for budget_bytes, words in named.items():
            asked = replace(problem, budget_bytes=budget_bytes, options=options)
            with work.reporter.stage(f"proving a bound for {words}"):
                bounds.append((budget_bytes, proven_ms(asked)))
            for method in methods:
                with work.reporter.stage(f"solving {words} by {method}"):
                    outcomes.append(outcome_of(asked, method))
    except KeyboardInterrupt:
        if not outcomes:
            raise
    return Comparison(problem.step_ms, tuple(outcomes), tuple(bounds))


def fit(asked: argparse.Namespace) -> int:
    """Find the largest batch within a budget, from the step at two sizes."""
    start = time.perf_counter()
    work = _Work(asked)
    seen = [work.capture(size) for size in FIT_SIZES]
    limit_bytes = work.room(asked.budget).budget_bytes
    forecast = _forecast(work, seen, limit_bytes)
    with work.reporter.stage("solving"):
        searched = search(forecast, asked.max_batch, asked.max_overhead, "largest", FIT_PLANS)
        if not searched.size:
            needed_bytes = forecast.enough_bytes(1, asked.max_overhead)
            raise InfeasibleBudgetError(
                f"Not even batch size 1 fits {format_bytes(limit_bytes)} with at most {asked.max_overhead:.0%} more "
                f"time: that needs {format_bytes(needed_bytes, up=True)} ({needed_bytes:,} bytes). Raise the budget or "
                "--max-overhead.",
                budget_bytes=limit_bytes,
                smallest_bytes=needed_bytes,
            )
        forecast.trial(searched.size)
    options = SizeOptions(max_overhead=asked.max_overhead, margin=0.0)
    result = searched.result(options, limit_bytes, forecast.trials, 0, time.perf_counter() - start)
    sizes = " and ".join(map(str, FIT_SIZES))
    notes = [f"Predicted from the step at batch sizes {sizes}; nothing ran.", *work.notes(seen[-1][0])]
    _answer(asked, {**result.to_dict(), "notes": notes}, result_table(result))
    return 0


def _forecast(work: _Work, seen: Sequence[tuple[OfflineStep, MergedStep]], limit_bytes: int) -> Forecast:
    """Return a forecast of all sizes from the step captured at two sizes."""
    samples = {captured.size: step for captured, step in seen}
    resident = Line(list(samples), [captured.resident_bytes for captured, _ in seen])
    limit_s = max(1.0, work.asked.time_limit_s / FIT_PLANS)
    options = SessionOptions(time_limit_s=limit_s, on_infeasible="warn", solver=work.asked.solver)
    try:
        return Forecast(samples, allocated_bytes(1, work.options.device), resident, limit_bytes, options)
    except SizesDifferError as error:
        raise ConfigurationError(f"The batch can't be scaled. {error}") from error


def doctor(asked: argparse.Namespace) -> int:
    """Check the installation; return 1 if something is wrong."""
    findings = examine(asked.factory, asked.script)
    is_bad = any(finding.verdict is Grade.BAD for finding in findings)
    styles = {Grade.GOOD: "green", Grade.KNOW: "magenta", Grade.BAD: "bold red"}
    lines = (
        Text.assemble((f"{finding.verdict.value:<5}", styles[finding.verdict]), f"{finding.name}: {finding.words}")
        for finding in findings
    )
    _answer(asked, {"ok": not is_bad, "findings": [asdict(finding) for finding in findings]}, *lines)
    return int(is_bad)


def _answer(asked: argparse.Namespace, numbers: dict[str, Any], *shown: RenderableType) -> None:
    """Write numbers as JSON if `--json` is given; unless that is standard output, print `shown` and the notes."""
    if asked.json is not None:
        write_json(numbers, asked.json)
    if asked.json == "-":
        return
    console = Output()
    for part in (*shown, comparisons.wrapped(numbers.get("notes", ()))):
        console.print(part, soft_wrap=isinstance(part, Text))
