"""Split norms into statistics and elementwise operations, and dropouts into a mask and a product.

The elementwise operations can be fused with their readers, and recomputed from the statistics or the mask.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..torch_private import tensor_state
from .kernels import as_eager, dropout, eager_scale
from .nodes import drop_unread, origin_of, values_of
from .replays import draw_mask_of, mask_arguments

aten = torch.ops.aten


def decompose(graph: fx.Graph) -> list[list[fx.Node]]:
    """Split each operation that `_REWRITES` has; return for each norm the operations that compute its statistics."""
    statistics: list[list[fx.Node]] = []
    for node in list(graph.nodes):
        rewrite = _REWRITES.get(node.target)
        if rewrite is not None:
            with graph.inserting_before(node):
                statistics.extend(rewrite(_Rewriting(node), *node.args))
    drop_unread(graph)
    return statistics


class _Rewriting:
    """Replaces one operation; each public method returns the operations that compute the statistics, if any."""

    def __init__(self, node: fx.Node) -> None:
        self.node, self.graph = node, node.graph
        self._origin = origin_of(node)

    def _add(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with tensor_state.fake_mode_of(tensor_state.leaves((values, named))):
            node.meta = {**self._origin, "val": target(*values, **named)}
        return node

    def _part(self, node: fx.Node, position: int) -> fx.Node:
        part = self.graph.call_function(operator.getitem, (node, position))
        part.meta = {**self._origin, "val": node.meta["val"][position]}
        return part

    def _precise(self, source: fx.Node) -> fx.Node:
        is_short = source.meta["val"].dtype in tensor_state.HALF_PRECISION
        return self._add(aten._to_copy.default, source, dtype=torch.float32) if is_short else source

    def _statistics(self, source: fx.Node, dims: list[int], epsilon: float) -> tuple[fx.Node, fx.Node, list[fx.Node]]:
        """Return variance and mean over some dimensions, and the operations that compute the inverse deviation."""
        both = self._add(aten.var_mean.correction, source, dims, correction=0, keepdim=True)
        variance, mean = self._part(both, 0), self._part(both, 1)
        shifted = self._add(aten.add.Scalar, variance, epsilon)
        return variance, mean, [both, shifted, self._add(aten.rsqrt.default, shifted)]

    def _standardized(self, source: fx.Node, mean: fx.Node, inverse: fx.Node) -> fx.Node:
        return self._add(aten.mul.Tensor, self._add(aten.sub.Tensor, source, mean), inverse)

    def _scaled(self, source: fx.Node, weight: Any, bias: Any, shape: list[int], dtype: torch.dtype) -> fx.Node:
        for factor, combine in ((weight, aten.mul.Tensor), (bias, aten.add.Tensor)):
            if factor is not None:
                source = self._add(combine, source, self._add(aten.view.default, factor, shape))
        return source if source.meta["val"].dtype == dtype else self._add(aten._to_copy.default, source, dtype=dtype)

    def _replace(self, results: Sequence[fx.Node], *statistics: list[fx.Node]) -> Sequence[list[fx.Node]]:
        """Replace the operation's results and return `statistics`; do nothing if the first result's strides differ."""
        if results[0].meta["val"].stride() != self.node.meta["val"][0].stride():
            return ()
        for part in values_of(self.node):
            position: Any = part.args[1]
            part.replace_all_uses_with(results[position])
            self.graph.erase_node(part)
        self.graph.erase_node(self.node)
        return statistics

    def batch_norm(self, *arguments: Any) -> Sequence[list[fx.Node]]:
        """Split a batch norm in training mode; the updates of running statistics are among the returned operations."""
        source, weight, bias, mean_before, variance_before, is_training, momentum, epsilon = arguments
        if not is_training:
            return ()
        shown: torch.Tensor = source.meta["val"]
        channels, dims = shown.shape[1], [d for d in range(shown.dim()) if d != 1]
        count = shown.numel() // channels
        variance, mean, statistics = self._statistics(self._precise(source), dims, epsilon)
        inverse = statistics[-1]
        flat = [self._add(aten.view.default, value, [channels]) for value in (mean, variance)]
        unbiased = self._add(aten.mul.Scalar, flat[1], count / max(1, count - 1))
        statistics, updated = [*statistics, unbiased], []
        for new, before in ((flat[0], mean_before), (unbiased, variance_before)):
            terms = [self._add(aten.mul.Scalar, new, momentum), self._add(aten.mul.Scalar, before, 1 - momentum)]
            updated.append(self._add(aten.add.Tensor, *terms))
            statistics += [*terms, updated[-1]]
        result = self._standardized(self._precise(source), mean, inverse)
        result = self._scaled(
            result, weight, bias, [channels if d == 1 else 1 for d in range(shown.dim())], shown.dtype
        )
        saved = [flat[0], self._add(aten.view.default, inverse, [channels])]
        return self._replace([result, *saved, *updated], statistics)

    def group_norm(self, *arguments: Any) -> Sequence[list[fx.Node]]:
        """Split a group norm of a contiguous tensor."""
        source, weight, bias, batch, channels, area, groups, epsilon = arguments
        shown: torch.Tensor = source.meta["val"]
        if not shown.is_contiguous():
            return ()
        shape = [batch, groups, channels // groups * area]
        grouped = self._add(aten.view.default, self._precise(source), shape)
        _, mean, statistics = self._statistics(grouped, [2], epsilon)
        inverse = statistics[-1]
        result = self._standardized(self._add(aten.view.default, self._precise(source), shape), mean, inverse)
        result = self._add(aten.view.default, result, list(shown.shape))
        result = self._scaled(result, weight, bias, [1, channels, *[1] * (shown.dim() - 2)], shown.dtype)
        saved = [self._add(aten.view.default, value, [batch, groups]) for value in (mean, inverse)]
        return self._replace([result, *saved], statistics)

    def dropout(self, source: Any, probability: float, *_: Any) -> Sequence[list[fx.Node]]:
        """Split a dropout on the CPU into a mask, drawn as in eager PyTorch, and a product."""
        if as_eager(self.node)[0] is not dropout:
            return ()
        mask = self._add(draw_mask_of, *mask_arguments(self.node))
        return self._replace([self._masked(source, mask, probability), mask])

    def dropout_backward(self, gradient: Any, mask: Any, _: float) -> Sequence[list[fx.Node]]:
        """Replace the backward of a split dropout by a product with the same mask and scale."""
        if mask.target is draw_mask_of:
            self.node.replace_all_uses_with(self._masked(gradient, mask, mask.args[-1]))
        return ()

    def _masked(self, source: fx.Node, mask: fx.Node, probability: float) -> fx.Node:
        product = self._add(aten.mul.Tensor, source, mask)
        return self._add(aten.mul.Tensor, product, eager_scale(source, probability))


_REWRITES: dict[Any, Callable[..., Sequence[list[fx.Node]]]] = {
    aten._native_batch_norm_legit_functional.default: _Rewriting.batch_norm,
    aten.native_group_norm.default: _Rewriting.group_norm,
    aten.native_dropout.default: _Rewriting.dropout,
    aten.native_dropout_backward.default: _Rewriting.dropout_backward,
}
