"""Norms of values in half precision with parameters in single precision, as autocast brings them about on a CPU.

PyTorch's kernels for CPUs keep the statistics of such a norm in single precision, and give its input a gradient in half
precision. Traces say otherwise: the statistics are in half precision, a group norm's gradient is in single precision,
and is cast. Here each value is shown in the type that its kernel makes, and that cast, a copy, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..torch_private import tensor_state
from .joint import show_as, values_of

aten = torch.ops.aten
# Positions of the parameters among the arguments. The first one that is given decides the type of the statistics.
_PARAMETERS = {
    aten.native_layer_norm.default: (2, 3),
    aten.native_group_norm.default: (1, 2),
    aten.native_batch_norm.default: (1, 2, 3, 4),
    aten._native_batch_norm_legit_functional.default: (1, 2, 3, 4),
}
_STATISTICS = (1, 2)  # positions among the results


def correct(joint: fx.GraphModule) -> None:
    """Correct the types in a joint graph, dead code already removed; it is changed."""
    for target, positions in _PARAMETERS.items():
        for norm in joint.graph.find_nodes(op="call_function", target=target):
            parameters = [norm.args[position] for position in positions]
            dtype = next((p.meta["val"].dtype for p in parameters if isinstance(p, fx.Node)), None)
            if dtype is not None and _is_half_on_cpu(norm.args[0]):
                _show_in(dtype, norm, _STATISTICS)
    for backward in joint.graph.find_nodes(op="call_function", target=aten.native_group_norm_backward.default):
        source: Any = backward.args[1]
        if _is_half_on_cpu(source):
            for gradient in _show_in(source.meta["val"].dtype, backward, (0,)):
                _leave_out_casts(gradient)


def _is_half_on_cpu(node: Any) -> bool:
    shown = node.meta["val"]
    return shown.device.type == "cpu" and shown.dtype in (torch.bfloat16, torch.float16)


def _show_in(dtype: torch.dtype, node: fx.Node, positions: Sequence[int]) -> list[fx.Node]:
    """Show some results of an operation in a type; return those that were shown in another one."""
    parts = [part for part in values_of(node) if part.args[1] in positions and part.meta["val"].dtype != dtype]
    for part in parts:
        with tensor_state.fake_mode_of([part.meta["val"]]):
            show_as(part, part.meta["val"].to(dtype))
    return parts


def _leave_out_casts(node: fx.Node) -> None:
    """Replace the casts of a value to the type that it has."""
    for user in list(node.users):
        if user.target is aten._to_copy.default and user.kwargs == {"dtype": node.meta["val"].dtype}:
            user.replace_all_uses_with(node)
            node.graph.erase_node(user)
