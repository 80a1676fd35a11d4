"""Views that undo one another: derivatives transpose what was transposed, and each call costs the host a microsecond.

What is left out here is the same for all sizes, so that graphs of several batch sizes stay alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..torch_private import tensor_state
from .joint import SHAPES, drop_unread, has_definite_strides, source_of

aten = torch.ops.aten

_NOTHING = (aten.detach.default, aten.alias.default)  # without autograd
_TO_THE_END = 2**63 - 1


def leave_out(joint: fx.GraphModule) -> None:
    """Make a joint graph, dead code already removed, read values where it reads views of them that show the same."""
    output = joint.graph.output_node()
    for node in joint.graph.nodes:
        if _only_shapes(node):
            before = source_of(node)
            if before.target in SHAPES and before.users.keys() == {node}:
                node.replace_input_with(before, source_of(before))
        same = _shown_by(node)
        if same is not None and not (output in node.users and (same.op == "placeholder" or output in same.users)):
            node.replace_all_uses_with(same)
    drop_unread(joint.graph)


def _shown_by(node: fx.Node) -> fx.Node | None:
    """Return the value of which a node is a view that shows all of it in the same shape and order."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node) or node.kwargs:
        return None
    source, arguments = node.args[0], node.args[1:]
    if node.target in _NOTHING or (node.target is aten.slice.Tensor and arguments[1:] in ((0, _TO_THE_END), ())):
        return source
    if _only_shapes(node) or (node.target is aten.expand.default and _is_definite(node.meta["val"])):
        shown = source.meta.get("val")
        return source if isinstance(shown, torch.Tensor) and shown.shape == node.meta["val"].shape else None
    before = source.args[1:]
    turns_back = (
        (node.target is source.target is aten.t.default)
        or (node.target is source.target is aten.transpose.int and _pair(source, before) == _pair(source, arguments))
        or (node.target is source.target is aten.permute.default and _is_inverse(before[0], arguments[0]))
        or (node.target is aten.squeeze.dim and source.target is aten.unsqueeze.default and arguments == before)
    )
    return source_of(source) if turns_back else None


def _only_shapes(node: fx.Node) -> bool:
    """Whether a node gives elements another shape, and that alone says which strides it has."""
    if node.target is not aten.view.default:
        return False
    return _is_definite(node.meta["val"])


def _is_definite(shown: torch.Tensor) -> bool:
    return not tensor_state.is_symbolic(shown) and has_definite_strides(shown)


def _pair(node: fx.Node, dims: Sequence[Any]) -> set[int]:
    rank = node.meta["val"].dim()
    return {dim % rank for dim in dims}


def _is_inverse(one: Any, other: Any) -> bool:
    return [one[dim] % len(one) for dim in other] == list(range(len(one)))
