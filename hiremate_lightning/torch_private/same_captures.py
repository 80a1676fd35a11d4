"""Tells that Dynamo captured once more what it had captured before: code of another module, or of a later call.

A layer that is called late, as where layers are left out at random, is captured apart from the layers before it, though
its graph is theirs. And code may change in its first call what it then asks for: transformers' heads for classification
write into the configuration which loss to compute. What was made of the first graph runs the second one too.

What is compared is all that a trace by AOTAutograd depends on: operations and constants of the graph, inputs by kind,
layout, and what memory they share, and the settings of torch. Where inputs come from does not count, and symbols for
sizes count by their place. Where any of it can't be compared, or where AOTAutograd asked for guards of its own, nothing
is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._guards import TracingContext

from . import hacks, tensor_state
from .autocasting import DEVICE_TYPES
from .size_symbols import NUMBERS

Runner = Callable[..., Any]
_PLAIN = {bool, int, str, bytes, type(None), type(Ellipsis)}
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_NO_SIZES = (torch.SymFloat, torch.SymBool)


class SameCaptures:
    """What runs in the place of captured code, by what was captured, as long as something else holds it.

    Args:
        tell: Called where code is captured once more and runs by what was made before.
    """

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
        key = _key(module, inputs)
        return None if key is None else self._runs.get(key)

    def keep(self, module: fx.GraphModule, inputs: Sequence[Any], run: Runner) -> None:
        """Learn what was made of code."""
        key = _key(module, inputs)
        if key is not None:
            self._runs[key] = run


def _key(module: fx.GraphModule, inputs: Sequence[Any]) -> Hashable:
    """Return what is equal for the same code; None where it can't be told."""
    if not hacks.is_on("same captures"):
        return None
    symbols = _Symbols(module.meta.get(NUMBERS, {}))
    autocasts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICE_TYPES]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled()
    settings = (*modes, *autocasts, *tensor_state.kernel_settings(), torch.get_default_dtype())
    try:
        return settings, symbols.inputs(inputs), _described_graph(module, symbols)
    except _CanNotBeComparedError:
        return None


class _CanNotBeComparedError(Exception):
    """Something is no plain value."""


def _guards() -> tuple[int, int]:
    context = TracingContext.try_get()
    shapes = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    of_code = 0 if context is None else len(context.guards_context.aotautograd_guards)
    return of_code, 0 if shapes is None else len(shapes.guards)


def _described_graph(module: fx.GraphModule, symbols: _Symbols) -> Hashable:
    values = tensor_state.leaves([node.meta.get("example_value") for node in module.graph.nodes])
    if any(isinstance(value, _NO_SIZES) for value in values) or not symbols.cover(values):
        raise _CanNotBeComparedError  # a trace may ask which number it is
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}
    nodes = []
    for node in module.graph.nodes:
        if node.op in ("get_attr", "call_module"):  # tensors and code that the graph holds
            raise _CanNotBeComparedError
        target = None if node.op in ("placeholder", "output") else node.target
        nodes.append((node.op, target, _described(node.args, numbers), _described(node.kwargs, numbers)))
    return tuple(nodes)


def _described(value: Any, numbers: dict[fx.Node, int]) -> Hashable:
    """Describe an argument, so that equal descriptions are of equal arguments: True and 1.0 are not 1."""
    if isinstance(value, fx.Node):
        return fx.Node, numbers[value]
    if type(value) is float:
        return float, value.hex()
    if isinstance(value, (tuple, list)):
        kind = tuple if isinstance(value, torch.Size) else type(value)
        return kind, tuple(_described(v, numbers) for v in value)
    if isinstance(value, dict):
        return type(value), tuple((_described(k, numbers), _described(v, numbers)) for k, v in value.items())
    if isinstance(value, slice):
        return slice, tuple(_described(v, numbers) for v in (value.start, value.stop, value.step))
    if type(value) in _PLAIN:
        return type(value), value
    raise _CanNotBeComparedError


class _Symbols:
    """The symbols for sizes of one capture, by their place among its inputs.

    Args:
        numbers: Symbols that are numbers now.
    """

    def __init__(self, numbers: Mapping[Any, int]) -> None:
        self._numbers = numbers.keys()
        self._places: dict[Any, Any] = {}

    def cover(self, values: Sequence[Any]) -> bool:
        """Whether sizes of some values are made of the symbols of the inputs alone."""
        sizes = [value for value in values if isinstance(value, torch.SymInt)]
        sizes += [size for value in values if tensor_state.is_symbolic(value) for size in value.shape]
        symbolic = (size for size in sizes if isinstance(size, torch.SymInt))
        return all(size.node.expr.free_symbols <= self._places.keys() | self._numbers for size in symbolic)

    def inputs(self, inputs: Sequence[Any]) -> Hashable:
        """Describe inputs, and what memory they share."""
        tensors = [value for value in inputs if not isinstance(value, torch.SymInt)]
        if not all(map(tensor_state.is_dense, tensors)):
            raise _CanNotBeComparedError
        storages = dict[int, int]()
        shared = tuple(storages.setdefault(tensor_state.storage_id(t), len(storages)) for t in tensors)
        return tuple(self._input(value) for value in inputs), shared

    def _input(self, value: Any) -> Hashable:
        if isinstance(value, torch.SymInt):
            return torch.SymInt, self._number(value)
        kind = type(value), isinstance(value, torch.nn.Parameter), value.dtype, value.device
        lies = tuple(map(self._number, (*value.shape, *value.stride(), value.storage_offset())))
        return (
            *kind,
            value.dim(),
            *lies,
            value.is_conj(),
            value.is_neg(),
            value.requires_grad,
            value.is_leaf,
            value._is_view(),
        )

    def _number(self, number: Any) -> Hashable:
        """Return a number, or what it is made of: symbols by their place, with what they may be."""
        if not isinstance(number, torch.SymInt):
            return int(number)
        expression, ranges = number.node.expr, number.node.shape_env.var_to_range
        for symbol in sorted(expression.free_symbols, key=str):
            self._places.setdefault(symbol, sympy.Symbol(f"s{len(self._places)}", integer=True))
        between = [(ranges[s].lower, ranges[s].upper) for s in sorted(expression.free_symbols, key=str)]
        return expression.xreplace(self._places), *between
