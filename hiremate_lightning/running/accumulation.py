"""Gradients that are added to `.grad` where they appear.

Autograd adds each gradient to the one that a parameter has already, and frees it. A captured graph hands all of its
gradients to autograd at once, at its end: while gradients are accumulated, two full sets of them would exist. So the
planned backward adds them by itself, as autograd would, wherever that is all that autograd would do with them. A
gradient that a hook is to see, or that is one of several terms, is handed on as ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..capturing.capture import Captured
from ..torch_private import backward_pass
from ..torch_private.tensor_state import are_alike

Leaves = Mapping[int, torch.Tensor]  # by position among the inputs of a captured graph


def find_leaves(captured: Captured, arguments: Sequence[Any]) -> dict[int, torch.Tensor]:
    """List the inputs whose gradients stay with them: those that no other code has computed.

    The tokens that order effects (checks of linear algebra) are traced as tensors, and come as None.
    """
    return {
        position: value
        for position in captured.trained
        if isinstance(value := arguments[position], torch.Tensor) and value.is_leaf
    }


def existing(leaves: Leaves) -> dict[int, torch.Tensor]:
    """Return the gradients that leaves have already."""
    return {position: gradient for position, leaf in leaves.items() if (gradient := leaf.grad) is not None}


def addable(captured: Captured, leaves: Leaves) -> frozenset[int]:
    """List the positions of the leaves with whose gradients the running backward does nothing but add them."""
    if not all(map(on_default_stream, {leaf.device for leaf in leaves.values()})):
        return frozenset()
    usual = {
        position: leaf
        for position, leaf in leaves.items()
        if position in captured.alike
        and type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and ((gradient := leaf.grad) is None or (are_alike(leaf, gradient) and not gradient.requires_grad))
    }
    return backward_pass.taking_one(usual)


def on_default_stream(device: torch.device) -> bool:
    """Whether a device runs one thing after the other."""
    return device.type != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
