"""Assignments to parts of tensors, `x[:, :k] = y`: one operation each, where a trace has several.

A trace changes nothing in place. It writes an assignment as a view, a copy of the view with other values, and for each
step of the indexing a copy of what lies around it; and its backward takes a copy of the gradient each time. Eager
PyTorch copies the gradient once and nothing else. Here an assignment copies what it assigns to, once, several on end
copy it once together, and what was only made to be filled, `torch.zeros(...)`, is made where it is filled. Gradients
that die there are not copied at all, see `overwriting`. Values are moved, never computed, so no number changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..torch_private import aot, tensor_state
from .joint import (
    drop_unread,
    follows_strides,
    has_definite_strides,
    is_view,
    may_lie_otherwise,
    operation_of,
    replace_node,
    show_as,
    source_of,
)
from .operations import Into, Operation, register

aten = torch.ops.aten

Path = tuple[tuple[str, tuple[int | None, ...]], ...]
"""The way from a tensor to a part of it: names of views in `_VIEWS`, with their arguments."""

_VIEWS = {"slice": aten.slice.Tensor, "select": aten.select.int, "diagonal": aten.diagonal.default}
_SCATTERS = {
    aten.slice_scatter.default: "slice",
    aten.select_scatter.default: "select",
    aten.diagonal_scatter.default: "diagonal",
}
_NAMES = {view: name for name, view in _VIEWS.items()}
_DEFAULTS: dict[str, tuple[int | None, ...]] = {"slice": (0, None, None, 1), "select": (), "diagonal": (0, 0, 1)}

# What gives the second argument in the shape and type of the first.
_NEW_VALUES = {aten.copy.default, aten.fill.Scalar, aten.fill.Tensor}

# What makes a tensor of one number like another tensor, which it does not read: the number, or where it is given.
_FILLED: dict[Any, int] = {
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.zeros.default: 0,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
    aten.ones.default: 1,
}
_FILLED_AS_GIVEN: dict[Any, int] = {aten.full_like.default: 1, aten.new_full.default: 2}
_EMPTY = {
    aten.empty_like.default,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


# What is laid out as another tensor is. The strides of all others are those that they were traced with.
_LAID_OUT_ALIKE = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default}


def assign(base: torch.Tensor, *parts: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor with other values in some parts of it.

    Args:
        base: The tensor.
        parts: A `Path` and what is assigned to the part at its end, a tensor or a number, and so on.
        out: The tensor itself, to change it in place.
    """
    return _fill(torch.empty_like(base).copy_(base) if out is None else out, parts)


def assign_to_new(
    size: Sequence[int], value: float | None, like: tuple[torch.dtype, torch.device], *parts: Any
) -> torch.Tensor:
    """Make a contiguous tensor with values in some parts of it.

    Args:
        size: Of the tensor.
        value: What is everywhere else; None for anything.
        like: Data type and device.
        parts: As for `assign`.
    """
    dtype, device = like
    made = torch.empty(size, dtype=dtype, device=device)
    return _fill(made if value is None else made.fill_(value), parts)


register(assign, Operation(into=Into.FIRST, keeps_nothing=True, follows_strides=True))
register(assign_to_new, Operation(keeps_nothing=True))


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


def gather(joint: fx.GraphModule) -> None:
    """Rewrite a joint graph, dead code already removed, so that each assignment is one operation."""
    graph = joint.graph
    for node in list(graph.nodes):
        _stand_alone(node)
    _copy_gradients_once(graph)
    for node in reversed(list(graph.nodes)):
        if node.target in _SCATTERS and node.users:  # without users it was a step of a later one
            _gather_steps(node)
    drop_unread(graph)
    assignments = graph.find_nodes(op="call_function", target=assign)
    for node in assignments:
        _merge_with_base(node)
    if assignments:
        drop_unread(graph)


def _stand_alone(node: fx.Node) -> None:
    """Make a tensor of one number from that number alone, so that computing it again needs no other tensor."""
    if node.target in _FILLED_AS_GIVEN:
        value: Any = node.args[_FILLED_AS_GIVEN[node.target]]
    elif node.target in _FILLED:
        value = _FILLED[node.target]
    else:
        return
    shown = node.meta["val"]
    if not _is_plain(shown) or not _is_contiguous(node) or node.kwargs.get("pin_memory"):
        return
    options = {"dtype": shown.dtype, "device": shown.device, "pin_memory": False}
    replace_node(node, aten.full.default, (list(shown.shape), value), options)


def _copy_gradients_once(graph: fx.Graph) -> None:
    """Make an assignment's backward write to the gradient itself where nothing else reads it, else to one copy.

    It is traced as a copy into new memory, which is copied itself before.
    Gradients that may lie in memory otherwise than traced, as the caller's may, are copied all the same.
    """
    unsettled: set[fx.Node] = set()
    for node in list(graph.nodes):
        follows = follows_strides(node.target) and unsettled & set(node.all_input_nodes)
        if aot.is_tangent(node) or follows or may_lie_otherwise(operation_of(node)):
            unsettled.add(node)
        if node.target is not aten.copy.default or source_of(node).target not in _EMPTY:
            continue
        source: Any = node.args[1]
        shown, given = node.meta["val"], source.meta.get("val")
        if not _is_plain(shown) or given is None:
            continue
        if (shown.shape, shown.dtype, shown.device) != (given.shape, given.dtype, given.device):
            continue
        root, is_alike = _only_read_for(node), source not in unsettled and _lies_as(source, shown)
        if is_alike and root is not None and _is_made(root) and _lies_as(root, shown):
            show_as(root, shown)
            node.replace_all_uses_with(root)
            graph.erase_node(node)
        elif is_alike:
            replace_node(node, aten.clone.default, (source,))
        elif _is_contiguous(source_of(node)):
            replace_node(node, aten.clone.default, (source,), {"memory_format": torch.contiguous_format})


def _only_read_for(copy: fx.Node) -> fx.Node | None:
    """Return what a copy is of before any views of it; None where something else reads that."""
    readers, node = set(copy.all_input_nodes[:1]) | {copy}, copy.all_input_nodes[-1]
    while node.users.keys() <= readers:
        if not is_view(node.target):
            return node
        readers, node = {node}, source_of(node)
    return None


def _is_made(node: fx.Node) -> bool:
    """Whether a value lies on memory of its own that one of PyTorch's operations has allocated for it."""
    made_by = operation_of(node)
    target: Any = made_by.target
    if not isinstance(target, aot.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    read = [t for a in made_by.all_input_nodes for t in tensor_state.leaves(a.meta.get("val"))]
    return tensor_state.storage_id(node.meta["val"]) not in tensor_state.storages_among(read)


def _gather_steps(node: fx.Node) -> None:
    """Make one operation of an assignment whose last step is this scatter."""
    base = source_of(node)
    if not _is_plain(base.meta.get("val")) or not _is_plain(node.meta["val"]):
        return
    path: list[Any] = []
    scatter: Any = node
    source: Any = node
    while source.target in _SCATTERS and (source is node or _leads_to(source, scatter, base, path)):
        step = _step(_SCATTERS[source.target], source.args[0], (*source.args[2:],))
        if source.kwargs or step is None:
            break
        path.append(step)
        scatter, source = source, source.args[1]
    if not path:
        return
    dtype = node.meta["val"].dtype  # the part gets a tensor that can be expanded to its shape, or a number
    while isinstance(source, fx.Node) and source.target in _NEW_VALUES and source.meta["val"].dtype == dtype:
        source = source.args[1]
    replace_node(node, assign, (base, tuple(path), source))


def _leads_to(source: fx.Node, scatter: fx.Node, base: fx.Node, path: Sequence[Any]) -> bool:
    """Whether what a scatter writes is the part of its base at a path, changed, and nothing else reads that."""
    view: Any = source.args[0]
    for step in reversed(path):
        if view.target not in _NAMES or _step(_NAMES[view.target], view.args[0], (*view.args[1:],)) != step:
            return False
        view = view.args[0]
    is_same = is_view(view.target) and (view.target, view.args, view.kwargs) == (base.target, base.args, base.kwargs)
    return source.users.keys() == {scatter} and (view is base or is_same)


def _step(name: str, source: Any, arguments: Sequence[Any]) -> tuple[str, tuple[int, ...]] | None:
    """Write one step of indexing in the one way that means the same; None where a number in it is not known yet."""
    shape, numbers = source.meta["val"].shape, (*arguments, *_DEFAULTS[name][len(arguments) :])
    if not all(isinstance(number, int) for number in (*shape, *numbers) if number is not None):
        return None
    if name == "diagonal":
        offset, first, second = numbers
        return name, (offset, first % len(shape), second % len(shape))
    dim = numbers[0] % len(shape)
    if name == "select":
        return name, (dim, numbers[1] % shape[dim])
    start, end, _ = slice(*numbers[1:]).indices(shape[dim])
    return name, (dim, start, max(start, end), numbers[3])


def _merge_with_base(node: fx.Node) -> None:
    """Do an assignment where what it assigns to is made, or assigned to before, for this alone.

    All that is assigned waits until then, and must be no more than what it is assigned to.
    """
    base: Any = node.args[0]
    shown, parts = base.meta["val"], node.args[1:]
    if base.users.keys() != {node} or not _is_plain(shown):
        return
    if base.target in (assign, assign_to_new):
        sources = (a for a in (*base.args, *parts) if isinstance(a, fx.Node) and a is not base.args[0])
        waiting = [t for t in (source.meta.get("val") for source in sources) if t is not None]
        if sum(t.numel() * t.itemsize for t in waiting) <= shown.numel() * shown.itemsize:
            replace_node(node, base.target, (*base.args, *parts))
    elif base.target in _EMPTY or base.target is aten.full.default:
        value = base.args[1] if base.target is aten.full.default else None
        if _is_contiguous(base) and not base.kwargs.get("pin_memory"):
            like = (shown.dtype, shown.device)
            replace_node(node, assign_to_new, (list(shown.shape), value, like, *parts))


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor that fills memory of its own, in any order of its dimensions."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or tensor_state.is_symbolic(value):
        return False
    fills = value.storage_offset() == 0 and value.untyped_storage().nbytes() == value.numel() * value.itemsize
    return fills and not value.is_conj() and not value.is_neg()


def _is_contiguous(made: fx.Node) -> bool:
    """Whether a new tensor has the strides that `torch.empty` gives to its shape."""
    shown: torch.Tensor = made.meta["val"]
    if made.target in _LAID_OUT_ALIKE and not has_definite_strides(shown):
        return False
    return torch.empty(shown.shape, device="meta").stride() == shown.stride()


def _lies_as(node: fx.Node, shown: torch.Tensor) -> bool:
    """Whether a value fills memory of its own with the same shape, strides and type as another one."""
    value = node.meta["val"]
    if not _is_plain(value) or not has_definite_strides(value):
        return False
    layout = (value.shape, value.stride(), value.dtype, value.device)
    return layout == (shown.shape, shown.stride(), shown.dtype, shown.device)
