"""Softmaxes of copies: the result takes the memory of what was copied for it.

In half precision a loss, and often attention, converts its numbers first: `F.cross_entropy(logits.float(), ...)`.
Eager PyTorch holds logits, converted logits and the result at once, for a language model often the largest moment of
the forward. Where nothing else reads the converted numbers, they and the softmax are one operation here, which writes
each row over what it was computed from. The kernels are those of eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from . import torch_private
from .joint import alone_behind, replace_node, source_of

aten = torch.ops.aten

_COPIES = (aten._to_copy.default, aten.clone.default)
_OPTIONS = {"dtype", "layout", "device", "memory_format"}


def softmax_of_copy(source: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, dim: int) -> torch.Tensor:
    """Copy a tensor and take the softmax of the copy.

    Args:
        source: The tensor.
        shape: Of the copy.
        dtype: Of the copy.
        dim: Along which the results add up to one.
    """
    return _of_copy(aten._softmax, source, shape, dtype, dim)


def log_softmax_of_copy(source: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, dim: int) -> torch.Tensor:
    """Copy a tensor and take the logarithms of the softmax of the copy; arguments as above."""
    return _of_copy(aten._log_softmax, source, shape, dtype, dim)


def _of_copy(kernel: Any, source: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, dim: int) -> torch.Tensor:
    copy = torch.empty(shape, dtype=dtype, device=source.device)
    copy.view(source.shape).copy_(source)
    if copy.requires_grad:  # what autograd records can't be overwritten
        return kernel.default(copy, dim, False)  # type: ignore[no-any-return]
    return kernel.out(copy, dim, False, out=copy)  # type: ignore[no-any-return]


_OF_COPIES = {aten._softmax.default: softmax_of_copy, aten._log_softmax.default: log_softmax_of_copy}


def join_copies(joint: fx.GraphModule) -> None:
    """Rewrite a joint graph so that a softmax and the copy that only it reads are one operation.

    Args:
        joint: Forward and backward, dead code already removed; changed.
    """
    for node in list(joint.graph.nodes):
        copied = _copied_for(node) if node.target in _OF_COPIES and not node.args[2] else None
        if copied is not None:
            value, dim = node.meta["val"], node.args[1]
            replace_node(node, _OF_COPIES[node.target], (copied, list(value.shape), value.dtype, dim))
    joint.graph.eliminate_dead_code()


def _copied_for(node: fx.Node) -> fx.Node | None:
    """Give what is copied for a softmax, None where it reads no copy of its own that fills its memory in order."""
    copy = alone_behind(node)
    if copy is None or copy.target not in _COPIES or not copy.kwargs.keys() <= _OPTIONS:
        return None
    source = source_of(copy)
    made, of = copy.meta["val"], source.meta["val"]
    is_plain = not torch_private.is_symbolic(made) and made.layout is torch.strided and made.is_contiguous()
    return source if is_plain and made.device == of.device and not of.is_complex() else None
