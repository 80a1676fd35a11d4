"""`hiremate run`: trains an unchanged script within a budget.

    hiremate run --budget 10GiB train.py --epochs 3
    hiremate run --budget 60% -m package.train --epochs 3
    accelerate launch -m hiremate_lightning.run --budget 60% train.py ...     (and torchrun -m, python -m)

The script runs as `python train.py` runs it: it is `__main__`, has its own `sys.argv` and `sys.path`, its exit code is
the command's, and an error shows the traceback of the script. Messages about plans go to standard error.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BudgetError, ConfigurationError, HiRemateError, did_you_mean
from ..options import ENVIRONMENT_BUDGET, OPTIONS, Option
from ..planning.planner import make_options
from ..reporting.svg_report import writable
from ..reporting.terminal import write_json
from ..units import format_bytes, format_ratio
from . import user_code

if TYPE_CHECKING:
    from ..integrations.any_script import Finder
    from ..planning.plan import Plan

PROGRAM = "hiremate run"
PROBLEM, USAGE = 1, 2

_USAGE = (
    "%(prog)s [options] train.py [arguments of the script]\n       %(prog)s [options] -m package.module [arguments]"
)
_EPILOG = """\
options come before the script; what follows it is the script's own.

examples:
  hiremate run --budget 10GiB train.py --epochs 3
  hiremate run --budget 60% --dry-run train.py --config base.yaml
  HIREMATE_BUDGET=10GiB hiremate run -m package.train
  torchrun --nproc-per-node 2 -m hiremate_lightning.run --budget 60% train.py
  accelerate launch -m hiremate_lightning.run --budget 60% train.py
"""
_LARGEST_BATCH = (
    "The batches of a script that nobody has read are its own. Use find_max_batch_size() or HiRemateBatchSizeFinder in "
    "the script, or `hiremate fit` for a model; see docs/batch_size.md"
)


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong option in one line, with the nearest option, and the command that shows all options."""

    meant: Mapping[str, str] = {}  # options of other tools, and what replaces each
    rest = ""  # end of the message about an unknown option

    def error(self, message: str) -> Any:
        """End the process with a message in one line."""
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0]
        if unknown:
            message = self.no_option(unknown)
        ended = message if message.endswith((".", "?")) else f"{message}."
        self.exit(USAGE, f"{self.prog}: {ended} See: {self.prog} --help\n")

    def no_option(self, name: str) -> str:
        """Describe the error of an unknown option, with the nearest known one."""
        known = [option for action in self._actions for option in action.option_strings]
        hint = f" {self.meant[name]}." if name in self.meant else did_you_mean(name, known)
        return f"there is no option {name!r}.{hint}{self.rest}"


def add_flag(parser: Any, option: Option, default: Any, default_words: str = "") -> None:
    """Add the flag of an option to a parser or to a group of it; `default` is the value if the flag is left out."""
    flag = option.flag
    assert flag is not None, "the option can be given on a command line"
    words = default_words or ("" if default is None else "%(default)s")
    text = f"{flag['help']} (default: {words})" if words else flag["help"]
    parser.add_argument(option.flag_name, dest=option.name, default=default, **{**flag, "help": text})


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own options, which end at the script."""
    made = OneLineParser(
        prog=PROGRAM,
        usage=_USAGE,
        description="Run a training script, unchanged, within a memory budget.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.meant, made.rest = {"--largest-batch": _LARGEST_BATCH}, " Options of the script follow it"
    made.add_argument(
        "--budget",
        default=os.environ.get(ENVIRONMENT_BUDGET),
        help=f'"8 GiB", "60%%" of what a step adds, or "auto" for what is free (or set {ENVIRONMENT_BUDGET})',
    )
    made.add_argument("--target", metavar="PATHS", help="submodules to plan, with commas between; else all that trains")
    made.add_argument("--dry-run", action="store_true", help="train two steps, say what a plan costs, and stop")
    made.add_argument("--html", metavar="FILE", type=Path, help="write the plan as one HTML page at the end")
    made.add_argument("--json", metavar="FILE", help="write the numbers as JSON at the end; - for the output")
    for option in OPTIONS.values():
        if option.flag is not None:
            add_flag(made, option, option.default)
    made.add_argument("--debug", action="store_true", help="show where an error of hiremate comes from")
    made.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, as python -m"
    )
    made.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None, *, ends_process: bool | None = None) -> int:
    """Run a script within a budget; return the exit code, unless the script raises SystemExit or KeyboardInterrupt.

    `arguments` are the command's own options, then the script and its arguments; by default `sys.argv`, after which the
    process ends.
    """
    asked = parser().parse_args(arguments)
    command = asked.module or asked.script
    if not command:
        parser().error("no script to run; give a path such as train.py, or -m and a module")
    try:
        return _run(asked, command, arguments is None if ends_process is None else ends_process)
    except HiRemateError as error:
        if asked.debug:
            raise
        words = "\n".join([str(error), *getattr(error, "__notes__", ())])
        words = words.replace("on_infeasible='warn'", "--on-infeasible warn")  # here the user gives it as a flag
        sys.stderr.write(f"{PROGRAM}: {words}\n")
        return USAGE if isinstance(error, BudgetError | ConfigurationError) else PROBLEM


def _run(asked: argparse.Namespace, command: Sequence[str], ends_process: bool) -> int:
    """Run a script, and find and plan the models that it trains; return the exit code."""
    user_code.find_script(command, bool(asked.module))
    options = {option.name: getattr(asked, option.name) for option in OPTIONS.values() if option.flag is not None}
    budget = asked.budget or "auto"
    make_options(budget, **options)
    for target in (asked.html, asked.json):
        if target is not None and str(target) != "-":
            writable(target, makes_folder=True)
    from ..integrations.any_script import Finder  # loads torch, which help and errors don't need

    target = asked.target.split(",") if asked.target else None
    page = None if asked.html is None else str(asked.html.absolute())  # the script may change the working directory
    more = {} if page is None else {"more": f"{page}, at the end"}
    finder = Finder(budget, target, options, is_dry=asked.dry_run, report=_write_line, **more)
    numbers = asked.json if asked.json in (None, "-") else str(Path(asked.json).absolute())
    process = os.getpid()
    try:
        with finder.in_place():
            user_code.run_script(command, bool(asked.module), ends_process)
        return 0
    except HiRemateError:
        raise
    except Exception as error:  # from the script
        _show_error(error)
        return PROBLEM
    finally:
        if os.getpid() == process:
            _show(finder, page, numbers)


# ---------------------------------------------------------------- what is said


def _write_line(line: str) -> None:
    """Write a line to standard error, on rank 0 only."""
    from ..reporting.report import is_rank_zero

    if is_rank_zero():
        sys.stderr.write(f"{PROGRAM}: {line}\n")
        sys.stderr.flush()


def _show_error(error: Exception) -> None:
    """Show the traceback of a script's error, without the frames that run the script."""
    runners = {__file__, user_code.__file__, runpy.__file__, "<frozen runpy>"}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in runners:
        trace = trace.tb_next
    trace = trace or error.__traceback__
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _show(finder: Finder, page: str | None, numbers: str | None) -> None:
    """Write the closing lines: each plan, or why there is none. Then write the page and the numbers, if requested."""
    from ..reporting.report import is_rank_zero

    seen = finder.seen
    for trained in finder.trained:
        _write_line(f"{trained.name}: {_words(trained.plan, seen.ended_by)}")
    if not finder.trained:
        _write_line(f"no training step was seen: {seen.reason}")
    for write, target in ((_write_pages, page), (_write_numbers, numbers)):
        try:
            if target is not None and is_rank_zero():
                write(target, finder)
        except (OSError, ConfigurationError) as error:  # keep the script's exit code
            _write_line(f"can't write what was asked for: {error}")
    if seen.is_stopped:
        _write_line(f"stopped by --dry-run after {seen.updates} updates of the weights")


def _write_pages(target: str, finder: Finder) -> None:
    from ..reporting.html_report import write_html

    page = Path(target)
    plans = [trained.plan for trained in finder.trained if trained.plan is not None]
    if not plans:
        _write_line(f"{page} is not written: there is no plan")
        return
    page.parent.mkdir(parents=True, exist_ok=True)
    for index, plan in enumerate(plans):
        path = page if not index else page.with_stem(f"{page.stem}-{index + 1}")
        _write_line(f"written: {write_html(plan, path, curve_limit_s=0)}")


def _write_numbers(target: str, finder: Finder) -> None:
    models = [{"model": t.name, "plan": None if t.plan is None else t.plan.to_dict()} for t in finder.trained]
    numbers = {"updates": finder.seen.updates, "models": models, "unplanned": None if models else finder.seen.reason}
    write_json(numbers, target)
    if target != "-":
        _write_line(f"written: {target}")


def _words(plan: Plan | None, ended_by: str | None) -> str:
    """Describe a plan: measured or predicted peak beside the eager peak, budget, extra time."""
    if plan is None and ended_by is not None:
        return f"no plan was made before the script ended, by {ended_by}"
    if plan is None:
        from ..integrations.any_script import DRY_STEPS

        return f"no plan was made. One is made in the second step; {DRY_STEPS} are needed at least"

    def measured_or(measured: float | None, predicted: float, write: Callable[[float], str]) -> str:
        return f"{write(predicted)} (predicted)" if measured is None else f"{write(measured)} (measured)"

    peak = measured_or(plan.measured.peak_bytes, plan.planned_peak_bytes, format_bytes)
    overhead = measured_or(plan.measured.overhead, plan.predicted_overhead, format_ratio)
    plain, budget = format_bytes(plan.unplanned_peak_bytes), format_bytes(plan.budget_bytes)
    return f"peak {peak}, {plain} without a plan; budget {budget} ({plan.budget}); extra time {overhead}"
