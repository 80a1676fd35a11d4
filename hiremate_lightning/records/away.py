"""Values that are away: in the host's memory between their last use in the forward and their first in the backward.

That is the third choice for what the backward reads, beside keeping it and computing it again. A copy to the host and
back takes no time of what computes, as long as it finds enough to go on with meanwhile: POFO (Beaumont, Eyraud-Dubois,
Shilova, "Efficient Combination of Rematerialization and Offloading for Training DNNs", NeurIPS 2021) and, without
recomputation, "Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training" (Euro-Par 2020) of the same
authors. Both are about chains, and copy a value as soon as it is made. Here it is any graph, and an `Away` says for a
storage where its copy begins, where its memory is given up, and where its way back begins.

What may not go away: what exists before the step (parameters, the batch), what the forward returns or the step hands
out, what the caller holds, and what code outside has made or reads. Of a step of several calls, a storage goes away in
the forward of its own call, and comes back in the backward of that call.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ..errors import ScheduleError
from .graph import OUTSIDE, Graph, StorageKind
from .schedule import Compute, CopyIn, CopyOut, Operation, Schedule, WaitIn, WaitOut, lower
from .step import Decisions, Step


@dataclass(frozen=True, slots=True)
class Host:
    """Memory of the host that values may go away to.

    Attributes:
        size_bytes: Its bytes.
        pinned: Storages that must stay on the device, for other reasons than the graph shows.
        has_round_blocks: Whether it hands out blocks of powers of two only, as PyTorch does where it pins them.
    """

    size_bytes: int
    pinned: frozenset[int] = frozenset()
    has_round_blocks: bool = False

    def holds(self, graph: Graph, aways: Iterable[Away]) -> bool:
        """Whether all that goes away in a step has a place: all of it lies there as the backward begins."""
        sizes = (graph.sizes[away.storage] for away in aways)
        return sum(round_block(size) if self.has_round_blocks else size for size in sizes) <= self.size_bytes


def round_block(size_bytes: int) -> int:
    """Round bytes up to a power of two, as PyTorch does with what it pins."""
    return 1 << (size_bytes - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Idle:
    """A storage that a schedule saves, and when nothing uses it.

    Attributes:
        storage: The storage.
        made: So many nodes of the forward have run when it has all its values.
        last: So many have run when nothing of the forward uses it any more.
        first: So many nodes have run in the backward when it is used again.
        end: So many have run in the forward when that of its call ends.
        start: So many have run in the backward when that of its call begins.
    """

    storage: int
    made: int
    last: int
    first: int
    end: int
    start: int


@dataclass(frozen=True, slots=True)
class Away:
    """Where a storage goes away and comes back; counted in nodes that have run, in the forward and in the backward.

    Attributes:
        storage: The storage.
        out: Its copy to the host begins here in the forward, at `Idle.made` or later.
        gone: Its memory is free from here on in the forward, from `Idle.last` to `Idle.end`; the program waits for the
            copy.
        back: It takes memory again from here on in the backward, from `Idle.start` to `Idle.first`, and its copy
            begins.
    """

    storage: int
    out: int
    gone: int
    back: int


def idle_storages(graph: Graph, schedule: Schedule, pinned: Collection[int] = ()) -> tuple[Idle, ...]:
    """List the storages that may go away in a schedule, in order of their last use in the forward.

    Args:
        graph: The step.
        schedule: A valid schedule of it, in which nothing is away.
        pinned: Storages that must stay for other reasons.
    """
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
    found = list[Idle]()
    for storage in saved:
        if storage is not None and storage in made and storage in first:
            end = ends[bisect_left(ends, made[storage])]
            start = starts[bisect_right(starts, first[storage]) - 1] + 1
            if last[storage] <= end:
                found.append(Idle(storage, made[storage], last[storage], first[storage], end, start))
    return tuple(sorted(found, key=lambda idle: (idle.last, idle.storage)))


def _outside(graph: Graph, runs: Sequence[int]) -> list[int]:
    """List the positions at which code outside runs: before the first node, between calls, and after the last one."""
    return [-1, *(n for n, index in enumerate(runs) if graph.nodes[index].op == OUTSIDE), len(runs)]


def _runs(operations: Iterable[Operation]) -> list[int]:
    return [operation.node for operation in operations if isinstance(operation, Compute)]


def _used(graph: Graph, index: int) -> set[int | None]:
    node = graph.nodes[index]
    return {graph.tensors[t].storage for t in (*node.inputs, *node.outputs)}


def _written(graph: Graph, index: int) -> Collection[int | None]:
    """List the storages that a node may write to: a view writes to none."""
    return _used(graph, index) if graph.nodes[index].is_mutating else graph.allocates[index]


def staying(graph: Graph) -> set[int]:
    """List the storages that others than the step itself see, and those without memory that comes and goes."""
    seen = {graph.tensors[t].storage for t in (*graph.inputs, *graph.outputs, *graph.held, *graph.gradients)}
    for node in graph.nodes:
        if node.op == OUTSIDE:
            seen.update(graph.tensors[t].storage for t in (*node.inputs, *node.outputs))
    others = (s for s, storage in enumerate(graph.storages) if storage.kind is not StorageKind.ACTIVATION)
    empty = (s for s, size_bytes in enumerate(graph.sizes) if not size_bytes)
    return {storage for storage in seen.union(others, empty) if storage is not None}


def put_away(graph: Graph, schedule: Schedule, aways: Sequence[Away], pinned: Collection[int] = ()) -> Schedule:
    """Return a schedule in which some storages are away for a while.

    Copies begin in the order of their places, and of `aways` at the same place. The program waits for a copy out at
    `gone`, and for a copy in where the storage is used first.

    Args:
        graph: The step.
        schedule: A valid schedule of it, in which nothing is away.
        aways: What goes away, each storage once.
        pinned: Storages that must stay for other reasons.

    Raises:
        ScheduleError: If a storage may not go away, or not at such places.
    """
    if not aways:
        return schedule
    idle = {found.storage: found for found in idle_storages(graph, schedule, pinned)}
    forward, backward = defaultdict[int, list[Operation]](list), defaultdict[int, list[Operation]](list)
    storages = [away.storage for away in aways]
    if len(set(storages)) < len(storages):
        raise ScheduleError("A storage goes away twice: name each once")
    for away in aways:
        found = idle.get(away.storage)
        if found is None:
            raise ScheduleError(f"Storage {away.storage} may not go away: choose among idle_storages(graph, schedule)")
        goes, comes = found.last <= away.gone <= found.end, found.start <= away.back <= found.first
        if not (goes and comes and found.made <= away.out <= away.gone):
            raise ScheduleError(f"{away} does not fit {found}")
    for away in aways:
        forward[away.out].append(CopyOut(away.storage))
    for away in aways:
        forward[away.gone].append(WaitOut(away.storage))
        backward[away.back].append(CopyIn(away.storage))
    for away in aways:
        backward[idle[away.storage].first].append(WaitIn(away.storage))
    return replace(
        schedule, forward=_inserted(schedule.forward, forward), backward=_inserted(schedule.backward, backward)
    )


def _inserted(operations: Sequence[Operation], places: dict[int, list[Operation]]) -> tuple[Operation, ...]:
    """Insert operations where so many nodes have run: after the frees that follow these, before the next node."""
    found, runs = list[Operation](), 0
    for operation in operations:
        if isinstance(operation, Compute):
            found += places.get(runs, ())
            runs += 1
        found.append(operation)
    return (*found, *places.get(runs, ()))


def split_aways(step: Step, recompute: Decisions, aways: Sequence[Away]) -> tuple[tuple[Away, ...], ...]:
    """Split what goes away in a step by these decisions: for each call its own, with places in its own nodes."""
    found: list[list[Away]] = [[] for _ in step.spans]
    schedule = lower(step.graph, recompute)
    forward, backward = ([step.owners[n] for n in _runs(half)] for half in (schedule.forward, schedule.backward))
    for away in aways:
        call = bisect_right(step.storages_at, away.storage) - 1

        def own(owners: Sequence[tuple[int, int] | None], place: int, call: int = call) -> int:
            return sum(owner is not None and owner[0] == call for owner in owners[:place])

        places = own(forward, away.out), own(forward, away.gone), own(backward, away.back)
        found[call].append(Away(away.storage - step.storages_at[call], *places))
    return tuple(map(tuple, found))


def storages_in(step: Step, by_call: Sequence[Iterable[int]]) -> frozenset[int]:
    """Return what some storages of each call are in the step."""
    pairs = zip(step.storages_at, by_call, strict=True)
    return frozenset(first + storage for first, own in pairs for storage in own)


def may_lie_aside(graph: Graph, storages: int) -> frozenset[int]:
    """Find what autograd saves of a step and nobody else holds until the backward.

    Args:
        graph: The step.
        storages: The number of its first storages that captured code holds.
    """
    stay = {graph.tensors[t].storage for t in (*graph.outputs, *graph.held, *graph.retained, *graph.gradients)}
    made = {storage for index in graph.forward for storage in graph.allocates[index]}
    needed = {s for t in graph.needed if (s := graph.tensors[t].storage) is not None and s < storages}
    return frozenset(needed & made - stay)
