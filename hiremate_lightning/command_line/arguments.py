"""The arguments of a command, read and checked before torch is loaded, which takes seconds.

What only torch or the model's own code can tell is checked by the commands.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigurationError, did_you_mean
from ..planning.solvers import get_strategy
from ..reporting.svg_report import writable
from ..units import Budget, parse_budget

DEVICES = ("cpu", "cuda")
LOSSES = ("auto", "model", "sum")
HALF_TYPES = ("bfloat16", "float16")
ZERO_GRADS = ("before", "after-forward", "accumulate")
ABOVE_ZERO = ("time_limit", "tflops", "bandwidth", "points", "max_batch", "tp", "link", "host_link")
# The classes of torch.optim, for misspelt names; torch itself is asked for those that are not here.
OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam"),
    *("RMSprop", "Rprop", "SGD", "SparseAdam"),
)
# The types of torch that inputs usually have, for misspelt names.
TYPES = (
    *("bfloat16", "bool", "complex64", "double", "float", "float16", "float32", "float64", "half", "int", "int16"),
    *("int32", "int64", "int8", "long", "short", "uint8"),
)
_BETWEEN = re.compile(r"(?<=[A-Za-z%])\s*,\s*")  # after a unit, or "auto"; other commas group digits
_DYNAMIC = re.compile(r"\bimport \*|\b(?:exec|globals|locals|setattr|vars|__dict__|__getattr__)\b")


def read(asked: argparse.Namespace) -> None:
    """Check all that can be checked without torch, and put values in the place of what lists or counts something.

    Raises:
        BudgetError: If a budget can't be read.
        ConfigurationError: If another argument can't be used; the text says how to write it.
    """
    if hasattr(asked, "methods"):
        asked.budget, asked.methods = read_budgets(asked.budget), read_methods(asked.methods)
    elif hasattr(asked, "budget"):
        asked.budget = parse_budget(asked.budget)
    if hasattr(asked, "max_overhead"):
        if asked.budget.share is not None:
            raise ConfigurationError("A share is of what grows with the batch: give --budget as bytes, or auto.")
        asked.max_overhead = read_overhead(asked.max_overhead)
    for name in ABOVE_ZERO:
        value = getattr(asked, name, None)
        if value is not None and not value > 0:
            raise ConfigurationError(f"--{name.replace('_', '-')} must be above 0, found {value}")
    for name in ("html", "svg", "json"):
        target = getattr(asked, name, None)
        if target not in (None, "-"):
            writable(target)  # before minutes go into solving
    if hasattr(asked, "fsdp"):
        _read_step(asked)
        _read_counts(asked)
    if getattr(asked, "factory", None) is not None:
        check_factory(asked.factory)


# ---------------------------------------------------------------- budgets and methods


def read_budgets(text: str) -> tuple[Budget, ...]:
    """Read one budget or several, such as "70%,50%,30%"."""
    return tuple(dict.fromkeys(parse_budget(part) for part in _BETWEEN.split(text)))


def read_methods(text: str | None) -> tuple[str, ...]:
    """Read names of methods, such as "portfolio,rotor"; none where none were asked for."""
    if text is None:
        return ()
    names = tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    if not names:
        raise ConfigurationError(f"--methods names none, found {text!r}. Name some, such as portfolio,hilp.")
    for name in names:
        get_strategy(name)
    return names


def read_overhead(text: str) -> float:
    """Read the most extra time to accept, such as "30%", as a ratio."""
    try:
        share = parse_budget(text).share
    except ValueError:
        share = None
    if share is None:
        raise ConfigurationError(f'--max-overhead must be a percentage such as "30%", found {text!r}')
    return share


# ---------------------------------------------------------------- the step


def _read_step(asked: argparse.Namespace) -> None:
    get_strategy(asked.solver)
    _check_choices(asked.device, asked.loss, asked.zero_grad)
    for option, name in (("--autocast", asked.autocast), ("--param-dtype", asked.param_dtype)):
        if name not in (None, *HALF_TYPES):
            hint = did_you_mean(name, HALF_TYPES)
            raise ConfigurationError(f"{option} must be {' or '.join(HALF_TYPES)}, found {name!r}.{hint}")
    if asked.optimizer not in ("none", *OPTIMIZERS) and (hint := did_you_mean(asked.optimizer, OPTIMIZERS)):
        raise ConfigurationError(f"torch.optim has no optimizer {asked.optimizer!r}.{hint} Name one, or none.")
    asked.input = () if asked.input is None else read_inputs(asked.input)
    if not getattr(asked, "offload", False):
        return
    if asked.device.partition(":")[0] != "cuda":
        raise ConfigurationError(
            f"--offload puts values of a GPU into the host's memory, which device {asked.device!r} has already. "
            "Add --device cuda, which need not be there."
        )
    if asked.host_budget is not None:
        text, asked.host_budget = asked.host_budget, parse_budget(asked.host_budget).size_bytes
        if asked.host_budget is None:
            raise ConfigurationError(f'--host-budget must be bytes such as "64 GiB", found {text!r}')


def _check_choices(device: str, loss: str, zero_grad: str) -> None:
    kind, _, index = device.partition(":")
    if kind not in DEVICES or not (index.isdecimal() or kind == device):
        hint = did_you_mean("cuda" if kind == "gpu" else kind, DEVICES)
        raise ConfigurationError(f"Can't plan for device {device!r}.{hint} Choose cpu or cuda.")
    if loss not in LOSSES:
        hint = did_you_mean(loss, LOSSES)
        raise ConfigurationError(f"Unknown loss {loss!r}.{hint} Choose one of: {', '.join(LOSSES)}")
    if zero_grad not in ("auto", *ZERO_GRADS):
        hint = did_you_mean(zero_grad, ZERO_GRADS)
        raise ConfigurationError(f"--zero-grad must be one of {', '.join(ZERO_GRADS)}, found {zero_grad!r}.{hint}")


class Input(NamedTuple):
    """One input as the command line names it: its keyword, "" for a positional one, its sizes, its type."""

    name: str
    shape: tuple[int, ...]  # the batch size first
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}{'=' * bool(self.name)}{'x'.join(map(str, self.shape))}:{self.dtype}"


def read_inputs(text: str) -> tuple[Input, ...]:
    """Read inputs such as "64x3x224x224" or "ids=8x128:int64,mask=8x128:bool"."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 1 and all(part.isdecimal() for part in parts):
        raise ConfigurationError(
            f"Can't read the input {text!r}: x joins the sizes of an input, a comma separates inputs. Did you mean "
            f"{'x'.join(parts)}? Several inputs of one dimension are named with their types: {':float32,'.join(parts)}"
            ":float32."
        )
    return tuple(map(_read_input, parts))


def _read_input(text: str) -> Input:
    name, equals, rest = text.rpartition("=")
    shape_text, colon, dtype = rest.partition(":")
    sizes = shape_text.lower().split("x")
    is_read = all(size.isdecimal() and int(size) > 0 for size in sizes) and (bool(dtype) or not colon)
    if (equals and not name.isidentifier()) or not is_read:
        raise ConfigurationError(
            f"Can't read the input {text!r}. Expected SHAPE, SHAPE:DTYPE or NAME=SHAPE:DTYPE, "
            "such as 64x3x224x224, 8x128:int64 or input_ids=8x128:int64."
        )
    named = Input(name, tuple(map(int, sizes)), dtype or "float32")
    if named.dtype not in TYPES and did_you_mean(dtype, TYPES):
        raise no_such_type(named, TYPES)
    return named


def no_such_type(named: Input, known: Iterable[str]) -> ConfigurationError:
    """Return the error for an input whose type torch does not have."""
    hint = did_you_mean(named.dtype, known)
    return ConfigurationError(f"torch has no type {named.dtype!r}, in {str(named)!r}.{hint} Name one such as int64.")


# ---------------------------------------------------------------- several GPUs


def _read_counts(asked: argparse.Namespace) -> None:
    text, asked.fsdp = asked.fsdp, read_counts(asked.fsdp)
    if (asked.fsdp != (1,) or asked.tp > 1) and asked.measure:
        raise ConfigurationError("--measure is of a step on one GPU. Leave it out with --fsdp and --tp.")
    if asked.fsdp == (1,) and (asked.units or asked.param_dtype):
        raise ConfigurationError("--units and --param-dtype say how --fsdp shards: add --fsdp 8, or leave them out.")
    if len(asked.fsdp) == 1:
        return
    if not hasattr(asked, "html"):
        raise ConfigurationError(f"Only plan takes several numbers of GPUs: expected one, found --fsdp {text}")
    if asked.budget.share is not None:
        raise ConfigurationError("A share is of what a step adds, which --fsdp changes: give --budget as bytes.")
    if asked.html is not None or asked.svg is not None:
        raise ConfigurationError("A page or a picture is of one plan: name one number, such as --fsdp 8.")


def read_counts(text: str | None) -> tuple[int, ...]:
    """Read the numbers of GPUs to shard over: "8", "2,4,8" or "auto", for which there are none."""
    if text == "auto":
        return ()
    parts = [part.strip() for part in (text or "1").split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigurationError(
            f"--fsdp takes a number of GPUs such as 8, several such as 2,4,8, or auto, found {text!r}"
        )
    return tuple(dict.fromkeys(map(int, parts)))


# ---------------------------------------------------------------- the model's code


def split_factory(text: str) -> tuple[str, str]:
    """Split "package.module:name" or "path/to/file.py:name" into place and name."""
    place, colon, name = text.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    if not colon or not name or not (is_module or place.endswith(".py")):
        hint = did_you_mean(text, [f"{place}.py:{name}"] if Path(f"{place}.py").is_file() else [])
        raise ConfigurationError(f"Can't read {text!r}.{hint} Expected PACKAGE.MODULE:NAME or path/to/file.py:NAME.")
    if place.endswith(".py") and not Path(place).is_file():
        raise ConfigurationError(f"There is no file {place!r}. Expected path/to/file.py:NAME.")
    return place, name


def check_factory(text: str) -> None:
    """Check what can be seen of a factory without running its file."""
    place, path = split_factory(text)
    file = Path(place) if place.endswith(".py") else _file_of_module(place)
    if file is None:
        return
    source = file.read_text(encoding="utf-8", errors="replace")
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ConfigurationError(f"Can't read {file}, line {error.lineno}: {error.msg}.") from None
    names = _names_at_the_top(tree)
    name = path.partition(".")[0]
    if name not in names and not _DYNAMIC.search(source):
        raise no_such_name(place, path, name, names)


def no_such_name(place: str, path: str, name: str, known: Iterable[str]) -> ConfigurationError:
    """Return the error for a file or module that lacks a name on a path such as "zoo.Net"."""
    hint = did_you_mean(name, sorted(each for each in known if not each.startswith("_")))
    return ConfigurationError(f"{place} has no {path!r}.{hint} Name a function, a class or a module object in it.")


def _names_at_the_top(tree: ast.Module) -> set[str]:
    """List the names that a module may bind at its top level, within branches too."""
    names, waiting = set[str](), list[ast.AST](tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            waiting.extend(ast.iter_child_nodes(node))
    return names


def _file_of_module(name: str) -> Path | None:
    """Find the file of a module that lies in the working folder and in no package; None for any other module."""
    root, _, rest = name.partition(".")
    file = Path(f"{root}.py")
    if file.is_file():
        return None if rest else file
    if not Path(root).is_dir() and root not in sys.modules and importlib.util.find_spec(root) is None:
        raise no_such_module(root)
    return None


def no_such_module(name: str) -> ConfigurationError:
    """Return the error for a module that can't be imported from here."""
    return ConfigurationError(
        f"There is no module {name!r}. Expected PACKAGE.MODULE:NAME, importable from here, or path/to/file.py:NAME."
    )
