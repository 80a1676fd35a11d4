"""Gradients of cross entropies in half precision: made, and converted, some rows at a time.

The gradient of `F.cross_entropy(logits.float(), ...)` goes back through two operations in single precision, and is
converted then. Eager PyTorch makes three tensors as large as the logits for it, beside the logarithms of the softmax.
Here the three are one operation, which makes its result of a few rows after the other. The kernels are those of eager
PyTorch, and of each row they compute the same, whatever rows are beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from . import torch_private
from .joint import alone_behind, replace_node

aten = torch.ops.aten

PARTS = 16  # at most
PART_BYTES = 2**20  # at least, of the logarithms: each part takes three launches
_TOGETHER = 8  # rows: a part begins where memory is aligned as for the first row, since kernels add up by that
_OPTIONS = {"dtype", "layout", "device"}


def cross_entropy_gradient(
    gradient: torch.Tensor,
    logarithms: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Give the gradient of a cross entropy with respect to its logits, converted.

    Args:
        gradient: Of the loss: a number, or one for each row.
        logarithms: Of the softmax of the logits, one row for each target, contiguous.
        target: Classes.
        weight: Of each class.
        reduction: Of the rows' losses: 0 for none, 1 for mean, 2 for sum.
        ignore_index: Target of rows that do not count.
        total_weight: Of all rows, as the forward has found it.
        shape: Of the result.
        dtype: Of the result.
    """
    count, rows = logarithms.shape[0], _rows_of_a_part(logarithms)
    result = torch.empty(shape, dtype=dtype, device=logarithms.device)
    by_rows = result.view(logarithms.shape)
    memory = torch.empty_like(logarithms[:rows])
    for start in range(0, count, rows):
        part = slice(start, start + rows)
        of = gradient[part] if gradient.dim() else gradient
        made = memory[: min(rows, count - start)]
        told = (target[part], weight, reduction, ignore_index, total_weight)
        aten.nll_loss_backward.grad_input(of, logarithms[part], *told, grad_input=made)
        aten._log_softmax_backward_data.out(made, logarithms[part], 1, made.dtype, out=made)
        by_rows[part].copy_(made)
    return result


def _rows_of_a_part(logarithms: torch.Tensor) -> int:
    """Give how many rows to take at a time: half of them at most, or the three operations would take less memory."""
    count, classes = logarithms.shape
    enough = -(-PART_BYTES // max(1, classes * logarithms.itemsize))
    rows = max(1, -(-count // PARTS), min(enough, -(-count // 2)))
    return -(-rows // _TOGETHER) * _TOGETHER


def join_gradients(joint: fx.GraphModule) -> None:
    """Rewrite a joint graph so that the gradient of a cross entropy and its conversion are one operation.

    Args:
        joint: Forward and backward, dead code already removed; changed.
    """
    for node in list(joint.graph.nodes):
        loss = _loss_behind(node) if node.target is aten._to_copy.default else None
        if loss is not None:
            value = node.meta["val"]
            replace_node(node, cross_entropy_gradient, (*loss.args, list(value.shape), value.dtype))
    joint.graph.eliminate_dead_code()


def _loss_behind(node: fx.Node) -> Any:
    """Give the derivative of a loss of which a node is nothing but the rest and a conversion to fewer bytes."""
    before: Any = alone_behind(node) if node.kwargs.keys() <= _OPTIONS else None
    if before is None or before.target is not aten._log_softmax_backward_data.default:
        return None
    loss: Any = alone_behind(before)
    if loss is None or loss.target is not aten.nll_loss_backward.default or loss.kwargs:
        return None
    read, (_, logarithms, dim, dtype) = loss.args[1], before.args
    made, converted = loss.meta["val"], node.meta["val"]
    if torch_private.is_symbolic(made) or logarithms is not read or made.dim() != 2 or dim not in (1, -1):
        return None
    alike = made.dtype == dtype == read.meta["val"].dtype and made.device == converted.device
    in_order = made.is_contiguous() and read.meta["val"].is_contiguous() and converted.is_contiguous()
    return loss if alike and in_order and converted.itemsize < made.itemsize else None
