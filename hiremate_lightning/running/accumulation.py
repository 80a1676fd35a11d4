"""Add gradients to `.grad` as soon as they are computed, and add up gradients of leaves that several graphs share.

A captured graph hands all of its gradients to autograd at its end: while gradients are accumulated, two full sets of
them would exist. So the planned backward adds a gradient to `.grad` itself, if autograd would do nothing else with it.

If several runs contribute to a leaf, and one of them contributes a sum of several terms, autograd would add in another
order than without capture, and the last bits would differ. So each run carries its sum over to the next run, which adds
its terms one by one, and the last run hands the sum to autograd. In a block of autocast, eager PyTorch casts a
parameter once: there the sum is carried over in half precision, and the last run of the block casts it.
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

RAN, SHARED = "ran", "shared leaves"  # keys in `backward_pass.notes`
Leaves = Mapping[int, torch.Tensor]  # by position among the inputs of a captured graph


def find_leaves(captured: Captured, arguments: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Return the leaves among the inputs that get gradients, by position.

    Tokens that order effects (checks of linear algebra) are traced as tensors, but are None at run time.
    """
    return {
        position: value
        for position in captured.trained
        if isinstance(value := arguments[position], torch.Tensor) and value.is_leaf
    }


def existing_gradients(leaves: Leaves) -> dict[int, torch.Tensor]:
    """Return the existing `.grad` of leaves, by position."""
    return {position: gradient for position, leaf in leaves.items() if (gradient := leaf.grad) is not None}


def positions_to_add(captured: Captured, leaves: Leaves) -> frozenset[int]:
    """Return the positions of leaves whose gradients the running backward would only add to `.grad`."""
    if not all(map(on_default_stream, {leaf.device for leaf in leaves.values()})):
        return frozenset()
    usual = {
        position: leaf
        for position, leaf in leaves.items()
        if position in captured.gradient_dtypes
        and type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and ((gradient := leaf.grad) is None or _takes(gradient, captured.gradient_dtypes[position], leaf))
    }
    return backward_pass.taking_one(usual)


def _takes(gradient: torch.Tensor, dtype: torch.dtype, leaf: torch.Tensor) -> bool:
    """Whether autograd would add a gradient of type `dtype` to the leaf's existing one in place, and exactly.

    Weights in half precision may accumulate gradients in single precision (`grad_dtype`), as FSDP2's do since 2.15.
    """
    is_exact = dtype is gradient.dtype or (gradient.dtype is torch.float32 and dtype in HALF_PRECISION)
    return is_exact and are_alike(leaf, gradient) and not gradient.requires_grad


def on_default_stream(device: torch.device) -> bool:
    """Whether operations on a device run one after the other: on a CPU, or in CUDA's default stream."""
    return device.type != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


# ---------------------------------------------------------------- sums that several graphs share


class SavedRun(Protocol):
    """The saved values of one run of a captured graph, as `execution.Saved` has them."""

    captured: Captured
    leaves: Mapping[int, torch.Tensor]  # the leaves among its inputs, by position
    block: object | None  # identity of the block of autocast that caches casts of leaves; None if there is none


@dataclass(eq=False)
class Shared:
    """The gradient of a leaf that several runs share."""

    awaited: int  # number of runs that have not contributed yet
    is_of_casts: bool  # whether it is added up in half precision, and cast at the end
    total: torch.Tensor | None = None  # sum of the contributions so far; None before the first one


def shared_leaves(run: SavedRun) -> dict[int, Shared]:
    """Return the shared gradients of a run's leaves, by position; the run's backward is about to start."""
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
    """Store the gradients of shared leaves that other runs will add to; return the others for autograd.

    Stored gradients are changed in place, so a gradient that other code may hold is copied. Gradients at the positions
    in `summed` are sums that no other code holds.
    """
    results = list(gradients)
    for position, leaf_sum in shared.items():
        leaf_sum.awaited -= 1
        if leaf_sum.awaited:
            gradient, results[position] = results[position], None
            is_exclusive = leaf_sum.total is not None or position in summed or gradient is None
            leaf_sum.total = gradient if is_exclusive else gradient.clone()
    return results


def _block_of(run: SavedRun, position: int) -> object | None:
    """Return the block of autocast in which a leaf's gradient is added up before its cast; None if it has no cast."""
    return run.block if position in run.captured.cast_terms else None


def _find_shared(run: SavedRun, ran: Sequence[SavedRun]) -> dict[tuple[int, object], Shared]:
    """Return, by leaf identity and block, the gradients whose last bits depend on the order of addition.

    Only captured graphs contribute to such a gradient, and none has run yet. One of them contributes a sum of terms, or
    several contribute in one block of autocast. The backward of `run` is about to start, those of `ran` have run.
    """
    tokens = (getattr(tensor, "hiremate", None) for tensor in backward_pass.saved_by_captured())
    runs = {id(other): other for other in (run, *tokens, *ran) if other is not None}
    if len(runs) == 1:
        return {}
    begun = {(id(leaf), _block_of(other, position)) for other in ran for position, leaf in other.leaves.items()}
    leaves: dict[int, torch.Tensor] = {}
    counts: defaultdict[int, defaultdict[object, list[int]]] = defaultdict(partial(defaultdict, list))
    for other in runs.values():  # count the terms of each contribution, by leaf and block
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
