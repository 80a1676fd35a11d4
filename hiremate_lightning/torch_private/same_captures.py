"""What is the same of captured code, and what was made of the same graph before.

A layer that is called late, as where layers are left out at random, is captured apart from the layers before it, though
its graph is theirs. And code may change in its first call what it then asks for: transformers' heads for classification
write into the configuration which loss to compute. What was made of the first graph runs the second one too.

What is compared is all that a trace by AOTAutograd depends on: operations and constants of the graph, inputs by kind,
layout, and what memory they share, and the settings of torch. What can't be described is like nothing else.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._guards import TracingContext

from . import autocasting, hacks, tensor_state
from .size_symbols import NUMBERS, expressions_in, values_in

Runner = Callable[..., Any]
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
VALUES = (type(None), bool, int, float, complex, str, bytes, *_OF_TORCH)
CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.CodeType)


class NotShownError(Exception):
    """Something is not shown to hold: that two things are alike, or what a value is."""


def expect(is_shown: bool, what: str) -> None:
    """Raise `NotShownError` where something is not shown."""
    if not is_shown:
        raise NotShownError(what)


def is_plain(value: Any) -> bool:
    """Whether a value is a constant or code."""
    return isinstance(value, (*VALUES, type(...), *CODE))


def described(value: Any, numbers: Mapping[fx.Node, int]) -> Hashable:
    """Describe an argument of a node, with numbers for nodes: `-0.0` is not `0.0`, and True and 1.0 are not 1."""
    if isinstance(value, fx.Node):
        return fx.Node, numbers[value]
    if isinstance(value, (tuple, list)):
        kind = tuple if isinstance(value, torch.Size) else type(value)
        return kind, tuple(described(v, numbers) for v in value)
    if isinstance(value, dict):
        return type(value), tuple((described(k, numbers), described(v, numbers)) for k, v in value.items())
    if isinstance(value, slice):
        return slice, tuple(described(v, numbers) for v in (value.start, value.stop, value.step))
    expect(is_plain(value), "an argument that is no plain value")
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def described_nodes(nodes: Iterable[fx.Node], numbers: Mapping[fx.Node, int]) -> Hashable:
    """Describe nodes of a graph that has neither tensors nor code of its own."""
    rows = []
    for node in nodes:
        expect(node.op not in ("get_attr", "call_module"), "tensors and code that a graph holds")
        target = None if node.op in ("placeholder", "output") else node.target
        rows.append((node.op, target, described(node.args, numbers), described(node.kwargs, numbers)))
    return tuple(rows)


def size_of(number: Any) -> Any:
    """Return a size as a number, or as an expression of symbols."""
    return number.node.expr if isinstance(number, torch.SymInt) else number


def facts_of(tensor: torch.Tensor, size: Callable[[Any], Any] = size_of) -> tuple[Any, ...]:
    """List what code can ask of a tensor without reading its values; `size` describes a size, stride or offset."""
    expect(tensor.layout is torch.strided, "a tensor that is not strided")
    where = type(tensor), tensor.dtype, tensor.device, tensor.dim()
    numbers = tuple(map(size, (*tensor.size(), *tensor.stride(), tensor.storage_offset())))
    state = tensor.requires_grad, tensor.is_inference(), tensor.is_conj(), tensor.is_neg()
    return *where, *numbers, *state, str(torch._C._dispatch_keys(tensor)), tensor.is_leaf, tensor._is_view()


class SameCaptures:
    """What runs in the place of captured code, as long as something else holds it; `tell` hears where it runs again."""

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        self._tell = tell
        self._runs: weakref.WeakValueDictionary[Hashable, Runner] = weakref.WeakValueDictionary()

    def run_of(
        self, make: Callable[[fx.GraphModule, Sequence[Any]], Runner], module: fx.GraphModule, inputs: Sequence[Any]
    ) -> Runner:
        """Return what runs captured code: what was made of the same code before, or else what is made now."""
        run = self.find(module, inputs)
        if run is not None:
            self._tell()
            return run
        guards_before = _guards()
        run = make(module, inputs)
        if _guards() == guards_before:
            self.keep(module, inputs, run)
        return run

    def find(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Runner | None:
        """Return what was made of the same code before; None where nothing was."""
        return self._runs.get(_key(module, inputs))

    def keep(self, module: fx.GraphModule, inputs: Sequence[Any], run: Runner) -> None:
        """Learn what was made of code."""
        key = _key(module, inputs)
        if key is not None:
            self._runs[key] = run


def _key(module: fx.GraphModule, inputs: Sequence[Any]) -> Hashable:
    """Return what is equal for the same code; None where it can't be told."""
    if not hacks.is_on("same captures"):
        return None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled()
    settings = (*modes, *autocasting.settings(), *tensor_state.kernel_settings(), torch.get_default_dtype())
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}
    try:
        return settings, _described_inputs(module, inputs), described_nodes(numbers, numbers)
    except NotShownError:
        return None


def _guards() -> tuple[int, int]:
    context = TracingContext.try_get()
    shapes = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    of_code = 0 if context is None else len(context.guards_context.aotautograd_guards)
    return of_code, 0 if shapes is None else len(shapes.guards)


def _described_inputs(module: fx.GraphModule, inputs: Sequence[Any]) -> Hashable:
    """Describe inputs, and what memory they share; symbols for sizes by their place, with what they may be."""
    places = dict[Any, Any]()

    def described_size(number: Any) -> Hashable:
        if not isinstance(number, torch.SymInt):
            return int(number)
        expression, ranges = number.node.expr, number.node.shape_env.var_to_range
        symbols = sorted(expression.free_symbols, key=str)
        for symbol in symbols:
            places.setdefault(symbol, sympy.Symbol(f"s{len(places)}", integer=True))
        return expression.xreplace(places), *((ranges[s].lower, ranges[s].upper) for s in symbols)

    tensors = [value for value in inputs if not isinstance(value, torch.SymInt)]
    expect(all(map(tensor_state.is_dense, tensors)), "an input that is no dense tensor")
    storages = dict[int, int]()
    shared = tuple(storages.setdefault(tensor_state.storage_id(t), len(storages)) for t in tensors)
    facts = tuple(
        described_size(value)
        if isinstance(value, torch.SymInt)
        else (isinstance(value, torch.nn.Parameter), *facts_of(value, described_size))
        for value in inputs
    )
    # A trace may ask what other symbols are; those of code at definite sizes are numbers now.
    values, known = values_in(module), places.keys() | module.meta.get(NUMBERS, {}).keys()
    expect(not any(isinstance(value, (torch.SymFloat, torch.SymBool)) for value in values), "a number that is no size")
    expect(all(size.free_symbols <= known for size in expressions_in(values)), "a size that no input has")
    return facts, shared
