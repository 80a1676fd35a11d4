"""What users can ask for: each option with its type, default, allowed values and meaning, stated here only.

An option is a field of `SessionOptions` (training within a budget) or of `SizeOptions` (searching for the largest
batch). Error messages and the flags of the command `hiremate` are made from its `Option`;
signatures and docstrings of the entry points, the table of docs/api.md, and the messages in docs/troubleshooting.md are
written from it by `python -m tests.option_docs --write`, and test_options.py compares them.

This module is imported for the help of a command, so it loads neither torch nor a solver.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

from .errors import ConfigurationError
from .units import Budget, parse_budget

ENVIRONMENT_BUDGET = "HIREMATE_BUDGET"  # the budget if neither script nor launcher names one
BUDGET_MEANING = (
    'Bytes ("12 GiB", "800 MB", an int) that must not be passed at any moment of a training step, all that is '
    'allocated on the device included; or a share ("60%", a float in (0, 1]) of what the unplanned step adds to '
    'what exists before it, the largest so far; or "auto" for what the device has free.'
)
METHODS = ("hilp", "rockmate", "rotor", "pofo", "min_memory", "twremat", "checkmate", "checkmate_lp", "chen", "dtr")
_QUOTED_METHODS = '"' + '", "'.join(METHODS) + '"'
SOLVER_MEANING = (
    'Leave it at the default, "portfolio", the best of several strategies. The others are for comparison: "segments", '
    f'without a MIP solver; "none"; or a method of a paper: {_QUOTED_METHODS}; see docs/formulation.md.'
)
SIZES_FORM = (
    "sizes must be like {'input_ids': {1: (1, 4096)}}: an argument, its dimension, its smallest and largest size"
)

OFFLOADS = ("off", "auto", "always allowed")

SizeRanges = Mapping[str, Mapping[int, tuple[int, int]]]


# ---------------------------------------------------------------- one option


@dataclass(frozen=True, slots=True)
class Option:
    """The name, type, default, meaning, allowed values and flag of an option."""

    name: str
    annotation: str  # type of the argument, as signatures write it
    default: Any  # value of the argument if it is left out
    meaning: str  # what it does, with its unit, as docstrings say it
    allowed: str = ""  # the allowed values, after "must be" in an error message; "" if `read` refuses the others
    is_allowed: Callable[[Any], bool] = lambda value: True
    read: Callable[[Any], Any] = lambda value: value  # converts an allowed value to the one in the record
    hint: str = ""  # follows the error message of a value that is not allowed
    # The option of `hiremate run`, as `add_argument` of argparse takes it; None if a command line can't express it.
    flag: Mapping[str, Any] | None = None

    @property
    def flag_name(self) -> str:
        """The name of the flag, without the unit, which is in its help."""
        return "--" + self.name.removesuffix("_s").replace("_", "-")

    def value_of(self, given: Any) -> Any:
        """Check an argument, and return the value of the record.

        Raises:
            ConfigurationError: If the argument is not allowed.
        """
        if not self.is_allowed(given):
            hint = f". {self.hint}" if self.hint else ""
            raise ConfigurationError(f"{self.name} must be {self.allowed}, found {given!r}{hint}")
        return self.read(given)


def _option(annotation: str, default: Any, meaning: str, **more: Any) -> Any:
    """Make a field of a record of options, which RUF009 takes for a mutable default; `_options_of` adds the name."""
    option = Option("", annotation, default, meaning, **more)
    return field(default=option.read(default), metadata={"option": option})


def _options_of(record: type) -> dict[str, Option]:
    """Return the options of a record, by name and in order."""
    return {f.name: replace(f.metadata["option"], name=f.name) for f in fields(record)}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# ---------------------------------------------------------------- training within a budget


@dataclass(frozen=True, slots=True)
class NamedSize:
    """A dimension of an argument, and the sizes that it will have."""

    argument: str
    dimension: int  # below 0 for one counted from the end
    least: int  # the smallest size
    most: int  # the largest size

    def __str__(self) -> str:
        return f"dimension {self.dimension} of {self.argument}"


def _can_be_written(folder: Any) -> bool:
    """Whether a folder exists or can be made, and can be written to; it is tried, since permissions don't bind root."""
    if folder is None:
        return True
    path = Path(folder).absolute()
    nearest = next(place for place in (path, *path.parents) if os.access(place, os.F_OK))
    try:
        with TemporaryFile(dir=nearest):
            return True
    except OSError:
        return False


def _named_sizes(sizes: SizeRanges | None) -> tuple[NamedSize, ...]:
    """Read the sizes that arguments will have; refuse a size without argument, dimension or range."""
    named_sizes = []
    for argument, dimensions in ({} if sizes is None else _items(sizes)).items():
        for dimension, ends in _items(dimensions).items():
            is_pair = isinstance(ends, tuple | list) and len(ends) == 2
            if not (is_pair and isinstance(argument, str) and all(map(_is_whole, (dimension, *ends)))):
                raise ConfigurationError(f"{SIZES_FORM}. Found {argument!r}: {{{dimension!r}: {ends!r}}}.")
            named = NamedSize(argument, dimension, *ends)
            if not 1 <= named.least <= named.most:
                raise ConfigurationError(
                    f"sizes must go from a size of at least 1 to one that is no smaller, found {named.least} to "
                    f"{named.most} for {named}."
                )
            named_sizes.append(named)
    return tuple(named_sizes)


def _items(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{SIZES_FORM}. Found {value!r}.")
    return value


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The options of a session: one field for each option, with the value that `Option.read` returns."""

    budget: Budget = _option("int | float | str", "auto", BUDGET_MEANING, read=parse_budget)  # noqa: RUF009
    time_limit_s: float = _option(
        "float",
        30.0,
        "Seconds for solving one plan, counted as the work of an idle core: a busy machine takes longer and finds the "
        "same. The clock ends it after 10 s and four times as long, with a warning.",
        allowed="above 0 seconds",
        is_allowed=lambda value: isinstance(value, int | float) and value > 0,
        flag={"help": "seconds to solve one plan", "type": float, "metavar": "SECONDS"},
    )
    max_plans: int = _option(
        "int",
        8,
        "Most plans to make, one for each step signature (input shapes, for example). After that, a step runs by "
        "the plan of another input shape if it fits, else at the least memory.",
        allowed="at least 1",
        is_allowed=lambda value: isinstance(value, int) and value >= 1,
        flag={"help": "most plans to make, one for each step signature", "type": int, "metavar": "COUNT"},
    )
    on_infeasible: str = _option(
        "str",
        "raise",
        '"raise" if nothing fits the budget, or "warn" to train on with the least memory found.',
        allowed="'raise' or 'warn'",
        is_allowed=lambda value: value in ("raise", "warn"),
        flag={"help": "what to do if nothing fits the budget", "choices": ("raise", "warn")},
    )
    cache_dir: Path | None = _option(  # noqa: RUF009
        "str | Path | None",
        None,
        "Folder for measured costs and plans, reused by later runs; None for no files.",
        allowed="a folder that can be written, or None",
        is_allowed=_can_be_written,
        read=lambda folder: None if folder is None else Path(folder),
        flag={"help": "keep measured costs and plans for later runs", "metavar": "FOLDER"},
    )
    solver: str = _option(
        "str",
        "portfolio",
        SOLVER_MEANING,
        flag={
            "help": "leave it at the default, portfolio; to compare, segments, none, or a method of a paper: "
            + ", ".join(METHODS),
            "metavar": "NAME",
        },
    )
    compile: str | None = _option(
        "str | None",
        None,
        '"inductor" to fuse operations into kernels that Inductor makes, None for PyTorch\'s own; see '
        "docs/compiled.md.",
        allowed="'inductor' or None",
        is_allowed=lambda value: value in (None, "inductor"),
        flag={"help": "fuse operations into kernels", "choices": ("inductor",)},
    )
    offload: str = _option(
        "str",
        "off",
        '"auto" to let plans put values into the host\'s memory between forward and backward if that is faster '
        "than to compute them again, or if nothing else fits, in up to half of what the host has free; "
        '"always allowed" for as much as host_budget names; "off" for never. See docs/offloading.md.',
        allowed="'off', 'auto' or 'always allowed'",
        is_allowed=lambda value: value in OFFLOADS,
        flag={"help": "let plans put values into the host's memory", "choices": OFFLOADS},
    )
    host_budget: Budget = _option(  # noqa: RUF009
        "int | str",
        "auto",
        'Most bytes of the host\'s memory for offloaded values, of this process ("64 GiB", an int); "auto" for '
        "half of what is free as planning begins, shared by the processes of a machine.",
        allowed='bytes such as "64 GiB", or "auto"',
        is_allowed=lambda value: not parse_budget(value).is_share,
        read=parse_budget,
        flag={"help": "most bytes of the host for values offloaded", "metavar": "BYTES"},
    )
    verify: int = _option(
        "str | int",
        "first",
        '"first" to prove captured code against eager PyTorch at its first run, a number of steps to prove it at as '
        'many runs, "off" to believe it; see docs/limits.md.',
        allowed="'first', 'off' or a number of steps of at least 1",
        is_allowed=lambda value: (_is_whole(value) and value >= 1) or value in ("first", "off"),
        read=lambda value: int(value == "first") if isinstance(value, str) else value,
        hint="'first' proves captured code against eager PyTorch at its first run.",
        flag={
            "help": "runs that are proved against eager PyTorch: first, off or a number",
            "type": lambda text: int(text) if text.lstrip("-").isdecimal() else text,
            "metavar": "RUNS",
        },
    )
    sizes: tuple[NamedSize, ...] = _option(
        "SizeRanges | None",
        None,
        'Smallest and largest size of a dimension of an argument, such as `{"input_ids": {1: (1, 4096)}}`. Dimensions '
        "of the same size, those of masks for example, follow. The largest sizes are planned in the first steps: a "
        "budget that is too small for them is refused then, and shares are of them. "
        "`torch._dynamo.mark_dynamic(tensor, dim, min=, max=)` on what the call is given asks for the same.",
        read=_named_sizes,
    )
    recomputable_operators: tuple[str, ...] = _option(
        "Sequence[str]",
        (),
        "Custom operators with Python code that give the same numbers when they run again, by name "
        '("mylibrary::attention"). Others with Python code run once in a step, and their results are kept.',
        allowed="""names such as ("mylibrary::attention",)""",
        is_allowed=lambda names: (
            isinstance(names, tuple | list) and all(isinstance(name, str) and "::" in name for name in names)
        ),
        read=tuple,
    )
    verbose: bool | Literal["full"] = _option(
        'bool | Literal["full"]',
        True,
        "Whether to report, on rank zero: a line when a plan is made, one when it was measured, one that says how to "
        'see more or where its page is; "full" for the whole table of the plan.',
        allowed="True, False or 'full'",
        is_allowed=lambda value: value in (True, False, "full"),
    )


OPTIONS = _options_of(SessionOptions)
# The options of a planned model that no second request changes; those of joined models are equal in them.
STAY = tuple(name for name in OPTIONS if name not in ("budget", "verbose"))


def refuse_changes(now: SessionOptions, asked: SessionOptions) -> None:
    """Refuse a second request that changes more than the budget; an argument with its default changes nothing.

    Raises:
        ConfigurationError: If an argument differs; the text names it.
    """
    defaults = SessionOptions()
    for name in STAY:
        value, before = getattr(asked, name), getattr(now, name)
        if value not in (before, getattr(defaults, name)):
            raise ConfigurationError(
                f"A model that is planned keeps its arguments, but for the budget: expected {name}={before!r} as "
                f"at first, found {value!r}. Call remove_hiremate(model) first."
            )


# ---------------------------------------------------------------- searching for the largest batch


@dataclass(frozen=True, slots=True)
class SizeOptions:
    """The options of a search for a size: one field for each, with the value that `Option.read` returns."""

    init_val: int = _option(
        "int",
        2,
        "Size of the first real step; small.",
        allowed="at least 1",
        is_allowed=lambda value: value >= 1,
    )
    max_val: int = _option(
        "int",
        8192,
        "Largest size to find: the length of the data set, say, at which HiRemateBatchSizeFinder stops by itself.",
    )
    max_overhead: float = _option(
        "float",
        0.3,
        "Most predicted overhead to accept, a ratio.",
        allowed="at least 0",
        is_allowed=lambda value: value >= 0,
    )
    objective: str = _option(
        "str",
        "largest",
        '"largest", or "throughput" for the most samples per second.',
        allowed="'largest' or 'throughput'",
        is_allowed=lambda value: value in ("largest", "throughput"),
    )
    margin: float = _option(
        "float",
        0.05,
        "Share of what the budget leaves beside weights and optimizer that predictions must leave free.",
        allowed="a share in [0, 1)",
        is_allowed=lambda value: 0 <= value < 1,
    )
    max_trials: int = _option(
        "int",
        25,
        "Most sizes to plan in one search.",
        allowed="at least 3",
        is_allowed=lambda value: value >= 3,
    )


SIZE_OPTIONS = _options_of(SizeOptions)


def make_size_options(**given: Any) -> SizeOptions:
    """Check the options of a search for a size; an option that is left out has its default.

    Raises:
        ConfigurationError: If an option is out of its range; the text names it.
    """
    options = SizeOptions(**{name: SIZE_OPTIONS[name].value_of(value) for name, value in given.items()})
    if options.max_val < options.init_val:
        raise ConfigurationError(f"max_val must be at least init_val, {options.init_val}, found {options.max_val!r}")
    return options
