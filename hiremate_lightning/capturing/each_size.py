"""Dynamic shapes: code that Dynamo captured once for all sizes, traced for each size or made from traces of a few.

A plan counts bytes, so it needs a joint graph with numbers as sizes. But most of a capture's time goes to Dynamo, which
reads the user's code. If sizes vary, Dynamo's graph has symbols for them and is reused: only AOTAutograd traces it for
each new size. Once there is a plan, and traces at different sizes differ only in numbers, a new size needs no trace
either: its code is made from the traces of a few sizes (samples).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx

from .. import thresholds
from ..housekeeping import Latest, collecting_what_it_leaves, log, weakly
from ..records.expressions import LEAST_SAMPLES, LEAST_SAMPLES_OF_TWO_TERMS, Sizes, SizesDifferError, vary_alone
from ..torch_private import captured_code, dynamo, tensor_state
from ..torch_private.size_symbols import Layout, SizeSymbols, trace_apart
from .same_captures import SameCaptures

MOST_SAMPLES = 6  # most traces kept as samples for one code
TRIED = 6  # most sizes at which tracing a sample is attempted
Runner = Callable[..., Any]
Smaller = Callable[[Sequence[Any]], tuple[Runner, list[Any]] | None]  # inputs -> runner at smaller sizes, cut inputs


@dataclass(frozen=True, eq=False)  # without slots, so that weak references are possible
class TracedCode:
    """Runs code at the sizes for which it was traced.

    Attributes:
        run: Runs the code.
        runtime: Runs in place of its joint graph; None if nothing has a gradient.
        at_other_sizes: Returns a runner of the code at other sizes. Its arguments are the module and the runtime
            at these sizes, and a function that makes the code at smaller sizes for the proof. The runner raises
            `SizesDifferError`, before it has run anything, if the code cannot be proved.
    """

    run: Runner
    runtime: Any
    at_other_sizes: Callable[[fx.GraphModule, Any, Smaller | None], Runner]

    def __call__(self, *arguments: Any) -> Any:
        """Run the code."""
        return self.run(*arguments)


class RuntimeSource(Protocol):
    """Makes runtimes of code for sizes that were not traced, from those of a few traced sizes."""

    def may_make(self, code: object, is_first: bool = False) -> bool:
        """Whether to trace samples of code and make runtimes from them; `is_first` if the code has no samples yet."""

    def runtime_at(self, code: object, samples: Sequence[tuple[Sizes, Any]], sizes: Sizes) -> Any:
        """Make the runtime of code at `sizes` from samples: the varying sizes of each, and its runtime.

        Raises:
            SizesDifferError: If the samples do not determine the code.
        """

    def failed(self, code: object, error: Exception) -> None:
        """Record that no code could be made for a size, or that it did not run."""


Trace = Callable[[fx.GraphModule, Sequence[Any]], TracedCode]
TraceAhead = Callable[[Runner, Sizes, Callable[[Sizes], Runner | None]], None]


class EachSize:
    """Captured code that is traced at each combination of sizes when it is first called with these sizes.

    Args:
        module: The graph that Dynamo captured.
        sizes: Positions of the inputs that are sizes.
        trace: Traces code of definite sizes on inputs without memory.
        trace_ahead: Called after each trace with the runner, its sizes, and a function that traces at given sizes.
        runtime_source: Makes runtimes for sizes that were not traced; None to trace each size.
        same: Finds the runner of the same code at the same definite sizes, also if it was captured elsewhere.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        sizes: Sequence[int],
        trace: Trace,
        trace_ahead: TraceAhead,
        runtime_source: RuntimeSource | None,
        same: SameCaptures,
    ) -> None:
        count = len(module.graph.find_nodes(op="placeholder"))
        self._sizes = tuple(sizes)
        self._input_positions = tuple(position for position in range(count) if position not in self._sizes)
        self._trace, self._trace_ahead, self._same = trace, trace_ahead, same
        self._depends_on_values = False  # whether a trace holds only for inputs with the same `_particulars`
        self._traced = Latest[tuple[Any, ...], Runner](thresholds.current.size_traces)
        self._runtime_source, self._symbols = runtime_source, SizeSymbols(module, self._sizes)
        self._samples, self._made = dict[Sizes, TracedCode](), weakref.WeakSet[Runner]()

    def run(self, *arguments: Any) -> Any:
        """Run the code traced or made for the sizes among the arguments; eager, as captured, if it can't be traced."""
        sizes = tuple(arguments[position] for position in self._sizes)
        inputs = [arguments[position] for position in self._input_positions]
        key = sizes, self._particulars(inputs)
        run = self._traced.get(key) or self._run_at(sizes, inputs)
        if key in self._traced:
            self._traced[key] = run  # mark it as the latest used
        try:
            return run(*inputs)
        except SizesDifferError as error:
            self._failed(error)
        return self._trace_new(sizes, inputs)(*inputs)  # the trace becomes a sample for similar sizes

    def _run_at(self, sizes: Sizes, inputs: Sequence[Any]) -> Runner:
        """Return a runner of the code at new sizes: that of the same code captured before, else a new one."""
        if self._symbols.learn(sizes):
            self._samples.clear()  # in the samples these sizes are equal, so their effects can't be told apart
        code = self._symbols.code_at(sizes)
        run = self._same.find(code, inputs)
        if run is not None:
            self._keep(sizes, inputs, run)
            return run
        run = self._make_for(sizes, inputs) or self._trace_new(sizes, inputs)
        if not self._depends_on_values:
            self._same.keep(code, inputs, run)
        return run

    # ---------------------------------------------------------------- traced

    def _trace_new(self, sizes: Sizes, inputs: Sequence[Any]) -> Runner:
        log.debug("tracing for the sizes %s", sizes)
        run: Runner
        try:
            run = self._trace_at(sizes, inputs)
        except Exception as error:  # AOTAutograd may raise anything: run eager
            dynamo.log_failure(error)
            run = captured_code.eager_module(self._symbols.code_at(sizes))
        self._keep(sizes, inputs, run)
        self._trace_ahead(run, sizes, lambda other: self._traced.get((other, ())) or self._trace_larger(other, inputs))
        return run

    def _trace_at(self, sizes: Sizes, inputs: Sequence[Any], layouts: Sequence[Layout | None] = ()) -> TracedCode:
        """Trace the code; keep the trace as a sample if it holds for all values of these sizes."""
        devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
        generators = torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"])
        with dynamo.counting_seconds(), generators, collecting_what_it_leaves():
            code = self._symbols.code_at(sizes)
            run, is_general = trace_apart(code, inputs, self._trace, layouts or [None] * len(inputs))
        may_make = self._runtime_source is not None and self._runtime_source.may_make(self)
        if is_general and may_make and len(self._samples) < MOST_SAMPLES:
            self._samples[sizes] = run
        self._depends_on_values = self._depends_on_values or not is_general
        return run

    def _trace_larger(self, sizes: Sizes, inputs: Sequence[Any]) -> TracedCode | None:
        """Trace the code at sizes of which no tensors exist; None if that fails or holds only for some values."""
        layouts = None if self._depends_on_values else self._symbols.layouts_at(sizes)
        if layouts is None:
            return None
        try:
            run = self._trace_at(sizes, inputs, [layouts[position] for position in self._input_positions])
        except Exception:  # AOTAutograd may raise anything: trace again when these sizes come
            log.debug("Code can't be traced ahead for the sizes %s", sizes, exc_info=True)
            return None
        if self._depends_on_values:
            return None
        self._keep(sizes, inputs, run)
        return run

    # ---------------------------------------------------------------- code made from samples

    def _make_for(self, sizes: Sizes, inputs: Sequence[Any]) -> Runner | None:
        """Make the code at new sizes from samples and return its runner; None if the code must be traced."""
        if self._runtime_source is None or self._depends_on_values or not self._symbols.vary:
            return None
        if not self._runtime_source.may_make(self, is_first=not self._samples):
            return None
        smaller = partial(weakly(self._made_smaller), sizes)  # the proof must not keep this code alive
        try:
            self._sample_near(sizes, inputs)
            run = self._made_at(sizes, smaller)
        except Exception as error:  # comparing samples may raise anything: trace instead
            log.debug("The sizes %s can't be made from samples", sizes, exc_info=True)
            self._failed(error)
            return None
        self._made.add(run)
        self._keep(sizes, inputs, run)
        return run

    def _sample_near(self, sizes: Sizes, inputs: Sequence[Any]) -> None:
        """Trace samples of sizes near these until there are enough to make the code from them, or too many failed."""
        tried, enough = 0, LEAST_SAMPLES if self._symbols.are_one else LEAST_SAMPLES_OF_TWO_TERMS
        for sample in self._symbols.samples_near(sizes, list(self._samples)):
            if len(self._samples) >= enough or tried == TRIED or self._depends_on_values:
                return
            if self._symbols.layouts_at(sample) is not None:
                tried += 1
                self._trace_larger(sample, inputs)

    def _made_at(self, sizes: Sizes, smaller: Smaller | None = None) -> Runner:
        assert self._runtime_source is not None, "asked where something makes runtimes"
        traces = list(self._samples.values())
        if not traces or any(trace.runtime is None for trace in traces):
            raise SizesDifferError("Nothing in the code has a gradient")
        whole = [self._symbols.with_computed(sample) for sample in self._samples]
        varying, new = vary_alone(whole, self._symbols.with_computed(sizes))
        runtimes = [(its_sizes, trace.runtime) for its_sizes, trace in zip(varying, traces, strict=True)]
        runtime = self._runtime_source.runtime_at(self, runtimes, new)
        return traces[0].at_other_sizes(self._symbols.code_at(sizes), runtime, smaller)

    def _made_smaller(self, sizes: Sizes, inputs: Sequence[Any]) -> tuple[Runner, list[Any]] | None:
        """Return a runner of the code at smaller sizes, and the arguments cut to these; None if that fails."""
        smaller = self._symbols.smaller(sizes)
        layouts = self._symbols.layouts_at(smaller)
        if layouts is None or smaller == sizes or smaller in self._samples:
            return None
        try:
            cut = [_cut(value, layouts[place]) for place, value in zip(self._input_positions, inputs, strict=True)]
            return self._made_at(smaller), cut
        except Exception:  # cutting arguments may raise anything: the code is proved at its own sizes
            log.debug("Code can't be made for the sizes %s", smaller, exc_info=True)
            return None

    def _failed(self, error: Exception) -> None:
        assert self._runtime_source is not None, "something was made"
        log.info("A size is traced: %s", error)
        self._runtime_source.failed(self, error)
        if not self._runtime_source.may_make(self):
            self._samples.clear()
            for key in [key for key, run in self._traced.items() if run in self._made]:
                del self._traced[key]

    # ---------------------------------------------------------------- keys of traces

    def _keep(self, sizes: Sizes, inputs: Sequence[Any], run: Runner) -> None:
        self._traced[sizes, self._particulars(inputs)] = run

    def _particulars(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return what else a trace depends on beside sizes: numbers, and offsets of tensors in shared storages."""
        if not self._depends_on_values:
            return ()
        storages: dict[int, list[tuple[int, int]]] = {}
        for position, value in enumerate(inputs):
            if tensor_state.is_dense(value):
                place = position, int(value.storage_offset())
                storages.setdefault(value.untyped_storage().data_ptr(), []).append(place)
        shared = [places for places in storages.values() if len(places) > 1]
        offsets = [(position, offset - places[0][1]) for places in shared for position, offset in places]
        return (*(value for value in inputs if not isinstance(value, torch.Tensor)), *offsets)


def _cut(value: Any, layout: Layout | None) -> Any:
    """Return an input cut to a smaller layout: of each longer dimension, rows at equal distances.

    A ValueError says that the input can't be cut.
    """
    if layout is None or not isinstance(value, torch.Tensor):
        return value
    shape, strides = layout
    if tensor_state.has_parts(value) or any(size > rows for size, rows in zip(shape, value.shape, strict=True)):
        raise ValueError
    with torch.no_grad():
        runtime = value.detach()
        for dimension, (size, rows) in enumerate(zip(shape, value.shape, strict=True)):
            if size < rows:
                runtime = runtime.index_select(dimension, torch.arange(size, device=value.device) * rows // size)
        cut = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).copy_(runtime)
    cut.requires_grad_(value.requires_grad)
    return cut if value.is_leaf else cut.clone()
