"""Gradients of leaves that several runs of captured graphs share, added up in the order of eager PyTorch.

Autograd adds up what reaches a leaf in one backward, a parameter say, term by term as it arrives. A captured graph
hands over one sum for all that read the leaf in it: where another graph, or another run of the same one, has
contributed before, that is another order of additions, and gives other last bits. So where all that reaches a leaf
comes from captured graphs, and is in one of them a sum of several terms, what the first ones give is carried over to
the next, which add their terms to it one by one, and the last one hands it to autograd.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..torch_private import backward_pass
from .accumulation import on_default_stream

RAN, SHARED = "ran", "shared leaves"  # in the notes about a backward


class SavedRun(Protocol):
    """What a run of a captured graph keeps for its backward.

    Attributes:
        leaves: The leaves among its inputs, by position.
        terms: Of how many terms their gradients are, by position, where it is more than one.
    """

    leaves: Mapping[int, torch.Tensor]
    terms: Mapping[int, int]


class Shared:
    """The gradient of a leaf that several runs share.

    Attributes:
        awaited: How many of them have not contributed yet.
        total: What the others have contributed, None before there is anything.
    """

    def __init__(self, awaited: int) -> None:
        self.awaited = awaited
        self.total: torch.Tensor | None = None


def shared_leaves(run: SavedRun) -> dict[int, Shared]:
    """Return the leaves of a run, by position, for whose gradients the order counts; its backward is about to run."""
    notes = backward_pass.notes()
    if notes is None:
        return {}
    ran: set[int] = notes.setdefault(RAN, set())
    if run.terms and SHARED not in notes:
        notes[SHARED] = _find_shared(run, ran)
    ran.add(id(run))
    shared: dict[int, Shared] = notes.get(SHARED, {})
    if not shared:
        return {}
    return {position: shared[id(leaf)] for position, leaf in run.leaves.items() if id(leaf) in shared}


def hand_on(gradients: Sequence[Any], shared: Mapping[int, Shared], summed: Collection[int]) -> Sequence[Any]:
    """Keep the gradients that others are to contribute to, and give the rest to autograd.

    What is kept is changed in place: what others may hold is copied.

    Args:
        gradients: What a backward gave.
        shared: The leaves whose gradients the order counts for, by position.
        summed: Positions of the gradients that were added up for themselves alone.
    """
    results = list(gradients)
    for position, own in shared.items():
        own.awaited -= 1
        if own.awaited:
            gradient, results[position] = results[position], None
            is_own = own.total is not None or position in summed or gradient is None
            own.total = gradient if is_own else gradient.clone()
    return results


def _find_shared(run: SavedRun, ran: set[int]) -> dict[int, Shared]:
    """Return, by identity, the leaves for whose gradients the order of additions counts.

    Only captured graphs contribute to such a gradient, none has done so yet, and one contributes a sum of terms.
    """
    tokens = (getattr(tensor, "hiremate", None) for tensor in backward_pass.saved_by_captured())
    runs = {id(other): other for other in (run, *tokens) if other is not None and id(other) not in ran}
    if len(runs) == 1:
        return {}
    leaves: dict[int, torch.Tensor] = {}
    counts: defaultdict[int, list[int]] = defaultdict(list)  # of the terms that each run contributes
    for other in runs.values():
        for position, leaf in other.leaves.items():
            leaves[id(leaf)] = leaf
            counts[id(leaf)].append(other.terms.get(position, 1))
    several = {leaf: len(terms) for leaf, terms in counts.items() if len(terms) > 1 and max(terms) > 1}
    return {
        leaf: Shared(number)
        for leaf, number in several.items()
        if backward_pass.terms_to(leaves[leaf]) == number and on_default_stream(leaves[leaf].device)
    }
