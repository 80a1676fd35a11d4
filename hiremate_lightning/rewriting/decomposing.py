"""Split norms into statistics and elementwise operations, as PyTorch's decompositions compute them.

The elementwise operations can be fused with their readers, and recomputed from the statistics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ..torch_private import operators, tensor_state
from .nodes import drop_unread, is_part, is_view, origin_of, reached, values_of

aten = torch.ops.aten


def decompose(graph: fx.Graph) -> list[list[fx.Node]]:
    """Split norms in training mode; return for each norm the operations that compute its statistics."""
    statistics = [_split(node) for node in list(graph.nodes) if node.target in operators.NORMS]
    drop_unread(graph)
    return statistics


def _split(norm: fx.Node) -> list[fx.Node]:
    """Split a norm; return the operations of its statistics, or nothing if its result would have other strides."""
    inputs, results = norm.all_input_nodes, _insert_parts(norm)
    if results[0].meta["val"].stride() != norm.meta["val"][0].stride():
        return []
    inner = reached(results[1:], lambda node: () if node in inputs else node.all_input_nodes).difference(inputs)
    # Each reader repeats parts, views and casts, see `fusion`.
    inner = {n for n in inner if not (is_part(n) or is_view(n.target) or n.target is aten._to_copy.default)}
    for part in values_of(norm):
        position: Any = part.args[1]
        part.replace_all_uses_with(results[position])
    return [node for node in norm.graph.nodes if node in inner]


def _insert_parts(norm: fx.Node) -> Any:
    """Insert the operations that compute a norm before it; return the nodes of its results."""
    inputs, arguments, norm_of = norm.all_input_nodes, norm.args, operators.NORMS[norm.target]

    def run(*tensors: torch.Tensor) -> Any:
        values: Any = fx.node.map_arg(arguments, dict(zip(inputs, tensors, strict=True)).__getitem__)
        source, *rest = values
        result, *others = norm_of(source.to(torch.promote_types(source.dtype, torch.float32)), *rest)
        return result.to(source.dtype), *others

    shown = [value.meta["val"] for value in inputs]
    with tensor_state.fake_mode_of(shown), torch.no_grad():
        traced = make_fx(run)(*shown).graph
    made = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
    with norm.graph.inserting_before(norm):
        for node in (node for node in traced.nodes if node.op == "call_function"):
            made[node] = norm.graph.node_copy(node, made.__getitem__)
            made[node].meta = {**origin_of(norm), "val": node.meta["val"]}
    return fx.node.map_arg(traced.output_node().args[0], made.__getitem__)
