"""The modules that AOTAutograd partitions a joint graph into: only their calling convention counts, neither runs."""

from __future__ import annotations

import torch
from torch import fx

from ..rewriting.joint import forward_nodes
from ..torch_private import aot, tensor_state
from ..torch_private.graph_texts import module_of
from .capture import Captured


def stub_modules(captured: Captured) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Make the modules of the forward and of the backward; what one saves for the other is an empty token."""
    with tensor_state.fake_mode_of([n.meta.get("val") for n in captured.placeholders]):
        token = torch.empty(0)
    forward, backward = _forward(captured, token), _backward(captured, token)
    return module_of(captured.joint, forward), module_of(captured.joint, backward)


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
