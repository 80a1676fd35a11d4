"""Gradients that are added to `.grad` where they appear, and sums of gradients that several graphs share.

A captured graph hands all of its gradients to autograd at its end: while gradients are accumulated, two full sets of
them would exist. So the planned backward adds them by itself, wherever that is all that autograd would do with them.

Where several runs contribute to a leaf, and one of them a sum of several terms, autograd would add up in another order
than without capture, and get other last bits. So the first runs carry their sum over to the next, which add their terms
to it one by one, and the last run hands it to autograd. In a block of autocast, in which eager PyTorch casts a
parameter once, such a sum is carried over in half precision, and the last run of the block casts it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ..capturing.capture import Captured
from ..torch_private import backward_pass
from ..torch_private.tensor_state import HALF_PRECISION, are_alike

RAN, SHARED = "ran", "shared leaves"  # in the notes about a backward
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


def existing_gradients(leaves: Leaves) -> dict[int, torch.Tensor]:
    """Return the gradients that leaves have already."""
    return {position: gradient for position, leaf in leaves.items() if (gradient := leaf.grad) is not None}


def positions_to_add(captured: Captured, leaves: Leaves) -> frozenset[int]:
    """List the positions of the leaves with whose gradients the running backward does nothing but add them."""
    if not all(map(on_default_stream, {leaf.device for leaf in leaves.values()})):
        return frozenset()
    usual = {
        position: leaf
        for position, leaf in leaves.items()
        if position in captured.alike
        and type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and ((gradient := leaf.grad) is None or _takes(gradient, captured.alike[position], leaf))
    }
    return backward_pass.taking_one(usual)


def _takes(gradient: torch.Tensor, dtype: torch.dtype, leaf: torch.Tensor) -> bool:
    """Whether autograd would only add a gradient of some type to the one that a leaf has, and no bit would be lost.

    Weights in half precision may accumulate gradients in single precision (`grad_dtype`), as FSDP2's do since 2.15.
    """
    is_exact = dtype is gradient.dtype or (gradient.dtype is torch.float32 and dtype in HALF_PRECISION)
    return is_exact and are_alike(leaf, gradient) and not gradient.requires_grad


def on_default_stream(device: torch.device) -> bool:
    """Whether a device runs one thing after the other."""
    return device.type != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


# ---------------------------------------------------------------- sums that several graphs share


class SavedRun(Protocol):
    """The values that a run of a captured graph keeps for its backward."""

    captured: Captured
    leaves: Mapping[int, torch.Tensor]  # the leaves among its inputs, by position
    block: object | None  # stands for the block of autocast that remembers the casts of leaves; None without one


@dataclass(eq=False)
class Shared:
    """The gradient of a leaf that several runs share."""

    awaited: int  # how many of them have not contributed yet
    is_of_casts: bool  # whether it is added up in half precision, and cast at the end
    total: torch.Tensor | None = None  # the sum of the others' contributions, None before there is any


def shared_leaves(run: SavedRun) -> dict[int, Shared]:
    """Return the leaves of a run, by position, for whose gradients the order counts; its backward is about to run."""
    notes = backward_pass.notes()
    if notes is None:
        return {}
    ran: list[SavedRun] = notes.setdefault(RAN, [])
    if (run.captured.terms or run.block) and SHARED not in notes:
        notes[SHARED] = _find_shared(run, ran)
    ran.append(run)
    shared: dict[tuple[int, object], Shared] = notes.get(SHARED, {})
    if not shared:
        return {}
    keys = {position: (id(leaf), _block_of(run, position)) for position, leaf in run.leaves.items()}
    return {position: shared[key] for position, key in keys.items() if key in shared}


def hand_on(gradients: Sequence[Any], shared: Mapping[int, Shared], summed: Collection[int]) -> Sequence[Any]:
    """Keep the gradients of shared leaves that others are to contribute to, and give the rest to autograd.

    Kept gradients are changed in place, so those that others may hold are copied. The summed ones, by position, were
    added up for themselves alone.
    """
    results = list(gradients)
    for position, own in shared.items():
        own.awaited -= 1
        if own.awaited:
            gradient, results[position] = results[position], None
            is_own = own.total is not None or position in summed or gradient is None
            own.total = gradient if is_own else gradient.clone()
    return results


def _block_of(run: SavedRun, position: int) -> object | None:
    """Return the block of autocast in which the gradient of a leaf is added up before it is cast; None for others."""
    return run.block if position in run.captured.cast_terms else None


def _find_shared(run: SavedRun, ran: Sequence[SavedRun]) -> dict[tuple[int, object], Shared]:
    """Return, by identity and block, the leaves for whose gradients it counts how they are added up.

    Only captured graphs contribute to such a gradient. One of them contributes a sum of terms and none has run yet, or
    several contribute in one block of autocast. The backward of `run` is about to run, those of `ran` have run.
    """
    tokens = (getattr(tensor, "hiremate", None) for tensor in backward_pass.saved_by_captured())
    runs = {id(other): other for other in (run, *tokens, *ran) if other is not None}
    if len(runs) == 1:
        return {}
    begun = {(id(leaf), _block_of(other, position)) for other in ran for position, leaf in other.leaves.items()}
    leaves: dict[int, torch.Tensor] = {}
    counts: defaultdict[int, defaultdict[object, list[int]]] = defaultdict(partial(defaultdict, list))
    for other in runs.values():  # of how many terms each one's contribution is, by leaf and block
        for position, leaf in other.leaves.items():
            leaves[id(leaf)] = leaf
            counts[id(leaf)][_block_of(other, position)].append(other.captured.terms.get(position, 1))
    return {
        (leaf, block): Shared(len(terms), is_of_casts=block is not None)
        for leaf, by_block in counts.items()
        for block, terms in by_block.items()
        if (leaf, block) not in begun
        if len(terms) > 1 and (block is not None or (max(terms) > 1 and len(by_block) == 1))
        if backward_pass.terms_to(leaves[leaf]) == sum(map(len, by_block.values()))
        if on_default_stream(leaves[leaf].device)
    }
