"""Which outputs of code get no gradients in a proof: those whose gradients do not come in training either.

Autograd computes the backward of code whose loss depends on some of its outputs in another way than where all get
gradients: terms of sums are left out, and what remains may lie otherwise in memory. So what is proved is the backward
that runs. Before the first one has run, it is guessed: code that returns its loss, and what the loss was computed from,
gets a gradient for its loss alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..capturing.capture import Captured
from ..torch_private import aot

Unused = Callable[[Sequence[Any]], frozenset[int]]  # returns, for the outputs of a run, positions of those


def unused_at(captured: Captured, missing: frozenset[int]) -> frozenset[int] | None:
    """Return the positions of the outputs whose gradients do not come; None where these are of more than outputs.

    Args:
        captured: The code.
        missing: Positions of these gradients among all that its backward takes.
    """
    positions = (aot.output_position(captured.tangents[gradient]) for gradient in missing)
    found = [position for position in positions if position is not None]
    return frozenset(found) if len(found) == len(missing) else None


def likely_unused(written: fx.GraphModule) -> Unused:
    """Return what guesses the outputs whose gradients do not come, for code that has not run yet."""

    def guess(outputs: Sequence[Any]) -> frozenset[int]:
        returned: Any = written.graph.output_node().args[0]
        if not isinstance(returned, (tuple, list)) or len(returned) != len(outputs):
            return frozenset()
        own = {i for i, value in enumerate(outputs) if isinstance(value, torch.Tensor) and value.grad_fn is not None}
        for loss in (i for i in sorted(own) if outputs[i].dim() == 0):
            others, sources = own - {loss}, _sources(returned[loss])
            if all(returned[other] in sources for other in others):
                return frozenset(others)
        return frozenset()

    return guess


def _sources(value: fx.Node) -> set[fx.Node]:
    """List a value and all that it is computed from."""
    found, open_ends = {value}, [value]
    while open_ends:
        new = set(open_ends.pop().all_input_nodes) - found
        found |= new
        open_ends.extend(new)
    return found
