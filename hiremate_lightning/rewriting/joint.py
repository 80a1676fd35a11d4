"""What the passes over a joint graph read, and what they find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..torch_private import aot
from .kernels import FusedKernels

Source = tuple[int, str]  # the captured node that made a traced node: identity of its graph, its name


@dataclass(frozen=True, slots=True)
class Joint:
    """One traced joint graph, which each pass changes in place."""

    module: fx.GraphModule
    forward_outputs: int  # number of outputs of the forward; the other outputs are gradients
    parameters: frozenset[int]  # positions of the parameters among the inputs
    blocks: Mapping[Source, int]  # the result of `casts.outermost_autocasts`
    of_any_type: Sequence[int]  # positions of the inputs that accept gradients of any dtype
    kernels: FusedKernels | None  # cache of fused kernels; None to fuse nothing
    terms_of_casts: dict[int, int] = field(default_factory=dict)  # filled by `casts.share`, see there

    @property
    def graph(self) -> fx.Graph:
        """The graph at this moment; `fuse` replaces it."""
        return self.module.graph

    def inputs_with_gradients(self) -> list[tuple[fx.Node, Any]]:
        """Return the inputs, each with its gradient or None."""
        return aot.inputs_with_gradients(self.module, self.forward_outputs)
