"""Results of the backward that take the memory of values of the forward."""

from __future__ import annotations

from .graph import Graph


def taken_bytes(graph: Graph) -> dict[int, int]:
    """Return, by node, the bytes of a result that takes the memory of a value which dies there in any schedule.

    Such a node needs that much less than its workspace: both the value and the result are counted while it runs.
    """
    nodes = ((position, index, graph.nodes[index].takes) for position, index in enumerate(graph.backward))
    takers = [(position, index, taken) for position, index, taken in nodes if taken is not None]
    last_reads = _last_reads(graph) if takers else {}
    found = {}
    for position, index, taken in takers:
        storage = graph.tensors[taken].storage
        if storage is not None and last_reads.get(storage, -1) <= position:
            found[index] = min(graph.sizes[storage], *(graph.sizes[s] for s in graph.allocates[index]))
    return found


def _last_reads(graph: Graph) -> dict[int, int]:
    """Return, by storage, the last place in the backward that may read it, or what is computed from it in the forward.

    Where a value may be computed again from it, its readers count. What stays to the end of the step is read after all,
    but what it was computed from is not.
    """
    end, last = len(graph.backward), dict[int, int]()
    for position, index in enumerate(graph.backward):
        last |= dict.fromkeys(graph.nodes[index].inputs, position)
    last |= dict.fromkeys(graph.gradients, end)
    for index in reversed(graph.forward):
        node = graph.nodes[index]
        latest = max((last[t] for t in node.outputs if t in last), default=-1)
        for tensor in node.inputs:
            last[tensor] = max(latest, last.get(tensor, -1))
    last |= dict.fromkeys((*graph.held, *graph.retained), end)
    by_storage = dict[int, int]()
    for tensor, position in last.items():
        storage = graph.tensors[tensor].storage
        if storage is not None:
            by_storage[storage] = max(position, by_storage.get(storage, -1))
    return by_storage
