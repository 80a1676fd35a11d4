"""The arguments of a command, read and checked before torch is loaded, which takes seconds.

The commands check what needs torch or the model's code.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from ..errors import BudgetError, ConfigurationError, did_you_mean
from ..planning.solvers.base import get_strategy
from ..records.costs import HALF_TYPES
from ..reporting.svg_report import writable
from ..units import Budget, parse_budget
from .user_code import find_script, split

DEVICES = ("cpu", "cuda")
WORDS = {  # words that an option takes, and the error for another word
    "loss": (("auto", "model", "sum"), "Unknown loss {!r}.{} Choose one of: auto, model, sum"),
    "zero_grad": (
        ("auto", "before", "after-forward", "accumulate"),
        "--zero-grad must be one of before, after-forward, accumulate, found {!r}.{}",
    ),
    "autocast": (HALF_TYPES, "--autocast must be bfloat16 or float16, found {!r}.{}"),
    "param_dtype": (HALF_TYPES, "--param-dtype must be bfloat16 or float16, found {!r}.{}"),
}
ABOVE_ZERO = ("time_limit_s", "tflops", "bandwidth", "points", "max_batch", "tp", "link", "host_link")
_BETWEEN = re.compile(r"(?<=[A-Za-z%])\s*,\s*")  # after a unit, or "auto"; other commas group digits


# ---------------------------------------------------------------- budgets and methods


def read_budgets(text: str) -> tuple[Budget, ...]:
    """Parse one or several budgets, such as "70%,50%,30%"."""
    return tuple(dict.fromkeys(parse_budget(part) for part in _BETWEEN.split(text)))


def read_methods(text: str) -> tuple[str, ...]:
    """Parse names of methods, such as "portfolio,rotor"."""
    names = tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    if not names:
        raise ConfigurationError(f"--methods names none, found {text!r}. Name some, such as portfolio,hilp.")
    for name in names:
        get_strategy(name)
    return names


def _read_overhead(text: str) -> float:
    with suppress(BudgetError):
        if (share := parse_budget(text).share) is not None:
            return share
    raise ConfigurationError(f'--max-overhead must be a percentage such as "30%", found {text!r}')


def _read_host_budget(text: str) -> int:
    size_bytes = parse_budget(text).size_bytes
    if size_bytes is None:
        raise ConfigurationError(f'--host-budget must be bytes such as "64 GiB", found {text!r}')
    return size_bytes


# ---------------------------------------------------------------- the step


class Input(NamedTuple):
    """One input of the command line: its keyword ("" for a positional one), its shape, its type."""

    name: str
    shape: tuple[int, ...]  # the batch size first
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}{'=' * bool(self.name)}{'x'.join(map(str, self.shape))}:{self.dtype}"


def read_inputs(text: str) -> tuple[Input, ...]:
    """Parse inputs such as "64x3x224x224" or "ids=8x128:int64,mask=8x128:bool"."""
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
    return Input(name, tuple(map(int, sizes)), dtype or "float32")


def read_counts(text: str) -> tuple[int, ...]:
    """Parse the numbers of GPUs to shard over: "8" or "2,4,8"; "auto" gives no numbers."""
    if text == "auto":
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigurationError(
            f"--fsdp takes a number of GPUs such as 8, several such as 2,4,8, or auto, found {text!r}"
        )
    return tuple(dict.fromkeys(map(int, parts)))


READERS: dict[str, Callable[[str], Any]] = {
    "budget": parse_budget,
    "budgets": read_budgets,
    "methods": read_methods,
    "max_overhead": _read_overhead,
    "host_budget": _read_host_budget,
    "input": read_inputs,
    "fsdp": read_counts,
}


def read(asked: argparse.Namespace) -> None:
    """Check all arguments that need no torch; replace lists and counts in `asked` by their parsed values."""
    values = {name: value for name, value in vars(asked).items() if value is not None}
    for name, reader in READERS.items():
        if isinstance(values.get(name), str):
            setattr(asked, name, reader(values[name]))
    for name in ABOVE_ZERO:
        if name in values and not values[name] > 0:
            flag = name.removesuffix("_s").replace("_", "-")
            raise ConfigurationError(f"--{flag} must be above 0, found {values[name]}")
    for name in ("html", "svg", "json"):
        if values.get(name) not in (None, "-"):
            writable(values[name])  # fail before solving, which takes minutes
    for name, (allowed, message) in WORDS.items():
        if name in values and values[name] not in allowed:
            raise ConfigurationError(message.format(values[name], did_you_mean(values[name], allowed)))
    if hasattr(asked, "max_overhead") and asked.budget.is_share:
        raise ConfigurationError("A share is of what grows with the batch: give --budget as bytes, or auto.")
    if hasattr(asked, "fsdp"):
        _check_step(asked)
        _check_counts(asked, values["fsdp"])
    if "factory" in values:
        split(asked.factory)
    if values.get("script"):
        find_script(asked.script)  # raises if there is no such script


def _check_step(asked: argparse.Namespace) -> None:
    get_strategy(asked.solver)
    kind, _, index = asked.device.partition(":")
    if kind not in DEVICES or not (index.isdecimal() or kind == asked.device):
        hint = did_you_mean("cuda" if kind == "gpu" else kind, DEVICES)
        raise ConfigurationError(f"Can't plan for device {asked.device!r}.{hint} Choose cpu or cuda.")
    if kind != "cuda" and getattr(asked, "offload", False):
        raise ConfigurationError(
            f"--offload puts values of a GPU into the host's memory, which device {asked.device!r} has already. "
            "Add --device cuda, which need not be there."
        )


def _check_counts(asked: argparse.Namespace, text: str) -> None:
    if (asked.fsdp != (1,) or asked.tp > 1) and asked.measure:
        raise ConfigurationError("--measure is of a step on one GPU. Leave it out with --fsdp and --tp.")
    if asked.fsdp == (1,) and (asked.units or asked.param_dtype):
        raise ConfigurationError("--units and --param-dtype say how --fsdp shards: add --fsdp 8, or leave them out.")
    if len(asked.fsdp) == 1:
        return
    if not hasattr(asked, "html"):
        raise ConfigurationError(f"Only plan takes several numbers of GPUs: expected one, found --fsdp {text}")
    if asked.budget.is_share:
        raise ConfigurationError("A share is of what a step adds, which --fsdp changes: give --budget as bytes.")
    if asked.html is not None or asked.svg is not None:
        raise ConfigurationError("A page or a picture is of one plan: name one number, such as --fsdp 8.")
