"""Captured code that differentiates inside of its forward, as models of forces do: what Dynamo reads of it, mended.

With `torch.autograd.grad(..., create_graph=True)` the backward of a `torch.autograd.Function` is differentiated once
more. Dynamo reads that backward as code without gradients, so that terms of the second derivative are missing, without
a word. Eager PyTorch runs it with gradients where its own backward is to be differentiated, and without them elsewhere;
both follow where captured code leaves that mode as autograd sets it.

A gradient must go through a graph that began before the captured code where something was computed there. Dynamo ends
its graph then, but does not see this of arguments that are passed by keyword, nor of one that was computed of another.
It would leave those parts of the gradient out, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import torch as dynamo_torch

from .hacks import replaced_entries

_APPLY = torch.ops.higher_order.autograd_function_apply
_SET_MODE = torch._C._set_grad_enabled
_handlers = dynamo_torch.TorchInGraphFunctionVariable._get_handlers()
_read_grad = _handlers.get(torch.autograd.grad)  # None before 2.13, where it ends graphs


@contextmanager
def seeing_what_began_before() -> Iterator[None]:
    """End graphs, for a while, where a gradient must go through what was computed before the captured code."""
    with replaced_entries(_handlers, {} if _read_grad is None else {torch.autograd.grad: _read_whole_grad}):
        yield


def _read_whole_grad(variable: Any, tracer: Any, *arguments: Any, **named: Any) -> Any:
    """Pass outputs and inputs by position, where Dynamo looks for what was computed before."""
    for name in ("outputs", "inputs")[len(arguments) :]:
        if name in named:
            arguments = (*arguments, named.pop(name))
    tensors = dynamo_torch._collect_tensors_with_sources(arguments[1]) if len(arguments) > 1 else []
    outer = [tensor for tensor, source in tensors if source]
    may_be_of_each_other = len(outer) > 1 and any(tensor.grad_fn is not None for tensor in outer)
    if may_be_of_each_other or (len(arguments) > 1 and _have_hooks(arguments[1])):
        unimplemented(
            gb_type="torch.autograd.grad of tensors from outside of the graph",
            context="",
            explanation="they have hooks, or one may have been computed of another: the graph does not show it",
            hints=[],
        )
    assert _read_grad is not None, "it is in its place"
    return _read_grad(variable, tracer, *arguments, **named)


def _have_hooks(inputs: Any) -> bool:
    """Whether hooks from outside of the captured code change what a gradient is, as it is captured."""
    given = (node.meta.get("grapharg") for node in dynamo_torch._collect_placeholder_nodes(inputs))
    return any(bool(getattr(argument.example, "_backward_hooks", None)) for argument in given if argument is not None)


def takes_gradients(code: fx.GraphModule) -> bool:
    """Whether captured code takes gradients inside of its forward."""
    inner = (module for module in code.modules() if isinstance(module, fx.GraphModule))
    return any(module.graph.find_nodes(op="call_function", target=torch.autograd.grad) for module in inner)


def keep_modes_of_backwards(code: fx.GraphModule) -> bool:
    """Run the backwards of autograd functions in the mode that autograd sets, where that makes a difference.

    Returns:
        Whether they do; not where such a backward changes the mode itself, of which Dynamo does not say how it was.
    """
    if not takes_gradients(code):
        return True
    outer = [module for module in code.modules() if isinstance(module, fx.GraphModule)]
    calls = [(module, node) for module in outer for node in module.graph.find_nodes(op="call_function", target=_APPLY)]
    for module, call in calls:
        body = call.args[1]
        assert isinstance(body, fx.Node), "Dynamo hands over both bodies as attributes"
        backward: Any = module.get_submodule(str(body.target))
        changes = backward.graph.find_nodes(op="call_function", target=_SET_MODE)
        if not changes:
            continue
        if [node.args for node in changes] != [(False,), (True,)]:  # off as it begins, on as it ends
            return False
        for node in changes:
            backward.graph.erase_node(node)
        backward.recompile()
    return True
