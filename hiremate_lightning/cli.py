"""The command line, `hiremate`: plan a model without training it, and look at plans.

Exit codes: 0 where all went well, 1 where nothing fits the budget or a problem was found, 2 where the command line
could not be understood. Errors take one line; `--debug` shows where they come from. What loads torch is imported by the
command that needs it, so that help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .errors import BudgetError, ConfigurationError, HiRemateError
from .units import Budget, format_bytes, format_ratio, format_time, parse_budget

if TYPE_CHECKING:
    from .offline import OfflineStep
    from .report import Reporter
    from .step import Step

OK, PROBLEM, USAGE = 0, 1, 2
FIT_SIZES = (4, 8)  # batch sizes that `fit` captures: 1 and 2 are special to many operators

_FACTORY = """\
FACTORY is PACKAGE.MODULE:NAME or path/to/file.py:NAME. It names a module, or a class or function that gives, without
arguments, a module, (module, inputs) or (module, dict of inputs by keyword).
"""
_EXAMPLES = {
    "plan": """\
  hiremate plan timm.models.resnet:resnet50 --input 64x3x224x224 --budget 4GiB --device cuda
  hiremate plan models.py:gpt2 --budget "24 GiB" --autocast bfloat16 --device cuda --html plan.html
  hiremate plan models.py:Net --input 256x128 --budget 50% --json -
  hiremate plan models.py:bert --input input_ids=8x128:int64,labels=8:int64 --budget 2GiB
""",
    "curve": """\
  hiremate curve models.py:gpt2 --device cuda
  hiremate curve models.py:Net --input 256x128 --points 20 --json curve.json
""",
    "fit": """\
  hiremate fit models.py:gpt2 --budget 24GiB --device cuda
  hiremate fit models.py:Net --input 8x128 --budget 2GiB --max-overhead 10%
""",
    "show": """\
  hiremate show plan.json
  hiremate show plan.html
""",
    "doctor": """\
  hiremate doctor
  hiremate doctor models.py:Net --json -
""",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Those of the command line by default.

    Returns:
        The exit code.
    """
    try:
        asked = _parser().parse_args(arguments)
    except SystemExit as stop:  # of argparse, which has said why: help is no error
        return int(stop.code or OK)
    if not asked.debug:
        warnings.simplefilter("ignore")  # those of other packages, about the model
        logging.getLogger("hiremate_lightning").setLevel(logging.ERROR)
    try:
        run: Callable[[argparse.Namespace], int] = asked.run
        return run(asked)
    except KeyboardInterrupt:
        return _fail(asked, "Interrupted.", PROBLEM)
    except BrokenPipeError:  # whoever read the output has seen enough
        sys.stderr.close()
        return OK
    except (BudgetError, ConfigurationError) as error:
        return _fail(asked, str(error), USAGE)
    except HiRemateError as error:
        return _fail(asked, str(error), PROBLEM)
    except Exception as error:  # the model's own code may raise anything
        return _fail(asked, f"{type(error).__name__}: {error}", PROBLEM)


def _fail(asked: argparse.Namespace, text: str, code: int) -> int:
    """Say in one line what went wrong; with --debug, raise what is being handled."""
    if asked.debug:
        raise
    line = next((line for line in text.splitlines() if line.strip()), "")
    sys.stderr.write(f"hiremate: {line.strip()}\n")
    return code


# ---------------------------------------------------------------- what was asked


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hiremate",
        description="Plan what a training step keeps and recomputes within a memory budget.",
        epilog="examples:\n" + "".join(text.splitlines(keepends=True)[0] for text in _EXAMPLES.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    plan = _command(commands, "plan", _plan, "plan a model under a budget, without training it and without its memory")
    _add_workload(plan)
    _add_budget(plan, '"8 GiB", "800 MB", "60%%" of what the step adds, or "auto" for what the device has free')
    plan.add_argument("--html", metavar="FILE", type=Path, help="write the report as one HTML page")
    curve = _command(commands, "curve", _curve, "show the extra time of many budgets")
    _add_workload(curve)
    curve.add_argument("--points", type=int, default=10, help="budgets to solve (default: %(default)s)")
    fit = _command(commands, "fit", _fit, "find the largest batch within a budget")
    _add_workload(fit)
    _add_budget(fit, '"8 GiB", "800 MB", or "auto" for what the device has free')
    fit.add_argument("--max-batch", type=int, default=8192, help="largest size to look at (default: %(default)s)")
    fit.add_argument("--max-overhead", default="30%", help="most extra time to accept (default: 30%%)")
    show = _command(commands, "show", _show, "show a plan that was written to a file")
    show.add_argument("file", metavar="FILE", type=Path, help="JSON or HTML, as `hiremate plan` and a Plan write them")
    doctor = _command(commands, "doctor", _doctor, "check versions, solvers, devices, and that a small plan works")
    doctor.add_argument("factory", metavar="FACTORY", nargs="?", help="a model: say whether it would be refused")
    _add_json(doctor)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], words: str) -> argparse.ArgumentParser:
    takes_model = name in ("plan", "curve", "fit")
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=words,
        description=f"{words[0].upper()}{words[1:]}." + (f"\n\n{_FACTORY}" if takes_model else ""),
        epilog=f"examples:\n{_EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--debug", action="store_true", help="show warnings, and where an error comes from")
    return parser


def _add_workload(parser: argparse.ArgumentParser) -> None:
    """Add what `plan`, `curve` and `fit` share: the model, its step, costs, solver, output."""
    parser.add_argument("factory", metavar="FACTORY", help="what gives the model, see above")
    step = parser.add_argument_group("the step")
    step.add_argument("--input", metavar="SHAPES", help="[NAME=]SHAPE[:DTYPE],..., such as 64x3x224x224")
    step.add_argument("--device", default="cpu", help="cpu or cuda; it need not be there (default: %(default)s)")
    step.add_argument("--loss", default="auto", help="auto, model (what it returns) or sum (of its outputs)")
    step.add_argument("--optimizer", default="AdamW", help="class of torch.optim, or none (default: %(default)s)")
    step.add_argument("--autocast", metavar="DTYPE", help="bfloat16 or float16, for mixed precision")
    costs = parser.add_argument_group("times, estimated from operation counts unless measured")
    costs.add_argument("--tflops", type=float, help="arithmetic of the device, 10^12 operations a second")
    costs.add_argument("--bandwidth", type=float, help="memory traffic of the device, GB a second")
    costs.add_argument("--measure", action="store_true", help="measure each operation; the device must be there")
    solving = parser.add_argument_group("solving and output")
    solving.add_argument("--solver", default="portfolio", help="name of a strategy (default: %(default)s)")
    solving.add_argument("--time-limit", type=float, default=20.0, help="seconds to solve (default: %(default)s)")
    _add_json(solving)


def _add_budget(parser: argparse.ArgumentParser, words: str) -> None:
    parser.add_argument("--budget", required=True, help=words)


def _add_json(parser: Any) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the numbers as JSON to a file, or to the output with -")


def _version() -> str:
    from . import __version__

    return f"hiremate {__version__}"


# ---------------------------------------------------------------- the step


class _Work:
    """The captured and costed step that a command asked for."""

    def __init__(self, asked: argparse.Namespace) -> None:
        import torch

        from .factory import Workload, find_factory, parse_inputs
        from .offline import OfflineOptions, rates_of
        from .report import Reporter
        from .solvers import get_strategy

        get_strategy(asked.solver)
        for name in ("time_limit", "tflops", "bandwidth", "points", "max_batch"):
            value = getattr(asked, name, None)
            if value is not None and not value > 0:
                raise ConfigurationError(f"--{name.replace('_', '-')} must be above 0, found {value}")
        try:
            device = torch.device(asked.device)
        except RuntimeError:
            raise ConfigurationError(f"Unknown device {asked.device!r}. Choose cpu or cuda.") from None
        self.asked = asked
        self.options = OfflineOptions(device, asked.loss, asked.optimizer, _autocast_type(asked.autocast))
        self.rates = rates_of(device, asked.tflops, asked.bandwidth)
        inputs = parse_inputs(asked.input) if asked.input else ()
        self.reporter: Reporter = Reporter(console=Console(stderr=True))
        self.workload = Workload(find_factory(asked.factory), asked.factory, inputs)

    def capture(self, size: int | None = None) -> tuple[OfflineStep, Step]:
        """Capture the step and cost it."""
        from .offline import capture_offline
        from .profiling import CostCache

        with self.reporter.stage("tracing"):
            captured = capture_offline(self.workload, self.options, size)
        if not self.asked.measure:
            return captured, captured.estimated(self.rates)
        with self.reporter.stage("profiling"):
            return captured, captured.measured(
                CostCache(), lambda done, total: self.reporter.progress("operations", done, total)
            )

    def budget_bytes(self, budget: Budget, resident_bytes: int, unplanned_bytes: int) -> int:
        """Turn a budget into bytes."""
        import torch

        from .planner import resolve
        from .torch_private import free_host_bytes

        free = 0
        if budget.is_auto and self.options.device.type == "cuda":
            if not torch.cuda.is_available():
                raise ConfigurationError('A budget of "auto" needs the device, and there is no CUDA device here.')
            free = torch.cuda.mem_get_info(self.options.device)[0]
        elif budget.is_auto:
            free = free_host_bytes()
        return resolve(budget, 0 if budget.is_auto else resident_bytes, unplanned_bytes, free)

    def notes(self, captured: OfflineStep) -> list[str]:
        """Say what the numbers rest on."""
        measured = "Times and workspaces of operations are measured one by one on this device."
        estimated = (
            f"Times are estimates from operation counts ({self.rates}); the workspaces that operations take while "
            "they run are not known without the device, and taken as 0."
        )
        parts = len(captured.captured)
        graphs = "one graph" if parts == 1 else f"{parts} graphs"
        resident = ", ".join(f"{name} {format_bytes(size)}" for name, size in captured.resident if size)
        optimizer = "" if self.options.optimizer == "none" else f" ({self.options.optimizer})"
        found = [
            measured if self.asked.measure else estimated,
            f"Captured as {graphs} at batch size {captured.size}, without memory; code outside of that is not counted.",
            f"Resident: {resident}{optimizer}; gradients of the step before, {format_bytes(captured.stale_bytes)}, "
            "count until the backward.",
        ]
        if self.options.is_stand_in:
            found.append("This torch is built without CUDA: captured on CPU tensors, accounted as on a GPU.")
        return found


def _autocast_type(name: str | None) -> Any:
    import torch

    if name is None:
        return None
    if name not in ("bfloat16", "float16"):
        raise ConfigurationError(f"--autocast must be bfloat16 or float16, found {name!r}")
    return getattr(torch, name)


# ---------------------------------------------------------------- commands


def _plan(asked: argparse.Namespace) -> int:
    from dataclasses import replace

    from .breakdown import plan_lines
    from .costs import step_time_ms
    from .plan import PlanningTime
    from .planner import PlanOptions, make_plan, unplanned
    from .terminal import plan_table

    budget = parse_budget(asked.budget)
    work = _Work(asked)
    captured, step = work.capture()
    resident = captured.resident_bytes
    budget_bytes = work.budget_bytes(budget, resident, unplanned(step).peak_bytes)
    with work.reporter.stage("solving"):
        plan = make_plan(
            step,
            budget,
            budget_bytes,
            resident,
            PlanOptions(asked.solver, asked.time_limit),
            target=captured.name,
            planning=PlanningTime(capture_s=captured.capture_s),
            progress=work.reporter.solving(step_time_ms(step.graph, step.profile)),
        )
    plan = replace(plan, resident_parts=captured.resident)
    if asked.html is not None:
        from .html_report import write_html

        with work.reporter.stage("writing the report"):
            write_html(plan, asked.html)
    notes = work.notes(captured)
    numbers = {
        **plan.to_dict(),
        "device": asked.device,
        "costs": plan.profile.device,
        "batch_size": captured.size,
        "step_ms": step_time_ms(plan.graph, plan.profile),
        "planned_step_ms": plan.planned.time_ms,
        "resident": dict(captured.resident),
        "notes": notes,
    }
    if not _write_json(asked.json, numbers):
        console = Console()
        if console.is_terminal:
            console.print(plan_table(plan))
        else:
            _say(console, plan_lines(plan))
        _say_notes(console, notes)
    return OK


def _curve(asked: argparse.Namespace) -> int:
    from .costs import step_time_ms
    from .planner import unplanned
    from .solvers import Problem, SolveOptions, smallest_budget
    from .solvers.curve import curve

    work = _Work(asked)
    captured, step = work.capture()
    least = smallest_budget(Problem(step.graph, step.profile, 0)).peak_bytes
    most = unplanned(step).peak_bytes
    budgets = [least + (most - least) * i // asked.points for i in range(asked.points)]
    options = SolveOptions(time_limit_s=asked.time_limit)
    with work.reporter.stage("solving"):
        found = curve(Problem(step.graph, step.profile, most, options), budgets, asked.solver)
    step_ms = step_time_ms(step.graph, step.profile)
    rows = []
    for point in found.points:
        known = found.solution(point.peak_bytes)
        rows.append(
            {
                "peak_bytes": captured.resident_bytes + point.peak_bytes,
                "overhead": point.recompute_ms / step_ms if step_ms else 0.0,
                "step_ms": step_ms + point.recompute_ms,
                "bound_overhead": known.bound_ms / step_ms if step_ms else 0.0,
                "strategy": point.strategy,
            }
        )
    notes = work.notes(captured)
    document = {"target": captured.name, "resident_bytes": captured.resident_bytes, "points": rows, "notes": notes}
    if not _write_json(asked.json, document):
        table = _table("peak memory", "step", "extra time", "no plan below", "found by")
        for row in rows:
            table.add_row(
                format_bytes(row["peak_bytes"]),
                format_time(row["step_ms"]),
                format_ratio(row["overhead"]),
                format_ratio(row["bound_overhead"]),
                row["strategy"],
            )
        console = Console()
        _say(console, [f"{captured.name}: peak memory against time; the last line is plain training"])
        console.print(table)
        _say_notes(console, notes)
    return OK


def _fit(asked: argparse.Namespace) -> int:
    import time

    from .planner import PlanOptions
    from .scaling import Line, Sample, Scaling
    from .size_result import BatchSizeResult, result_lines, result_table
    from .size_search import Forecast, Objective, search

    start = time.perf_counter()
    budget, accepted = parse_budget(asked.budget), parse_budget(asked.max_overhead).share
    if budget.share is not None:
        raise ConfigurationError("A share is of what grows with the batch: give --budget as bytes, or auto.")
    if accepted is None:
        raise ConfigurationError(f'--max-overhead must be a percentage such as "30%", found {asked.max_overhead!r}')
    work = _Work(asked)
    seen = [work.capture(size) for size in FIT_SIZES]
    try:
        samples = [Sample(c.size, step.graph, step.profile) for c, step in seen]
        scaling = Scaling(samples, 512 if work.options.device.type == "cuda" else 1)
    except ValueError as error:
        raise ConfigurationError(f"The batch can't be scaled: {error}") from error
    residents = [captured.resident_bytes for captured, _ in seen]
    limit_bytes = work.budget_bytes(budget, 0, 0)
    limit_s = max(1.0, asked.time_limit / 5)
    forecast = Forecast(
        scaling, Line(FIT_SIZES, residents), limit_bytes, PlanOptions(asked.solver, limit_s, on_infeasible="warn")
    )
    with work.reporter.stage("solving"):
        found = search(forecast, asked.max_batch, accepted, Objective.LARGEST, max_plans=12)
    if found.size:
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
        console = Console()
        if console.is_terminal:
            console.print(result_table(result))
        else:
            _say(console, result_lines(result))
        _say_notes(console, notes)
    if not found.size:
        return _fail(asked, f"Not even batch size 1 fits {format_bytes(limit_bytes)}.", PROBLEM)
    return OK


def _show(asked: argparse.Namespace) -> int:
    from .plan_summary import read_summary, summary_rows

    console = Console()
    for name, words in summary_rows(read_summary(asked.file)):
        indent = " " * 12
        lines = textwrap.wrap(words, max(40, console.width - 12)) or [""]
        _say(console, [f"{name:<12}{lines[0]}", *(indent + line for line in lines[1:])])
    return OK


def _doctor(asked: argparse.Namespace) -> int:
    from dataclasses import asdict

    from .doctor import Verdict, examine

    findings = examine(asked.factory)
    is_bad = any(finding.verdict is Verdict.BAD for finding in findings)
    if not _write_json(asked.json, {"ok": not is_bad, "findings": [asdict(finding) for finding in findings]}):
        console = Console()
        colours = {Verdict.GOOD: "green", Verdict.KNOW: "magenta", Verdict.BAD: "bold red"}
        for finding in findings:
            mark = Text(f"{finding.verdict.value:<5}", colours[finding.verdict])
            console.print(mark.append(f"{finding.name}: {finding.words}", "default not bold"), soft_wrap=True)
    return PROBLEM if is_bad else OK


# ---------------------------------------------------------------- output


def _write_json(target: str | None, document: Any) -> bool:
    """Write JSON where it was asked for; whether it went to the output, which is then all that goes there."""
    if target is None:
        return False
    text = json.dumps(document, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return True
    Path(target).write_text(text, encoding="utf-8")
    return False


def _say(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _say_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(Text(note, "dim"))


def _table(*headers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for header in headers:
        table.add_column(header, justify="left" if header == headers[-1] else "right")
    return table
