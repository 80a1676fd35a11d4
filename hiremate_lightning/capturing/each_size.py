"""Dynamic shapes: code that Dynamo captured once for all sizes, traced anew for each, or made from traces of a few.

A plan is of bytes, so the joint graph that it is made of has numbers for sizes. But most seconds of a capture go to
Dynamo, which reads the user's code. Where sizes vary its graph has symbols for them, and is kept: only AOTAutograd's
trace is made for each size that comes. Once there is a plan, and sizes differ in numbers alone, even that
is left out: code for a new size is made from traces of a few.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from .. import thresholds
from ..housekeeping import Latest, collecting_what_it_leaves
from ..records.expressions import LEAST_SAMPLES, LEAST_SAMPLES_OF_TWO_TERMS, Sizes, SizesDifferError, vary_alone
from ..torch_private import captured_code, dynamo, tensor_state
from ..torch_private.size_symbols import Layout, SizeSymbols, trace_apart
from .same_captures import SameCaptures

log = logging.getLogger("hiremate_lightning")
MOST_SAMPLES = 6  # of code, of which the latest traced size may be one
TRIED = 6  # sizes of samples
Runner = Callable[..., Any]
Smaller = Callable[[Sequence[Any]], tuple[Runner, list[Any]] | None]  # from arguments: code, and some of each of them


@dataclass(frozen=True, eq=False)  # without slots, so that it can be held weakly
class TracedCode:
    """What runs code at the sizes for which it was traced.

    Attributes:
        run: Runs the code.
        part: What runs in the place of its joint graph; None where nothing has a gradient.
        at_other_sizes: Returns what runs the code at other sizes, given as the module there and a part that was made
            for them. It may be proved at smaller sizes. It raises `SizesDifferError`, before anything has run, where it
            can't be.
    """

    run: Runner
    part: Any
    at_other_sizes: Callable[[fx.GraphModule, Any, Smaller | None], Runner]

    def __call__(self, *arguments: Any) -> Any:
        """Run the code."""
        return self.run(*arguments)


class PartSource(Protocol):
    """Makes parts of code for sizes that were not traced, from the parts of a few others."""

    def may_make(self, code: object, is_first: bool = False) -> bool:
        """Whether to make parts of code; also for the first sizes that come, where these are."""

    def part_at(self, code: object, samples: Sequence[tuple[Sizes, Any]], sizes: Sizes) -> Any:
        """Make a part of code from those for other sizes, each with all that varies there.

        Raises:
            SizesDifferError: If these don't tell.
        """

    def failed(self, code: object, error: Exception) -> None:
        """Learn that there was no part for a size, or that it did not run."""


Trace = Callable[[fx.GraphModule, Sequence[Any]], TracedCode]
TraceAhead = Callable[[Runner, Sizes, Callable[[Sizes], TracedCode | None]], None]


class EachSize:
    """Captured code that is traced when it is first called with a size.

    Args:
        module: What Dynamo captured.
        sizes: Positions of the inputs that are sizes.
        trace: Traces code of definite sizes, given that code and inputs without memory.
        trace_ahead: Called after each trace with its result, the sizes, and what traces the code for sizes to come.
        part_source: Makes parts for sizes that were not traced; None to trace each size.
        same: Knows what runs the same code at definite sizes, whoever captured it.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        sizes: Sequence[int],
        trace: Trace,
        trace_ahead: TraceAhead,
        part_source: PartSource | None,
        same: SameCaptures,
    ) -> None:
        count = len(module.graph.find_nodes(op="placeholder"))
        self._sizes = tuple(sizes)
        self._others = tuple(position for position in range(count) if position not in self._sizes)
        self._trace, self._trace_ahead, self._same = trace, trace_ahead, same
        self._is_particular = False
        self._traced = Latest[tuple[Any, ...], Runner](thresholds.current.size_traces)
        self._ahead = dict[Sizes, TracedCode]()
        self._part_source, self._symbols = part_source, SizeSymbols(module, self._sizes)
        self._samples, self._made = dict[Sizes, TracedCode](), weakref.WeakSet[Runner]()

    def run(self, *arguments: Any) -> Any:
        """Run what was traced for the sizes among the arguments; where that fails, the code as it was captured."""
        sizes = tuple(arguments[position] for position in self._sizes)
        others = [arguments[position] for position in self._others]
        key = sizes, self._particulars(others)
        run = self._traced.get(key) or self._run_at(sizes, others)
        if key in self._traced:
            self._traced[key] = run  # the latest one
        try:
            return run(*others)
        except SizesDifferError as error:
            self._failed(error)
        return self._trace_new(sizes, others)(*others)  # it becomes a sample, so that sizes like it can be made

    def _run_at(self, sizes: Sizes, others: Sequence[Any]) -> Runner:
        """Return what runs the code at new sizes: what runs the same code already, or else what is made or traced."""
        if self._symbols.learn(sizes):
            self._samples.clear()  # they don't tell apart what is not equal now
        code = self._symbols.code_at(sizes)
        run = self._same.find(code, others)
        if run is not None:
            self._keep(sizes, others, run)
            return run
        run = self._make_for(sizes, others) or self._trace_new(sizes, others)
        if not self._is_particular:
            self._same.keep(code, others, run)
        return run

    # ---------------------------------------------------------------- traced

    def _trace_new(self, sizes: Sizes, others: Sequence[Any]) -> Runner:
        log.debug("tracing for the sizes %s", sizes)
        run: Runner
        try:
            run, _ = self._trace_at(sizes, others)
        except Exception as error:  # whatever AOTAutograd fails on
            dynamo.tell_of_failure(error)
            run = captured_code.eager_module(self._symbols.code_at(sizes))
        self._keep(sizes, others, run)
        self._trace_ahead(run, sizes, lambda larger: self._traced_ahead(larger, others))
        return run

    def _trace_at(
        self, sizes: Sizes, others: Sequence[Any], layouts: Sequence[Layout | None] = ()
    ) -> tuple[TracedCode, bool]:
        """Trace the code; return also whether that holds for all values of these sizes: it is a sample then."""
        devices = {value.device for value in others if isinstance(value, torch.Tensor)}
        generators = torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"])
        with dynamo.counting_seconds(), generators, collecting_what_it_leaves():
            code = self._symbols.code_at(sizes)
            run, is_general = trace_apart(code, others, self._trace, layouts or [None] * len(others))
        may_make = self._part_source is not None and self._part_source.may_make(self)
        if is_general and may_make and len(self._samples) < MOST_SAMPLES:
            self._samples[sizes] = run
        self._is_particular = self._is_particular or not is_general
        return run, is_general

    def _trace_larger(self, sizes: Sizes, others: Sequence[Any]) -> TracedCode | None:
        """Trace the code for sizes of which no tensors exist; None where that does not hold for all values of these."""
        layouts = None if self._is_particular else self._symbols.layouts_at(sizes)
        if layouts is None:
            return None
        try:
            run, is_general = self._trace_at(sizes, others, [layouts[position] for position in self._others])
        except Exception:  # whatever AOTAutograd fails on: it is traced again when these sizes come
            log.debug("Code can't be traced ahead for the sizes %s", sizes, exc_info=True)
            return None
        if not is_general:
            return None
        self._keep(sizes, others, run)
        return run

    def _traced_ahead(self, sizes: Sizes, others: Sequence[Any]) -> TracedCode | None:
        run = self._ahead.get(sizes) or self._trace_larger(sizes, others)
        if run is not None:
            self._ahead[sizes] = run
        return run

    # ---------------------------------------------------------------- made of traces

    def _make_for(self, sizes: Sizes, others: Sequence[Any]) -> Runner | None:
        """Make code of some sizes run from samples; None where it is to be traced."""
        if self._part_source is None or self._is_particular or not self._symbols.vary:
            return None
        if not self._part_source.may_make(self, is_first=not self._samples):
            return None
        method = weakref.WeakMethod(self._made_smaller)  # what is proved must not keep the code alive

        def smaller(others: Sequence[Any]) -> tuple[Runner, list[Any]] | None:
            make = method()
            return None if make is None else make(sizes, others)

        try:
            self._sample_near(sizes, others)
            run = self._made_at(sizes, smaller)
        except Exception as error:  # whatever fails as samples are compared: a trace serves, as it would without them
            log.debug("The sizes %s can't be made from samples", sizes, exc_info=True)
            self._failed(error)
            return None
        self._made.add(run)
        self._keep(sizes, others, run)
        return run

    def _sample_near(self, sizes: Sizes, others: Sequence[Any]) -> None:
        """Trace the code at as many sizes as tell all sizes, as far as it is for these."""
        tried, enough = 0, LEAST_SAMPLES if self._symbols.are_one else LEAST_SAMPLES_OF_TWO_TERMS
        for sample in self._symbols.samples_near(sizes, list(self._samples)):
            if len(self._samples) >= enough or tried == TRIED or self._is_particular:
                return
            if self._symbols.layouts_at(sample) is not None:
                tried += 1
                self._trace_larger(sample, others)

    def _made_at(self, sizes: Sizes, smaller: Smaller | None = None) -> Runner:
        assert self._part_source is not None, "asked where something makes parts"
        traces = list(self._samples.values())
        if not traces or any(trace.part is None for trace in traces):
            raise SizesDifferError("Nothing in the code has a gradient")
        whole = [self._symbols.with_computed(sample) for sample in self._samples]
        varying, new = vary_alone(whole, self._symbols.with_computed(sizes))
        parts = [(those, trace.part) for those, trace in zip(varying, traces, strict=True)]
        part = self._part_source.part_at(self, parts, new)
        return traces[0].at_other_sizes(self._symbols.code_at(sizes), part, smaller)

    def _made_smaller(self, sizes: Sizes, others: Sequence[Any]) -> tuple[Runner, list[Any]] | None:
        """Make the code run at smaller sizes that were not traced, with some of each argument; None if that fails."""
        smaller = self._symbols.smaller(sizes)
        layouts = self._symbols.layouts_at(smaller)
        if layouts is None or smaller == sizes or smaller in self._samples:
            return None
        try:
            some = [_some_of(value, layouts[place]) for place, value in zip(self._others, others, strict=True)]
            return self._made_at(smaller), some
        except Exception:  # whatever fails as arguments are cut: the code is proved at its own sizes
            log.debug("Code can't be made for the sizes %s", smaller, exc_info=True)
            return None

    def _failed(self, error: Exception) -> None:
        assert self._part_source is not None, "something was made"
        log.info("A size is traced: %s", error)
        self._part_source.failed(self, error)
        if not self._part_source.may_make(self):
            self._samples.clear()
            for key in [key for key, run in self._traced.items() if run in self._made]:
                del self._traced[key]

    # ---------------------------------------------------------------- what a trace depends on

    def _keep(self, sizes: Sizes, others: Sequence[Any], run: Runner) -> None:
        self._traced[sizes, self._particulars(others)] = run

    def _particulars(self, others: Sequence[Any]) -> tuple[Any, ...]:
        """Return what a trace depends on beside sizes: numbers, and how tensors lie in storages that they share."""
        if not self._is_particular:
            return ()
        storages: dict[int, list[tuple[int, int]]] = {}
        for position, value in enumerate(others):
            if tensor_state.is_dense(value):
                place = position, int(value.storage_offset())
                storages.setdefault(value.untyped_storage().data_ptr(), []).append(place)
        shared = [places for places in storages.values() if len(places) > 1]
        offsets = [(position, offset - places[0][1]) for places in shared for position, offset in places]
        return (*(value for value in others if not isinstance(value, torch.Tensor)), *offsets)


def _some_of(value: Any, layout: Layout | None) -> Any:
    """Return what stands for an input at smaller sizes: of each dimension as many rows as it has there, from all over.

    Where that can't be, a ValueError is raised.
    """
    if layout is None or not isinstance(value, torch.Tensor):
        return value
    shape, strides = layout
    if tensor_state.has_parts(value) or any(size > rows for size, rows in zip(shape, value.shape, strict=True)):
        raise ValueError
    with torch.no_grad():
        some = value.detach()
        for dimension, (size, rows) in enumerate(zip(shape, value.shape, strict=True)):
            if size < rows:
                some = some.index_select(dimension, torch.arange(size, device=value.device) * rows // size)
        other = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).copy_(some)
    other.requires_grad_(value.requires_grad)
    return other if value.is_leaf else other.clone()
