"""The content of constants, tensors and fx graphs as values that can be compared; an error for what has none."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext

_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
VALUES = (type(None), bool, int, float, complex, str, bytes, *_OF_TORCH)
CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.CodeType)


class NotShownError(Exception):
    """It is not shown that two things are alike, or what a value is."""


def expect(is_shown: bool, what: str) -> None:
    """Raise `NotShownError` unless something is shown."""
    if not is_shown:
        raise NotShownError(what)


def is_plain(value: Any) -> bool:
    """Whether a value is a constant, a class or a function."""
    return isinstance(value, (*VALUES, type(...), *CODE))


def content_of(value: Any, numbers: Mapping[fx.Node, int]) -> Hashable:
    """Return the content of an argument of a node: `-0.0` differs from `0.0`, and True and 1.0 from 1."""
    if isinstance(value, fx.Node):
        return fx.Node, numbers[value]
    if isinstance(value, (tuple, list)):
        kind = tuple if isinstance(value, torch.Size) else type(value)
        return kind, tuple(content_of(v, numbers) for v in value)
    if isinstance(value, dict):
        return type(value), tuple((content_of(k, numbers), content_of(v, numbers)) for k, v in value.items())
    if isinstance(value, slice):
        return slice, tuple(content_of(v, numbers) for v in (value.start, value.stop, value.step))
    expect(is_plain(value), "an argument that is no plain value")
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def content_of_nodes(nodes: Iterable[fx.Node], numbers: Mapping[fx.Node, int]) -> Hashable:
    """Return the content of nodes of a graph; raise `NotShownError` if the graph holds tensors or modules."""
    rows = []
    for node in nodes:
        expect(node.op not in ("get_attr", "call_module"), "tensors and code that a graph holds")
        target = None if node.op in ("placeholder", "output") else node.target
        rows.append((node.op, target, content_of(node.args, numbers), content_of(node.kwargs, numbers)))
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


def guard_counts() -> tuple[int, int]:
    """Return the number of AOTAutograd's guards, and of guards on sizes, in the current capture."""
    context = TracingContext.try_get()
    shapes = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    aot_guards = 0 if context is None else len(context.guards_context.aotautograd_guards)
    return aot_guards, 0 if shapes is None else len(shapes.guards)
