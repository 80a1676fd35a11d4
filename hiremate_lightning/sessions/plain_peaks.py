"""What planned kinds of steps take without their plans, by simulation of what was captured of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..records.graph import Graph, StorageKind
from ..records.schedule import with_checkpoints
from ..records.simulation import simulate_plain
from .kinds import Kind
from .known import KnownCall
from .plain_steps import PlainPeak
from .planned import PlannedKinds
from .repeated_blocks import Blocks


class PlainPeaks:
    """Simulates steps as the user wrote them.

    Args:
        planned: The plans.
    """

    def __init__(self, planned: PlannedKinds) -> None:
        self._planned = planned
        self._twice: dict[Kind, tuple[Blocks, int]] = {}
        self._without: dict[tuple[Kind, frozenset[int]], int | None] = {}
        self._simulated: dict[
            Kind, tuple[tuple[KnownCall, ...], tuple[Any, ...]]
        ] = {}  # calls, and what existed before

    def as_written(self) -> dict[Kind, PlainPeak]:
        """Return what each planned kind of step takes, with the margin that its plan needed."""
        return self._each(lambda kind: self._planned.plans[kind].unplanned.peak_bytes)

    def called_twice(self, blocks: Blocks) -> dict[Kind, PlainPeak]:
        """Return what each planned kind of step takes where blocks of the model are called twice."""
        return self._each(partial(self._twice_bytes, blocks))

    def _each(self, added_bytes: Callable[[Kind], int]) -> dict[Kind, PlainPeak]:
        plans, kinds = self._planned.plans, self._planned.kinds
        most_resident_bytes = max((plan.resident_bytes for plan in plans.values()), default=0)
        is_share = self._planned.options.budget.share is not None
        found = {}
        for kind, plan in plans.items():
            self._forget_others(kind)
            room_bytes = plan.budget_bytes - (plan.resident_bytes if is_share else most_resident_bytes)
            without = partial(self._bytes_without, kind)
            found[kind] = PlainPeak(added_bytes(kind) + kinds.described(kind).margin_bytes, room_bytes, without)
        return found

    def _forget_others(self, kind: Kind) -> None:
        """Forget what was simulated of a kind of step before something else was learned of it."""
        known = self._planned.kinds.described(kind)
        before = known.resident.kept, known.resident.stale_bytes, known.resident.left_bytes
        found = self._simulated.get(kind)
        if found is None or found[0] is not known.calls or found[1] != before:
            self._simulated[kind] = known.calls, before
            self._twice.pop(kind, None)
            for key in [key for key in self._without if key[0] == kind]:
                del self._without[key]

    def _twice_bytes(self, blocks: Blocks, kind: Kind) -> int:
        found = self._twice.get(kind)
        if found is None or found[0] is not blocks:
            step = self._planned.kinds.described(kind).merge()
            graph = with_checkpoints(step.graph, blocks.calls_in(step))
            self._twice[kind] = found = blocks, simulate_plain(graph, step.profile).peak_bytes
        return found[1]

    def _bytes_without(self, kind: Kind, sizes: frozenset[int]) -> int | None:
        """Return what a kind of step adds beside the tensors that have some sizes; None where that can't be told."""
        key = kind, sizes
        if key not in self._without:
            plan = self._planned.plans[kind]
            graph = _without(plan.graph, sizes)
            self._without[key] = None if graph is None else simulate_plain(graph, plan.profile).peak_bytes
        return self._without[key]


def _without(graph: Graph, sizes: frozenset[int]) -> Graph | None:
    """Take tensors out of a graph that have one of some sizes, or a multiple; None where parameters have them too."""

    def has_any(shape: tuple[int, ...]) -> bool:
        return any(length and not length % size for length in shape for size in sizes)

    own = {s for s, storage in enumerate(graph.storages) if storage.kind is StorageKind.PARAMETER}
    of_sizes = {tensor.storage for tensor in graph.tensors if has_any(tensor.shape)}
    if of_sizes & own:
        return None
    storages = (replace(s, size_bytes=0) if number in of_sizes else s for number, s in enumerate(graph.storages))
    return replace(graph, storages=tuple(storages))
