"""A captured graph and its costs at sizes that were never traced: its numbers are expressions of the sizes.

The same code at a few sizes is the same graph, node for node, with other numbers. Shapes and bytes of storages are
expressions, or there is no template: they are exact at all sizes. Workspaces of some kernels are none; they are bounded
from above. Times are on a line through those measured, over the work that an operation does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .costs import Profile
from .expressions import Expression, NoTemplateError, Sizes, find_expression
from .graph import Graph, Node
from .scaling import Line, difference

Costed = tuple[Graph, Profile]


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
        self._works = list(zip(*map(_works, graphs), strict=True))
        times = zip(*(profile.time_ms for _, profile in samples), strict=True)
        self._times = [_line(*pair) for pair in zip(self._works, times, strict=True)]
        self._workspaces = list(zip(*(profile.workspace_bytes for _, profile in samples), strict=True))
        for same in self._workspaces:
            self._find(same)

    def at(self, sizes: Sizes) -> Costed:
        """Return the graph and its costs at some sizes."""
        values = {same: e.at(sizes) for same, e in self._expressions.items() if e is not None}
        tensors, storages, nodes = list(self._base.tensors), list(self._base.storages), list(self._base.nodes)
        for index, columns in self._shapes.items():
            tensors[index] = replace(tensors[index], shape=tuple(values[same] for same in columns))
        for index, same in self._storages.items():
            storages[index] = replace(storages[index], size_bytes=values[same])
        elements = [math.prod(tensor.shape) for tensor in tensors]
        works = list[int]()
        for index, node in enumerate(nodes):
            work = _elements_of(node, elements)
            if index in self._nodes:
                flops, plain_bytes = (values.get(same) for same in self._nodes[index])
                of_samples = [own[0] for own in self._works[index]]
                flops = _bound(self._nodes[index][0], of_samples, work) if flops is None else flops
                plain_bytes = _bound(self._nodes[index][1], of_samples, work) if plain_bytes is None else plain_bytes
                key = f"{node.key} at {sizes}"
                nodes[index] = replace(node, key=key, flops=flops, plain_bytes=plain_bytes)
            works.append(work)
        graph = replace(self._base, nodes=tuple(nodes), tensors=tuple(tensors), storages=tuple(storages))
        return graph, self._costs_at(values, graph, works)

    def _costs_at(self, values: dict[tuple[int, ...], int], graph: Graph, works: Sequence[int]) -> Profile:
        times, workspaces = list[float](), list[int]()
        for index, node in enumerate(graph.nodes):
            same, work = self._workspaces[index], works[index]
            exact = values.get(same)
            bound = _bound(same, [own[0] for own in self._works[index]], work) if exact is None else exact
            times.append(self._times[index].measured(node.flops or work))
            workspaces.append(bound)
        return replace(self._profile, time_ms=tuple(times), workspace_bytes=tuple(workspaces))

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
        found = {}
        for index, tensors in enumerate(zip(*(graph.tensors for graph in graphs), strict=True)):
            shapes = [tensor.shape for tensor in tensors]
            if len(set(shapes)) > 1:
                found[index] = list(zip(*shapes, strict=True))
                for same in found[index]:
                    self._need(same, f"a dimension of {tensors[0].name}")
        return found

    def _find_storages(self, graphs: Sequence[Graph]) -> dict[int, tuple[int, ...]]:
        """Find for each storage that grows its bytes."""
        found = {}
        for index, storages in enumerate(zip(*(graph.storages for graph in graphs), strict=True)):
            same = tuple(storage.size_bytes for storage in storages)
            if len(set(same)) > 1:
                self._need(same, f"the size of the storage {index}")
                found[index] = same
        return found

    def _find_nodes(self, graphs: Sequence[Graph]) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Find for each operation that grows its arithmetic, and what plain PyTorch needs beside it."""
        found = {}
        for index, nodes in enumerate(zip(*(graph.nodes for graph in graphs), strict=True)):
            if len({node.key for node in nodes}) > 1:
                found[index] = tuple(node.flops for node in nodes), tuple(node.plain_bytes for node in nodes)
                for same in found[index]:
                    self._find(same)
        return found


def _structure(node: Node) -> tuple[object, ...]:
    """Return what of a node does not depend on sizes, beyond what `difference` compares."""
    return node.takes, node.plain_inputs, node.checkpoint, node.is_saved, node.compiled


def _elements_of(node: Node, elements: Sequence[int]) -> int:
    return sum(elements[t] for t in (*node.inputs, *node.outputs))


def _works(graph: Graph) -> list[tuple[int, int]]:
    """Return for each node the elements that it reads and makes, and its arithmetic, or else these elements again."""
    elements = [math.prod(tensor.shape) for tensor in graph.tensors]
    counts = ((node, _elements_of(node, elements)) for node in graph.nodes)
    return [(count, node.flops or count) for node, count in counts]


def _line(works: Sequence[tuple[int, int]], times: Sequence[float]) -> Line:
    """Return the line of times over work; of samples that work as much, the longest time."""
    longest = dict[int, float]()
    for (_, work), time_ms in zip(works, times, strict=True):
        longest[work] = max(longest.get(work, 0.0), time_ms)
    return Line(*zip(*sorted(longest.items()), strict=True))


def _bound(values: Sequence[int], works: Sequence[int], work: int) -> int:
    """Bound a number from above that has no expression: it grows no faster than its largest ratio to the elements."""
    most = max(values)
    if work <= max(works):
        return most
    return max(most, math.ceil(max(value / max(1, own) for value, own in zip(values, works, strict=True)) * work))
