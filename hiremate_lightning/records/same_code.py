"""Whether graphs are the same code, captured at other sizes or again; and a call of the same code at another size.

The front end numbers names as it meets them, so names don't count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .costs import Profile
from .graph import Graph
from .step import Call, Gap, GapPart


def difference(first: Graph, second: Graph) -> str | None:
    """Describe the first difference of two graphs other than sizes; None where there is none.

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
    """Predict a call of the same code captured at another size; None where that is other code.

    The memory of outside code is taken to grow as the input or output that grows most, and never to shrink.
    """
    graph = replace(graph, held=call.graph.held).like(graph)
    if difference(call.graph, graph) is not None:
        return None
    counts = [[math.prod(g.tensors[t].shape) for t in (*g.inputs, *g.outputs)] for g in (call.graph, graph)]
    growth = max([1.0, *(new / max(1, old) for old, new in zip(*counts, strict=True))])

    def grown(gap: Gap) -> Gap:
        held_bytes = max(gap.held_bytes, math.ceil(growth * gap.held_bytes))  # bytes that are given back do not grow
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
