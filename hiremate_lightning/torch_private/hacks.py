"""List in one table every function of torch that this package replaces for a while, each with one switch.

The docstring of a replacement says what it changes, and what happens without it. On a release of torch that a hack was
not checked on, hacks that save time or avoid graph breaks are off. Hacks that correct torch are tried, and are off if
torch lacks the names that they replace. `hiremate doctor` lists the hacks that are off.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any

import torch

from ..housekeeping import log
from . import CHECKED_VERSIONS

_SINCE_2_13 = CHECKED_VERSIONS[CHECKED_VERSIONS.index("2.13") :]


class Stage(Flag):
    """When a hack is in place: around a planned call, while Dynamo captures code, while AOTAutograd traces a graph."""

    CALLING = auto()
    CAPTURING = auto()
    TRACING = auto()


@dataclass(frozen=True, slots=True)
class Hack:
    """One change to what torch does.

    Attributes:
        name: The name of its switch.
        place: Functions that return its context managers, with their modules; "" for a hack that other code checks.
        stages: When it is in place.
        mends: Whether it corrects torch, and so is tried on releases that it was not checked on.
        checked: The releases of torch that it was checked on.
    """

    name: str
    place: str
    stages: Stage = Stage.CAPTURING
    mends: bool = True
    checked: tuple[str, ...] = CHECKED_VERSIONS


HACKS = (
    Hack("small buckets", "sharding.smallest_buckets", Stage.CALLING, mends=False),
    Hack("unread numbers", "readings.unread_numbers"),
    Hack("noted changes", "captured_code.noted"),
    Hack("reentrant checkpoint", "readings.checkpoints"),
    Hack("checkpoint in segments", "readings.checkpoints_in_segments", mends=False),
    Hack("gradients from before", "readings.gradients_from_before"),
    Hack("backwards without a gradient", "readings.backwards", mends=False),
    Hack("out by copying", "readings.copied_results", mends=False),
    Hack("answers to code that runs", "readings.no_session"),
    Hack("foreign code", "readings.functions_of_numpy, readings.methods_of_arrays"),
    Hack("own generators", "readings.generators"),
    Hack("messages once", "readings.messages, tensor_state.without_log_of_fakes", mends=False),
    Hack("user compiled", "compiled_by_torch.functions, compiled_by_torch.methods"),
    Hack("lengths of tuples", "readings.lengths"),
    Hack("ranges of steps", "readings.ranges", mends=False, checked=_SINCE_2_13),
    Hack("names of classes", "readings.names", mends=False, checked=_SINCE_2_13),
    Hack("written numbers", "readings.written_numbers"),
    Hack("regions", "regions.repeated_modules.copied", mends=False, checked=_SINCE_2_13),
    Hack("decided branches", "decided_branches.decided", mends=False),
    Hack("eager kernels", "eager_tracing.eager_kernels", Stage.TRACING),
    Hack("strides", "eager_tracing.eager_strides_of_one, eager_tracing.eager_strides", Stage.TRACING),
    Hack("guarded overlaps", "eager_tracing.guarded_overlaps", Stage.TRACING),
    Hack("results that are inputs", "aot.returning_the_right_values", Stage.TRACING),
    Hack("unsought aliases", "aot.not_looking_for_aliases", Stage.TRACING),
    Hack("gradients with metadata", "aot.taking_gradients_with_metadata", Stage.TRACING),
    Hack("byte targets", "eager_tracing.byte_targets", Stage.CAPTURING | Stage.TRACING, mends=False),
    # Code that is captured again without a difference runs its earlier program: it is not traced and planned again.
    Hack("same captures", "", mends=False),
)
_BY_NAME = {hack.name: hack for hack in HACKS}
RELEASE = ".".join(torch.__version__.split(".")[:2])
_off = set[str]()  # names of hacks that are switched off
_missing = dict[str, str]()  # names of hacks that fail on this release, with the error


def is_on(name: str) -> bool:
    """Whether a hack is in use."""
    hack = _BY_NAME[name]
    return (hack.mends or RELEASE in hack.checked) and name not in _off and name not in _missing


def off() -> list[Hack]:
    """List the hacks that are not in use."""
    return [hack for hack in HACKS if not is_on(hack.name)]


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Switch hacks off in a `with` block; all of them if none is named."""
    switched = ({_BY_NAME[name].name for name in names} or set(_BY_NAME)) - _off
    _off.update(switched)
    try:
        yield
    finally:
        _off.difference_update(switched)


@contextmanager
def applied(stage: Stage) -> Iterator[None]:
    """Put the hacks of a stage in place in a `with` block, in the order of the table."""
    with ExitStack() as in_place:
        for hack in HACKS:
            if hack.place and stage in hack.stages and is_on(hack.name):
                _enter(in_place, hack)
        yield


def _enter(in_place: ExitStack, hack: Hack) -> None:
    """Put one hack in place; turn it off if a release that it was not checked on lacks a name that it needs."""
    try:
        with ExitStack() as contexts:
            for place in hack.place.split(", "):
                contexts.enter_context(pkgutil.resolve_name(f"{__package__}.{place}")())
            in_place.enter_context(contexts.pop_all())
    except Exception as error:  # any name that another release moved or renamed
        if RELEASE in hack.checked:
            raise
        _missing[hack.name] = f"{type(error).__name__}: {error}"
        log.debug("torch %s is used without the hack %r", torch.__version__, hack.name, exc_info=True)


# ---------------------------------------------------------------- how torch is changed


StandIn = tuple[Any, str, Any]  # an attribute's owner, its name, and its replacement


def instead_of(*places: str) -> Callable[[Callable[..., Any]], Callable[[], AbstractContextManager[None]]]:
    """Make a function replace torch's at `places` in a `with` block; it gets the original before the arguments."""

    def decorate(function: Callable[..., Any]) -> Callable[[], AbstractContextManager[None]]:
        @functools.cache
        def stand_ins() -> tuple[StandIn, ...]:
            owners = [(pkgutil.resolve_name(path), name) for path, _, name in (p.rpartition(".") for p in places)]
            return tuple((owner, name, around(getattr(owner, name), function)) for owner, name in owners)

        return functools.wraps(function)(lambda: replaced(*stand_ins()))

    return decorate


def around(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function named like the original that calls `function` with the original before the arguments."""

    @functools.wraps(original)  # torch reads names and modules of its functions
    def run(*arguments: Any, **named: Any) -> Any:
        return function(original, *arguments, **named)

    return run


@contextmanager
def replaced(*stand_ins: StandIn) -> Iterator[None]:
    """Replace attributes in a `with` block."""
    originals = [getattr(owner, name) for owner, name, _ in stand_ins]
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(stand_ins, originals, strict=True):
            setattr(owner, name, original)


@contextmanager
def replaced_entries(table: MutableMapping[Any, Any], stand_ins: Mapping[Any, Any]) -> Iterator[None]:
    """Replace entries of a table, or add entries to it, in a `with` block."""
    originals = {key: table[key] for key in stand_ins if key in table}
    table.update(stand_ins)
    try:
        yield
    finally:
        for key in stand_ins:
            table.pop(key, None)
        table.update(originals)
