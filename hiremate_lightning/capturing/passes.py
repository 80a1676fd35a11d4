"""The passes that rewrite a joint graph before records are made of it, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from ..rewriting import assignments, casts, losses, mixed_norms, pooling, views
from ..rewriting.contributions import Contributions
from ..rewriting.fused_kernel import FusedKernels
from ..rewriting.fusion import fuse
from ..torch_private import aot


@dataclass(frozen=True, slots=True)
class Traced:
    """A joint graph as AOTAutograd traced it, and what its passes read beside it.

    Attributes:
        joint: Forward and backward.
        forward_count: How many of its outputs the forward returns.
        parameters: Positions of the parameters among the inputs.
        blocks: The blocks of autocast in which casts are remembered, by the captured nodes in them.
        contributions: The gradients that eager PyTorch gets in several terms.
        kernels: Where the kernels of fused operations are kept; None to fuse nothing.
    """

    joint: fx.GraphModule
    forward_count: int
    parameters: frozenset[int]
    blocks: Mapping[aot.Source, int]
    contributions: Contributions
    kernels: FusedKernels | None


PASSES: tuple[Callable[[Traced], object], ...] = (
    lambda traced: traced.joint.graph.eliminate_dead_code(lambda node: bool(node.users) or node.is_impure()),
    lambda traced: mixed_norms.correct(traced.joint),
    lambda traced: traced.contributions.hand_over(traced.joint, traced.forward_count),
    lambda traced: casts.share(traced.joint, traced.forward_count, traced.parameters, traced.blocks),
    lambda traced: assignments.gather(traced.joint),
    lambda traced: views.leave_out(traced.joint),
    lambda traced: losses.join(traced.joint),
    lambda traced: pooling.join(traced.joint),
    lambda traced: None if traced.kernels is None else fuse(traced.joint, traced.forward_count, traced.kernels),
    lambda traced: traced.joint.recompile(),
)


def rewrite(traced: Traced) -> None:
    """Run all passes over a joint graph, which they change."""
    for run in PASSES:
        run(traced)
