"""Read operators' schemas and registrations: the fastest way to call one, its draws and writes, and Python kernels.

PyTorch calls an operator by its schema, as captured graphs do, or by the functions that users call, which parse their
arguments half a microsecond to two microseconds faster. Whether a function does the same is tested, once for each form
of a call. `test_operators.py` fails loudly when a name moves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import fx
from torch._decomp.decompositions import _native_batch_norm_legit_functional
from torch._library.custom_ops import OPDEFS
from torch._refs import native_group_norm
from torch.library import _impls
from torch.utils._python_dispatch import TorchDispatchMode

from . import aot, tensor_state

# Norms, with functions that compute them by elementwise operations and reductions.
NORMS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._native_batch_norm_legit_functional.default: _native_batch_norm_legit_functional,
    torch.ops.aten.native_group_norm.default: native_group_norm,
}
_NO_KERNELS = ("Meta", "Autograd")  # kernels of these dispatch keys compute no values
_fast_calls: dict[Any, Any] = {}  # by form of a call: the function to call, None for the schema's


def shortest(node: fx.Node) -> Any:
    """Return the fastest function that does the same as a node's operator, with the same arguments."""
    target: Any = node.target
    if type(target) is not aot.OpOverload:
        return target
    form = _form(node)
    if form not in _fast_calls:
        places = (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase) if target.namespace == "aten" else ()
        named = (getattr(place, target.overloadpacket.__name__, None) for place in places)
        _fast_calls[form] = next((f for f in named if f is not None and _does_the_same(f, node)), None)
    return _fast_calls[form] or schema_call(target)


def _form(node: fx.Node) -> tuple[Any, ...]:
    return node.target, tuple(map(_kind, node.args)), tuple((name, _kind(a)) for name, a in node.kwargs.items())


def schema_call(target: aot.OpOverload) -> Callable[..., Any]:
    """Return the function that an operator's call goes on to."""
    call: Callable[..., Any] = target._op
    return call


def _kind(argument: Any) -> Any:
    """Describe an argument by what functions of torch distinguish overloads by."""
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        return ("tensor", value.dim()) if isinstance(value, torch.Tensor) else type(value)
    if isinstance(argument, (list, tuple)):
        return (list, *map(_kind, argument))
    return type(argument) if isinstance(argument, (int, float)) else (type(argument), repr(argument))


def _does_the_same(function: Callable[..., Any], node: fx.Node) -> bool:
    """Whether a function calls the operator that a node calls, with the same arguments."""
    if not all(isinstance(a.meta.get("val"), torch.Tensor) for a in node.all_input_nodes):
        return False
    made = {a: torch.empty((0,) * a.meta["val"].dim(), device="meta") for a in node.all_input_nodes}
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), made.__getitem__)
    expected, called = _first_call(node.target, args, kwargs), _first_call(function, args, kwargs)
    target: Any = node.target
    has_one_form = len(target.overloadpacket.overloads()) == 1  # a composite operator calls another first
    is_sure = called is not None and (called[0] is target or has_one_form)
    return is_sure and _are_equal(called, expected)


class _FirstCall(TorchDispatchMode):
    """Stops a computation at its first operator by an error, and keeps the operator with its arguments."""

    called: tuple[Any, ...] | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called = function, args, kwargs or {}
        raise NotImplementedError


def _first_call(function: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """Return the first operator that a function calls, with its arguments; None if the function rejects its own."""
    first = _FirstCall()  # type: ignore[no-untyped-call]
    with suppress(Exception), tensor_state.real_mode(), torch.no_grad(), first:  # it may take other arguments
        function(*args, **kwargs)
    return first.called


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[k], other[k]) for k in one)
    return type(one) is type(other) and bool(one == other)


def draws(function: Any) -> bool:
    """Whether a torch function, or a tensor method of this name, draws random numbers."""
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    operator = getattr(torch.ops.aten, name, None)
    overloads = operator.overloads() if operator is not None else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(operator, overload).tags for overload in overloads)


def name_of(operator: Any) -> str:
    """Return an operator's name, as "library::name"; "" for a kernel that is no operator."""
    return str(operator._schema.name) if isinstance(operator, aot.OpOverload) else ""


@functools.cache
def written_arguments(operator: aot.OpOverload) -> tuple[tuple[int, str], ...]:
    """Return the position and the name of each argument that an operator writes to, by its schema."""
    arguments = enumerate(operator._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def has_python_code(operator: Any) -> bool:
    """Whether an operator is implemented in Python, by `torch.library.custom_op` or `torch.library.impl`."""
    name = name_of(operator)
    keys = [key.split("/") for key in _impls if name]
    dispatch_keys = [dispatch for library, op, dispatch in keys if f"{library}::{op.partition('.')[0]}" == name]
    return name in OPDEFS or any(not dispatch.startswith(_NO_KERNELS) for dispatch in dispatch_keys)
