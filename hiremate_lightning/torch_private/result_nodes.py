"""A node of autograd's graph for each result of captured code, as eager code has it.

AOTAutograd makes one node for all results. A hook on one of them would be called, with None, where only another one
gets a gradient. And where a hook holds what was computed from another result, as that of a deep equilibrium model does,
the node would hold the hook, and the hook the node: neither would ever be freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import Node

from .tensor_state import changes_uncounted


class _OwnNode(torch.autograd.Function):
    """Hands a gradient on as it is, None too. The result is the same tensor, with another node."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def give_own_nodes(results: Iterable[Any]) -> None:
    """Where tensors share a node, give each a node of its own. Views keep theirs."""
    tensors = list({id(result): result for result in results if isinstance(result, torch.Tensor)}.values())
    if len(tensors) == 1:
        return
    with torch._C.DisableTorchFunction():  # neither modes nor classes of users are to see this
        tensors = [tensor for tensor in tensors if tensor.grad_fn is not None and not tensor._is_view()]
        shared = Counter[Node | None](tensor.grad_fn for tensor in tensors)
        for tensor in tensors:
            if shared[tensor.grad_fn] > 1:
                with changes_uncounted([tensor]):
                    _OwnNode.apply(tensor)  # type: ignore[no-untyped-call]
