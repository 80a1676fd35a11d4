"""Account a step as on a GPU, where CPU tensors stand in for those of a GPU that is not there."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import fx
from torch.nn import functional as F

from ..memory.allocator import allocated_bytes
from ..records.costs import HALF_TYPES
from ..records.graph import Graph
from ..rewriting.joint import is_order_dependent_on_gpu

aten = torch.ops.aten


def on_gpu(graph: Graph, device: torch.device) -> Graph:
    """Account a graph that was captured on CPU tensors as on a GPU."""
    storages = [replace(s, size_bytes=allocated_bytes(s.size_bytes, device)) for s in graph.storages]
    for mask in (n.outputs[1] for n in graph.nodes if n.op == "aten.native_dropout.default"):
        if (storage := graph.tensors[mask].storage) is not None:
            storages[storage] = replace(storages[storage], plain_times=1)  # a GPU's kernel gives booleans
    nodes = tuple(replace(n, is_random=n.is_random or is_order_dependent_on_gpu(n.op)) for n in graph.nodes)
    return replace(graph, storages=tuple(storages), nodes=nodes)


def with_gpu_attention(module: fx.GraphModule) -> fx.GraphModule:
    """Replace attention, whose kernel depends on the device, in a graph that Dynamo captured."""
    for node in module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        node.target = _gpu_attention
    module.recompile()
    return module


def _gpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stand in for F.scaled_dot_product_attention with the kernel that a GPU would choose; tensors are fake.

    Args:
        query: Batch x heads x length x width.
        key: As the query, of its own length; fewer heads with `enable_gqa`.
        value: As the key.
        attn_mask: Booleans or biases, expandable to batch x heads x length x length of the keys.
        dropout_p: Probability of dropout.
        is_causal: Whether to mask what is later.
        scale: Factor of the scores, None for the default.
        enable_gqa: Whether several heads of the query share one of the key.
    """
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
    if attn_mask is None and str(query.dtype).removeprefix("torch.") in HALF_TYPES:
        flash = aten._scaled_dot_product_flash_attention.default
        return cast("torch.Tensor", flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0])
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(bias.logical_not(), -torch.inf)
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    efficient = aten._scaled_dot_product_efficient_attention.default
    return cast("torch.Tensor", efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0])
