"""A captured graph and its costs at sizes that were never traced: its numbers follow from those of a few samples.

The same code at a few sizes is the same graph, node for node, with other numbers. These follow from the sizes exactly,
or nearly, along one size (`expressions`). A storage has the bytes of the tensor that fills it, so these are exact even
where they grow with the square of a length. Times are on a line through the measured ones, over an operation's work.
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
LEAST = 2  # size of a dimension: tensors of one or no row are often handled apart


class GraphAtSizes:
    """A graph and its costs at all sizes.

    Samples are the same at a few sizes; fields that do not depend on sizes are the first one's. Numbers follow from
    sizes `exactly`, or `on_line`. The allocator hands out multiples of a block.

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
        self._nodes = {  # that grow: the arithmetic of each, and the bytes that eager PyTorch needs for it
            index: (tuple(node.flops for node in nodes), tuple(node.plain_bytes for node in nodes))
            for index, nodes in enumerate(zip(*(graph.nodes for graph in graphs), strict=True))
            if len({(node.key, node.flops, node.plain_bytes) for node in nodes}) > 1
        }
        counts = [_counts(graph, _elements(graph.tensors)) for graph in graphs]
        works = (_works(graph.nodes, of_nodes) for graph, of_nodes in zip(graphs, counts, strict=True))
        times = (profile.time_ms for _, profile in samples)
        self._counts = list(zip(*counts, strict=True))  # of each node, in each sample
        self._times = [_line(*pair) for pair in zip(zip(*works, strict=True), zip(*times, strict=True), strict=True)]
        self._workspaces = list(zip(*(profile.workspace_bytes for _, profile in samples), strict=True))

    def at(self, sizes: Sizes) -> Costed:
        """Return the graph and its costs at some sizes.

        Raises:
            SizesDifferError: If the samples don't tell about these.
        """

        @cache
        def measured(values: Values) -> int | None:
            number = self._number(values, True)
            return None if number is None else number(sizes)

        def bounded(index: int, values: Values) -> int:
            """Return a number of a node; without an expression it grows as its largest ratio to elements at most."""
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
            storages[index] = Storage(self._in_blocks(size_bytes), storages[index].kind, storages[index].plain_times)
        for index, (flops, plain_bytes) in self._nodes.items():
            nodes[index] = replace(
                nodes[index],
                key=f"{nodes[index].key} at {sizes}",
                flops=bounded(index, flops),
                plain_bytes=bounded(index, plain_bytes),
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
        """Find for each tensor that grows the values of each dimension."""
        growing = {}
        for index, tensors in enumerate(zip(*(graph.tensors for graph in graphs), strict=True)):
            shapes = [tensor.shape for tensor in tensors]
            if len(set(shapes)) > 1:
                growing[index] = list(zip(*shapes, strict=True))
                for values in growing[index]:
                    self._need(values, what=f"a dimension of {tensors[0].name}")
        return growing

    def _find_storages(self, graphs: Sequence[Graph]) -> tuple[dict[int, int], dict[int, Values]]:
        """Find for each storage that grows the tensor that fills it; its bytes where none does."""
        tensors_on: dict[int | None, list[int]] = {}
        for index in self._shapes:
            tensors_on.setdefault(self._base.tensors[index].storage, []).append(index)
        filled, growing = dict[int, int](), dict[int, Values]()
        for index, storages in enumerate(zip(*(graph.storages for graph in graphs), strict=True)):
            values = tuple(storage.size_bytes for storage in storages)
            filling = [tensor for tensor in tensors_on.get(index, ()) if self._fills(tensor, values, graphs)]
            if filling:
                # The tensor of most dimensions: a flattened one hides that two of them grow.
                filled[index] = max(filling, key=lambda tensor: len(self._base.tensors[tensor].shape))
            elif storages[0].kind.is_resident and self._number(values, True) is None:
                continue  # an input may be part of a larger tensor of the caller's: no step allocates its bytes
            elif len(set(values)) > 1:
                self._need(values, True, f"the size of the storage {index}")
                growing[index] = values
        return filled, growing

    def _fills(self, index: int, sizes_bytes: Values, graphs: Sequence[Graph]) -> bool:
        """Whether a tensor takes up exactly its storage in all samples, and was captured, not measured."""
        producer, dtype = self._base.tensors[index].producer, self._base.tensors[index].dtype
        if producer is not None and self._base.nodes[producer].op == OUTSIDE:
            return False
        pairs = zip((graph.tensors[index].shape for graph in graphs), sizes_bytes, strict=True)
        return all(self._in_blocks(math.prod(shape) * item_bytes(dtype)) == own for shape, own in pairs)


def _structure(node: Node) -> tuple[Any, ...]:
    """Return the fields of a node that do not depend on sizes, and that `Graph.difference` does not compare."""
    return node.takes, node.plain_inputs, node.checkpoint, node.is_saved, node.compiled


def _elements(tensors: Sequence[Tensor]) -> list[int]:
    return [math.prod(tensor.shape) for tensor in tensors]


def _counts(graph: Graph, elements: Sequence[int]) -> list[int]:
    """Count for each node the elements that it reads and makes."""
    return [sum(elements[t] for t in (*node.inputs, *node.outputs)) for node in graph.nodes]


def _works(nodes: Sequence[Node], counts: Sequence[int]) -> list[int]:
    """Return for each node the number that its time grows with: its arithmetic, or else the elements it handles."""
    return [node.flops or count for node, count in zip(nodes, counts, strict=True)]


def _line(works: Sequence[int], times: Sequence[float]) -> Line:
    """Return the line of times over work; of samples that work as much, the longest time."""
    longest = dict[int, float]()
    for work, time_ms in zip(works, times, strict=True):
        longest[work] = max(longest.get(work, 0.0), time_ms)
    return Line(*zip(*sorted(longest.items()), strict=True))
