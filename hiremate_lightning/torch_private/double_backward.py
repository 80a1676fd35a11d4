"""Captured code that differentiates inside of its forward, as models of forces do: what Dynamo reads of it, mended.

With `torch.autograd.grad(..., create_graph=True)` the backward of a `torch.autograd.Function` is differentiated once
more. Dynamo reads that backward as code without gradients, so that terms of the second derivative are missing, without
a word. Eager PyTorch runs it with gradients where its own backward is to be differentiated, and without them elsewhere;
both follow where captured code leaves that mode as autograd sets it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_APPLY = torch.ops.higher_order.autograd_function_apply
_SET_MODE = torch._C._set_grad_enabled


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
    return all(_keep_mode(module.get_submodule(str(_body(node).target))) for module, node in calls)


def _body(call: fx.Node) -> fx.Node:
    """Return the node that stands for the backward of an autograd function that is called."""
    body: Any = call.args[1]
    assert isinstance(body, fx.Node), "Dynamo hands over both bodies as attributes"
    return body


def _keep_mode(backward: Any) -> bool:
    """Leave out that a backward switches gradients off as it begins, and on as it ends."""
    changes = backward.graph.find_nodes(op="call_function", target=_SET_MODE)
    if not changes:
        return True
    if [node.args for node in changes] != [(False,), (True,)]:
        return False
    for node in changes:
        backward.graph.erase_node(node)
    backward.recompile()
    return True
