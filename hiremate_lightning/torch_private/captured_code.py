"""Dynamo's graphs, made to run as the user's code does: calls of checkpoint, gradients in a forward, bans on hooks.

Dynamo captures a call of `torch.utils.checkpoint` as an operator that only serves to be traced. Run by itself it
computes again with other random numbers than before, and so gives wrong gradients behind a dropout.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule as module_of  # whose code is written when it is first called
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from . import aot, autocasting, tensor_state
from .hacks import instead_of

__all__ = ["module_of"]

log = logging.getLogger("hiremate_lightning")
Rewrite = Callable[[fx.Graph, fx.Node, dict[str, fx.GraphModule]], None]
_APPLY = torch.ops.higher_order.autograd_function_apply
_BANS = torch._C._autograd._saved_tensors_hooks_disable, torch._C._autograd._saved_tensors_hooks_enable
_made_with: WeakIdKeyDictionary = WeakIdKeyDictionary()  # changes that stand-ins for inputs were made with


def eager_module(module: fx.GraphModule) -> fx.GraphModule:
    """Make captured code call checkpoint as the user's code does."""
    return _rewritten(module, (tag_activation_checkpoint,), _checkpoint)


def without_checkpoints(module: fx.GraphModule) -> fx.GraphModule:
    """Put checkpointed code in the place of its calls, so that its values are kept, and let hooks see what is saved."""
    whole = _rewritten(module, (tag_activation_checkpoint,), _inline)
    return _rewritten(whole, _BANS, lambda graph, call, _: graph.erase_node(call))


def _rewritten(module: fx.GraphModule, functions: Sequence[Any], rewrite: Rewrite) -> fx.GraphModule:
    """Copy code, and code inside of it, with other calls where that calls any of some functions."""
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
    # The user's code does not pass buffers as arguments.
    names = [a.name if isinstance(a, fx.Node) and a.op == "placeholder" else "" for a in call.args[1:]]
    call.target = _checkpointed
    call.kwargs = call.kwargs | {"buffers": tuple(i for i, name in enumerate(names) if "_buffers_" in name)}


def _inline(graph: fx.Graph, call: fx.Node, bodies: dict[str, fx.GraphModule]) -> None:
    """Put the nodes of a body in the place of a call."""
    name = str(cast(fx.Node, call.args[0]).target)  # Dynamo hands over the body as an attribute
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


def takes_gradients(code: fx.GraphModule) -> bool:
    """Whether captured code takes gradients inside of its forward."""
    inner = (module for module in code.modules() if isinstance(module, fx.GraphModule))
    return any(module.graph.find_nodes(op="call_function", target=torch.autograd.grad) for module in inner)


def keep_modes_of_backwards(code: fx.GraphModule) -> bool:
    """Run the backwards of autograd functions in the mode that autograd sets, where that makes a difference.

    With `torch.autograd.grad(..., create_graph=True)` such a backward is differentiated once more. Dynamo reads it as
    code without gradients, so that terms of the second derivative are missing; eager PyTorch runs it with them.
    Return False where such a backward changes the mode itself, of which Dynamo does not say how it was.
    """
    if not takes_gradients(code):
        return True
    outer = [module for module in code.modules() if isinstance(module, fx.GraphModule)]
    calls = [(module, node) for module in outer for node in module.graph.find_nodes(op="call_function", target=_APPLY)]
    for module, call in calls:
        body = cast(fx.Node, call.args[1])  # Dynamo hands over both bodies as attributes
        backward: Any = module.get_submodule(str(body.target))
        changes = backward.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
        if changes and [node.args for node in changes] != [(False,), (True,)]:  # off as it begins, on as it ends
            return False
        for node in changes:
            backward.graph.erase_node(node)
        backward.recompile()
    return True


def lost_changes(written: fx.GraphModule) -> list[str]:
    """List the inputs of captured code that the user's code changes in place more often than the captured code does.

    Dynamo runs each operation on stand-ins without memory as it reads it, which count their changes, and drops later
    what it takes for unread. So its graph is run on new stand-ins, which must count as many. They have numbers for
    sizes, since some operations turn symbols into numbers. Stand-ins of inputs that share memory count each other's
    changes, and the new ones do not: their counts are added up.
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
    except Exception as error:  # whatever needs a number, or a gradient
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
    """Note how many changes a stand-in counts already, where another one has its memory; else code may run eager."""
    stand_in = make(*arguments, **options)
    if isinstance(stand_in, torch.Tensor) and stand_in not in _made_with:
        _made_with[stand_in] = _changes_of(stand_in)
    return stand_in


def _changes_of(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    return tensor_state.versions_of([value])[0] - int(_made_with.get(value, 0))


def _with_numbers(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value
    shape, strides = (map(tensor_state.int_hint, sizes) for sizes in (value.shape, value.stride()))
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=value.dtype, device=value.device)
