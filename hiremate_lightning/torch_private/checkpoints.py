"""Calls of `torch.utils.checkpoint` in captured code that runs uncompiled.

Dynamo captures such a call as an operator that only serves to be traced. Run by itself it computes again with other
random numbers than before, and so gives wrong gradients behind a dropout.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils.checkpoint import checkpoint

from . import autocasting

Rewrite = Callable[[fx.Graph, fx.Node, fx.GraphModule], None]


def eager_module(module: fx.GraphModule) -> fx.GraphModule:
    """Make captured code call checkpoint as the user's code does."""
    return _rewritten(module, _checkpoint)


def without(module: fx.GraphModule) -> fx.GraphModule:
    """Put checkpointed code in the place of its calls, so that its values are kept."""
    return _rewritten(module, _inline)


def _rewritten(module: fx.GraphModule, rewrite: Rewrite) -> fx.GraphModule:
    """Copy code, and code inside of it, with other calls where that checkpoints anything."""
    inner = {name: child for name, child in module.named_children() if isinstance(child, fx.GraphModule)}
    replaced = {name: _rewritten(child, rewrite) for name, child in inner.items()}
    is_called = bool(module.graph.find_nodes(op="call_function", target=tag_activation_checkpoint))
    if not is_called and all(replaced[name] is child for name, child in inner.items()):
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.find_nodes(op="call_function", target=tag_activation_checkpoint):
        rewrite(graph, node, replaced[str(_body(node).target)])
    copy = fx.GraphModule(module, graph)
    copy.meta = dict(module.meta)
    for name in replaced.keys() & dict(copy.named_children()).keys():
        setattr(copy, name, replaced[name])
    return copy


def _body(call: fx.Node) -> fx.Node:
    """Return the node that stands for the code that a call checkpoints."""
    body = call.args[0]
    assert isinstance(body, fx.Node), "Dynamo hands over the body as an attribute"
    return body


def _checkpoint(_: fx.Graph, call: fx.Node, __: fx.GraphModule) -> None:
    # The user's code does not pass buffers as arguments.
    names = [a.name if isinstance(a, fx.Node) and a.op == "placeholder" else "" for a in call.args[1:]]
    call.target = _checkpointed
    call.kwargs = call.kwargs | {"buffers": tuple(i for i, name in enumerate(names) if "_buffers_" in name)}


def _inline(graph: fx.Graph, call: fx.Node, body: fx.GraphModule) -> None:
    """Put the nodes of a body in the place of a call."""
    values = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[1:], strict=True))
    with graph.inserting_before(call):
        results = cast(Sequence[fx.Node], graph.graph_copy(body.graph, values))
        for node in body.graph.find_nodes(op="get_attr"):
            values[node].target = f"{_body(call).target}.{node.target}"
    for user in list(call.users):
        assert user.target is operator.getitem, "Dynamo takes apart what a call returns"
        user.replace_all_uses_with(results[cast(int, user.args[1])])
        graph.erase_node(user)
    graph.erase_node(call)


def _checkpointed(function: fx.GraphModule, *arguments: Any, buffers: tuple[int, ...], **options: Any) -> Any:
    """Checkpoint a call; its code may update buffers, which as arguments must stay what they were."""
    if "_checkpoint_context_fn" in function.meta:  # of selective checkpointing
        options["context_fn"] = function.meta["_checkpoint_context_fn"]

    def run(*others: Any) -> Any:
        rest = iter(others)
        with autocasting.as_found_on_error():  # checkpoint ends a second run by an error, where all is computed
            return function(*(value if i in buffers else next(rest) for i, value in enumerate(kept)))

    kept = [value if i in buffers else None for i, value in enumerate(arguments)]
    others = (value for i, value in enumerate(arguments) if i not in buffers)
    return checkpoint(run, *others, **options | {"use_reentrant": False})
