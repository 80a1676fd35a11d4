"""Replay a schedule without a device: is it valid, how many bytes live after each operation, how long does it take?

The simulator is the oracle of the project, and shares no code with the solvers that propose schedules. It counts
storages, not tensors: a block lives as long as any tensor on it. It counts all bytes that the step allocates, at the
size that the allocator hands out, and the workspace of the running node. Tensors that the caller holds are never freed,
whatever the schedule frees or recomputes. Resident bytes are the same for every schedule; the caller adds them. An
offloaded storage takes memory until the wait for its copy out, and again from the start of its copy in. These are
places in the program, so that only times depend on the link.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..errors import ScheduleError
from .costs import Link, Profile, in_eager
from .graph import Graph
from .schedule import (
    Compute,
    CopyIn,
    Copying,
    CopyOut,
    Free,
    Operation,
    Schedule,
    WaitIn,
    WaitOut,
    eager_decisions,
    keep_all,
    lower,
)


@dataclass(frozen=True, slots=True)
class Moment:
    """One operation of the timeline."""

    node: int  # the node that ran
    peak_bytes: int  # bytes while the node runs: live ones before it, its outputs and its workspace
    live_bytes: int  # bytes after the node and the frees that follow; following copies in belong to the next moment


@dataclass(frozen=True, slots=True)
class Simulation:
    """The bytes and times of a schedule."""

    timeline: tuple[Moment, ...]  # one moment for each node that runs, in order
    turn: int  # number of moments before the backward
    peak_bytes: int  # largest `peak_bytes` of the timeline
    saved_bytes: int  # bytes that live at the turn
    time_ms: float  # time of all nodes, and of waits for copies
    recompute_ms: float  # time of recomputation
    wait_ms: float = 0.0  # time of waits for copies
    host_bytes: int = 0  # most bytes on the host at once

    @property
    def peak_moment(self) -> Moment:
        """The first moment at the peak."""
        return max(self.timeline, key=lambda moment: moment.peak_bytes)

    @property
    def extra_ms(self) -> float:
        """Time of recomputation and of waits for copies."""
        return self.recompute_ms + self.wait_ms

    @property
    def overhead(self) -> float:
        """Ratio of extra time to time without recomputation and waits."""
        useful = self.time_ms - self.extra_ms
        return self.extra_ms / useful if useful else 0.0


@dataclass(frozen=True, slots=True)
class Allocations:
    """The allocations and frees (events) of a schedule, in order: they give its peak at any sizes of the storages."""

    storages: np.ndarray  # the storage of each event
    signs: np.ndarray  # for each event, 1 for an allocation, -1 for a free
    nodes: np.ndarray  # the nodes that run, in order
    events: np.ndarray  # for each run of a node, the number of events before its peak

    def peak_bytes(self, storage_bytes: npt.ArrayLike, workspace_bytes: npt.ArrayLike) -> int:
        """Return the peak of the schedule from the bytes of each storage and the workspace of each node."""
        live = np.concatenate(([0], np.cumsum(self.signs * np.asarray(storage_bytes)[self.storages])))
        return int(np.max(live[self.events] + np.asarray(workspace_bytes)[self.nodes], initial=0))


class _Memory:
    """Live blocks. A block is one allocation of a storage; it dies with the last tensor on it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.live_bytes = 0
        self.block_of: dict[int, int] = {}  # live tensor -> block, -1 for one that costs nothing
        self.tensors_on: list[int] = []  # block -> number of live tensors
        self.storage_of_block: list[int] = []
        self.moments = 0  # number of nodes that have run
        self.first: list[int] = []  # block -> first moment at which it lives
        self.last: dict[int, int] = {}  # freed block -> last moment at which it lives
        self.to_hold = set(graph.held)
        # storage that is being offloaded -> its block, and the last copying operation
        self.copied: dict[int | None, tuple[int, type[Copying]]] = {}
        self.host_bytes = self.host_peak_bytes = 0

    def retain(self, tensors: Iterable[int]) -> None:
        """Hold tensors to the end of the step."""
        for block in (self.block_of[t] for t in tensors):
            if block >= 0:
                self.tensors_on[block] += 1

    def check_live(self, tensors: tuple[int, ...], why: str) -> None:
        for tensor in tensors:
            if tensor not in self.block_of:
                raise ScheduleError(f"{why} {self.graph.tensors[tensor].name!r}, which is not in memory")
            if self.copied and self.is_offloaded(tensor):
                raise ScheduleError(f"{why} {self.graph.tensors[tensor].name!r}, which is offloaded")

    def check_unchanged(self, tensors: tuple[int, ...], why: str) -> None:
        """Raise if one of the tensors is being copied out."""
        for tensor in tensors:
            if self._last_copying(tensor) is CopyOut:
                raise ScheduleError(f"{why} {self.graph.tensors[tensor].name!r}, which is being copied out")

    def define(self, outputs: tuple[int, ...], inputs: tuple[int, ...]) -> None:
        """Place each output on its input's block if it is a view, else on a new block."""
        storage_of = self.graph.tensors
        block_of_storage = {storage_of[t].storage: self.block_of[t] for t in inputs}
        defined = []
        for tensor in outputs:
            storage = storage_of[tensor].storage
            if storage is None or self.graph.storages[storage].kind.is_resident:
                block = -1
            elif storage in block_of_storage:
                block = block_of_storage[storage]
            else:
                block = block_of_storage[storage] = self._allocate(storage)
            defined.append((tensor, block))
        for tensor, block in defined:
            if tensor in self.block_of:
                self.free(tensor)
            self.block_of[tensor] = block
            if block >= 0:
                self.tensors_on[block] += 1 + (tensor in self.to_hold)  # the holder's own reference is never dropped
                self.to_hold.discard(tensor)

    def _allocate(self, storage: int) -> int:
        """Return a new block for a storage."""
        block = len(self.tensors_on)
        self.tensors_on.append(0)
        self.storage_of_block.append(storage)
        self.first.append(self.moments)
        self.live_bytes += self.graph.sizes[storage]
        return block

    def _give_back(self, block: int) -> None:
        self.last[block] = self.moments - 1
        self.live_bytes -= self.graph.sizes[self.storage_of_block[block]]

    def is_offloaded(self, tensor: int) -> bool:
        """Whether a tensor is on the host or on the way back, and not on the device."""
        return self._last_copying(tensor) in (WaitOut, CopyIn)

    def _last_copying(self, tensor: int) -> type[Copying] | None:
        """Return the last copying operation of a tensor's block; None if it is not being offloaded."""
        block, last = self.copied.get(self.graph.tensors[tensor].storage, (None, None))
        return last if self.block_of.get(tensor) == block else None

    def free(self, tensor: int) -> None:
        self.check_live((tensor,), "The schedule frees")
        block = self.block_of.pop(tensor)
        if block >= 0:
            self.tensors_on[block] -= 1
            if not self.tensors_on[block]:
                if self.copied.get(self.storage_of_block[block], (None,))[0] == block:
                    name = self.graph.tensors[tensor].name
                    raise ScheduleError(f"The schedule frees {name!r}, which is being copied out")
                self._give_back(block)

    def copy(self, operation: Copying) -> None:
        """Replay one of the four copying operations of a storage."""
        storage = operation.storage
        block, done = self.copied.get(storage, (None, None))
        if done is not _BEFORE[type(operation)]:
            raise ScheduleError(f"{type(operation).__name__} of {self._name(storage)!r} is out of turn")
        if block is None:
            tensors = self.graph.tensors
            blocks_of = {live for tensor, live in self.block_of.items() if tensors[tensor].storage == storage}
            if len(blocks_of) != 1 or -1 in blocks_of:
                raise ScheduleError(f"The schedule copies {self._name(storage)!r}, which is not one block of the step")
            block = blocks_of.pop()
            self.host_bytes += self.graph.sizes[storage]
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        elif isinstance(operation, WaitOut):
            if self.tensors_on[block] != len(self._tensors_on(block)):
                raise ScheduleError(f"{self._name(storage)!r} can't be offloaded: it is held to the end of the step")
            self._give_back(block)
        elif isinstance(operation, CopyIn):
            block = self._move(block)
        else:
            self.host_bytes -= self.graph.sizes[storage]
            del self.copied[storage]
            return
        self.copied[storage] = block, type(operation)

    def _move(self, block: int) -> int:
        """Move the tensors of an offloaded block to a new block, and return it."""
        tensors, new = self._tensors_on(block), self._allocate(self.storage_of_block[block])
        self.block_of.update(dict.fromkeys(tensors, new))
        self.tensors_on[new], self.tensors_on[block] = self.tensors_on[block], 0
        return new

    def _tensors_on(self, block: int) -> list[int]:
        return [tensor for tensor, other in self.block_of.items() if other == block]

    def _name(self, storage: int | None) -> str:
        return next(tensor.name for tensor in self.graph.tensors if tensor.storage == storage)

    def check_copied(self, why: str, *done: type[Copying]) -> None:
        """Raise if the last copying operation of a storage is one of these."""
        for storage, (_, last) in self.copied.items():
            if last in done:
                raise ScheduleError(f"{why} {self._name(storage)!r}: its last operation is {last.__name__}")


_BEFORE: dict[type[Copying], type[Copying] | None] = {CopyOut: None, WaitOut: CopyOut, CopyIn: WaitOut, WaitIn: CopyIn}


class _Replay:
    """The state of a replay: memory, and the clocks of computation and of copies in both directions.

    A copy begins when all operations before it, and all earlier copies in its direction, have ended. Computation goes
    on meanwhile, and stops only at the program's waits.
    """

    def __init__(self, graph: Graph, profile: Profile) -> None:
        self.memory = _Memory(graph)
        self.timeline: list[Moment] = []
        self.runs = [0] * len(graph.nodes)
        self.turn = self.saved_bytes = 0
        self.wait_ms = 0.0
        self._graph, self._profile = graph, profile
        self._now_ms = 0.0  # end of the last computation or wait
        self._copied_ms: dict[type[Copying], float] = {CopyOut: 0.0, CopyIn: 0.0}  # end of the last copy, by direction
        self._done_ms: dict[tuple[int, type[Copying] | None], float] = {}

    def run(self, operations: Iterable[Operation], half: str, copying: tuple[type[Copying], ...]) -> None:
        """Replay the operations of one half of the step, in which only some kinds of copying are allowed."""
        is_taken = False  # whether a copy in has taken memory since the last node
        for operation in operations:
            if isinstance(operation, Compute):
                self._compute(operation.node)
                is_taken = False
                continue
            if isinstance(operation, Free):
                if is_taken:
                    raise ScheduleError(
                        "The schedule frees after a copy in that no node has followed yet: free before it"
                    )
                self.memory.free(operation.tensor)
            elif isinstance(operation, copying):
                self.memory.copy(operation)
                self._copy(operation)
                is_taken |= isinstance(operation, CopyIn)
            else:
                raise ScheduleError(
                    f"The {half} has a {type(operation).__name__}: values are offloaded in the forward, and come back "
                    "after it"
                )
            if self.timeline and not is_taken:
                moment = self.timeline[-1]
                self.timeline[-1] = Moment(moment.node, moment.peak_bytes, self.memory.live_bytes)

    def _compute(self, index: int) -> None:
        node, memory = self._graph.nodes[index], self.memory
        if self.runs[index] and not node.is_repeatable:
            raise ScheduleError(f"The schedule runs {node.name!r} twice, but it must run once")
        memory.check_live(node.inputs, f"{node.name!r} reads")
        if node.is_mutating:
            memory.check_unchanged(node.inputs, f"{node.name!r} changes")
        memory.define(node.outputs, node.inputs)
        peak_bytes = memory.live_bytes + self._profile.workspace_bytes[index]
        self.timeline.append(Moment(index, peak_bytes, memory.live_bytes))
        memory.moments += 1
        self.runs[index] += 1
        self._now_ms += self._profile.time_ms[index]

    def _copy(self, operation: Copying) -> None:
        """Advance the clocks by the start of a copy, or by a wait."""
        link, storage, kind = self._profile.link, operation.storage, type(operation)
        if link is None:
            raise ScheduleError("The schedule copies to the host, but its costs do not say how fast (Profile.link)")
        if isinstance(operation, (CopyOut, CopyIn)):
            copy_ms = link.out_ms if isinstance(operation, CopyOut) else link.in_ms
            end_ms = max(self._now_ms, self._copied_ms[kind]) + copy_ms(self._graph.sizes[storage])
            self._copied_ms[kind] = self._done_ms[storage, kind] = end_ms
        else:
            wait_ms = max(0.0, self._done_ms[storage, _BEFORE[kind]] - self._now_ms)
            self._now_ms += wait_ms
            self.wait_ms += wait_ms

    def blocks(self) -> list[tuple[int, int, int]]:
        """Return the storage of each block, and the first and last moment at which it lives."""
        memory, end = self.memory, self.memory.moments - 1
        pairs = enumerate(zip(memory.storage_of_block, memory.first, strict=True))
        return [(storage, first, memory.last.get(block, end)) for block, (storage, first) in pairs]


def simulate(graph: Graph, profile: Profile, schedule: Schedule) -> Simulation:
    """Replay a schedule; return its bytes above resident ones, and its times.

    Raises:
        ScheduleError: If a node reads, or a free drops, a tensor that is not in memory; if a node that must run once
            runs again; if a node of the step doesn't run, or a gradient doesn't exist at the end.
    """
    replay = _replay(graph, profile, schedule)
    once = {*graph.forward, *graph.backward}
    return Simulation(
        timeline=tuple(replay.timeline),
        turn=replay.turn,
        peak_bytes=max((moment.peak_bytes for moment in replay.timeline), default=0),
        saved_bytes=replay.saved_bytes,
        time_ms=sum(count * profile.time_ms[n] for n, count in enumerate(replay.runs)) + replay.wait_ms,
        recompute_ms=sum((count - (n in once)) * profile.time_ms[n] for n, count in enumerate(replay.runs)),
        wait_ms=replay.wait_ms,
        host_bytes=replay.memory.host_peak_bytes,
    )


def _replay(graph: Graph, profile: Profile | None, schedule: Schedule) -> _Replay:
    """Replay a schedule; without a profile, only the moments of allocations and frees are meaningful."""
    nothing = (0,) * len(graph.nodes)
    replay = _Replay(graph, profile or Profile(nothing, nothing, "", Link(math.inf, math.inf)))
    memory = replay.memory
    memory.define(graph.inputs, ())
    replay.run(schedule.forward, "forward", (CopyOut, WaitOut))
    replay.turn = len(replay.timeline)
    memory.check_copied("The forward ends before it has copied out", CopyOut)
    memory.check_live(tuple(t for t in schedule.saved if not memory.is_offloaded(t)), "The schedule saves")
    survivors = {*schedule.saved, *graph.held, *graph.inputs}
    for tensor in [t for t in memory.block_of if t not in survivors]:
        memory.free(tensor)
    replay.saved_bytes = memory.live_bytes
    memory.retain(t for t in set(graph.retained).intersection(schedule.saved) if not memory.is_offloaded(t))
    memory.define(graph.tangents, ())
    replay.run(schedule.backward, "backward", (CopyIn, WaitIn))
    memory.check_copied("The step ends without", CopyOut, WaitOut, CopyIn)
    memory.check_live(graph.gradients, "The step returns")
    for index in (*graph.forward, *graph.backward):
        if not replay.runs[index]:
            raise ScheduleError(f"The schedule never runs {graph.nodes[index].name!r}")
    return replay


def allocations(
    graph: Graph, schedule: Schedule, offloaded: Collection[int] = (), brought_back: Collection[int] = ()
) -> Allocations:
    """Return the allocations and frees of a schedule.

    Storages in `offloaded` are freed after their last use in the forward. Those also in `brought_back` take memory
    again from their first use in the backward on.
    """
    replay = _replay(graph, None, schedule)
    nodes, turn = [moment.node for moment in replay.timeline], replay.turn
    uses: dict[int, list[int]] = {storage: [] for storage in offloaded}  # moments of reads and writes
    for moment, index in enumerate(nodes):
        touched = (*graph.nodes[index].inputs, *graph.nodes[index].outputs)
        for storage in uses.keys() & {graph.tensors[t].storage for t in touched}:
            uses[storage].append(moment)
    first, last = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)  # storages, by moment
    for storage, start, end in replay.blocks():
        first[start].append(storage)
        if storage in uses and start < turn <= end:
            last[max(moment for moment in uses[storage] if moment < turn)].append(storage)
            if storage not in brought_back:
                continue
            first[min((moment for moment in uses[storage] if moment >= turn), default=end)].append(storage)
        last[end].append(storage)
    storages, signs, before = list[int](), list[int](), list[int]()
    for moment in range(len(nodes)):
        storages += [*first[moment], *last[moment]]
        signs += [1] * len(first[moment]) + [-1] * len(last[moment])
        before.append(len(storages) - len(last[moment]))
    return Allocations(*(np.array(values, dtype=np.int64) for values in (storages, signs, nodes, before)))


def blocks(graph: Graph, schedule: Schedule) -> list[tuple[int, int, int]]:
    """Return the storage of each block that a schedule allocates, and the first and last moment at which it lives."""
    return _replay(graph, None, schedule).blocks()


def simulate_eager(graph: Graph, profile: Profile) -> Simulation:
    """Simulate a step as eager PyTorch runs it."""
    eager, costs = in_eager(graph, profile)
    return simulate(eager, costs, lower(eager, eager_decisions(eager)))


def forward_peak_bytes(graph: Graph, profile: Profile) -> int:
    """Return the peak of eager PyTorch's forward without gradients: each value is freed after its last use."""
    eager, costs = in_eager(graph, profile)
    alone = replace(eager, backward=(), tangents=(), gradients=())
    return simulate(alone, costs, lower(alone, keep_all(alone))).peak_bytes
