"""Undefined gradients: find the backward nodes that need not run if the caller left some outputs unused.

A model may return more than its loss, logits for example. Autograd then has no gradient for the logits. torch.compile
passes zeros instead: the zeros are as large as the logits, adding them may change the strides of the true gradient, and
they reach parameters that eager training leaves without gradient. Here, as in eager training, a backward node runs only
if one of its incoming gradients has arrived, and a sum with one missing term is the present term. The backward of a
`torch.autograd.Function` gets zeros for its missing gradients if at least one of its gradients has arrived.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import torch
from torch import fx

from ..memory.allocator import allocated_bytes
from ..records.costs import Profile
from ..records.graph import Graph, Node
from ..rewriting.nodes import reshaped
from ..rewriting.overwriting import overwrite
from ..torch_private import aot
from .capture import Absence, Captured

NOTHING_ABSENT = Absence()


def find_absent(captured: Captured, missing: frozenset[int]) -> Absence:
    """Return what is absent from the backward if the outputs at the positions `missing` get no gradient.

    The result is cached for each `missing`: the proof, the records, the plan and the program all need it.
    """
    if missing not in captured.absences:
        captured.absences[missing] = _find(captured, missing)
    return captured.absences[missing]


def _find(captured: Captured, missing: frozenset[int]) -> Absence:
    tangents = captured.tangents
    absent = {tangents[position] for position in missing}
    dependent, replaced = set(tangents), dict[fx.Node, fx.Node]()
    for is_of_function, nodes in groupby(tuple(captured.joint.graph.nodes), aot.is_of_function_backward):
        members, present = list(nodes), dependent - absent if is_of_function else set()
        gets_zeros = any(not present.isdisjoint(node.all_input_nodes) for node in members)
        for node in members:
            gradients = [a for a in node.all_input_nodes if a in dependent]
            if not gradients or node.op == "output":
                continue
            dependent.add(node)
            if gets_zeros:
                continue
            if all(a in absent for a in gradients):
                absent.add(node)
            elif (other := _other_term(node, absent)) is not None:
                replaced[node] = other
    absence = Absence(frozenset(absent), replaced)
    graph, overwrites = _overwritten(captured, absence)
    return replace(absence, overwrites=overwrites, graph=graph)


def _other_term(node: fx.Node, absent: set[fx.Node]) -> fx.Node | None:
    """Return the present term of a sum of two whose other term is absent; None if the sum is not equal to the term."""
    terms = node.all_input_nodes
    present = [a for a in terms if a not in absent]
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(terms) != 2 or len(present) != 1:
        return None
    total, term = node.meta.get("val"), present[0].meta.get("val")
    if not isinstance(total, torch.Tensor) or not isinstance(term, torch.Tensor):
        return None
    return present[0] if (total.shape, total.dtype) == (term.shape, term.dtype) else None


def without_missing(captured: Captured, missing: frozenset[int], profile: Profile) -> tuple[Graph, Profile]:
    """Return the captured graph and its costs without the nodes that only the missing gradients need.

    Nodes and tensors keep their indices; absent ones take no memory and no time. Forward values that only absent nodes
    read stay alive until the backward starts, since the forward does not know yet which gradients will be missing.
    """
    if not missing:
        return captured.graph, profile
    if captured.made_from is not None:
        graph, profile = captured.made_from.without(missing, captured.sizes)
        return graph.reading_once(captured.overwritten), profile
    absence = find_absent(captured, missing)
    assert absence.graph is not None, "found for gradients that are missing"
    graph = absence.graph
    gone = _gone(captured, absence)
    present = {
        t.storage
        for t, value in zip(graph.tensors, captured.fx_values, strict=True)
        if value not in absence.values and t.producer not in gone
    }
    storages = tuple(s if i in present else replace(s, size_bytes=0) for i, s in enumerate(graph.storages))

    def zeros_bytes(node: fx.Node) -> int:
        """Return the bytes of the zeros that a node reads in place of absent inputs while it runs."""
        shown = [a.meta["val"] for a in node.all_input_nodes if a in absence.values]
        on_device = (t for t in shown if t.device == captured.device)
        return sum(allocated_bytes(t.numel() * t.dtype.itemsize, captured.device) for t in on_device)

    idle = gone | {i for i, node in enumerate(captured.fx_nodes) if node in absence.replaced}
    costs = replace(
        profile,
        time_ms=tuple(0.0 if i in idle else time_ms for i, time_ms in enumerate(profile.time_ms)),
        workspace_bytes=tuple(
            0 if i in idle else size + zeros_bytes(node)
            for i, (node, size) in enumerate(zip(captured.fx_nodes, profile.workspace_bytes, strict=True))
        ),
    )
    tensors = tuple(replace(t, storage=None) if t.producer in gone else t for t in graph.tensors)  # not even views
    return replace(graph, nodes=_without_reads_of_dropped_nodes(graph, gone), tensors=tensors, storages=storages), costs


def _gone(captured: Captured, absence: Absence) -> set[int]:
    """List the backward nodes that are absent, and those whose results no remaining node reads."""
    graph = captured.graph
    read = {t for t in graph.gradients if captured.fx_values[t] not in absence.values}
    gone = set()
    for index in reversed(graph.backward):
        node, value = graph.nodes[index], captured.fx_nodes[index]
        is_read = node.is_random or node.is_mutating or not read.isdisjoint(node.outputs)
        if value in absence.values or not is_read:
            gone.add(index)
        elif value in absence.replaced:
            read.add(captured.tensor_of[absence.replaced[value]])
        else:
            read.update(node.inputs)
    return gone


def _without_reads_of_dropped_nodes(graph: Graph, gone: set[int]) -> tuple[Node, ...]:
    """Return the nodes, where the first backward node reads the forward values in place of the dropped nodes."""
    made = {t for index in graph.forward for t in graph.nodes[index].outputs}
    early = [t for index in sorted(gone) for t in graph.nodes[index].inputs if t in made]
    nodes = [
        replace(n, inputs=(), takes=None, eager_bytes=0, eager_inputs=(), function=None) if index in gone else n
        for index, n in enumerate(graph.nodes)
    ]
    if early:
        first = graph.backward[0]
        nodes[first] = replace(nodes[first], inputs=tuple(dict.fromkeys((*nodes[first].inputs, *early))))
    return tuple(nodes)


def _overwritten(captured: Captured, absence: Absence) -> tuple[Graph, dict[fx.Node, int]]:
    """Return the graph with each sum replaced by its present term, and the overwrites that remain possible.

    A present term is never overwritten, since its strides and its other readers are unknown before it exists. Reshaped
    values are not overwritten either: the copy in the trace may be a view if the term has other strides.
    """
    graph, tensor_of = captured.allocating, captured.tensor_of
    merged: dict[int, int] = {}
    for total, term in absence.replaced.items():
        kept, dropped = graph.tensors[tensor_of[term]].storage, graph.tensors[tensor_of[total]].storage
        if kept is not None and dropped is not None:
            merged[dropped] = merged.get(kept, kept)
    tensors = tuple(t if t.storage not in merged else replace(t, storage=merged[t.storage]) for t in graph.tensors)
    absent = {graph.tensors[tensor_of[value]].storage for value in absence.values if value in tensor_of}
    backward = (captured.fx_nodes[index] for index in graph.backward)
    pairs = ((read, node) for node in backward if (read := reshaped(node)) is not None)
    storages = (graph.tensors[tensor_of[value]].storage for pair in pairs for value in pair if value in tensor_of)
    spared = {*merged.values(), *storages}
    return overwrite(replace(graph, tensors=tensors), captured.fx_nodes, captured.fx_values, spared, absent)[:2]
