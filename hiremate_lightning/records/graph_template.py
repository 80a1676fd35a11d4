"""A captured graph and its costs at sizes that were never traced: its numbers are expressions of the sizes.

The same code at a few sizes is the same graph, node for node, with other numbers. Shapes and bytes of storages are
expressions, or there is no template: they are exact at all sizes. Workspaces of some kernels are none; they are bounded
from above. Times are on a line through those measured, over the work that an operation does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial

from .costs import Profile
from .expressions import Expression, NoTemplateError, Sizes, find_expression
from .graph import Graph, Node, Storage, Tensor
from .scaling import Line, difference

Costed = tuple[Graph, Profile]
GrowingNode = tuple[Callable[..., Node], tuple[int, ...], tuple[int, ...]]  # what makes it, and numbers of each sample
GROWING = ("key", "flops", "plain_bytes")
LEAST = 2  # size of a dimension: tensors of one or no row are often handled apart


class GraphTemplate:
    """A graph and its costs at all sizes.

    Args:
        samples: The graph and its costs as they are at a few sizes.
        sizes: The sizes of each; those that are equal in all samples are one size.

    Raises:
        NoTemplateError: If the samples are other code, or a shape or a storage has no expression.
    """

    def __init__(self, samples: Sequence[Costed], sizes: Sequence[Sizes]) -> None:
        graphs = [graph for graph, _ in samples]
        self._base, self._profile = samples[0]
        for size, graph in zip(sizes, graphs, strict=True):
            why = difference(self._base, graph)
            if why is not None:
                raise NoTemplateError(f"The code at the sizes {size} is not that at the sizes {sizes[0]}: {why}")
            if list(map(_structure, graph.nodes)) != list(map(_structure, self._base.nodes)):
                raise NoTemplateError(f"Operations at the sizes {size} take other memory than at the sizes {sizes[0]}")
        self._sizes = tuple(sizes)
        self._expressions = dict[tuple[int, ...], Expression | None]()
        self._shapes = self._find_shapes(graphs)
        self._storages = self._find_storages(graphs)
        self._nodes = self._find_nodes(graphs)
        self._counts = list(zip(*map(_counts, graphs), strict=True))
        works = zip(*map(_works, graphs), strict=True)
        times = zip(*(profile.time_ms for _, profile in samples), strict=True)
        self._times = [_line(*pair) for pair in zip(works, times, strict=True)]
        self._workspaces = list(zip(*(profile.workspace_bytes for _, profile in samples), strict=True))
        for same in self._workspaces:
            self._find(same)

    def at(self, sizes: Sizes) -> Costed:
        """Return the graph and its costs at some sizes.

        Raises:
            NoTemplateError: If the samples don't tell about these.
        """
        values = {same: e.at(sizes) for same, e in self._expressions.items() if e is not None}
        if any(values[same] < LEAST <= min(same) for columns in self._shapes.values() for same in columns):
            raise NoTemplateError(f"At the sizes {sizes} there are dimensions of 1 or less, which samples do not have")
        tensors, storages, nodes = list(self._base.tensors), list(self._base.storages), list(self._base.nodes)
        for index, columns in self._shapes.items():
            before, shape = tensors[index], tuple(values[same] for same in columns)
            tensors[index] = Tensor(before.name, before.storage, shape, before.dtype, before.producer)
        for index, same in self._storages.items():
            storages[index] = Storage(values[same], storages[index].kind, storages[index].plain_times)
        graph = replace(self._base, tensors=tuple(tensors), storages=tuple(storages))
        counts = _counts(graph)

        def number(index: int, same: tuple[int, ...]) -> int:
            return values[same] if same in values else _bound(same, self._counts[index], counts[index])

        suffix = f" at {sizes}"
        for index, (make, flops, plain_bytes) in self._nodes.items():
            key = nodes[index].key + suffix
            nodes[index] = make(key=key, flops=number(index, flops), plain_bytes=number(index, plain_bytes))
        graph = replace(graph, nodes=tuple(nodes)).like(self._base)
        works = (node.flops or count for node, count in zip(nodes, counts, strict=True))
        times = tuple(line.measured(work) for line, work in zip(self._times, works, strict=True))
        workspaces = tuple(number(index, same) for index, same in enumerate(self._workspaces))
        return graph, replace(self._profile, time_ms=times, workspace_bytes=workspaces)

    # ---------------------------------------------------------------- expressions

    def _find(self, same: tuple[int, ...]) -> Expression | None:
        if same not in self._expressions:
            self._expressions[same] = find_expression(self._sizes, same)
        return self._expressions[same]

    def _need(self, same: tuple[int, ...], what: str) -> None:
        if self._find(same) is None:
            raise NoTemplateError(f"At the sizes {self._sizes} {what} is {same}, which is no expression of them")

    def _find_shapes(self, graphs: Sequence[Graph]) -> dict[int, list[tuple[int, ...]]]:
        """Find for each tensor that grows the values of each dimension."""
        growing = {}
        for index, tensors in enumerate(zip(*(graph.tensors for graph in graphs), strict=True)):
            shapes = [tensor.shape for tensor in tensors]
            if len(set(shapes)) > 1:
                growing[index] = list(zip(*shapes, strict=True))
                for same in growing[index]:
                    self._need(same, f"a dimension of {tensors[0].name}")
        return growing

    def _find_storages(self, graphs: Sequence[Graph]) -> dict[int, tuple[int, ...]]:
        """Find for each storage that grows its bytes."""
        growing = {}
        for index, storages in enumerate(zip(*(graph.storages for graph in graphs), strict=True)):
            same = tuple(storage.size_bytes for storage in storages)
            if storages[0].kind.is_resident and self._find(same) is None:
                continue  # an input may be part of a larger tensor of the caller's: no step allocates its bytes
            if len(set(same)) > 1:
                self._need(same, f"the size of the storage {index}")
                growing[index] = same
        return growing

    def _find_nodes(self, graphs: Sequence[Graph]) -> dict[int, GrowingNode]:
        """Find for each operation that grows its arithmetic, and what plain PyTorch needs beside it."""
        growing = {}
        for index, nodes in enumerate(zip(*(graph.nodes for graph in graphs), strict=True)):
            if len({node.key for node in nodes}) > 1:
                flops, plain_bytes = tuple(node.flops for node in nodes), tuple(node.plain_bytes for node in nodes)
                growing[index] = _made_like(nodes[0]), flops, plain_bytes
                self._find(flops)
                self._find(plain_bytes)
        return growing


def _made_like(node: Node) -> Callable[..., Node]:
    """Return what makes nodes that differ from one in what grows, several times as fast as `replace`."""
    return partial(Node, **{f.name: getattr(node, f.name) for f in fields(node) if f.name not in GROWING})


def _structure(node: Node) -> tuple[object, ...]:
    """Return what of a node does not depend on sizes, beyond what `difference` compares."""
    return node.takes, node.plain_inputs, node.checkpoint, node.is_saved, node.compiled


def _counts(graph: Graph) -> list[int]:
    """Count for each node the elements that it reads and makes."""
    elements = [math.prod(tensor.shape) for tensor in graph.tensors]
    return [sum(elements[t] for t in (*node.inputs, *node.outputs)) for node in graph.nodes]


def _works(graph: Graph) -> list[int]:
    """Return for each node its arithmetic, or else the elements that it reads and makes."""
    return [node.flops or count for node, count in zip(graph.nodes, _counts(graph), strict=True)]


def _line(works: Sequence[int], times: Sequence[float]) -> Line:
    """Return the line of times over work; of samples that work as much, the longest time."""
    longest = dict[int, float]()
    for work, time_ms in zip(works, times, strict=True):
        longest[work] = max(longest.get(work, 0.0), time_ms)
    return Line(*zip(*sorted(longest.items()), strict=True))


def _bound(values: Sequence[int], counts: Sequence[int], count: int) -> int:
    """Bound a number from above that has no expression: it grows no faster than its largest ratio to the elements.

    Args:
        values: The number in each sample.
        counts: The elements that the operation reads and makes in each.
        count: Those that it reads and makes now.
    """
    most = max(values)
    ratio = max(value / max(1, elements) for value, elements in zip(values, counts, strict=True))
    return most if count <= max(counts) else max(most, math.ceil(ratio * count))
