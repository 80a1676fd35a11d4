"""From rows of producers back to decisions for `schedule.lower`: views are put in where they are read."""

from __future__ import annotations

from collections.abc import Iterable

from ...records.graph import Direction
from ...records.schedule import ensure
from .choices import Rows
from .model import StepModel


def decisions(model: StepModel, rows: Rows) -> tuple[tuple[int, ...], ...]:
    """Return the nodes to run before each backward position, with views and other nodes that cost nothing.

    The rows have the producers recomputed before each backward position, as a replay returns them.
    """
    return _Lowering(model, rows).decisions()


class _Lowering:
    """The tensors that are available as the backward goes on."""

    def __init__(self, model: StepModel, rows: Rows) -> None:
        self._model, self._rows = model, rows
        graph = model.graph
        self._on: dict[int | None, list[int]] = {}  # the forward's tensors on each storage
        for tensor, storage in enumerate(model.storage_of):
            producer = graph.tensors[tensor].producer
            if producer is not None and graph.nodes[producer].direction is not Direction.BACKWARD:
                self._on.setdefault(storage, []).append(tensor)
        self._available = set(graph.inputs) | set(graph.tangents) | self._always_there()

    def _always_there(self) -> set[int]:
        """List the forward tensors that live through the turn: on kept, held and resident storages, or on none."""
        model, graph = self._model, self._model.graph
        kept = model.kept_through_the_turn(self._rows)
        tensors = set()
        for node in graph.forward:
            for tensor in graph.nodes[node].outputs:
                storage = model.storage_of[tensor]
                if (
                    storage is None
                    or storage in kept
                    or storage not in model.made_at
                    or graph.recomputers[tensor] is None
                ):
                    tensors.add(tensor)
        return tensors

    def decisions(self) -> tuple[tuple[int, ...], ...]:
        """Walk through the backward."""
        graph, rows = self._model.graph, []
        for position, row in enumerate(self._rows):
            before: list[int] = []
            for node in row:
                self._bring(graph.nodes[node].inputs, before)
                before.append(node)
                made = set(graph.nodes[node].outputs)
                for storage in {self._model.storage_of[t] for t in made} - {None}:  # views of earlier values are stale
                    self._available.difference_update([t for t in self._on.get(storage, ()) if t not in made])
                self._available.update(made)
            if position < len(graph.backward):
                last = graph.nodes[graph.backward[position]]
                self._bring(last.inputs, before)
                self._available.update(last.outputs)
            else:
                self._bring(graph.gradients, before)
            rows.append(tuple(before))
        return tuple(rows)

    def _bring(self, tensors: Iterable[int], before: list[int]) -> None:
        """Run the views, and other nodes that cost nothing, that make tensors available."""
        for tensor in tensors:
            ensure(self._model.graph, tensor, self._available, before)
