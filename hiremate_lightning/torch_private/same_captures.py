"""Tells that Dynamo captured once more what it had captured before, since what changed in between made no difference.

Code may change in its first call what it then asks for: transformers' heads for classification write into the
configuration which loss to compute. The second call is captured anew, and its graph is that of the first. What was made
of that runs the second call too.

What is compared is all that a trace by AOTAutograd depends on: operations and constants of the graph, inputs by kind,
layout, origin, and what memory they share, and the settings of torch. Where any of it can't be compared, where sizes
vary, or where AOTAutograd asked for guards of its own, nothing is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext

from . import hacks, tensor_state
from .autocasting import DEVICE_TYPES

Runner = Callable[..., Any]
_PLAIN = {bool, int, str, bytes, type(None), type(Ellipsis)}
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


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
        if not hacks.is_on("same captures"):
            return make(module, inputs)
        try:
            key: Hashable = _settings(), _described_graph(module), _described_inputs(module, inputs)
        except _CanNotBeComparedError:
            return make(module, inputs)
        run = self._runs.get(key)
        if run is not None:
            self._tell()
            return run
        guards_before = _guards()
        run = make(module, inputs)
        if _guards() == guards_before:
            self._runs[key] = run
        return run


class _CanNotBeComparedError(Exception):
    """Something is no plain value."""


def _guards() -> int:
    context = TracingContext.try_get()
    return 0 if context is None else len(context.guards_context.aotautograd_guards)


def _settings() -> Hashable:
    autocasts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICE_TYPES]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled()
    return (*modes, *autocasts, *tensor_state.kernel_settings(), torch.get_default_dtype())


def _described_graph(module: fx.GraphModule) -> Hashable:
    values = tensor_state.leaves([node.meta.get("example_value") for node in module.graph.nodes])
    if any(isinstance(value, _SYMBOLS) or tensor_state.is_symbolic(value) for value in values):
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
        return type(value), tuple(_described(v, numbers) for v in value)
    if isinstance(value, dict):
        return type(value), tuple((_described(k, numbers), _described(v, numbers)) for k, v in value.items())
    if isinstance(value, slice):
        return slice, tuple(_described(v, numbers) for v in (value.start, value.stop, value.step))
    if type(value) in _PLAIN:
        return type(value), value
    raise _CanNotBeComparedError


def _described_inputs(module: fx.GraphModule, inputs: Sequence[Any]) -> Hashable:
    sources = [getattr(node, "_dynamo_source", None) for node in module.graph.find_nodes(op="placeholder")]
    if None in sources or len(sources) != len(inputs) or not all(map(tensor_state.is_dense, inputs)):
        raise _CanNotBeComparedError
    storages = dict[int, int]()
    shared = [storages.setdefault(tensor_state.storage_id(t), len(storages)) for t in inputs]
    return tuple((source, *_layout(t)) for source, t in zip(sources, inputs, strict=True)), tuple(shared)


def _layout(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    lies = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()
    if not all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride(), tensor.storage_offset())):
        raise _CanNotBeComparedError
    kind = type(tensor), isinstance(tensor, torch.nn.Parameter), tensor.dtype, tensor.device
    return *kind, *lies, tensor.requires_grad, tensor.is_leaf, tensor._is_view()
