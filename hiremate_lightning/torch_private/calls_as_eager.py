"""Calls that Dynamo captures otherwise than eager PyTorch runs them: of logs, generators, checkpoints, backwards."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import _trace_wrapped_higher_order_op
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._dynamo.variables.misc import LoggingLoggerVariable, RandomVariable
from torch._dynamo.variables.tensor import TensorVariable


def _log_early(variable: Any, tracer: Any, name: str, values: list[Any], named: dict[str, Any]) -> Any:
    """Log at capture what is logged once (transformers' `logger.warning_once`); drop what the logger does not show."""
    level = getattr(logging, name.upper(), None)
    is_constant = all(value.is_python_constant() for value in (*values, *named.values()))
    if name.endswith("_once") and is_constant:
        constants = {key: value.as_python_constant() for key, value in named.items()}
        getattr(variable.value, name)(*(value.as_python_constant() for value in values), **constants)
    elif level is None or variable.value.isEnabledFor(level):
        return _break_graph(variable, tracer, name, values, named)
    return ConstantVariable.create(None)


def _draw_outside(variable: Any, tracer: Any, name: str, values: list[Any], named: dict[str, Any]) -> Any:
    """End a graph where a generator is asked that lives longer than the call."""
    if variable.source is not None:
        unimplemented(
            gb_type="A generator of random numbers that outlives the call",
            context=name,
            explanation="it draws outside of captured graphs, as it goes on from call to call",
            hints=[],
        )
    return _draw(variable, tracer, name, values, named)


def _checkpoint_as_asked(variable: Any, tracer: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
    """Compute without gradients what the reentrant variant of checkpoint gives none; Dynamo takes it for the other one.

    That variant is an autograd function: it has a gradient only where a tensor among its own arguments has one.
    """
    is_reentrant = "use_reentrant" not in named or named["use_reentrant"].as_python_constant() in (True, None)
    values = [a.realize() for a in arguments[1:]]
    tensors = (v.as_proxy().node.meta["example_value"] for v in values if isinstance(v, TensorVariable))
    if not is_reentrant or any(tensor.requires_grad for tensor in tensors):
        return _checkpoint(variable, tracer, arguments, named)
    warnings.warn("None of the inputs have requires_grad=True. Gradients will be None", stacklevel=2)  # as eager does
    plain = VariableTracker.build(tracer, _without_gradients)
    return tracer.inline_user_function_return(plain, arguments, {})


def _without_gradients(function: Callable[..., Any], *arguments: Any) -> Any:
    with torch.no_grad():
        return function(*arguments)


def _for_contiguous(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the backward of an autograd function to get contiguous gradients, as Dynamo does; but some may be None."""

    def run(ctx: Any, *gradients: Any) -> Any:
        return backward(ctx, *[g if g is None else g.contiguous() for g in gradients])

    return run


_break_graph, _draw = LoggingLoggerVariable.call_method, RandomVariable.call_method
_checkpoint = CheckpointHigherOrderVariable._call_function
MESSAGES = (
    (LoggingLoggerVariable, "call_method", _log_early),
    (logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True),  # it logs a traceback for a wrong shape
)
GENERATORS = ((RandomVariable, "call_method", _draw_outside),)
CHECKPOINT = ((CheckpointHigherOrderVariable, "_call_function", _checkpoint_as_asked),)
BACKWARDS = ((_trace_wrapped_higher_order_op, "autograd_function_backward_rewritten", _for_contiguous),)
