"""Offloaded storages: in the host's memory between their last use in the forward and their first in the backward.

A copy to the host and back takes no time as long as the device has other work meanwhile: POFO (Beaumont, Eyraud-Dubois,
Shilova, "Efficient Combination of Rematerialization and Offloading for Training DNNs", NeurIPS 2021) and, without
recomputation, "Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training" (Euro-Par 2020) of the same
authors. Both papers are about chains, and copy a value as soon as it is computed. Here the graph is arbitrary. An
`Offload` says where the copy out of a storage begins, where its memory is freed, and where the copy in begins: in the
forward and in the backward of the call that computes it. `staying` lists the storages that must not be offloaded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ..errors import ScheduleError
from .graph import OUTSIDE, Graph, StorageKind
from .schedule import Compute, CopyIn, CopyOut, Operation, Schedule, WaitIn, WaitOut, lower
from .step import Decisions, MergedStep


@dataclass(frozen=True, slots=True)
class Host:
    """The host's memory for offloaded storages."""

    size_bytes: int  # bytes that offloaded storages may take
    pinned: frozenset[int] = frozenset()  # storages that must stay on the device, beyond `staying(graph)`
    has_round_blocks: bool = False  # whether each block has a power of two of bytes, as PyTorch's pinned memory

    def holds(self, graph: Graph, offloads: Iterable[Offload]) -> bool:
        """Whether all offloaded storages of a step fit at once, as they lie here when the backward begins."""
        sizes = (graph.sizes[offload.storage] for offload in offloads)
        return sum(round_block(size) if self.has_round_blocks else size for size in sizes) <= self.size_bytes


def round_block(size_bytes: int) -> int:
    """Return bytes rounded up to a power of two, as PyTorch does for pinned memory."""
    return 1 << (size_bytes - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Idle:
    """A storage that a schedule saves, and when nothing uses it. Places count the nodes that have run in their half."""

    storage: int
    made: int  # place in the forward after its last write
    last: int  # place in the forward after its last use
    first: int  # place in the backward of its first use
    end: int  # place in the forward where its call's forward ends
    start: int  # place in the backward where its call's backward starts


@dataclass(frozen=True, slots=True)
class Offload:
    """Places at which a storage is offloaded and comes back, in nodes that have run in the forward or the backward."""

    storage: int
    out: int  # place in the forward where its copy to the host begins, at `Idle.made` or later
    # Place in the forward where the program waits for the copy and frees the memory, from `Idle.last` to `Idle.end`.
    gone: int
    # Place in the backward where it takes memory and its copy back begins, from `Idle.start` to `Idle.first`.
    back: int


def idle_storages(graph: Graph, schedule: Schedule, pinned: Collection[int] = ()) -> tuple[Idle, ...]:
    """List the storages that a schedule without offloads may offload, in order of their last use in the forward."""
    forward, backward = _runs(schedule.forward), _runs(schedule.backward)
    first = dict[int | None, int]()
    for number, index in enumerate(backward):
        for storage in _used(graph, index):
            first.setdefault(storage, number)
    made, last = dict[int | None, int](), dict[int | None, int]()
    for number, index in enumerate(forward, start=1):
        last.update(dict.fromkeys(_used(graph, index), number))
        made.update(dict.fromkeys(_written(graph, index), number))
    saved = {graph.tensors[t].storage for t in schedule.saved} - staying(graph) - set(pinned)
    ends, starts = _outside(graph, forward), _outside(graph, backward)
    idle = list[Idle]()
    for storage in saved:
        if storage is not None and storage in made and storage in first:
            end = ends[bisect_left(ends, made[storage])]
            start = starts[bisect_right(starts, first[storage]) - 1] + 1
            if last[storage] <= end:
                idle.append(Idle(storage, made[storage], last[storage], first[storage], end, start))
    return tuple(sorted(idle, key=lambda one: (one.last, one.storage)))


def _outside(graph: Graph, runs: Sequence[int]) -> list[int]:
    """List the positions of uncaptured code: before the first node, between calls, and after the last node."""
    return [-1, *(n for n, index in enumerate(runs) if graph.nodes[index].op == OUTSIDE), len(runs)]


def _runs(operations: Iterable[Operation]) -> list[int]:
    return [operation.node for operation in operations if isinstance(operation, Compute)]


def _used(graph: Graph, index: int) -> set[int | None]:
    node = graph.nodes[index]
    return {graph.tensors[t].storage for t in (*node.inputs, *node.outputs)}


def _written(graph: Graph, index: int) -> Collection[int | None]:
    """Return the storages that a node may write to; a view writes to none."""
    return _used(graph, index) if graph.nodes[index].is_mutating else graph.allocates[index]


def staying(graph: Graph) -> set[int]:
    """Return the storages that must not be offloaded: other code sees them, or the step does not allocate them."""
    seen = {graph.tensors[t].storage for t in (*graph.inputs, *graph.outputs, *graph.held, *graph.gradients)}
    for node in graph.nodes:
        if node.op == OUTSIDE:
            seen.update(graph.tensors[t].storage for t in (*node.inputs, *node.outputs))
    no_activations = (s for s, storage in enumerate(graph.storages) if storage.kind is not StorageKind.ACTIVATION)
    empty = (s for s, size_bytes in enumerate(graph.sizes) if not size_bytes)
    return {storage for storage in seen.union(no_activations, empty) if storage is not None}


def with_offloads(graph: Graph, schedule: Schedule, offloads: Sequence[Offload]) -> Schedule:
    """Return the schedule with some storages offloaded.

    Copies begin in the order of their places, and of `offloads` at the same place. The program waits for a copy out at
    `gone`, and for a copy in at the storage's first use in the backward.

    Raises:
        ScheduleError: If a storage is offloaded twice, must not be offloaded, or not at these places.
    """
    if not offloads:
        return schedule
    idle = {one.storage: one for one in idle_storages(graph, schedule)}
    forward, backward = defaultdict[int, list[Operation]](list), defaultdict[int, list[Operation]](list)
    storages = [offload.storage for offload in offloads]
    if len(set(storages)) < len(storages):
        raise ScheduleError("A storage is offloaded twice: name each once")
    for offload in offloads:
        fits = idle.get(offload.storage)
        if fits is None:
            raise ScheduleError(
                f"Storage {offload.storage} may not be offloaded: choose among idle_storages(graph, schedule)"
            )
        goes, comes = fits.last <= offload.gone <= fits.end, fits.start <= offload.back <= fits.first
        if not (goes and comes and fits.made <= offload.out <= offload.gone):
            raise ScheduleError(f"{offload} does not fit {fits}")
    for offload in offloads:
        forward[offload.out].append(CopyOut(offload.storage))
    for offload in offloads:
        forward[offload.gone].append(WaitOut(offload.storage))
        backward[offload.back].append(CopyIn(offload.storage))
    for offload in offloads:
        backward[idle[offload.storage].first].append(WaitIn(offload.storage))
    return replace(
        schedule, forward=_inserted(schedule.forward, forward), backward=_inserted(schedule.backward, backward)
    )


def _inserted(operations: Sequence[Operation], places: dict[int, list[Operation]]) -> tuple[Operation, ...]:
    """Return operations with others inserted at places: just before the next node, after all frees."""
    result, runs = list[Operation](), 0
    for operation in operations:
        if isinstance(operation, Compute):
            result += places.get(runs, ())
            runs += 1
        result.append(operation)
    return (*result, *places.get(runs, ()))


def split_offloads(
    step: MergedStep, recompute: Decisions, offloads: Sequence[Offload]
) -> tuple[tuple[Offload, ...], ...]:
    """Divide the offloads of a step among its calls; their places then count the nodes of the call alone."""
    by_call: list[list[Offload]] = [[] for _ in step.spans]
    schedule = lower(step.graph, recompute)
    forward, backward = ([step.owners[n] for n in _runs(half)] for half in (schedule.forward, schedule.backward))
    for offload in offloads:
        call = bisect_right(step.storages_at, offload.storage) - 1

        def in_call(owners: Sequence[tuple[int, int] | None], place: int, call: int = call) -> int:
            return sum(owner is not None and owner[0] == call for owner in owners[:place])

        places = in_call(forward, offload.out), in_call(forward, offload.gone), in_call(backward, offload.back)
        by_call[call].append(Offload(offload.storage - step.storages_at[call], *places))
    return tuple(map(tuple, by_call))


def storages_in(step: MergedStep, by_call: Sequence[Iterable[int]]) -> frozenset[int]:
    """Return the indices in the step of storages of each call."""
    pairs = zip(step.storages_at, by_call, strict=True)
    return frozenset(first + storage for first, storages in pairs for storage in storages)


def can_be_offloaded(graph: Graph, storages: int) -> frozenset[int]:
    """Return the storages that autograd saves and nothing else holds before the backward, so they can be offloaded.

    Only the first `storages` of the graph belong to captured code.
    """
    stay = {graph.tensors[t].storage for t in (*graph.outputs, *graph.held, *graph.retained, *graph.gradients)}
    made = {storage for index in graph.forward for storage in graph.allocates[index]}
    needed = {s for t in graph.needed if (s := graph.tensors[t].storage) is not None and s < storages}
    return frozenset(needed & made - stay)
