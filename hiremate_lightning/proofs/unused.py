"""Which outputs of code get no gradients in a proof: those whose gradients do not come in training either.

Where the loss depends on some outputs only, autograd computes another backward than where all outputs get gradients:
it leaves out terms of sums, and the rest may lie otherwise in memory. So the backward that runs is the one to prove.
Before the first backward has run it is guessed: code that returns its loss, and what the loss was computed from, gets a
gradient for its loss alone.
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
    outputs = [position for position in positions if position is not None]
    return frozenset(outputs) if len(outputs) == len(missing) else None


def likely_unused(written: fx.GraphModule) -> Unused:
    """Return a function that guesses which outputs get no gradients, for code that has not run yet."""

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
    sources, open_ends = {value}, [value]
    while open_ends:
        new = set(open_ends.pop().all_input_nodes) - sources
        sources |= new
        open_ends.extend(new)
    return sources
