"""Undefined gradients: what of a backward needs no work where None comes for outputs that the caller left unused.

A model may return more than its loss, logits for example. Autograd then has no gradient for the rest. PyTorch's
compiled functions are given zeros instead: as large as the logits, added to the true gradient, which may come out with
other strides then, and handed on to parameters that plain training leaves alone. So here, as in plain training, a
computation none of whose gradients has arrived is left out, and of a sum the other term is taken. The backward of a
`torch.autograd.Function` gets zeros for those of its gradients that have not arrived, if any has.
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

NOTHING = Absence()


def find_absent(captured: Captured, missing: frozenset[int]) -> Absence:
    """Return what is absent where gradients of outputs have not arrived, of which `missing` lists the positions.

    It is found once for each of them: the proof, the records, the plan and the program that it runs by all ask for it.
    """
    if missing not in captured.absences:
        captured.absences[missing] = _find(captured, missing)
    return captured.absences[missing]


def _find(captured: Captured, missing: frozenset[int]) -> Absence:
    tangents = captured.tangents
    absent = {tangents[position] for position in missing}
    dependent, replaced = set(tangents), dict[fx.Node, fx.Node]()
    for is_of_function, nodes in groupby(tuple(captured.joint.graph.nodes), aot.is_of_function_backward):
        together, there = list(nodes), dependent - absent if is_of_function else set()
        gets_zeros = any(not there.isdisjoint(node.all_input_nodes) for node in together)
        for node in together:
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
    """Return the term of a sum that is there, where the other one is absent and the sum is nothing but that term."""
    terms = node.all_input_nodes
    there = [a for a in terms if a not in absent]
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(terms) != 2 or len(there) != 1:
        return None
    total, term = node.meta.get("val"), there[0].meta.get("val")
    if not isinstance(total, torch.Tensor) or not isinstance(term, torch.Tensor):
        return None
    return there[0] if (total.shape, total.dtype) == (term.shape, term.dtype) else None


def without_missing(captured: Captured, missing: frozenset[int], profile: Profile) -> tuple[Graph, Profile]:
    """Return the graph of captured code, and its costs, without what gradients at some positions would have brought.

    Nodes and tensors keep their indices; what is absent takes no memory and no time. Forward values that only absent
    computations read are read as the backward starts: nobody knows at the forward that nothing will read them.
    """
    if not missing:
        return captured.graph, profile
    if captured.made_from is not None:
        graph, profile = captured.made_from.without(missing, captured.sizes)
        return graph.reading_once(captured.overwritten), profile
    absence = find_absent(captured, missing)
    assert absence.graph is not None, "something is missing"
    graph = absence.graph
    gone = _gone(captured, absence)
    there = {
        t.storage
        for t, value in zip(graph.tensors, captured.fx_values, strict=True)
        if value not in absence.values and t.producer not in gone
    }
    storages = tuple(s if i in there else replace(s, size_bytes=0) for i, s in enumerate(graph.storages))
    idle = gone | {i for i, node in enumerate(captured.fx_nodes) if node in absence.replaced}
    costs = replace(
        profile,
        time_ms=tuple(0.0 if i in idle else time_ms for i, time_ms in enumerate(profile.time_ms)),
        workspace_bytes=tuple(
            0 if i in idle else size + _zeros_bytes(node, absence, captured.device)
            for i, (node, size) in enumerate(zip(captured.fx_nodes, profile.workspace_bytes, strict=True))
        ),
    )
    tensors = tuple(replace(t, storage=None) if t.producer in gone else t for t in graph.tensors)  # not even views
    return replace(graph, nodes=_reading_at_once(graph, gone), tensors=tensors, storages=storages), costs


def _gone(captured: Captured, absence: Absence) -> set[int]:
    """List the nodes of the backward that are absent, and those whose results nothing else reads."""
    graph = captured.graph
    tensor_of = {value: index for index, value in enumerate(captured.fx_values)}
    read = {t for t in graph.gradients if captured.fx_values[t] not in absence.values}
    gone = set()
    for index in reversed(graph.backward):
        node, value = graph.nodes[index], captured.fx_nodes[index]
        is_read = node.is_random or node.is_mutating or not read.isdisjoint(node.outputs)
        if value in absence.values or not is_read:
            gone.add(index)
        elif value in absence.replaced:
            read.add(tensor_of[absence.replaced[value]])
        else:
            read.update(node.inputs)
    return gone


def _reading_at_once(graph: Graph, gone: set[int]) -> tuple[Node, ...]:
    """Return the nodes as they are where those that are gone read nothing, and the first of the backward all that."""
    made = {t for index in graph.forward for t in graph.nodes[index].outputs}
    early = [t for index in sorted(gone) for t in graph.nodes[index].inputs if t in made]
    nodes = [
        replace(n, inputs=(), takes=None, plain_bytes=0, plain_inputs=()) if index in gone else n
        for index, n in enumerate(graph.nodes)
    ]
    if early:
        first = graph.backward[0]
        nodes[first] = replace(nodes[first], inputs=tuple(dict.fromkeys((*nodes[first].inputs, *early))))
    return tuple(nodes)


def _overwritten(captured: Captured, absence: Absence) -> tuple[Graph, dict[fx.Node, int]]:
    """Return the graph in which sums are their other term, and what is still overwritten there.

    Who else holds such a term, and how it lies in memory, is known to nobody before it is there: it is left alone. What
    is reshaped is left alone too: a copy in the trace may be a view of a term with other strides.
    """
    graph = captured.allocating
    tensor_of = {value: index for index, value in enumerate(captured.fx_values)}
    merged: dict[int, int] = {}
    for total, term in absence.replaced.items():
        into, of = graph.tensors[tensor_of[term]].storage, graph.tensors[tensor_of[total]].storage
        if into is not None and of is not None:
            merged[of] = merged.get(into, into)
    tensors = tuple(t if t.storage not in merged else replace(t, storage=merged[t.storage]) for t in graph.tensors)
    absent = {graph.tensors[tensor_of[value]].storage for value in absence.values if value in tensor_of}
    backward = (captured.fx_nodes[index] for index in graph.backward)
    pairs = ((read, node) for node in backward if (read := reshaped(node)) is not None)
    storages = (graph.tensors[tensor_of[value]].storage for pair in pairs for value in pair if value in tensor_of)
    spared = {*merged.values(), *storages}
    return overwrite(replace(graph, tensors=tensors), captured.fx_nodes, captured.fx_values, spared, absent)[:2]


def _zeros_bytes(node: fx.Node, absence: Absence, device: torch.device) -> int:
    """Return the bytes of the zeros that stand in, while a computation runs, for what it reads and is absent."""
    shown = [a.meta["val"] for a in node.all_input_nodes if a in absence.values]
    return sum(allocated_bytes(t.numel() * t.dtype.itemsize, device) for t in shown if t.device == device)
