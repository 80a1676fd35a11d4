"""The command line, `hiremate`: plans a model without training it, and shows plans.

Exit codes: 0 for success, 1 if nothing fits the budget or a problem was found, 2 for a wrong command line, 130 after
Ctrl-C. Errors take one line; `--debug` shows the traceback. Only the commands that need torch import it, so that help
and errors in options come at once.
"""

from __future__ import annotations

import argparse
import logging
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from .. import __version__
from ..errors import BudgetError, ConfigurationError, HiRemateError, did_you_mean, place_of
from ..housekeeping import log
from ..options import OPTIONS, SIZE_OPTIONS
from ..reporting.plan_summary import read_summary, rows_of, summary_rows
from ..reporting.terminal import Output, module_table
from .arguments import read
from .run import PROBLEM, USAGE, OneLineParser, add_flag
from .run import main as run_script
from .user_code import import_failures

OK, STOPPED = 0, 130
RUN = "run"  # the arguments after this word belong to a script
LABEL_WIDTH = 12

# Options of other tools, and what to use here instead.
_MEANT = {
    **dict.fromkeys(
        ("--batch", "--batch-size", "--bs"), "The batch size is the first size of --input, such as --input 64x3x224x224"
    ),
    **dict.fromkeys(("--shape", "--shapes", "--inputs", "--input-shape"), "Shapes are named with --input"),
    **dict.fromkeys(("--memory", "--mem", "--limit", "--max-memory"), "The memory to stay within is --budget"),
    **dict.fromkeys(("--gpus", "--gpu", "--num-gpus", "--world-size"), "The number of GPUs is --fsdp or --tp"),
    **dict.fromkeys(("--cuda",), "The device is --device cuda"),
    **dict.fromkeys(("--dtype", "--amp", "--precision", "--bf16", "--fp16"), "Mixed precision is --autocast bfloat16"),
    **dict.fromkeys(("--output", "--out", "--save"), "Files to write are --json FILE, --html FILE and --svg FILE"),
    **dict.fromkeys(("--timeout", "--seconds"), "The seconds to solve are --time-limit"),
    "--budget": "This command looks at many budgets; plan, fit and compare take --budget",
    **dict.fromkeys(("--verbose", "--traceback"), "All that was seen is shown by --debug"),
}
_FACTORY = """\
FACTORY is PACKAGE.MODULE:NAME or path/to/file.py:NAME. It names a module, or a
class or function that gives, without arguments, a module, (module, inputs) or
(module, dict of inputs by keyword).
"""
_EXAMPLES = {
    "plan": """\
  hiremate plan models.py:Net --input 256x128 --budget 50%
  hiremate plan torchvision.models:resnet50 --input 64x3x224x224 \\
      --budget 4GiB --device cuda --html resnet50.html --svg resnet50.svg
  hiremate plan models.py:gpt2 --budget 24GiB --device cuda --autocast bfloat16
  hiremate plan models.py:llama --budget 80GiB --device cuda --fsdp auto \\
      --param-dtype bfloat16
  hiremate plan models.py:bert --budget 2GiB --json - \\
      --input input_ids=8x128:int64,labels=8:int64
""",
    "curve": """\
  hiremate curve models.py:gpt2 --device cuda
  hiremate curve models.py:Net --input 256x128 --points 20 --json curve.json
""",
    "compare": """\
  hiremate compare models.py:gpt2 --budget 60% --device cuda
  hiremate compare models.py:Net --input 256x128 --budget 70%,50%,30% \\
      --methods portfolio,hilp,segments --json methods.json --svg methods.svg
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
  hiremate doctor --json - train.py --epochs 3
""",
    RUN: """\
  hiremate run --budget 10GiB train.py --epochs 3
""",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default the one of `sys.argv`; return its exit code."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    parser = _parser()
    if not words:
        parser.print_help()
        return USAGE
    if words[:1] == [RUN]:
        return run_script(words[1:], ends_process=arguments is None)
    scripts = (place for place, word in enumerate(words) if words[0] == "doctor" and word.endswith(".py"))
    end = next(scripts, len(words))  # the rest belongs to the script
    try:
        asked = parser.parse_args(words[:end])
    except SystemExit as stop:  # from argparse, which has printed why; help is no error
        return int(stop.code or OK)
    asked.script = words[end:]
    with _quiet(asked.debug):
        try:
            return _show(asked) if asked.command == "show" else _with_torch(asked)
        except KeyboardInterrupt:
            sys.stderr.write("hiremate: stopped by Ctrl-C, before there was an answer\n")
            return STOPPED
        except Exception as error:  # the model's own code may raise anything
            if asked.debug:
                raise
            sys.stderr.write(f"hiremate: {_one_line(error)}\n")
            return USAGE if isinstance(error, (BudgetError, ConfigurationError)) else PROBLEM


def _one_line(error: BaseException) -> str:
    """Describe an error in one line; errors from outside of this package with type and place in the user's code."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, HiRemateError) and line:
        return line
    return f"{type(error).__name__}: {line}".removesuffix(": ") + place_of(error)


@contextmanager
def _quiet(debug: bool) -> Iterator[None]:
    """Silence warnings about the model's code, and this package's logs below errors, unless `--debug` is given."""
    level = log.level
    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
            log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)


# ---------------------------------------------------------------- what was asked


class _Parser(OneLineParser):
    """Reports a misspelt command or option, with the nearest name, before missing arguments."""

    meant = _MEANT

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Check names first, so that a misspelt name is not reported as a missing argument."""
        words = [*(sys.argv[1:] if args is None else args)]
        if self._subparsers is None:
            options = [name for action in self._actions for name in action.option_strings]
            for name in (text.partition("=")[0] for text in words if text.startswith("--")):
                if not any(option.startswith(name) for option in options):
                    self.error(self.no_option(name))
        else:
            if words and words[0].startswith("--") and words[0] not in ("--help", "--version"):
                self.error(f"options come after the command, such as plan, found {words[0]!r} before it")
            command = next((text for text in words if not text.startswith("-")), None)
            if command == "help":
                self.print_help()
                self.exit(OK)
            if command is not None and command not in _EXAMPLES:
                hint = did_you_mean(command, _EXAMPLES)
                self.error(f"there is no command {command!r}.{hint} Choose one of: {', '.join(_EXAMPLES)}")
        return super().parse_known_args(words, namespace)


class _UsedOnce(argparse.Action):
    """Store an option that takes a list; refuse a second use, which would replace the first silently."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if getattr(namespace, self.dest) != self.default:
            parser.error(f"argument {option_string}: given twice. Put what it lists behind one, with commas between")
        setattr(namespace, self.dest, values)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hiremate",
        description="Plan what a training step keeps and recomputes within a memory budget.",
        epilog="examples:\n" + "".join(text.splitlines(keepends=True)[0] for text in _EXAMPLES.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hiremate {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands.add_parser(RUN, help="run a training script, unchanged, within a budget", add_help=False)
    _add_model_commands(commands)
    show = _command(commands, "show", "show a plan that was written to a file")
    show.add_argument("file", metavar="FILE", type=Path, help="JSON or HTML, as `hiremate plan` and a Plan write it")
    doctor = _command(commands, "doctor", "check versions, solvers, devices and a small plan")
    doctor.usage = "%(prog)s [options] [FACTORY | train.py [arguments of the script]]"
    doctor.add_argument(
        "factory",
        metavar="FACTORY",
        nargs="?",
        help="a model, as plan takes it: say whether it would be refused; "
        "or a script and its arguments: run it up to its first training step, and say what would be planned",
    )
    _add_json(doctor)
    return parser


def _add_model_commands(commands: Any) -> None:
    """Add the commands that take a model."""
    plan = _model_command(commands, "plan", "plan a model under a budget, without its memory")
    host = plan.add_argument_group("the host's memory, between forward and backward")
    host.add_argument("--offload", action="store_true", help="let the plan put values there, from a GPU")
    host.add_argument("--host-link", type=float, help="copies each way, GB a second (default: 25, PCIe 4; or measured)")
    add_flag(host, OPTIONS["host_budget"], None, "no limit")
    words = '"8 GiB", "60%%" of what the step adds, or "auto" for what is free'
    plan.add_argument("--budget", required=True, help=words)
    plan.add_argument("--html", metavar="FILE", type=Path, help="write the report as one HTML page")
    plan.add_argument("--svg", metavar="FILE", type=Path, help="draw memory over time as an SVG picture")
    curve = _model_command(commands, "curve", "show the extra time of many budgets")
    curve.add_argument("--points", type=int, default=10, help="budgets to solve (default: %(default)s)")
    compare = _model_command(commands, "compare", "compare methods of solving under the same budgets")
    compare.set_defaults(time_limit_s=10.0, solver="none")
    words = '"8 GiB", "60%%" of what the step adds, or several such as 70%%,50%%,30%%'
    compare.add_argument("--budget", dest="budgets", required=True, help=words)
    compare.add_argument("--methods", default=(), help="names of strategies, such as portfolio,hilp (default: all)")
    compare.add_argument("--svg", metavar="FILE", type=Path, help="draw time over budget, a line for each method")
    fit = _model_command(commands, "fit", "find the largest batch within a budget")
    fit.set_defaults(fsdp="1", tp=1, units=None, param_dtype=None, link=None)  # gathers aren't linear in the batch
    fit.add_argument("--budget", required=True, help='"8 GiB", or "auto" for what is free')
    most = SIZE_OPTIONS["max_val"].default
    fit.add_argument("--max-batch", type=int, default=most, help="largest size to look at (default: %(default)s)")
    fit.add_argument("--max-overhead", default="30%", help="most extra time to accept (default: 30%%)")


def _command(commands: Any, name: str, words: str, more: str = "") -> argparse.ArgumentParser:
    """Add a command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=words,
        description=f"{words[0].upper()}{words[1:]}.{more}",
        epilog=f"examples:\n{_EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=name)
    parser.add_argument("--debug", action="store_true", help="show warnings, and where an error comes from")
    return parser


def _model_command(commands: Any, name: str, words: str) -> argparse.ArgumentParser:
    """Add a command whose arguments are a model, its step, costs, solver and output."""
    parser = _command(commands, name, words, f"\n\n{_FACTORY}")
    parser.add_argument("factory", metavar="FACTORY", help="what gives the model, see above")
    step = parser.add_argument_group("the step")
    words = "[NAME=]SHAPE[:DTYPE],..., such as 64x3x224x224"
    step.add_argument("--input", action=_UsedOnce, default=(), metavar="SHAPES", help=words)
    step.add_argument("--device", default="cpu", help="cpu or cuda; it need not be there (default: %(default)s)")
    step.add_argument("--loss", default="auto", help="auto, model (what it returns) or sum (of its outputs)")
    step.add_argument("--optimizer", default="AdamW", help="class of torch.optim, or none (default: %(default)s)")
    words = (
        "when gradients are freed: before the forward, after-forward, or accumulate for a step that adds to them "
        "(default: after-forward for a LightningModule, as Lightning does, else before)"
    )
    step.add_argument("--zero-grad", metavar="WHEN", default="auto", help=words)
    step.add_argument("--autocast", metavar="DTYPE", help="bfloat16 or float16, for mixed precision")
    costs = parser.add_argument_group("times, estimated from operation counts unless measured")
    costs.add_argument("--tflops", type=float, help="arithmetic of the device, 10^12 operations a second")
    costs.add_argument("--bandwidth", type=float, help="memory traffic of the device, GB a second")
    costs.add_argument("--measure", action="store_true", help="measure each operation; the device must be there")
    solving = parser.add_argument_group("solving and output")
    if name != "compare":
        add_flag(solving, OPTIONS["solver"], OPTIONS["solver"].default)
    add_flag(solving, OPTIONS["time_limit_s"], 20.0)
    _add_json(solving)
    if name != "fit":
        _add_several(parser)
    return parser


def _add_several(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that spread a model over several GPUs."""
    several = parser.add_argument_group("several GPUs, each of which gets the inputs as named")
    words = "shard over N GPUs (FSDP2); plan also takes 2,4,8 and auto"
    several.add_argument("--fsdp", metavar="N", default="1", help=words)
    words = "divide each block over N GPUs, as the model's _tp_plan names"
    several.add_argument("--tp", metavar="N", type=int, default=1, help=words)
    several.add_argument("--units", metavar="CLASSES", help="classes of the units to shard, instead of repeated blocks")
    several.add_argument("--param-dtype", metavar="DTYPE", help="type that FSDP2 gathers parameters in: bfloat16")
    several.add_argument("--link", type=float, help="what a GPU sends, GB a second (default: 300, NVLink of an A100)")


def _add_json(parser: Any) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the numbers as JSON to a file; - for the output")


# ---------------------------------------------------------------- what they do


def _with_torch(asked: argparse.Namespace) -> int:
    """Run a command that needs torch, and return its exit code; `doctor` checks first that torch can be imported."""
    read(asked)
    if asked.command == "doctor":
        with Console(stderr=True).status("HiRemate: importing what is installed"):
            failures = import_failures(["torch"])
        if failures:
            sys.stderr.write(
                f"hiremate: torch can't be imported ({failures['torch']}). Mend it with: pip install --force-reinstall "
                "torch, with the index of the build that fits your device\n"
            )
            return PROBLEM
    with Console(stderr=True).status("HiRemate: loading PyTorch"):
        from . import commands

    code: int = getattr(commands, asked.command)(asked)
    return code


def _show(asked: argparse.Namespace) -> int:
    console = Output()
    width, numbers = max(40 + LABEL_WIDTH, console.width), read_summary(asked.file)
    for name, words in summary_rows(numbers):
        label, indent = f"{name:<{LABEL_WIDTH}}", " " * LABEL_WIDTH
        lines = textwrap.fill(words, width, initial_indent=label, subsequent_indent=indent)
        console.print(Text(lines), soft_wrap=True)
    if rows := rows_of(numbers):
        console.print()
        console.print(module_table(rows))
    return OK
