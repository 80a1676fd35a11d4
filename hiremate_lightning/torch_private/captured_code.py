"""Make Dynamo's captured graphs run as eager code does: calls of checkpoint, gradients in a forward, bans on hooks.

Dynamo captures a call of `torch.utils.checkpoint` as a higher-order operator that only AOTAutograd can trace. If it
runs by itself, its recompute draws other random numbers than its forward, so gradients behind a dropout are wrong.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule as module_of  # generates its Python code at the first call
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from ..housekeeping import log
from . import aot, autocasting, tensor_state
from .hacks import instead_of

__all__ = ["module_of"]

Rewrite = Callable[[fx.Graph, fx.Node, dict[str, fx.GraphModule]], None]
_APPLY = torch.ops.higher_order.autograd_function_apply
_BANS = torch._C._autograd._saved_tensors_hooks_disable, torch._C._autograd._saved_tensors_hooks_enable
_changes_at_start: WeakIdKeyDictionary = WeakIdKeyDictionary()  # counts of changes in place that fake inputs start with


def eager_module(module: fx.GraphModule) -> fx.GraphModule:
    """Return captured code that calls `torch.utils.checkpoint` as the user's code does, not checkpoint operators."""
    return _rewritten(module, (tag_activation_checkpoint,), _checkpoint)


def without_checkpoints(module: fx.GraphModule) -> fx.GraphModule:
    """Return captured code with checkpointed bodies inlined, so that their values are saved, and no bans on hooks."""
    whole = _rewritten(module, (tag_activation_checkpoint,), _inline)
    return _rewritten(whole, _BANS, lambda graph, call, _: graph.erase_node(call))


def _rewritten(module: fx.GraphModule, functions: Sequence[Any], rewrite: Rewrite) -> fx.GraphModule:
    """Copy captured code, and the graph modules in it, with calls of `functions` rewritten; without any, return it."""
    inner = {name: child for name, child in module.named_children() if isinstance(child, fx.GraphModule)}
    replaced = {name: _rewritten(child, functions, rewrite) for name, child in inner.items()}
    if replaced == inner and not any(node.target in functions for node in module.graph.nodes):
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for call in [node for node in graph.nodes if node.target in functions]:
        rewrite(graph, call, replaced)
    copy = module_of(module, graph)
    copy.meta = dict(module.meta)
    for name in replaced.keys() & dict(copy.named_children()).keys():
        setattr(copy, name, replaced[name])
    return copy


def _checkpoint(_: fx.Graph, call: fx.Node, __: dict[str, fx.GraphModule]) -> None:
    # Dynamo passes buffers as arguments; the user's code does not.
    names = [a.name if isinstance(a, fx.Node) and a.op == "placeholder" else "" for a in call.args[1:]]
    call.target = _checkpointed
    call.kwargs = call.kwargs | {"buffers": tuple(i for i, name in enumerate(names) if "_buffers_" in name)}


def _inline(graph: fx.Graph, call: fx.Node, bodies: dict[str, fx.GraphModule]) -> None:
    """Replace a call of a checkpoint operator by the nodes of its body."""
    name = str(cast(fx.Node, call.args[0]).target)  # Dynamo passes the body as a get_attr node
    body = bodies[name]
    values = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[1:], strict=True))
    with graph.inserting_before(call):
        results = cast(Sequence[fx.Node], graph.graph_copy(body.graph, values))
        for node in body.graph.find_nodes(op="get_attr"):
            values[node].target = f"{name}.{node.target}"
    for user in list(call.users):
        assert user.target is operator.getitem, "Dynamo takes apart what a call returns"
        user.replace_all_uses_with(results[cast(int, user.args[1])])
        graph.erase_node(user)
    graph.erase_node(call)


def _checkpointed(function: fx.GraphModule, *arguments: Any, buffers: tuple[int, ...], **options: Any) -> Any:
    """Checkpoint a call. Buffers are bound, not passed: code may update them, and arguments must not change."""
    if "_checkpoint_context_fn" in function.meta:  # selective checkpointing
        options["context_fn"] = function.meta["_checkpoint_context_fn"]

    def run(*passed: Any) -> Any:
        rest = iter(passed)
        with autocasting.as_found_on_error():  # checkpoint stops its recompute by an error
            return function(*(value if i in buffers else next(rest) for i, value in enumerate(bound)))

    bound = [value if i in buffers else None for i, value in enumerate(arguments)]
    passed = (value for i, value in enumerate(arguments) if i not in buffers)
    return checkpoint(run, *passed, **options | {"use_reentrant": False})


def takes_gradients(code: fx.GraphModule) -> bool:
    """Whether captured code calls `torch.autograd.grad` in its forward."""
    inner = (module for module in code.modules() if isinstance(module, fx.GraphModule))
    return any(module.graph.find_nodes(op="call_function", target=torch.autograd.grad) for module in inner)


def keep_modes_of_backwards(code: fx.GraphModule) -> bool:
    """Remove grad mode switches from captured backwards of autograd functions, if the forward takes gradients.

    With `torch.autograd.grad(..., create_graph=True)` eager PyTorch runs such a backward with gradients and
    differentiates it again. Dynamo captures it as code without gradients, so terms of the second derivative are
    missing. Return False if a backward switches the mode itself: Dynamo does not record which mode it was traced in.
    """
    if not takes_gradients(code):
        return True
    outer = [module for module in code.modules() if isinstance(module, fx.GraphModule)]
    calls = [(module, node) for module in outer for node in module.graph.find_nodes(op="call_function", target=_APPLY)]
    for module, call in calls:
        body = cast(fx.Node, call.args[1])  # Dynamo passes both bodies as get_attr nodes
        backward: Any = module.get_submodule(str(body.target))
        changes = backward.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
        if changes and [node.args for node in changes] != [(False,), (True,)]:  # off at the start, on at the end
            return False
        for node in changes:
            backward.graph.erase_node(node)
        backward.recompile()
    return True


def lost_changes(written: fx.GraphModule) -> list[str]:
    """Return the names of inputs that the user's code changes in place more often than its captured graph does.

    Dynamo runs each operation on fake tensors, whose versions count changes in place, and later drops nodes that it
    takes for unread. Here the graph runs on new fake tensors, whose counts must not be lower. They have numbers as
    sizes, since some operations turn symbols into numbers. Dynamo's fake inputs on one storage count each other's
    changes, and the new ones do not: the counts of the new ones are added up.
    """
    inputs = list(written.graph.find_nodes(op="placeholder"))
    shown = [node.meta.get("example_value") for node in inputs]
    counts = list(map(_changes_of, shown))
    if not any(counts):
        return []
    try:
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), torch.no_grad():
            new = [_with_numbers(value) for value in shown]
            fx.Interpreter(written).run(*new)
    except Exception as error:  # an operation that needs a tensor's value, or a gradient
        log.debug("Changes in place could not be counted again: %s", error)
        return []
    is_simple = not any(isinstance(node.target, aot.HigherOrderOperator) for node in written.graph.nodes)
    storages = [tensor_state.storage_id(value) if tensor_state.is_dense(value) else None for value in shown]
    again = Counter[int | None]()
    for storage, value in zip(storages, new, strict=True):
        again[storage] += _changes_of(value)
    pairs = zip(inputs, counts, (again[storage] for storage in storages), strict=True)
    return [str(node.target) for node, before, now in pairs if before and (not now or (is_simple and now < before))]


@instead_of("torch._dynamo.variables.builder.wrap_to_fake_tensor_and_record")
def noted(make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Record how many changes a fake input starts with if it shares memory; without this, code may run eager."""
    stand_in = make(*arguments, **options)
    if isinstance(stand_in, torch.Tensor) and stand_in not in _changes_at_start:
        _changes_at_start[stand_in] = _changes_of(stand_in)
    return stand_in


def _changes_of(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    return tensor_state.versions_of([value])[0] - int(_changes_at_start.get(value, 0))


def _with_numbers(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value
    shape, strides = (map(tensor_state.int_hint, sizes) for sizes in (value.shape, value.stride()))
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=value.dtype, device=value.device)
