"""Values that are away: in the host's memory between their last use in the forward and their first in the backward.

That is the third choice for what the backward reads, beside keeping it and computing it again. A copy to the host and
back takes no time of what computes, as long as it finds enough to go on with meanwhile: POFO (Beaumont, Eyraud-Dubois,
Shilova, "Efficient Combination of Rematerialization and Offloading for Training DNNs", NeurIPS 2021) and, without
recomputation, "Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training" (Euro-Par 2020) of the same
authors. Both are about chains, and copy a value as soon as it is made. Here it is any graph, and an `Away` says for a
storage where its copy begins, where its memory is given up, and where its way back begins.

What may not go away: what exists before the step (parameters, the batch), what the forward returns or the step hands
out, what the caller holds, and what code outside has made or reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ..errors import ScheduleError
from .graph import OUTSIDE, Graph, StorageKind
from .schedule import Compute, CopyIn, CopyOut, Operation, Schedule, WaitIn, WaitOut


@dataclass(frozen=True, slots=True)
class Idle:
    """A storage that a schedule saves, and when nothing uses it.

    Attributes:
        storage: The storage.
        made: So many nodes of the forward have run when it has all its values.
        last: So many have run when nothing of the forward uses it any more.
        first: So many nodes have run in the backward when it is used again.
    """

    storage: int
    made: int
    last: int
    first: int


@dataclass(frozen=True, slots=True)
class Away:
    """Where a storage goes away and comes back; counted in nodes that have run, in the forward and in the backward.

    Attributes:
        storage: The storage.
        out: Its copy to the host begins here in the forward, at `Idle.made` or later.
        gone: Its memory is free from here on in the forward, at `Idle.last` or later; the program waits for the copy.
        back: It takes memory again from here on in the backward, and its copy begins; at `Idle.first` or earlier.
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
    saved = {graph.tensors[t].storage for t in schedule.saved} - _staying(graph) - set(pinned)
    found = [Idle(s, made[s], last[s], first[s]) for s in saved if s is not None and s in made and s in first]
    return tuple(sorted(found, key=lambda idle: (idle.last, idle.storage)))


def _runs(operations: Iterable[Operation]) -> list[int]:
    return [operation.node for operation in operations if isinstance(operation, Compute)]


def _used(graph: Graph, index: int) -> set[int | None]:
    node = graph.nodes[index]
    return {graph.tensors[t].storage for t in (*node.inputs, *node.outputs)}


def _written(graph: Graph, index: int) -> Collection[int | None]:
    """List the storages that a node may write to: a view writes to none."""
    return _used(graph, index) if graph.nodes[index].is_mutating else graph.allocates[index]


def _staying(graph: Graph) -> set[int | None]:
    """List the storages that others than the step itself see, and those without memory that comes and goes."""
    seen = {graph.tensors[t].storage for t in (*graph.inputs, *graph.outputs, *graph.held, *graph.gradients)}
    for node in graph.nodes:
        if node.op == OUTSIDE:
            seen.update(graph.tensors[t].storage for t in (*node.inputs, *node.outputs))
    others = (s for s, storage in enumerate(graph.storages) if storage.kind is not StorageKind.ACTIVATION)
    return seen.union(others, (s for s, size_bytes in enumerate(graph.sizes) if not size_bytes))


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
    idle = {found.storage: found for found in idle_storages(graph, schedule, pinned)}
    forward, backward = defaultdict[int, list[Operation]](list), defaultdict[int, list[Operation]](list)
    runs, storages = len(_runs(schedule.forward)), [away.storage for away in aways]
    if len(set(storages)) < len(storages):
        raise ScheduleError("A storage goes away twice: name each once")
    for away in aways:
        found = idle.get(away.storage)
        if found is None:
            raise ScheduleError(f"Storage {away.storage} may not go away: choose among idle_storages(graph, schedule)")
        fits = found.made <= away.out <= away.gone <= runs and found.last <= away.gone and 0 <= away.back <= found.first
        if not fits:
            raise ScheduleError(f"{away} does not fit {found} in a forward of {runs} operations")
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
