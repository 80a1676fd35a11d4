"""Code that is not torch's and that Dynamo reads in its own way: it ends graphs where numbers may be others.

Dynamo lets torch compute what NumPy would, which adds in another order and rounds exponentials otherwise. It calls
functions that `functools.lru_cache` wraps in each step, so that what is drawn or counted once would be so each time.
And operators that users define: which of them have Python code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.exc import unimplemented
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch._dynamo.variables.misc import NumpyVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable
from torch._library.custom_ops import OPDEFS
from torch.library import _impls

from .aot import OpOverload

# What rounds nothing, or as IEEE 754 says. A product is taken for one of sizes.
EXACT = frozenset(
    """
    abs absolute add all amax amin any arange argmax argmin array asarray ascontiguousarray astype atleast_1d ceil clip
    concatenate copy divide empty equal expand_dims eye fill flatten flip floor floor_divide full full_like greater
    greater_equal hstack isfinite isnan item less less_equal logical_and logical_not logical_or max maximum min minimum
    moveaxis multiply ndim negative nonzero not_equal ones ones_like permute prod ravel repeat reshape roll round shape
    sign size split sqrt square squeeze stack subtract swapaxes take tile tolist transpose true_divide vstack where
    zeros zeros_like
    """.split()  # noqa: SIM905 - a word a line is sixty lines
)
_NO_KERNELS = ("Meta", "Autograd")  # what these dispatch keys run computes no numbers
_inline = WrapperUserFunctionVariable.call_function
_call_numpy = NumpyVariable.call_function
_call_method = NumpyNdarrayVariable.call_method


def call_cached(variable: Any, tracer: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
    """Read through a function whose results are cached, unless it draws or changes something."""
    changes, before = _changes(tracer), set(tracer.output.graph.nodes)
    result = _inline(variable, tracer, arguments, named)
    added = [node for node in tracer.output.graph.nodes if node not in before]
    is_drawn = any(draws(node.target) for node in added if node.op in ("call_function", "call_method"))
    if is_drawn or _changes(tracer) != changes:
        _end_graph(variable.get_name(), "its results are cached, and it draws random numbers or changes something")
    return result


def _changes(tracer: Any) -> tuple[int, int]:
    """Count what captured code changed, and what it drew of Python's own random numbers."""
    effects: SideEffects = tracer.output.side_effects
    existing = (v for v in effects.id_to_variable.values() if v.source is not None)
    return sum(map(effects.is_modified, existing)), len(tracer.output.random_calls)


def draws(function: Any) -> bool:
    """Whether a function of torch, or a method of this name, draws random numbers."""
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    operator = getattr(torch.ops.aten, name, None)
    overloads = operator.overloads() if operator is not None else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(operator, overload).tags for overload in overloads)


def _numpy_function(variable: Any, tracer: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
    name = getattr(variable.value, "__name__", "")
    if not isinstance(variable.value, type) and name not in EXACT:
        _end_graph(f"numpy.{name}", "NumPy may round otherwise than torch in its place")
    return _call_numpy(variable, tracer, arguments, named)


def _numpy_method(variable: Any, tracer: Any, name: str, arguments: list[Any], named: dict[str, Any]) -> Any:
    if not name.startswith("__") and name not in EXACT:
        _end_graph(f"ndarray.{name}", "NumPy may round otherwise than torch in its place")
    return _call_method(variable, tracer, name, arguments, named)


def _end_graph(name: str, reason: str) -> None:
    unimplemented(gb_type=f"{name} runs as it is", context=name, explanation=reason, hints=[])


WHILE_CAPTURING = (
    (NumpyVariable, "call_function", _numpy_function),
    (NumpyNdarrayVariable, "call_method", _numpy_method),
)


# ---------------------------------------------------------------- operators that users define with `torch.library`


def name_of(operator: Any) -> str:
    """Return the name of an operator, as "library::name"; nothing for a kernel that is no operator."""
    return str(operator._schema.name) if isinstance(operator, OpOverload) else ""


def has_python_code(operator: Any) -> bool:
    """Whether Python code computes an operator: that of `torch.library.custom_op`, or of `torch.library.impl`."""
    name = name_of(operator)
    keys = [key.split("/") for key in _impls if name]
    own = [dispatch for library, op, dispatch in keys if f"{library}::{op.partition('.')[0]}" == name]
    return name in OPDEFS or any(not dispatch.startswith(_NO_KERNELS) for dispatch in own)
