"""Every change that this folder makes to what torch does, in one table: each has one switch.

A release of torch that a hack was not checked on gets plain capture: hacks that save time or avoid graph breaks are
off. Hacks that mend what torch gets wrong are tried there, and are off where torch has no such names any more.
`hiremate doctor` tells which ones are off.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from . import CHECKED_VERSIONS

log = logging.getLogger("hiremate_lightning")

_SINCE_2_13 = CHECKED_VERSIONS[CHECKED_VERSIONS.index("2.13") :]


class Stage(Enum):
    """When a hack is in place."""

    CAPTURING = "while Dynamo captures code"
    TRACING = "while AOTAutograd traces captured code"
    CALLING = "around a planned call"


@dataclass(frozen=True, slots=True)
class Hack:
    """One change to what torch does.

    Attributes:
        name: How it is switched.
        does: What it changes.
        without: What happens where it is off.
        place: The modules, with functions that return context managers; "" for a hack that other code asks for.
        stages: When it is in place.
        mends: Whether it mends what torch gets wrong, and so is tried on releases that it was not checked on.
        checked: The releases of torch that it was checked on.
    """

    name: str
    does: str
    without: str
    place: str = ""
    stages: tuple[Stage, ...] = (Stage.CAPTURING,)
    mends: bool = True
    checked: tuple[str, ...] = CHECKED_VERSIONS


HACKS = (
    # Around each call
    Hack(
        "code by code",
        "each code is captured with settings of its own, and again without symbols where Dynamo fails on these",
        "settings hold for whole calls; a number that changes is captured anew; no hack while Dynamo captures is there",
    ),
    Hack(
        "small buckets",
        "graphs end by buckets of 1 MiB at least, where DistributedDataParallel has smaller ones",
        "Dynamo fails on smaller buckets, and that code runs uncaptured",
        "sharding.smallest_buckets",
        stages=(Stage.CALLING,),
        mends=False,
    ),
    # While Dynamo captures
    Hack(
        "unread numbers",
        "a counter in double precision that code changes in place is captured",
        "the proof sees the lost change, and that code runs eager",
        "readings.unread_numbers",
    ),
    Hack(
        "noted changes",
        "stand-ins that share memory are known by the changes that they begin with",
        "code whose inputs share memory may run eager",
        "captured_code.noted",
    ),
    Hack(
        "reentrant checkpoint",
        "checkpoint(use_reentrant=True) of inputs without gradients gives none",
        "such calls get gradients that eager PyTorch does not give",
        "readings.checkpoints",
    ),
    Hack(
        "gradients from before",
        "graphs end at gradients that must go through what was computed before them, however these are asked for",
        "such a gradient lacks those parts, in silence",
        "readings.gradients_from_before",
    ),
    Hack(
        "backwards without a gradient",
        "a backward of an autograd function is captured where some of its gradients are None",
        "such code runs uncaptured",
        "readings.backwards",
        mends=False,
    ),
    Hack(
        "out by copying",
        "a call whose out= is not contiguous is captured as a result that is copied",
        "graphs end at these",
        "readings.copied_results",
        mends=False,
    ),
    Hack(
        "answers",
        "code that asks whether it is compiled hears no, as in eager PyTorch",
        "it hears yes, and may compute something else",
    ),
    Hack(
        "answers to code that runs",
        "functions that users put into graphs unread hear no, too, while torch compiles",
        "these hear yes",
        "readings.no_session",
    ),
    Hack(
        "foreign code",
        "functions of NumPy that torch would round otherwise end graphs",
        "torch computes them, and rounds otherwise",
        "readings.functions_of_numpy, readings.methods_of_arrays",
    ),
    Hack(
        "own generators",
        "a random.Random that outlives the call draws outside of graphs",
        "it draws what it drew when it was captured",
        "readings.generators",
    ),
    Hack(
        "messages once",
        "messages of logs that are said once, or not at all, do not end graphs",
        "graphs end at these",
        "readings.messages, tensor_state.without_log_of_fakes",
        mends=False,
    ),
    Hack(
        "user compiled",
        "functions that their author compiled stay compiled, each call one operation",
        "their numbers are those of eager PyTorch, not of the author's kernels",
        "compiled_by_torch.marked",
    ),
    Hack(
        "lengths of tuples",
        "a tuple whose class has a __len__ of its own is guarded by what it holds",
        "such code is captured anew in each call, or runs uncaptured",
        "readings.lengths",
    ),
    Hack(
        "guards once",
        "that a module has no hooks is guarded once",
        "it is guarded twice, which takes time in each call",
        "readings.absent_hooks",
        mends=False,
    ),
    Hack(
        "ranges of steps",
        "a range in steps to a size that varies, over blocks of tokens say, is guarded by how many steps it takes",
        "such code is captured anew for each size",
        "readings.ranges",
        mends=False,
        checked=_SINCE_2_13,
    ),
    Hack(
        "names of classes",
        "the names of classes and functions of torch, and of their modules, are strings",
        "Dynamo 2.13 ends graphs where code asks what such a name begins with, as peft's DoRA does",
        "readings.names",
        mends=False,
        checked=_SINCE_2_13,
    ),
    Hack(
        "written numbers",
        "a number that varies keeps its format where code writes it into a string",
        "Dynamo before 2.14 forgets the format",
        "readings.written_numbers",
    ),
    Hack(
        "regions",
        "modules that are alike are captured once",
        "the first step takes longer",
        "regions.repeated_modules.copied",
        mends=False,
        checked=_SINCE_2_13,
    ),
    Hack(
        "decided branches",
        "branches on positions, masks and other integers are decided while code is captured",
        "graphs end at these, and models that ask are planned in pieces",
        "decided_branches.decided",
        mends=False,
    ),
    # While AOTAutograd traces
    Hack(
        "eager kernels",
        "operators that torch decomposes with other numbers stay whole",
        "the proof sees other numbers, and that code runs eager",
        "eager_tracing.eager_kernels",
        stages=(Stage.TRACING,),
    ),
    Hack(
        "strides of one",
        "dimensions of size 1 have the strides that kernels give them",
        "a batch of one image may take other kernels: the proof sees other numbers, and that code runs eager",
        "eager_tracing.eager_strides_of_one",
        stages=(Stage.TRACING,),
    ),
    Hack(
        "strides",
        "results of norms have the strides and types that the CPU's kernels give them",
        "as for strides of one",
        "eager_tracing.eager_strides",
        stages=(Stage.TRACING,),
    ),
    Hack(
        "guarded overlaps",
        "which inputs overlap is guarded where some are written to",
        "inputs that overlapped once are taken to overlap for ever",
        "eager_tracing.guarded_overlaps",
        stages=(Stage.TRACING,),
    ),
    Hack(
        "results that are inputs",
        "an input that is changed and returned takes its own place among the results",
        "the proof sees other numbers, and that code runs eager",
        "aot.returning_the_right_values",
        stages=(Stage.TRACING,),
    ),
    Hack(
        "unsought aliases",
        "the first run of a graph takes tensors that carry metadata",
        "such code fails when it runs first, and then runs eager",
        "aot.not_looking_for_aliases",
        stages=(Stage.TRACING,),
    ),
    Hack(
        "gradients with metadata",
        "backwards take gradients that carry metadata",
        "such backwards fail",
        "aot.taking_gradients_with_metadata",
        stages=(Stage.TRACING,),
    ),
    Hack(
        "byte targets",
        "losses of classes that are bytes are traced",
        "such code runs uncaptured",
        "eager_tracing.byte_targets",
        stages=(Stage.CAPTURING, Stage.TRACING),
        mends=False,
    ),
    Hack(
        "sums of windows",
        "sums of windows, as of an istft, are traced by their shape",
        "the first step takes up to a minute longer",
        "eager_tracing.sums_at_once",
        stages=(Stage.CAPTURING, Stage.TRACING),
        mends=False,
    ),
    # Where the code asks
    Hack(
        "absent gradients",
        "backwards get None for gradients that never came",
        "they get zeros, and so do parameters that have no gradient in eager PyTorch",
    ),
    Hack(
        "same captures",
        "code that is captured again without a difference runs by what was made before",
        "it is traced, and planned, again",
        mends=False,
    ),
)
_BY_NAME = {hack.name: hack for hack in HACKS}
_torch = types.SimpleNamespace(release=".".join(torch.__version__.split(".")[:2]))
_off = set[str]()  # switched off
_missing = dict[str, str]()  # off on this release, and why


def is_on(name: str) -> bool:
    """Whether a hack is in use."""
    return _is_on(_BY_NAME[name])


def _is_on(hack: Hack) -> bool:
    is_tried = hack.mends or _torch.release in hack.checked
    return is_tried and hack.name not in _off and hack.name not in _missing


def is_tried() -> bool:
    """Whether this release of torch is one that all was checked on."""
    return _torch.release in CHECKED_VERSIONS


def off() -> list[Hack]:
    """List the hacks that are not in use."""
    return [hack for hack in HACKS if not _is_on(hack)]


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Switch hacks off for a while; all of them where none is named."""
    switched = ({_BY_NAME[name].name for name in names} or set(_BY_NAME)) - _off
    _off.update(switched)
    try:
        yield
    finally:
        _off.difference_update(switched)


@contextmanager
def as_on(release: str) -> Iterator[None]:
    """Take torch for another release for a while."""
    before, missing = _torch.release, dict(_missing)
    _torch.release = release
    try:
        yield
    finally:
        _torch.release = before
        _missing.clear()
        _missing.update(missing)


@contextmanager
def applied(stage: Stage) -> Iterator[None]:
    """Put the hacks of a stage in place for a while, in the order of the table."""
    with ExitStack() as in_place:
        for hack in HACKS:
            if hack.place and stage in hack.stages and _is_on(hack):
                _enter(in_place, hack)
        yield


def _enter(in_place: ExitStack, hack: Hack) -> None:
    """Put one hack in place; on a release that it was not checked on it may find other names than it needs."""
    try:
        with ExitStack() as own:
            for place in hack.place.split(", "):
                module, _, name = place.rpartition(".")
                own.enter_context(getattr(importlib.import_module(f".{module}", __package__), name)())
            in_place.enter_context(own.pop_all())
    except Exception as error:  # whatever another release has moved or renamed
        if _torch.release in hack.checked:
            raise
        _missing[hack.name] = f"{type(error).__name__}: {error}"
        log.debug("torch %s is used without the hack %r", torch.__version__, hack.name, exc_info=True)


# ---------------------------------------------------------------- how torch is changed


StandIn = tuple[Any, str, Any]  # for an attribute: its owner, its name, and what is in its place


def instead_of(*places: str) -> Callable[[Callable[..., Any]], Callable[[], AbstractContextManager[None]]]:
    """Make a function one that stands in, for a while, for functions of torch, which it gets before the arguments.

    Args:
        places: Those of torch's functions, such as "torch.module.Class.method"; looked up at the first use.
    """

    def decorate(function: Callable[..., Any]) -> Callable[[], AbstractContextManager[None]]:
        @functools.cache
        def stand_ins() -> tuple[StandIn, ...]:
            return tuple(_standing_in(place, function) for place in places)

        return functools.wraps(function)(lambda: replaced(*stand_ins()))

    return decorate


def _standing_in(place: str, function: Callable[..., Any]) -> StandIn:
    owner_path, _, name = place.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    original = getattr(owner, name)

    @functools.wraps(original)
    def run(*arguments: Any, **named: Any) -> Any:
        return function(original, *arguments, **named)

    return owner, name, run


@contextmanager
def replaced(*stand_ins: StandIn) -> Iterator[None]:
    """Put something in the place of attributes for a while."""
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
    """Put something in the place of entries of a table, or add entries to it, for a while."""
    originals = {key: table[key] for key in stand_ins if key in table}
    table.update(stand_ins)
    try:
        yield
    finally:
        for key in stand_ins:
            del table[key]
        table.update(originals)
