"""What becomes of a joint graph: the passes that rewrite it, in their order, and what AOTAutograd gets back for it.

AOTAutograd partitions the graph into two modules, of which only the calling convention counts: neither runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ..rewriting import assignments, casts, losses, pooling, views
from ..rewriting.contributions import Contributions
from ..rewriting.fused_kernel import FusedKernels
from ..rewriting.fusion import fuse
from ..rewriting.joint import forward_nodes
from ..torch_private import aot, tensor_state
from .capture import Captured


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
    lambda traced: casts.show_types_of_norms(traced.joint),
    lambda traced: traced.contributions.hand_over(traced.joint, traced.forward_count),
    lambda traced: traced.contributions.note_casts(
        casts.share(traced.joint, traced.forward_count, traced.parameters, traced.blocks)
    ),
    lambda traced: casts.leave_out(traced.joint, traced.forward_count, traced.contributions.of_other_types),
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


# ---------------------------------------------------------------- what AOTAutograd gets back


def stub_modules(captured: Captured) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Make the modules of the forward and of the backward; what one saves for the other is an empty token."""
    with tensor_state.fake_mode_of([n.meta.get("val") for n in captured.placeholders]):
        token = torch.empty(0)
    forward, backward = _forward(captured, token), _backward(captured, token)
    return fx.GraphModule(captured.joint, forward), fx.GraphModule(captured.joint, backward)


def _forward(captured: Captured, token: torch.Tensor) -> fx.Graph:
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = forward_nodes(captured.joint, captured.forward_outputs).union(captured.placeholders)
    for node in captured.joint.graph.nodes:
        if node in needed:
            values[node] = graph.node_copy(node, values.__getitem__)
    made = graph.call_function(torch.empty, ((0,),))
    made.meta["val"] = token
    outputs = [values[v] if isinstance(v, fx.Node) else v for v in captured.forward_outputs]
    graph.output((*outputs, made)).meta["desc"] = [*captured.output_descriptions[0], aot.describe_saved()]
    return graph


def _backward(captured: Captured, token: torch.Tensor) -> fx.Graph:
    graph = fx.Graph()
    graph.placeholder("token").meta["val"] = token
    for tangent in captured.tangents:
        graph.placeholder(tangent.name).meta = dict(tangent.meta)
    gradients = list(captured.backward_outputs)
    for position, value in enumerate(gradients):
        if isinstance(value, fx.Node):
            gradients[position] = stand_in = graph.call_function(torch.empty, ((0,),))
            stand_in.meta = dict(value.meta)
    graph.output(tuple(gradients)).meta["desc"] = list(captured.output_descriptions[1])
    return graph
