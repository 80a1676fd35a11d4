"""The values that a schedule saves for the backward: which of them other code sees, may change, or overwrites."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ..capturing.capture import Captured
from ..records.graph import StorageKind
from ..records.schedule import Schedule
from ..rewriting.nodes import operation_named


@dataclass(frozen=True, slots=True)
class SavedValues:
    """Positions of the values that a program saves, by properties that would take time to look up in each step."""

    returned: tuple[int, ...]  # values that the forward also returns
    views: tuple[int, ...]  # values on storages that other code holds, or that a gradient may take: may be views
    # Values that must not change in place between forward and backward, each with the position of an output on its
    # storage, through which other code may change it; None if there is no such output.
    watched: tuple[tuple[int, int | None], ...]
    borrowed: tuple[int, ...]  # values that eager training would not save, and that other code may overwrite
    copied: tuple[int, ...]  # values that are saved as copies, because other code is known to overwrite them


def saved_values(captured: Captured, schedule: Schedule) -> SavedValues:
    """Describe the values that a schedule of a captured graph saves."""
    graph = captured.graph
    saved = [captured.fx_values[t] for t in schedule.saved]
    storages = [graph.tensors[t].storage for t in schedule.saved]
    tensors = [i for i, t in enumerate(schedule.saved) if graph.tensors[t].dtype]
    outputs, shown, unread = set(captured.forward_outputs), _outputs_on(captured), _unread_in_eager(captured)
    taken = {graph.tensors[node.takes].storage for node in graph.nodes if node.takes is not None}
    returned = {graph.tensors[t].storage for t in graph.outputs}
    resident = {i for i, storage in enumerate(graph.storages) if storage.kind.is_resident}
    # Other code sees and may change storages of outputs, and resident ones that the step itself does not change.
    seen = (returned | resident - {graph.tensors[t].storage for t in captured.mutated}) - {None}
    # No view may be saved of a storage that a gradient may take, or that a grad_fn may come to hold.
    unviewable = taken | returned | (resident - _parameters(captured)) | {None}
    borrowed = [i for i in tensors if storages[i] in seen and storages[i] in unread]
    copied = [i for i in borrowed if storages[i] in captured.overwritten]
    watched = (i for i in tensors if storages[i] in seen and i not in copied)
    return SavedValues(
        returned=tuple(i for i in tensors if saved[i] in outputs),
        views=tuple(i for i in tensors if storages[i] in unviewable),
        watched=tuple((i, output) for i in watched for output in shown.get(storages[i], [None])),
        borrowed=tuple(borrowed),
        copied=tuple(copied),
    )


def _parameters(captured: Captured) -> set[int]:
    return {i for i, s in enumerate(captured.graph.storages) if s.kind is StorageKind.PARAMETER}


def _outputs_on(captured: Captured) -> dict[int | None, list[int | None]]:
    """Return the positions of the outputs on each storage."""
    tensors = captured.graph.tensors
    storage_of = {value: tensors[t].storage for t, value in enumerate(captured.fx_values)}
    positions: dict[int | None, list[int | None]] = {}
    for position, value in enumerate(captured.forward_outputs):
        if isinstance(value, fx.Node) and storage_of[value] is not None:
            positions.setdefault(storage_of[value], []).append(position)
    return positions


def _unread_in_eager(captured: Captured) -> set[int]:
    """Return the storages, except parameters', that the backward of eager PyTorch would not read."""
    graph = captured.graph
    read = set(graph.gradients)
    for index in graph.backward:
        node = captured.fx_nodes[index]
        ours_alone = operation_named(node.target).unread_in_eager(node)
        read.update(t for t in graph.nodes[index].inputs if captured.fx_values[t] not in ours_alone)
    needed = {graph.tensors[t].storage for t in read}
    return set(range(len(graph.storages))) - needed - _parameters(captured)
