"""One training step at other sizes: its graph and costs, refitted from steps that ran at a few sizes.

A *size* is any whole number that the step's tensors grow with: the batch size, a sequence length. Steps captured at two
sizes must be the same graph, node for node; then each dimension of each tensor lies on a line through its values there,
and bytes are products of dimensions, so they are exact also where they grow with the square of a sequence length. What
was only measured (time, workspace, the bytes of outside code) can't be exact: between two sizes it is interpolated,
beyond them it follows the last two, by their line or, where it grew faster than the size, by that power.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from .costs import Profile
from .graph import OUTSIDE, Graph, Storage, Tensor, item_bytes
from .step import Call, Gap, GapPart, Step

MAX_POWER = 2.0  # of the size, that anything measured is taken to grow by


def difference(first: Graph, second: Graph) -> str | None:
    """Describe where two graphs stop being the same but for sizes, None where they don't.

    Names don't count: the front end numbers them as it meets them.
    """
    if first.structure == second.structure and _orders(first) == _orders(second):
        return None
    for one, other in zip(first.nodes, second.nodes, strict=False):
        if _work(one) != _work(other):
            where = f" in module {one.module!r}" if one.module else ""
            return f"node {one.name} ({one.op}){where} is {other.name} ({other.op}) there"
    for before, after in zip(first.tensors, second.tensors, strict=False):
        if (before.storage, before.dtype, before.producer, len(before.shape)) != (
            after.storage,
            after.dtype,
            after.producer,
            len(after.shape),
        ):
            return f"tensor {before.name} is another one there, {after.name}"
    if [s.kind for s in first.storages] != [s.kind for s in second.storages] or _orders(first) != _orders(second):
        counts = f"{len(first.nodes)} and {len(second.nodes)} nodes, {len(first.tensors)} and {len(second.tensors)}"
        return f"they have {counts} tensors, or run them in another order"
    return None


def _work(node: object) -> tuple[object, ...]:
    names = ("op", "direction", "inputs", "outputs", "is_random", "is_mutating", "reads_mutated", "replays")
    return tuple(getattr(node, name) for name in names)


def _orders(graph: Graph) -> tuple[object, ...]:
    counts = (len(graph.nodes), len(graph.tensors))
    ends = (graph.inputs, graph.tangents, graph.outputs, graph.gradients, graph.held)
    return (counts, graph.forward, graph.backward, ends)


def are_same(graphs: Sequence[Graph], others: Sequence[Graph]) -> bool:
    """Whether the same code at the same sizes was captured twice."""
    return len(graphs) == len(others) and all(
        [t.shape for t in one.tensors] == [t.shape for t in other.tensors] and difference(one, other) is None
        for one, other in zip(graphs, others, strict=True)
    )


def is_no_larger(graph: Graph, than: Graph) -> bool:
    """Whether no tensor of a graph is larger in any dimension than in another graph of the same code."""
    pairs = zip(graph.tensors, than.tensors, strict=True)
    return all(size <= most for one, other in pairs for size, most in zip(one.shape, other.shape, strict=True))


def at_size(call: Call, graph: Graph, profile: Profile) -> Call | None:
    """Foresee a call of the same code captured at another size, None where that is other code.

    What runs outside is taken to grow as the input or output does that grows most, and never to shrink.
    """
    graph = replace(graph, held=call.graph.held).like(graph)
    if difference(call.graph, graph) is not None:
        return None
    counts = [[math.prod(g.tensors[t].shape) for t in (*g.inputs, *g.outputs)] for g in (call.graph, graph)]
    growth = max([1.0, *(new / max(1, old) for old, new in zip(*counts, strict=True))])

    def grown(gap: Gap) -> Gap:
        held_bytes = max(gap.held_bytes, math.ceil(growth * gap.held_bytes))  # what is given back does not grow
        return replace(gap, held_bytes=held_bytes, peak_bytes=math.ceil(growth * gap.peak_bytes))

    return replace(
        call,
        graph=graph,
        profile=profile,
        before_deaths=tuple(GapPart(s.alive, math.ceil(growth * s.peak_bytes)) for s in call.before_deaths),
        before_forward=grown(call.before_forward),
        after_forward=grown(call.after_forward),
        before_backward=grown(call.before_backward),
        after_backward=grown(call.after_backward),
    )


class Line:
    """Values at a few sizes, and at all others.

    Args:
        sizes: Sizes, ascending, at least one.
        values: The value at each.
    """

    def __init__(self, sizes: Sequence[int], values: Sequence[float]) -> None:
        self._sizes = tuple(sizes)
        self._values = tuple(values)

    def ends(self, size: float) -> tuple[tuple[int, float], tuple[int, float]]:
        """Return the two sizes between which a size lies, or the nearest two, with the values there."""
        i = min(max(bisect_right(self._sizes, size) - 1, 0), len(self._sizes) - 2)
        return (self._sizes[i], self._values[i]), (self._sizes[i + 1], self._values[i + 1])

    def straight(self, size: float) -> float:
        """Return the value on the straight line through these two."""
        (x, low), (y, high) = self.ends(size)
        return low + (high - low) * (size - x) / (y - x)

    def whole(self, size: int) -> int:
        """Return the value on the line, for values that are whole numbers; rounded up, at least 0."""
        if len(self._sizes) == 1:
            return int(self._values[0])
        (x, low), (y, high) = ((end, int(value)) for end, value in self.ends(size))
        return max(0, -((-(low * (y - x) + (high - low) * (size - x))) // (y - x)))

    def measured(self, size: int) -> float:
        """Return the value, for what was measured: beyond the last size never less than there, and see `MAX_POWER`."""
        if len(self._sizes) == 1:
            return self._values[0]
        (x, low), (y, high) = self.ends(size)
        on_line = self.straight(size)
        if size <= y:
            return max(0.0, on_line)
        power = min(MAX_POWER, (math.log(high) - math.log(low)) / math.log(y / x)) if min(low, high) > 0 else 0.0
        return max(high, on_line, high * (size / y) ** power if power > 1 else 0.0)


class Scaling:
    """A step at any size.

    Args:
        samples: The step by size, at least 1; one is enough for a step that is the same at all sizes.
        block_bytes: The allocator hands out multiples of it.

    Attributes:
        sizes: The sizes of the samples, ascending.

    Raises:
        ValueError: If two of the graphs differ in more than sizes.
    """

    def __init__(self, samples: Mapping[int, Step], block_bytes: int = 1) -> None:
        self._at = dict(sorted(samples.items()))
        self.sizes, self._samples = tuple(self._at), tuple(self._at.values())
        self._block_bytes = block_bytes
        for size, other in itertools.pairwise(self.sizes):
            found = difference(self._at[size].graph, self._at[other].graph)
            if found is not None:
                raise ValueError(f"The steps at sizes {size} and {other} are not the same graph: {found}")

    def at(self, size: int) -> Step:
        """Return the step at a size; at the size of a sample, that sample."""
        if size in self._at:
            return self._at[size]
        base = self._samples[-1]
        tensors = list(base.graph.tensors)
        for index, lines in self._growing_shapes.items():
            tensors[index] = replace(tensors[index], shape=tuple(line.whole(size) for line in lines))
        storages = list(base.graph.storages)
        for index, source in self._growing_storages.items():
            storages[index] = replace(storages[index], size_bytes=self._bytes_at(size, source, tensors))
        nodes = list(base.graph.nodes)
        for index, line in self._growing_flops.items():
            nodes[index] = replace(nodes[index], flops=round(line.measured(size)))
        graph = replace(base.graph, nodes=tuple(nodes), tensors=tuple(tensors), storages=tuple(storages))
        times = tuple(line.measured(size) for line in self._times)
        workspaces = tuple(self._round(math.ceil(line.measured(size))) for line in self._workspaces)
        return replace(base, graph=graph, profile=Profile(times, workspaces, base.profile.device, base.profile.link))

    def _bytes_at(self, size: int, source: int | Line, tensors: Sequence[Tensor]) -> int:
        if isinstance(source, Line):
            return self._round(math.ceil(source.measured(size)))
        return self._round(_bytes_of(tensors[source]))

    def _round(self, size_bytes: int) -> int:
        return -(-size_bytes // self._block_bytes) * self._block_bytes

    @cached_property
    def _growing_shapes(self) -> dict[int, tuple[Line, ...]]:
        found = {}
        for index, same in enumerate(zip(*(sample.graph.tensors for sample in self._samples), strict=True)):
            shapes = [tensor.shape for tensor in same]
            if len(set(shapes)) > 1:
                found[index] = tuple(Line(self.sizes, dimension) for dimension in zip(*shapes, strict=True))
        return found

    @cached_property
    def _growing_storages(self) -> dict[int, int | Line]:
        """Find the tensor that fills each growing storage; the line of its bytes where none does."""
        on: dict[int, list[int]] = {}
        for index, tensor in enumerate(self._samples[-1].graph.tensors):
            if tensor.storage is not None:
                on.setdefault(tensor.storage, []).append(index)
        found: dict[int, int | Line] = {}
        for index, same in enumerate(zip(*(sample.graph.storages for sample in self._samples), strict=True)):
            filling = [tensor for tensor in on.get(index, ()) if self._fills(tensor, same)]
            if any(tensor in self._growing_shapes for tensor in filling):
                # The tensor of most dimensions: a flattened one hides that two of them grow.
                found[index] = max(filling, key=lambda tensor: len(self._samples[-1].graph.tensors[tensor].shape))
            elif len({storage.size_bytes for storage in same}) > 1:
                found[index] = Line(self.sizes, [storage.size_bytes for storage in same])
        return found

    def _fills(self, index: int, storages: Sequence[Storage]) -> bool:
        """Whether a tensor takes up exactly its storage in all samples, and was captured, not measured."""
        tensors = [sample.graph.tensors[index] for sample in self._samples]
        producer = tensors[0].producer
        if producer is not None and self._samples[0].graph.nodes[producer].op == OUTSIDE:
            return False
        pairs = zip(tensors, storages, strict=True)
        return all(self._round(_bytes_of(tensor)) == storage.size_bytes for tensor, storage in pairs)

    @cached_property
    def _growing_flops(self) -> dict[int, Line]:
        counts = zip(*([node.flops for node in sample.graph.nodes] for sample in self._samples), strict=True)
        return {index: Line(self.sizes, same) for index, same in enumerate(counts) if len(set(same)) > 1}

    @cached_property
    def _times(self) -> tuple[Line, ...]:
        return self._lines([sample.profile.time_ms for sample in self._samples])

    @cached_property
    def _workspaces(self) -> tuple[Line, ...]:
        return self._lines([sample.profile.workspace_bytes for sample in self._samples])

    def _lines(self, values: Sequence[Sequence[float]]) -> tuple[Line, ...]:
        return tuple(Line(self.sizes, same) for same in zip(*values, strict=True))


def _bytes_of(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * item_bytes(tensor.dtype)
