"""The values that a schedule saves for the backward: which of them others see, may change, or may read instead."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from ..capturing.capture import Captured
from ..records.graph import StorageKind
from ..records.schedule import Schedule
from ..rewriting.kernels import as_eager
from ..rewriting.nodes import operation_named, operation_of
from ..torch_private import aot

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class SavedValues:
    """Facts about the values that a program saves, by their positions; to look them up in each step would take time."""

    names: tuple[str, ...]
    returned: tuple[int, ...]  # those that the forward also returns
    views: tuple[int, ...]  # those that may be views of tensors that others hold, or of memory that a gradient may take
    # Those whose change in place between forward and backward is an error, each with the position of an output on its
    # memory, through which code outside may change it, or with None where there is none.
    watched: tuple[tuple[int, int | None], ...]
    borrowed: tuple[int, ...]  # those that plain training would not need, and that code outside may overwrite
    copied: tuple[int, ...]  # those of which a copy is saved, since code outside is known to overwrite them


def saved_values(captured: Captured, schedule: Schedule) -> SavedValues:
    """Describe the values that a schedule of a captured graph saves."""
    graph = captured.graph
    saved = [captured.fx_values[t] for t in schedule.saved]
    storages = [graph.tensors[t].storage for t in schedule.saved]
    tensors = [i for i, t in enumerate(schedule.saved) if graph.tensors[t].dtype]
    outputs, shown, unread = set(captured.forward_outputs), _outputs_on(captured), _unread_plainly(captured)
    finished = {finish.result for finish in captured.finishes.values()}
    taken = {graph.tensors[node.takes].storage for node in graph.nodes if node.takes is not None}
    returned = {graph.tensors[t].storage for t in graph.outputs}
    resident = {i for i, storage in enumerate(graph.storages) if storage.kind.is_resident}
    # Others see and may change what is returned, or exists beside the step and is left as it is.
    seen = (returned | resident - {graph.tensors[t].storage for t in captured.mutated}) - {None}
    # No view may be saved of what a gradient may take, or a grad_fn may come to hold.
    unviewable = taken | returned | (resident - _parameters(captured)) | {None}
    borrowed = [i for i in tensors if storages[i] in seen and storages[i] in unread]
    copied = [i for i in borrowed if storages[i] in captured.overwritten]
    watched = (i for i in tensors if storages[i] in seen and i not in copied)
    may_be_views = (i for i in tensors if storages[i] in unviewable)
    return SavedValues(
        names=tuple(value.name for value in saved),
        returned=tuple(i for i in tensors if saved[i] in outputs),
        views=tuple(i for i in may_be_views if _may_be_view(captured, schedule.saved[i], finished)),
        watched=tuple((i, output) for i in watched for output in shown.get(storages[i], [None])),
        borrowed=tuple(borrowed),
        copied=tuple(copied),
    )


def _parameters(captured: Captured) -> set[int]:
    return {i for i, s in enumerate(captured.graph.storages) if s.kind is StorageKind.PARAMETER}


def _may_be_view(captured: Captured, tensor: int, finished: Collection[fx.Node]) -> bool:
    """Whether a value may come as a view of another one: tensors that PyTorch's own operators allocate do not."""
    value, storage = captured.fx_values[tensor], captured.graph.tensors[tensor].storage
    maker = operation_of(value)
    if maker.op == "placeholder":
        return storage is None or captured.graph.storages[storage].kind is not StorageKind.PARAMETER
    if maker.op != "call_function" or value in finished:
        return True  # a finished result may be a view of the unfinished one
    target = as_eager(maker)[0]
    if not isinstance(target, aot.OpOverload) or target.namespace != "aten":
        return True
    shows = any(result.alias_info is not None for result in target._schema.returns)
    return shows or target is aten._unsafe_view.default  # in whose place a view runs


def _outputs_on(captured: Captured) -> dict[int | None, list[int | None]]:
    """List by storage the positions of the outputs on it."""
    tensors = captured.graph.tensors
    storage_of = {value: tensors[t].storage for t, value in enumerate(captured.fx_values)}
    positions: dict[int | None, list[int | None]] = {}
    for position, value in enumerate(captured.forward_outputs):
        if isinstance(value, fx.Node) and storage_of[value] is not None:
            positions.setdefault(storage_of[value], []).append(position)
    return positions


def _unread_plainly(captured: Captured) -> set[int]:
    """List the storages, except parameters', that a plain backward would not read."""
    graph = captured.graph
    read = set(graph.gradients)
    for index in graph.backward:
        node = captured.fx_nodes[index]
        ours_alone = operation_named(node.target).plain_only_reads(node)
        read.update(t for t in graph.nodes[index].inputs if captured.fx_values[t] not in ours_alone)
    needed = {graph.tensors[t].storage for t in read}
    return set(range(len(graph.storages))) - needed - _parameters(captured)
