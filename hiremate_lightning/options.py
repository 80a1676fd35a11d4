"""What training was asked for: a budget, and how to plan within it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import ConfigurationError
from .planning.planner import DEFAULT_SOLVER, PlanOptions
from .planning.solvers.worker import check_strategy
from .units import Budget, parse_budget

Sizes = Mapping[str, Mapping[int, tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class NamedSize:
    """A dimension of an argument, and the sizes that it will have.

    Attributes:
        argument: Name of the argument.
        dimension: Number of the dimension; from the end where it is below 0.
        least: The smallest size.
        most: The largest size.
    """

    argument: str
    dimension: int
    least: int
    most: int

    def __str__(self) -> str:
        return f"dimension {self.dimension} of {self.argument}"


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What a session was asked for.

    Attributes:
        budget: Bytes allowed at any moment of a step.
        plan: How to plan.
        max_plans: Most plans to make; beyond it, a step of another kind runs as was planned for another input shape.
        cache_dir: Where to keep profiles between runs, None for nowhere.
        verbose: Whether to report; "full" for the whole table.
        compile: "inductor" to fuse operations into kernels that Inductor makes, None for PyTorch's own.
        verify: Number of first runs at which captured code is proved against eager PyTorch.
        sizes: The sizes that were named, of which the largest are planned in the first steps.
        background: Whether training goes on while plans after the first are solved.
    """

    budget: Budget
    plan: PlanOptions = PlanOptions()
    max_plans: int = 8
    cache_dir: Path | None = None
    verbose: bool | Literal["full"] = True
    compile: str | None = None
    verify: int = 1
    sizes: tuple[NamedSize, ...] = ()
    background: bool = False


def make_options(
    budget: int | float | str | Budget,
    *,
    time_limit_s: float = 30.0,
    max_plans: int = 8,
    on_infeasible: str = "raise",
    cache_dir: str | Path | None = None,
    solver: str = DEFAULT_SOLVER,
    compile: str | None = None,
    verify: str | int = "first",
    sizes: Sizes | None = None,
    background: bool = False,
    verbose: bool | Literal["full"] = True,
) -> SessionOptions:
    """Check the arguments that all ways to plan share.

    Raises:
        BudgetError: If the budget can't be read.
        ConfigurationError: If another argument is out of its range; the text names it. Or if no MIP solver works.
    """
    if on_infeasible not in ("raise", "warn"):
        raise ConfigurationError(f"on_infeasible must be 'raise' or 'warn', found {on_infeasible!r}")
    if not (isinstance(time_limit_s, int | float) and time_limit_s > 0):
        raise ConfigurationError(f"time_limit_s must be above 0 seconds, found {time_limit_s!r}")
    if compile not in (None, "inductor"):
        raise ConfigurationError(f"compile must be 'inductor' or None, found {compile!r}")
    if not (isinstance(max_plans, int) and max_plans >= 1):
        raise ConfigurationError(f"max_plans must be at least 1, found {max_plans!r}")
    if verbose not in (True, False, "full"):
        raise ConfigurationError(f"verbose must be True, False or 'full', found {verbose!r}")
    if not isinstance(background, bool):
        raise ConfigurationError(f"background must be True or False, found {background!r}")
    folder = None if cache_dir is None else Path(cache_dir)
    asked = parse_budget(budget)
    check_strategy(solver)  # last: it starts a process
    return SessionOptions(
        budget=asked,
        plan=PlanOptions(solver, time_limit_s, on_infeasible, folder),
        max_plans=max_plans,
        cache_dir=folder,
        verbose=verbose,
        compile=compile,
        verify=_parse_verify(verify),
        sizes=_parse_sizes(sizes),
        background=background,
    )


def _parse_verify(verify: str | int) -> int:
    """Read at how many first runs captured code is proved.

    Raises:
        ConfigurationError: If it is neither "first" nor "off" nor a number of steps.
    """
    if verify in ("first", "off") and isinstance(verify, str):
        return int(verify == "first")
    if isinstance(verify, int) and not isinstance(verify, bool) and verify >= 1:
        return verify
    raise ConfigurationError(
        f"verify must be 'first', 'off' or a number of steps of at least 1, found {verify!r}. 'first' proves captured "
        "code against eager PyTorch at its first run."
    )


def _parse_sizes(sizes: Sizes | None) -> tuple[NamedSize, ...]:
    """Read the sizes that arguments will have.

    Raises:
        ConfigurationError: If they are not named by argument and dimension, or a range is none.
    """
    form = "sizes must be like {'input_ids': {1: (1, 4096)}}: an argument, its dimension, its smallest and largest size"
    found = []
    for argument, dimensions in ({} if sizes is None else _items(sizes, form)).items():
        for dimension, ends in _items(dimensions, form).items():
            is_pair = isinstance(ends, tuple | list) and len(ends) == 2
            if not (is_pair and isinstance(argument, str) and all(map(_is_whole, (dimension, *ends)))):
                raise ConfigurationError(f"{form}. Found {argument!r}: {{{dimension!r}: {ends!r}}}.")
            named = NamedSize(argument, dimension, *ends)
            if not 1 <= named.least <= named.most:
                raise ConfigurationError(
                    f"sizes must go from a size of at least 1 to one that is no smaller, found {named.least} to "
                    f"{named.most} for {named}."
                )
            found.append(named)
    return tuple(found)


def _items(value: Any, form: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{form}. Found {value!r}.")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def refuse_changes(now: SessionOptions, asked: SessionOptions) -> None:
    """Refuse a second request that asks for more than another budget; what is left at its default asks for nothing.

    Raises:
        ConfigurationError: If an argument is another one; the text names it.
    """
    defaults, known = _arguments(SessionOptions(Budget())), _arguments(now)
    for name, value in _arguments(asked).items():
        if value not in (known[name], defaults[name]):
            raise ConfigurationError(
                f"A model that is planned keeps its arguments, but for the budget: expected {name}={known[name]!r} as "
                f"at first, found {value!r}. Call remove_hiremate(model) first."
            )


def _arguments(options: SessionOptions) -> dict[str, Any]:
    """Return what decides on a plan, beside the budget, by the names of the arguments."""
    return {
        "time_limit_s": options.plan.time_limit_s,
        "max_plans": options.max_plans,
        "on_infeasible": options.plan.on_infeasible,
        "cache_dir": options.cache_dir,
        "solver": options.plan.solver,
        "compile": options.compile,
        "verify": options.verify,
        "sizes": options.sizes,
        "background": options.background,
    }
