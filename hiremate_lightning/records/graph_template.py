"""A captured graph and its costs at sizes that were never traced: its numbers follow from those of a few samples.

The same code at a few sizes is the same graph, node for node, with other numbers. `Expressions` or `FittedLines`
compute these from the sizes (`sized_numbers`). A storage has the bytes of the tensor that fills it, so these are exact
even where they grow with the square of a length. Times are on a line through the measured ones: over the work of an
operation, or over the size where only one varies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial

from .costs import Profile
from .expressions import NoTemplateError, Sizes
from .graph import OUTSIDE, Graph, Node, Storage, Tensor, item_bytes
from .sized_numbers import Expressions, FittedLines, Line, Number, Values

Costed = tuple[Graph, Profile]
GrowingNode = tuple[Callable[..., Node], Values, Values]  # its maker, its arithmetic, bytes that plain PyTorch needs
GROWING = ("key", "flops", "plain_bytes")
LEAST = 2  # size of a dimension: tensors of one or no row are often handled apart


class GraphTemplate:
    """A graph and its costs at all sizes.

    Args:
        samples: The graph and its costs at a few sizes. Fields that do not depend on sizes are the first one's.
        numbers: How numbers follow from the sizes of these samples.
        block_bytes: The allocator hands out multiples of it.

    Raises:
        NoTemplateError: If the samples are other code, or a shape or a storage does not follow from the sizes.
    """

    def __init__(self, samples: Sequence[Costed], numbers: Expressions | FittedLines, block_bytes: int = 1) -> None:
        graphs = [graph for graph, _ in samples]
        self._base, self._profile = samples[0]
        self._numbers, self._block_bytes = numbers, block_bytes
        self._check_are_same(graphs)
        self._counted, self._measured = dict[Values, Number](), dict[Values, Number | None]()
        self._shapes = self._find_shapes(graphs)
        self._filled, self._storages = self._find_storages(graphs)
        self._nodes = self._find_nodes(graphs)
        counts = [_counts(graph, _elements(graph.tensors)) for graph in graphs]
        triples = zip(graphs, counts, numbers.sizes, strict=True)
        works = (self._works(graph.nodes, of_nodes, size) for graph, of_nodes, size in triples)
        times = (profile.time_ms for _, profile in samples)
        self._counts = list(zip(*counts, strict=True))  # of each node, in each sample
        self._times = [_line(*pair) for pair in zip(zip(*works, strict=True), zip(*times, strict=True), strict=True)]
        self._workspaces = list(zip(*(profile.workspace_bytes for _, profile in samples), strict=True))
        for values in self._workspaces:
            self._measure(values)

    def at(self, sizes: Sizes) -> Costed:
        """Return the graph and its costs at some sizes.

        Raises:
            NoTemplateError: If the samples don't tell about these.
        """
        measured = {values: number(sizes) for values, number in self._measured.items() if number is not None}
        tensors = self._tensors_at(sizes)
        elements = _elements(tensors)
        storages, nodes = list(self._base.storages), list(self._base.nodes)
        sized = [(s, elements[t] * item_bytes(tensors[t].dtype)) for s, t in self._filled.items()]
        for index, size_bytes in (*sized, *((s, measured[values]) for s, values in self._storages.items())):
            storages[index] = Storage(self._in_blocks(size_bytes), storages[index].kind, storages[index].plain_times)
        counts = _counts(self._base, elements)

        def number(index: int, values: Values) -> int:
            if values in measured:
                return measured[values]
            # Without an expression it grows no faster than its largest ratio to the elements read and made.
            before, most = self._counts[index], max(values)
            ratio = max(value / max(1, count) for value, count in zip(values, before, strict=True))
            return most if counts[index] <= max(before) else max(most, math.ceil(ratio * counts[index]))

        suffix = f" at {sizes}"
        for index, (make, flops, plain_bytes) in self._nodes.items():
            key = nodes[index].key + suffix
            nodes[index] = make(key=key, flops=number(index, flops), plain_bytes=number(index, plain_bytes))
        graph = replace(self._base, nodes=tuple(nodes), tensors=tuple(tensors), storages=tuple(storages))
        pairs = zip(self._times, self._works(nodes, counts, sizes), strict=True)
        times = tuple(line.measured(work) for line, work in pairs)
        workspaces = tuple(self._in_blocks(number(index, values)) for index, values in enumerate(self._workspaces))
        return graph.like(self._base), replace(self._profile, time_ms=times, workspace_bytes=workspaces)

    def _tensors_at(self, sizes: Sizes) -> list[Tensor]:
        counted = {values: number(sizes) for values, number in self._counted.items()}
        if self._numbers.is_exact and any(size < LEAST <= min(values) for values, size in counted.items()):
            raise NoTemplateError(f"At the sizes {sizes} there are dimensions of 1 or less, which samples do not have")
        tensors = list(self._base.tensors)
        for index, columns in self._shapes.items():
            before, shape = tensors[index], tuple(counted[values] for values in columns)
            tensors[index] = Tensor(before.name, before.storage, shape, before.dtype, before.producer)
        return tensors

    def _works(self, nodes: Sequence[Node], counts: Sequence[int], sizes: Sizes) -> Sequence[int]:
        """Return for each node the number that its time grows with.

        That is its arithmetic, or else the elements that it reads and makes. For lines over one size it is the size.
        """
        if not self._numbers.is_exact:
            return sizes * len(nodes)
        return [node.flops or count for node, count in zip(nodes, counts, strict=True)]

    def _in_blocks(self, size_bytes: int) -> int:
        return -(-size_bytes // self._block_bytes) * self._block_bytes

    # ---------------------------------------------------------------- how numbers follow from sizes

    def _check_are_same(self, graphs: Sequence[Graph]) -> None:
        sizes = [", ".join(map(str, size)) for size in self._numbers.sizes]
        for size, graph in zip(sizes, graphs, strict=True):
            why = self._base.difference(graph)
            if why is not None:
                raise NoTemplateError(f"The steps at sizes {sizes[0]} and {size} are not the same graph: {why}")
            if self._numbers.is_exact and list(map(_structure, graph.nodes)) != list(map(_structure, self._base.nodes)):
                raise NoTemplateError(f"Operations at the sizes {size} take other memory than at the sizes {sizes[0]}")

    def _measure(self, values: Values) -> Number | None:
        if values not in self._measured:
            self._measured[values] = self._numbers.measured(values)
        return self._measured[values]

    def _need(self, number: Number | None, values: Values, what: str) -> Number:
        if number is None:
            raise NoTemplateError(
                f"At the sizes {self._numbers.sizes} {what} is {values}, which is no expression of them"
            )
        return number

    def _find_shapes(self, graphs: Sequence[Graph]) -> dict[int, list[Values]]:
        """Find for each tensor that grows the values of each dimension."""
        growing = {}
        for index, tensors in enumerate(zip(*(graph.tensors for graph in graphs), strict=True)):
            shapes = [tensor.shape for tensor in tensors]
            if len(set(shapes)) > 1:
                growing[index] = list(zip(*shapes, strict=True))
                for values in growing[index]:
                    number = self._counted.get(values) or self._numbers.counted(values)
                    self._counted[values] = self._need(number, values, f"a dimension of {tensors[0].name}")
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
            elif storages[0].kind.is_resident and self._measure(values) is None:
                continue  # an input may be part of a larger tensor of the caller's: no step allocates its bytes
            elif len(set(values)) > 1:
                self._need(self._measure(values), values, f"the size of the storage {index}")
                growing[index] = values
        return filled, growing

    def _fills(self, index: int, sizes_bytes: Values, graphs: Sequence[Graph]) -> bool:
        """Whether a tensor takes up exactly its storage in all samples, and was captured, not measured."""
        producer, dtype = self._base.tensors[index].producer, self._base.tensors[index].dtype
        if producer is not None and self._base.nodes[producer].op == OUTSIDE:
            return False
        pairs = zip((graph.tensors[index].shape for graph in graphs), sizes_bytes, strict=True)
        return all(self._in_blocks(math.prod(shape) * item_bytes(dtype)) == own for shape, own in pairs)

    def _find_nodes(self, graphs: Sequence[Graph]) -> dict[int, GrowingNode]:
        """Find for each operation that grows its arithmetic, and the bytes that plain PyTorch needs for it."""
        growing: dict[int, GrowingNode] = {}
        for index, nodes in enumerate(zip(*(graph.nodes for graph in graphs), strict=True)):
            if len({(node.key, node.flops, node.plain_bytes) for node in nodes}) > 1:
                flops = tuple(node.flops for node in nodes)
                plain_bytes = tuple(node.plain_bytes for node in nodes)
                same = {f.name: getattr(nodes[0], f.name) for f in fields(nodes[0]) if f.name not in GROWING}
                growing[index] = partial(Node, **same), flops, plain_bytes  # several times as fast as `replace`
                self._measure(flops)
                self._measure(plain_bytes)
        return growing


def _structure(node: Node) -> tuple[object, ...]:
    """Return the fields of a node that do not depend on sizes, and that `Graph.difference` does not compare."""
    return node.takes, node.plain_inputs, node.checkpoint, node.is_saved, node.compiled


def _elements(tensors: Sequence[Tensor]) -> list[int]:
    return [math.prod(tensor.shape) for tensor in tensors]


def _counts(graph: Graph, elements: Sequence[int]) -> list[int]:
    """Count for each node the elements that it reads and makes."""
    return [sum(elements[t] for t in (*node.inputs, *node.outputs)) for node in graph.nodes]


def _line(works: Sequence[int], times: Sequence[float]) -> Line:
    """Return the line of times over work; of samples that work as much, the longest time."""
    longest = dict[int, float]()
    for work, time_ms in zip(works, times, strict=True):
        longest[work] = max(longest.get(work, 0.0), time_ms)
    return Line(*zip(*sorted(longest.items()), strict=True))
