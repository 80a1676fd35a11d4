"""Calls of `torch.utils.checkpoint` in captured code that runs uncompiled.

Dynamo captures such a call as an operator that only serves to be traced. Run by itself it computes again with other
random numbers than before, and so gives wrong gradients behind a dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils.checkpoint import checkpoint


def as_written(module: fx.GraphModule) -> fx.GraphModule:
    """Make captured code call checkpoint as the user's code does."""
    return _calling(module, _checkpointed)


def without(module: fx.GraphModule) -> fx.GraphModule:
    """Make captured code call the checkpointed function itself, and keep its values."""
    return _calling(module, _called)


def _calling(module: fx.GraphModule, function: Callable[..., Any]) -> fx.GraphModule:
    """Copy code, and code inside of it, where that checkpoints anything."""
    inner = {name: child for name, child in module.named_children() if isinstance(child, fx.GraphModule)}
    replaced = {name: _calling(child, function) for name, child in inner.items()}
    is_called = bool(module.graph.find_nodes(op="call_function", target=tag_activation_checkpoint))
    if not is_called and all(replaced[name] is child for name, child in inner.items()):
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.find_nodes(op="call_function", target=tag_activation_checkpoint):
        node.target = function
        node.kwargs = node.kwargs | {"buffers": _buffers(node.args[1:])}
    copy = fx.GraphModule(module, graph)
    copy.meta = dict(module.meta)
    for name in replaced.keys() & dict(copy.named_children()).keys():
        setattr(copy, name, replaced[name])
    return copy


def _buffers(arguments: Sequence[Any]) -> tuple[int, ...]:
    """List the positions of buffers among the arguments of a call, which the user's code does not pass as such."""
    names = [a.name if isinstance(a, fx.Node) and a.op == "placeholder" else "" for a in arguments]
    return tuple(i for i, name in enumerate(names) if "_buffers_" in name)


def _checkpointed(function: fx.GraphModule, *arguments: Any, buffers: tuple[int, ...], **options: Any) -> Any:
    """Checkpoint a call; its code may update buffers, which as arguments must stay what they were."""
    if "_checkpoint_context_fn" in function.meta:  # of selective checkpointing
        options["context_fn"] = function.meta["_checkpoint_context_fn"]

    def run(*others: Any) -> Any:
        rest = iter(others)
        return function(*(value if i in buffers else next(rest) for i, value in enumerate(kept)))

    kept = [value if i in buffers else None for i, value in enumerate(arguments)]
    others = (value for i, value in enumerate(arguments) if i not in buffers)
    return checkpoint(run, *others, **options | {"use_reentrant": False})


def _called(function: fx.GraphModule, *arguments: Any, **_: Any) -> Any:
    return function(*arguments)
