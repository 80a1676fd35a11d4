"""The largest sizes of inputs, as a user named them: a step of these sizes is planned before it comes.

`VaryingSizes` finds the sizes that vary from call to call without being named.

Captured code with symbols for these sizes is traced for the largest ones as soon as it is traced for others. The joint
graph at these sizes is exact, its operations are measured one by one, and no tensor of the step is allocated. Memory of
code outside of captured graphs is taken to grow in proportion to its inputs and outputs.

Captured code knows a size by its value alone. So a size is planned ahead only if no other dimension of the batch has
the same value.
"""

from __future__ import annotations

import inspect
import weakref
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..errors import ConfigurationError, did_you_mean
from ..measuring.resident import Resident
from ..objects import attempt, is_of
from ..options import NamedSize
from ..records.expressions import Sizes
from ..records.graph import StorageKind
from ..running.execution import GraphRuntime
from ..signatures.recorded_step import RecordedStep, foresee
from ..signatures.step_signature import GraphNumbers, StepSignature
from ..torch_private import dynamo
from .graph_runtimes import GraphRuntimes

MOST_SEEN = 16  # different shapes kept of the arguments of one call
Arguments = tuple[Sequence[Any], Mapping[str, Any]]


class LargestSizes:
    """The largest sizes of the steps of one model, by the sizes that its user named."""

    def __init__(self, named: Sequence[NamedSize], runtimes: GraphRuntimes, warn: Callable[..., None]) -> None:
        self.becomes: Mapping[int, int] = {}  # sizes of the latest step, and the size of each in the largest step
        self._named, self._runtimes, self._warn = named, runtimes, warn
        self._wishes: dict[str, NamedSize] = {}  # the named sizes that arguments of calls had, by their text
        self._ends: dict[str, list[tuple[int, int]]] = {}  # of each argument with a named size: each size, its largest
        self._shapes: dict[str, Sizes] = {}  # shapes of all arguments by name
        self._taken: weakref.WeakKeyDictionary[GraphRuntime, Mapping[int, int]] = weakref.WeakKeyDictionary()
        self._larger: weakref.WeakKeyDictionary[GraphRuntime, GraphRuntime] = weakref.WeakKeyDictionary()

    # ---------------------------------------------------------------- arguments of calls

    def called(
        self, function: Callable[..., Any] | None, arguments: Arguments, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Store the sizes of a planned call, and choose what they become in the largest step.

        Args:
            function: The function whose signature names the arguments; None if there is none.
            arguments: Positional and keyword arguments.
            tensors: All tensors in the arguments.

        Raises:
            ConfigurationError: If an argument does not have the dimension that was named.
        """
        if not self._named and not any(map(dynamo.named_ranges, tensors)):
            return
        by_name = _by_name(function, arguments, tensors)
        marked = [NamedSize(name, *ends) for name, tensor in by_name.items() for ends in dynamo.named_ranges(tensor)]
        self._shapes |= {name: tuple(tensor.shape) for name, tensor in by_name.items()}
        met = [named for named in (*self._named, *marked) if named.argument in by_name]
        self._ends |= {named.argument: [(n, n) for n in self._shapes[named.argument]] for named in met}
        for named in met:
            self._set_end(named)
        if met:
            self._choose()

    def _set_end(self, named: NamedSize) -> None:
        """Store the largest value of a named size; warn if the size is outside of the named range."""
        shape = self._shapes[named.argument]
        if not -len(shape) <= named.dimension < len(shape):
            raise ConfigurationError(
                f"sizes= names {named}, which has {len(shape)} dimensions: it was given with the shape {shape}. "
                "The first dimension is 0."
            )
        size = shape[named.dimension]
        self._ends[named.argument][named.dimension] = size, named.most
        self._wishes[str(named)] = named
        if not named.least <= size <= named.most:
            self._warn(
                f"The size {size} of {named} is not among those named, {named.least} to {named.most}: it is planned "
                "when it comes, and may exceed the budget once. Name it in sizes= to have it planned ahead.",
                topic=f"outside {named}",
            )

    def _choose(self) -> None:
        """Set `becomes`; warn of a size that two dimensions share, of which only one grows."""
        ends = defaultdict[int, set[int]](set)
        for size, most in (pair for pairs in self._ends.values() for pair in pairs):
            ends[size].add(most)
        self.becomes = {size: max(mosts) for size, mosts in ends.items() if len(mosts) == 1 and max(mosts) > size}
        for size, mosts in ends.items():
            if len(mosts) > 1 and max(mosts) > size:
                self._warn(
                    f"Two dimensions of a batch have the size {size}, and sizes= names only one of them: which is "
                    "which can't be told, so the largest size is not planned ahead from this batch. Let the first "
                    "batch have different sizes."
                )

    def _check(self) -> None:
        """Raise a ConfigurationError if no call was given an argument that is named."""
        unknown = [named for named in self._named if named.argument not in self._shapes]
        if unknown:
            name, known = unknown[0].argument, ", ".join(f"{n} {shape}" for n, shape in self._shapes.items())
            raise ConfigurationError(
                f"sizes= names {name!r}, and no planned call was given a tensor of that name. "
                f"{did_you_mean(name, list(self._shapes)).strip()} Found: {known or 'no named tensors'}."
            )

    # ---------------------------------------------------------------- captured graphs

    def took(self, runtime: GraphRuntime) -> None:
        """Store for a new captured graph what its sizes become in the largest step."""
        self._taken[runtime] = self.becomes

    def trace_ahead(self, run: Any, sizes: Sizes, trace: Callable[[Sizes], Any]) -> None:
        """Trace captured code for the largest sizes too, once it was traced for others and has a gradient there."""
        runtime, larger = getattr(run, "runtime", None), tuple(self.becomes.get(size, size) for size in sizes)
        if runtime is not None and larger != sizes:
            at_largest = getattr(trace(larger), "runtime", None)
            if at_largest is not None:
                self._larger[runtime] = at_largest

    # ---------------------------------------------------------------- steps

    def foresee(
        self, signature: StepSignature, resident: Resident
    ) -> tuple[GraphNumbers, RecordedStep, Mapping[int, int]] | None:
        """Foresee the step of the largest sizes from a recorded one, and from the memory that exists before that.

        Returns:
            The captured graphs that it runs, the step, and what sizes become in it; None if nothing is named, or, with
            a warning, if the step can't be foreseen.

        Raises:
            ConfigurationError: If no call was given an argument that is named.
        """
        self._check()
        runtimes = self._runtimes.numbered(signature.graphs)
        if not any(self._taken[runtime] for runtime in runtimes):
            return None
        larger = {runtime: self._larger.get(runtime, runtime) for runtime in runtimes}
        is_fixed = len(runtimes) < len(signature.graphs) or any(
            larger[runtime] is runtime and self._grows(runtime) for runtime in runtimes
        )
        step = None if is_fixed or signature.recorded.waits else self._at_largest(signature.recorded, larger, resident)
        if step is None:
            self._warn(
                f"The largest size can't be planned ahead ({', '.join(self._wishes)}): captured code has the size as a "
                "fixed number, or a graph waits for a later step. Training goes on: that size is planned when it "
                "comes, and shares of the budget are of the largest step so far."
            )
            return None
        graphs = tuple(larger[runtime].number for runtime in runtimes)
        return graphs, step, ChainMap(*(dict(self._taken[runtime]) for runtime in runtimes))

    def _grows(self, runtime: GraphRuntime) -> bool:
        """Whether any input of a captured graph, weights left out, has a size that becomes larger."""
        graph, becomes = runtime.captured.graph, self._taken[runtime]
        inputs = [graph.tensors[t] for t in graph.inputs]
        data = (t for t in inputs if t.storage is None or graph.storages[t.storage].kind is not StorageKind.PARAMETER)
        return any(size in becomes for tensor in data for size in tensor.shape)

    def _at_largest(
        self, recorded: RecordedStep, larger: Mapping[GraphRuntime, GraphRuntime], resident: Resident
    ) -> RecordedStep | None:
        profiles = [self._runtimes.measure_once(larger[call.runtime]) for call in recorded.calls]
        captured = [larger[call.runtime].captured for call in recorded.calls]
        step = foresee([recorded], list(zip(captured, profiles, strict=True)), resident)
        if step is None or not step.hands_on:
            return None
        more_bytes = step.given_bytes - recorded.given_bytes
        calls = tuple(replace(call, runtime=larger[call.runtime]) for call in step.calls)
        return replace(step, calls=calls, resident=resident.with_more("batch", more_bytes))

    def __str__(self) -> str:
        return ", ".join(f"{named} is {named.most}" for named in self._wishes.values())


class VaryingSizes:
    """The sizes of the latest call that vary from call to call, known after three calls with different sizes.

    A size that equals a dimension of a weight is left out: the two can't be told apart by value.
    """

    def __init__(self, weights: Callable[[], Iterable[Sizes]]) -> None:
        self._weights = weights
        self._seen: dict[tuple[object, ...], list[Sizes]] = {}  # different sizes of each call, by its name and ranks
        self._varied = set[int]()  # sizes of the latest call that vary

    def called(self, name: str, shapes: Sequence[Sizes]) -> None:
        """Add a call, with the shapes of its arguments."""
        sizes = tuple(size for shape in shapes for size in shape)
        seen = self._seen.setdefault((name, *map(len, shapes)), [])
        if sizes not in seen and len(seen) < MOST_SEEN:
            seen.append(sizes)
        columns = list(zip(*seen, sizes, strict=True)) if len(seen) > 2 else []
        fixed = {column[-1] for column in columns if len(set(column)) == 1}
        self._varied = {column[-1] for column in columns} - fixed

    def __iter__(self) -> Iterator[int]:
        """Yield the sizes."""
        return iter(self._varied.difference(*self._weights()))


def _by_name(
    function: Callable[..., Any] | None, arguments: Arguments, tensors: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return tensors by the names of their arguments; by key if they are in a mapping, else by number."""
    args, kwargs = arguments
    named: dict[str, Any] = {}
    if function is not None:
        named = attempt(
            lambda: dict(inspect.signature(function).bind_partial(*args, **kwargs).arguments),
            {},
            "the signature of a forward",
        )
    for value in list(named.values()):
        if is_of(value, Mapping):
            items: dict[str, Any] = attempt(partial(dict, value), {}, f"the items of {type(value).__name__}")
            named = {**items, **named}
    by_name = {str(name): value for name, value in named.items() if isinstance(value, torch.Tensor)}
    named_ids = {id(tensor) for tensor in by_name.values()}
    unnamed = [tensor for tensor in tensors if id(tensor) not in named_ids]
    return by_name | {f"argument {number}": tensor for number, tensor in enumerate(unnamed, start=1)}
