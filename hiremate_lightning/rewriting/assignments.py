"""Passes that make each assignment to a slice, `x[:, :k] = y`, one operation, and remove views without effect.

A functionalised trace changes nothing in place. For one assignment it has a view, a new tensor with the assigned
values, and a copy of the surrounding tensor for each step of the indexing; its backward copies the gradient each time.
Eager PyTorch copies only the gradient, once. After this pass an assignment copies its base tensor once, consecutive
assignments share one copy, and a base that is only filled, such as `torch.zeros(...)`, is created by the assignment.
Gradients that nothing reads later are not copied, see `overwriting`. Values are only moved, so no number changes.

A view that undoes another view is removed: derivatives transpose transposed tensors back, and each call costs the host
a microsecond. The same views are removed at all sizes, so that graphs of several batch sizes stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from ..torch_private import aot
from . import nodes
from .joint import Joint

aten = torch.ops.aten

Path = tuple[tuple[str, tuple[int | None, ...]], ...]
"""The views that lead from a tensor to a part of it: names in `_VIEWS`, with their arguments."""

_VIEWS = {"slice": aten.slice.Tensor, "select": aten.select.int, "diagonal": aten.diagonal.default}
_SCATTERS = {
    aten.slice_scatter.default: "slice",
    aten.select_scatter.default: "select",
    aten.diagonal_scatter.default: "diagonal",
}

# Operators that return the second argument in the shape and dtype of the first.
_NEW_VALUES = {aten.copy.default, aten.fill.Scalar, aten.fill.Tensor}

# Operators that fill a new tensor with one number -> function that finds the number among the arguments.
_FILLED: dict[Any, Callable[[Any], Any]] = {
    **dict.fromkeys((aten.zeros_like.default, aten.new_zeros.default, aten.zeros.default), lambda arguments: 0),
    **dict.fromkeys((aten.ones_like.default, aten.new_ones.default, aten.ones.default), lambda arguments: 1),
    aten.full_like.default: itemgetter(1),
    aten.new_full.default: itemgetter(2),
}
_EMPTY = {
    aten.empty_like.default,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}

# Operators whose result has the strides of their argument at run time. All others have the traced strides.
_LAID_OUT_ALIKE = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default}


def assign(base: torch.Tensor, *parts: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a copy of a tensor with values assigned to parts of it; with `out=base`, assign in place.

    `parts` alternates: a `Path` to a part of the tensor, then the tensor or number to assign to it, and so on.
    """
    return _fill(torch.empty_like(base).copy_(base) if out is None else out, parts)


def assign_to_new(
    size: Sequence[int], value: float | None, like: tuple[torch.dtype, torch.device], *parts: Any
) -> torch.Tensor:
    """Return a new contiguous tensor filled with a value (None for uninitialised), and with `parts` as in `assign`."""
    made = torch.empty(size, dtype=like[0], device=like[1])
    return _fill(made if value is None else made.fill_(value), parts)


nodes.register(assign, nodes.Operation(into=nodes.Into.FIRST, keeps_nothing=True))
nodes.register(assign_to_new, nodes.Operation(keeps_nothing=True))


def _fill(result: torch.Tensor, parts: Sequence[Any]) -> torch.Tensor:
    for path, source in zip(parts[::2], parts[1::2], strict=True):
        part = result
        for name, arguments in path:
            part = _VIEWS[name](part, *arguments)
        if isinstance(source, torch.Tensor):
            part.copy_(source)
        else:
            part.fill_(source)
    return result


def gather(joint: Joint) -> None:
    """Make each assignment one operation."""
    for node in list(joint.graph.nodes):
        if node.target in _FILLED and _is_usual(node):
            # `torch.full` makes a tensor of one number without another tensor, so its recomputation needs no other.
            shown, number = node.meta["val"], _FILLED[node.target](node.args)
            options = {"dtype": shown.dtype, "device": shown.device, "pin_memory": False}
            nodes.replace_node(node, aten.full.default, (list(shown.shape), number), options)
    _copy_gradients_once(joint.module)
    for node in reversed(list(joint.graph.nodes)):
        if node.target in _SCATTERS and node.users:  # a scatter without users was a step of a gathered assignment
            _gather_steps(node)


def merge_with_bases(joint: Joint) -> None:
    """Let each assignment create its base if the base is only filled, and join consecutive assignments to one base.

    The joined sources stay alive until the last assignment, so their bytes may not exceed those of the base.
    """
    for node in joint.graph.find_nodes(op="call_function", target=assign):
        base: Any = node.args[0]
        shown, parts = base.meta["val"], node.args[1:]
        if base.users.keys() != {node} or not nodes.fills_memory(shown):
            continue
        if base.target in (assign, assign_to_new):
            sources = (a for a in (*base.args, *parts) if isinstance(a, fx.Node) and a is not base.args[0])
            waiting = [t for t in (source.meta.get("val") for source in sources) if t is not None]
            if sum(t.nbytes for t in waiting) <= shown.nbytes:
                nodes.replace_node(node, base.target, (*base.args, *parts))
        elif (base.target in _EMPTY or base.target is aten.full.default) and _is_usual(base):
            value = base.args[1] if base.target is aten.full.default else None
            like = (shown.dtype, shown.device)
            nodes.replace_node(node, assign_to_new, (list(shown.shape), value, like, *parts))


def _copy_gradients_once(joint: fx.GraphModule) -> None:
    """Make an assignment's backward write into one copy of the gradient, which `overwriting` then leaves out if it may.

    The trace copies the gradient into new memory, and then copies that memory once more.
    """
    unsettled = nodes.unsettled_among(filter(aot.is_tangent, joint.graph.find_nodes(op="placeholder")))
    for node in nodes.computations(joint):
        nodes.note_unsettled(node, unsettled)
        if node.target is not aten.copy.default or nodes.source_of(node).target not in _EMPTY:
            continue
        source: Any = node.args[1]
        shown, copied = node.meta["val"], source.meta.get("val")
        if not nodes.fills_memory(shown) or copied is None:
            continue
        if (shown.shape, shown.dtype, shown.device) != (copied.shape, copied.dtype, copied.device):
            continue
        is_alike = source not in unsettled and nodes.lies_as(copied, shown) and nodes.has_definite_strides(shown)
        if is_alike:
            nodes.replace_node(node, aten.clone.default, (source,))
        elif _is_usual(nodes.source_of(node)):
            nodes.replace_node(node, aten.clone.default, (source,), {"memory_format": torch.contiguous_format})


def _gather_steps(node: fx.Node) -> None:
    """Replace the scatters of one assignment by `assign`; `node` is the last scatter."""
    base = nodes.source_of(node)
    if not nodes.fills_memory(base.meta.get("val")) or not nodes.fills_memory(node.meta["val"]):
        return
    path: list[Any] = []
    scatter: Any = node
    source: Any = node
    part: torch.Tensor = base.meta["val"]
    while source.target in _SCATTERS and (source is node or _changes(source, part, scatter)):
        name, arguments = _SCATTERS[source.target], source.args[2:]
        if source.kwargs or any(isinstance(argument, fx.Node) for argument in arguments):
            break
        path.append((name, arguments))
        part = _VIEWS[name](part, *arguments)
        scatter, source = source, source.args[1]
    if not path:
        return
    dtype = node.meta["val"].dtype  # `assign` expands the source by itself, so skip copies of the same dtype
    while isinstance(source, fx.Node) and source.target in _NEW_VALUES and source.meta["val"].dtype == dtype:
        source = source.args[1]
    nodes.replace_node(node, assign, (base, tuple(path), source))


def _changes(source: fx.Node, part: torch.Tensor, scatter: fx.Node) -> bool:
    """Whether a node gives a part of a tensor other values, and only `scatter` reads these."""
    return source.users.keys() == {scatter} and nodes.show_the_same(nodes.source_of(source).meta.get("val"), part)


def _is_usual(made: fx.Node) -> bool:
    """Whether a new tensor lies in memory as `torch.empty` gives it for its shape."""
    shown: torch.Tensor = made.meta["val"]
    if not nodes.fills_memory(shown) or made.kwargs.get("pin_memory"):
        return False
    if made.target in _LAID_OUT_ALIKE and not nodes.has_definite_strides(shown):
        return False
    return torch.empty(shown.shape, device="meta").stride() == shown.stride()


# ---------------------------------------------------------------- views that undo one another

_NOTHING = (aten.detach.default, aten.alias.default)  # without effect in a graph that runs without autograd
# Views whose result has strides of their input, in dimensions of size 1 too.
_KEEP_STRIDES = (aten.permute.default, aten.t.default, aten.transpose.int)
_ANYWHERE = (aten.as_strided.default, aten.slice.Tensor)  # views that may show all elements at one size only
_WHOLE = ((), (0, 2**63 - 1))  # beginning and end of a slice that shows all elements


def leave_out_views(joint: Joint) -> None:
    """Make nodes read a value itself in place of a view with the same shape and elements; removes pairs of views."""
    output = joint.graph.output_node()
    for node in joint.graph.nodes:
        if node.target is aten.view.default and nodes.has_definite_strides(node.meta["val"]):
            before = nodes.source_of(node)
            if before.target in nodes.SHAPES and before.users.keys() == {node}:
                node.replace_input_with(before, nodes.source_of(before))
        same = _shown_by(node)
        if same is not None and not (output in node.users and (same.op == "placeholder" or output in same.users)):
            node.replace_all_uses_with(same)


def _shown_by(view: fx.Node) -> fx.Node | None:
    """Return the value whose elements a view, or several views, show in the same shape and order; None without one."""
    if view.target in _NOTHING or (view.target is aten.slice.Tensor and view.args[2:] in _WHOLE):
        return nodes.source_of(view)
    source, keeps_strides, same = view, True, None
    while nodes.is_view(source.target) and source.target not in _ANYWHERE:
        keeps_strides = keeps_strides and source.target in _KEEP_STRIDES
        source = nodes.source_of(source)
        is_same = nodes.show_the_same(source.meta.get("val"), view.meta.get("val"))
        if is_same and (keeps_strides or nodes.has_definite_strides(view.meta["val"])):
            same = source
    return same
