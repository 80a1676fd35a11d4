"""A captured graph and its costs at sizes that were never traced, computed from a few samples.

Samples are the same code traced at a few sizes: the same graph, node for node, with other numbers. The numbers follow
from the sizes exactly, or nearly along one size (`expressions`). A storage has the bytes of the tensor that fills it:
they are exact even if they grow with the square of a length. Times lie on a line over the operation's work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from .costs import Profile
from .expressions import Line, Number, Sizes, SizesDifferError, Values, exactly
from .graph import OUTSIDE, Graph, Node, Storage, Tensor, item_bytes

Costed = tuple[Graph, Profile]
LEAST = 2  # least size of a dimension: code often treats tensors of one or no row differently


class GraphAtSizes:
    """A graph and its costs at all sizes.

    Args:
        samples: The same code at a few sizes; fields that do not depend on sizes are the first one's.
        sizes: The sizes of each sample.
        numbers: How numbers follow from sizes: `exactly` or `on_line`.
        block_bytes: The allocator hands out multiples of this.

    Raises:
        SizesDifferError: If the samples are other code, or a shape or a storage does not follow from the sizes.
    """

    def __init__(
        self,
        samples: Sequence[Costed],
        sizes: Sequence[Sizes],
        numbers: Callable[[Sequence[Sizes], Values, bool], Number | None] = exactly,
        block_bytes: int = 1,
    ) -> None:
        graphs = [graph for graph, _ in samples]
        self._base, self._profile = samples[0]
        self._sizes, self._is_exact, self._block_bytes = tuple(sizes), numbers is exactly, block_bytes
        self._number = cache(partial(numbers, self._sizes))
        self._check_are_same(graphs)
        self._shapes = self._find_shapes(graphs)
        self._filled, self._storages = self._find_storages(graphs)
        self._nodes = {  # for each node that grows: its `flops` and its `eager_bytes` in the samples
            index: (tuple(node.flops for node in nodes), tuple(node.eager_bytes for node in nodes))
            for index, nodes in enumerate(zip(*(graph.nodes for graph in graphs), strict=True))
            if len({(node.key, node.flops, node.eager_bytes) for node in nodes}) > 1
        }
        counts = [_counts(graph, _elements(graph.tensors)) for graph in graphs]
        works = (_works(graph.nodes, of_nodes) for graph, of_nodes in zip(graphs, counts, strict=True))
        times = (profile.time_ms for _, profile in samples)
        self._counts = list(zip(*counts, strict=True))  # elements of each node in each sample
        self._times = [_line(*pair) for pair in zip(zip(*works, strict=True), zip(*times, strict=True), strict=True)]
        self._workspaces = list(zip(*(profile.workspace_bytes for _, profile in samples), strict=True))

    def at(self, sizes: Sizes) -> Costed:
        """Return the graph and its costs at these sizes.

        Raises:
            SizesDifferError: If the samples don't determine them.
        """

        @cache
        def measured(values: Values) -> int | None:
            number = self._number(values, True)
            return None if number is None else number(sizes)

        def bounded(index: int, values: Values) -> int:
            """Return a number of a node; without an expression, a bound by its largest ratio to the elements."""
            number = measured(values)
            if number is not None:
                return number
            before, most = self._counts[index], max(values)
            ratio = max(value / max(1, count) for value, count in zip(values, before, strict=True))
            return most if counts[index] <= max(before) else max(most, math.ceil(ratio * counts[index]))

        tensors = self._tensors_at(sizes)
        elements = _elements(tensors)
        counts = _counts(self._base, elements)
        storages, nodes = list(self._base.storages), list(self._base.nodes)
        sized = [(s, elements[t] * item_bytes(tensors[t].dtype)) for s, t in self._filled.items()]
        for index, size_bytes in (*sized, *((s, measured(values) or 0) for s, values in self._storages.items())):
            storages[index] = Storage(self._in_blocks(size_bytes), storages[index].kind, storages[index].eager_times)
        for index, (flops, eager_bytes) in self._nodes.items():
            nodes[index] = replace(
                nodes[index],
                key=f"{nodes[index].key} at {sizes}",
                flops=bounded(index, flops),
                eager_bytes=bounded(index, eager_bytes),
            )
        graph = replace(self._base, nodes=tuple(nodes), tensors=tuple(tensors), storages=tuple(storages))
        pairs = zip(self._times, _works(nodes, counts), strict=True)
        times = tuple(line.measured(work) for line, work in pairs)
        workspaces = tuple(self._in_blocks(bounded(index, values)) for index, values in enumerate(self._workspaces))
        return graph.like(self._base), replace(self._profile, time_ms=times, workspace_bytes=workspaces)

    def _tensors_at(self, sizes: Sizes) -> list[Tensor]:
        @cache
        def counted(values: Values) -> int:
            size = self._need(values)(sizes)
            if self._is_exact and size < LEAST <= min(values):
                raise SizesDifferError(f"At the sizes {sizes} a dimension is {size}, which is 2 or more in all samples")
            return size

        tensors = list(self._base.tensors)
        for index, columns in self._shapes.items():
            before, shape = tensors[index], tuple(map(counted, columns))
            tensors[index] = Tensor(before.name, before.storage, shape, before.dtype, before.producer)
        return tensors

    def _in_blocks(self, size_bytes: int) -> int:
        return -(-size_bytes // self._block_bytes) * self._block_bytes

    # ---------------------------------------------------------------- how numbers follow from sizes

    def _check_are_same(self, graphs: Sequence[Graph]) -> None:
        sizes = [", ".join(map(str, size)) for size in self._sizes]
        for size, graph in zip(sizes, graphs, strict=True):
            why = self._base.difference(graph)
            if why is not None:
                raise SizesDifferError(f"The steps at sizes {sizes[0]} and {size} are not the same graph: {why}")
            if self._is_exact and list(map(_structure, graph.nodes)) != list(map(_structure, self._base.nodes)):
                raise SizesDifferError(f"Operations at the sizes {size} take other memory than at the sizes {sizes[0]}")

    def _need(self, values: Values, is_measured: bool = False, what: str = "a number") -> Number:
        number = self._number(values, is_measured)
        if number is None:
            raise SizesDifferError(f"At the sizes {self._sizes} {what} is {values}, which is no expression of them")
        return number

    def _find_shapes(self, graphs: Sequence[Graph]) -> dict[int, list[Values]]:
        """Return, for each tensor that grows, the values of each dimension in the samples."""
        growing = {}
        for index, tensors in enumerate(zip(*(graph.tensors for graph in graphs), strict=True)):
            shapes = [tensor.shape for tensor in tensors]
            if len(set(shapes)) > 1:
                growing[index] = list(zip(*shapes, strict=True))
                for values in growing[index]:
                    self._need(values, what=f"a dimension of {tensors[0].name}")
        return growing

    def _find_storages(self, graphs: Sequence[Graph]) -> tuple[dict[int, int], dict[int, Values]]:
        """Return, for each storage that grows, the tensor that fills it, or its bytes in the samples if none does."""
        tensors_on: dict[int | None, list[int]] = {}
        for index in self._shapes:
            tensors_on.setdefault(self._base.tensors[index].storage, []).append(index)
        filled, growing = dict[int, int](), dict[int, Values]()
        for index, storages in enumerate(zip(*(graph.storages for graph in graphs), strict=True)):
            values = tuple(storage.size_bytes for storage in storages)
            filling = [tensor for tensor in tensors_on.get(index, ()) if self._fills(tensor, values, graphs)]
            if filling:
                # Choose the tensor of most dimensions: in a flattened one two growing dimensions are a product.
                filled[index] = max(filling, key=lambda tensor: len(self._base.tensors[tensor].shape))
            elif storages[0].kind.is_resident and self._number(values, True) is None:
                continue  # an input may be a part of the caller's larger tensor; the step does not allocate its bytes
            elif len(set(values)) > 1:
                self._need(values, True, f"the size of the storage {index}")
                growing[index] = values
        return filled, growing

    def _fills(self, index: int, sizes_bytes: Values, graphs: Sequence[Graph]) -> bool:
        """Whether a tensor of captured code fills its storage exactly in all samples."""
        producer, dtype = self._base.tensors[index].producer, self._base.tensors[index].dtype
        if producer is not None and self._base.nodes[producer].op == OUTSIDE:
            return False
        pairs = zip((graph.tensors[index].shape for graph in graphs), sizes_bytes, strict=True)
        return all(self._in_blocks(math.prod(shape) * item_bytes(dtype)) == size for shape, size in pairs)


def _structure(node: Node) -> tuple[Any, ...]:
    """Return the fields of a node that do not depend on sizes, and that `Graph.difference` does not compare."""
    named = node.is_saved, node.compiled, node.function
    return node.takes, node.is_out_of_place_in_eager, node.eager_inputs, node.checkpoint, *named


def _elements(tensors: Sequence[Tensor]) -> list[int]:
    return [math.prod(tensor.shape) for tensor in tensors]


def _counts(graph: Graph, elements: Sequence[int]) -> list[int]:
    """Return, for each node, the number of elements that it reads and writes."""
    return [sum(elements[t] for t in (*node.inputs, *node.outputs)) for node in graph.nodes]


def _works(nodes: Sequence[Node], counts: Sequence[int]) -> list[int]:
    """Return, for each node, the number that its time grows with: its arithmetic if known, else its elements."""
    return [node.flops or count for node, count in zip(nodes, counts, strict=True)]


def _line(works: Sequence[int], times: Sequence[float]) -> Line:
    """Return the line of times over work; samples of equal work count with their longest time."""
    longest = dict[int, float]()
    for work, time_ms in zip(works, times, strict=True):
        longest[work] = max(longest.get(work, 0.0), time_ms)
    return Line(*zip(*sorted(longest.items()), strict=True))
