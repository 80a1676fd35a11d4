"""The step as the strategies see it: storages that may be kept or recomputed, and policies that decide on them.

A *choice* is a forward storage that the backward reads, or that is read to recompute another choice. Views cost nothing
and are left out; `model.decisions` adds them again.

A *policy* says which choices are kept through the turn, and which are dropped after a backward position although they
are used again, so that they are recomputed once more.

A *key* is a place in the backward: `position << ROW | index` for a node that is recomputed before a backward position,
`position << ROW | LAST` for the backward's own node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import add

from ...records.graph import Graph
from ...records.schedule import keep_all, lower, must_run
from ...records.simulation import simulate
from .base import Problem, Work

LEAST_MS = 1e-6  # least time of a recomputation
ROW = 20  # bits of a key for the place within a row
LAST = (1 << ROW) - 1
Rows = list[list[int]]  # producers recomputed before each backward position, and before the end


@dataclass(frozen=True)
class Policy:
    """Which choices are kept, dropped and recomputed early."""

    kept: frozenset[int]  # choices kept through the turn
    # Pairs of choice and backward position: dropped after the position, and recomputed before the next use.
    drops: frozenset[tuple[int, int]] = frozenset()
    # Pairs of choice and backward position: recomputed before the position, although the first use is later.
    early: frozenset[tuple[int, int]] = frozenset()

    def distance(self, other: Policy) -> int:
        """Count the decisions in which two policies differ."""
        return len(self.kept ^ other.kept) + len(self.drops ^ other.drops) + len(self.early ^ other.early)


def at_node(position: int) -> int:
    """Return the key of a backward node."""
    return position << ROW | LAST


def alive_bytes(values: Iterable[tuple[int, int, int]], count: int) -> list[int]:
    """Return the live bytes at each of `count` places; a value is (first place, last place, bytes)."""
    change = [0] * (count + 1)
    for first, last, size_bytes in values:
        change[first] += size_bytes
        change[last + 1] -= size_bytes
    return list(accumulate(change[:count]))


def spread(seen: set[int], starts: Iterable[int], following: Callable[[int], Iterable[int]]) -> set[int]:
    """Add to `seen` the starts and everything reachable from them by `following`; return `seen`."""
    stack = [s for s in starts if s not in seen]
    seen.update(stack)
    while stack:
        fresh = [s for s in following(stack.pop()) if s not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return seen


def lives_of(graph: Graph) -> dict[int, tuple[int, int]]:
    """Return, for each storage that the forward makes, the forward positions at which it is made and last read."""
    lives = {storage: (made, made) for made, node in enumerate(graph.forward) for storage in graph.allocates[node]}
    for position, node in enumerate(graph.forward):
        for tensor in graph.nodes[node].inputs:
            storage = graph.tensors[tensor].storage
            if storage in lives:
                lives[storage] = lives[storage][0], max(lives[storage][1], position)
    return lives


def crossing_bytes(graph: Graph) -> list[int]:
    """Return, for each forward position, the bytes made before it and read at it or later in the forward."""
    lives = ((made + 1, last, graph.sizes[storage]) for storage, (made, last) in lives_of(graph).items())
    return alive_bytes(lives, len(graph.forward))


class Choices:
    """The storages of a problem to decide on, with their readers, producers and bytes; `work` counts the searches."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.work = problem, Work(problem.options.time_limit_s)
        graph = self.graph = problem.graph
        self.sizes = graph.sizes
        self.storage_of = [t.storage for t in graph.tensors]
        self.made_at = {s: i for i, n in enumerate(graph.forward) for s in graph.allocates[n]}
        self._held = {self.storage_of[t] for t in graph.held}
        self.retained = {self.storage_of[t] for t in graph.retained}  # live to the end if kept
        reads_of_forward = enumerate(self._forward_storages(graph.nodes[n].inputs) for n in graph.forward)
        self._last_read = {s: position for position, storages in reads_of_forward for s in storages}
        # The choices that each backward position reads, those returned as gradients, and both together.
        self.reads = [self._forward_storages(graph.nodes[n].inputs) for n in graph.backward]
        self.returned = self._forward_storages(graph.gradients)
        self.all_reads = [*self.reads, self.returned]
        self.uses: dict[int, list[int]] = {}  # for each choice, the backward positions that read it
        for position, storages in enumerate(self.all_reads):
            for storage in storages:
                self.uses.setdefault(storage, []).append(position)
        # Storages that a later call reads as its inputs, in its backward or in recomputation.
        again = {t for node in set(graph.recomputers) if node is not None for t in graph.nodes[node].inputs}
        handed = {t for t in again if graph.tensors[t].producer is None}
        self._passed_on = {self.storage_of[t] for t in (*graph.needed, *handed) if graph.recomputers[t] is None}
        self._collect_choices()
        self._collect_pins()
        self._measure_the_rest()

    def _forward_storages(self, tensors: Iterable[int]) -> tuple[int, ...]:
        storages = dict.fromkeys(self.storage_of[t] for t in tensors)
        return tuple(s for s in storages if s is not None and s in self.made_at and s not in self._held)

    def _collect_choices(self) -> None:
        graph = self.graph
        self.producer = dict[int, int]()  # for each choice, the node that recomputes it
        self.needs = dict[int, tuple[int, ...]]()  # for each producer, the choices that it reads

        def sources(storage: int) -> tuple[int, ...]:
            made_by = graph.nodes[graph.forward[self.made_at[storage]]]
            node = graph.recomputers[next(t for t in made_by.outputs if self.storage_of[t] == storage)]
            if node is None or storage in self._passed_on:  # a later call can't run nodes of an earlier call
                return ()
            self.producer[storage] = node
            needs, made = self._forward_storages(graph.nodes[node].inputs), graph.allocates[node]
            self.needs[node] = tuple(s for s in needs if s not in made)
            return self.needs[node]

        # Storages to decide on, in order of production; fixed storages have no producer and are always kept.
        self.choices = tuple(sorted(spread(set(), self.uses, sources), key=self.made_at.__getitem__))
        self.fixed = frozenset(s for s in self.choices if s not in self.producer)
        self.makes: dict[int, list[int]] = {}  # for each producer, the choices that it makes
        for storage in self.choices:
            if storage in self.producer:
                self.makes.setdefault(self.producer[storage], []).append(storage)
        times_ms = self.problem.profile.time_ms
        self.cost_ms = {node: max(times_ms[node], LEAST_MS) for node in self.makes}

    def _collect_pins(self) -> None:
        """Find the spans of backward positions in which views made by the backward hold forward storages."""
        made: dict[int, int] = {}
        last: dict[int, int] = {}
        for position, index in enumerate(self.graph.backward):
            node = self.graph.nodes[index]
            made.update((t, position) for t in node.outputs if self.storage_of[t] in self.made_at)
            last.update((t, position) for t in node.inputs if t in made)
        last.update((t, len(self.graph.backward)) for t in self.graph.gradients if t in made)
        self.pins: dict[int, list[tuple[int, int]]] = {}  # for each choice, the spans in which these views hold it
        for tensor, position in last.items():
            storage = self.storage_of[tensor]
            assert storage is not None
            self.pins.setdefault(storage, []).append((made[tensor], position))
        reads = [*(self.graph.nodes[n].inputs for n in self.graph.backward), self.graph.gradients]
        # For each backward position and the end: choices read only through these views, and where the view was made.
        self.seen_from: list[dict[int, int]] = []
        for tensors in reads:
            direct = {self.storage_of[t] for t in tensors if t not in made}
            viewed = {self.storage_of[t]: made[t] for t in tensors if t in made}
            self.seen_from.append({s: at for s, at in viewed.items() if s is not None and s not in direct})

    def _measure_the_rest(self) -> None:
        """Compute the bytes that no decision changes: simulate keeping everything, and subtract the choices."""
        chosen = set(self.choices)
        retained = (t for t in self.graph.retained if self.storage_of[t] not in chosen)
        graph = replace(self.graph, retained=tuple(retained))
        schedule = lower(graph, keep_all(graph))
        everything = simulate(graph, self.problem.profile, schedule)
        is_all = graph.retained == self.graph.retained
        kept = everything if is_all else simulate(self.graph, self.problem.profile, schedule)
        self.keep_all_bytes = kept.peak_bytes
        turn, count = len(graph.forward), len(everything.timeline)

        def last(storage: int) -> int:
            return turn + self.uses[storage][-1] if storage in self.uses else self.last_forward_use(storage)

        lives = ((self.made_at[s], last(s), self.sizes[s]) for s in self.choices)
        held = alive_bytes(lives, count + 1)
        rest = [moment.peak_bytes - kept for moment, kept in zip(everything.timeline, held, strict=False)]
        after = [moment.live_bytes - kept for moment, kept in zip(everything.timeline, held[1:], strict=True)]
        self.forward_rest, self.gradients = rest[:turn], rest[turn:]  # while the node of each position runs
        # In memory as the backward starts: held storages, saved ones, and the gradients of outputs that it reads.
        read = {t for node in graph.backward for t in graph.nodes[node].inputs} | set(graph.gradients)
        lasting = (*schedule.saved, *graph.held, *(t for t in graph.tangents if t in read))
        at_turn = {self.storage_of[t] for t in lasting} - chosen
        self.live_gradients = [  # just before the node of each position runs, and at the end
            sum(self.sizes[s] for s in at_turn if s is not None),
            *after[turn:],
        ]
        self.transient = {  # for each producer, the bytes that exist only while it runs
            node: self.problem.profile.workspace_bytes[node]
            + sum(self.sizes[s] for s in graph.allocates[node] if s not in self.producer)
            for node in self.makes
        }

    @cached_property
    def need_bytes(self) -> list[int]:
        """For each backward position, the least bytes of any policy while its node runs."""
        return [
            rest + sum(self.sizes[s] for s in reads) for rest, reads in zip(self.gradients, self.reads, strict=True)
        ]

    @cached_property
    def least_bytes(self) -> int:
        """A lower bound on every schedule's peak: the largest need of a node while it runs."""
        chosen, peak_bytes = set(self.choices), max(self.need_bytes, default=0)
        for rest, node in zip(self.forward_rest, self.graph.forward, strict=True):
            operands = {*self._forward_storages(self.graph.nodes[node].inputs), *self.graph.allocates[node]}
            peak_bytes = max(peak_bytes, rest + sum(self.sizes[s] for s in operands & chosen))
        return peak_bytes

    def neediest(self, parts: int) -> tuple[int, ...]:
        """Return the position with the largest `need_bytes` in each of `parts` equal parts of the backward."""
        count = len(self.reads)
        ranges = (range(count * i // parts, count * (i + 1) // parts) for i in range(parts))
        return tuple(max(part, key=self.need_bytes.__getitem__) for part in ranges if part)

    def sources(self, storage: int) -> tuple[int, ...]:
        """Return the choices that the producer of a choice reads."""
        return self.needs[self.producer[storage]] if storage in self.producer else ()

    def last_forward_use(self, storage: int) -> int:
        """Return the last forward position that reads a choice; the position that makes it if none reads it."""
        return self._last_read.get(storage, self.made_at[storage])

    def is_pinned(self, storage: int, position: int) -> bool:
        """Whether a view made by the backward holds a storage beyond a position."""
        return any(first <= position < last for first, last in self.pins.get(storage, ()))

    def recompute(self, storage: int, live: set[int], waiting: list[int] | None = None) -> Iterator[int]:
        """Yield the nodes that recompute a choice from live ones; add the choices that they make to `live`.

        `waiting` receives the choices that wait for the yielded node.
        """
        return must_run(storage, live, self.producer, self.needs, self.makes, waiting)

    @cached_property
    def order(self) -> dict[int, int]:
        """Number the producers in the forward's order, each after the producers of its inputs."""
        live, row = set(self.fixed), list[int]()
        for storage in self.choices:
            if storage not in live:
                row.extend(self.recompute(storage, live))
        return {node: number for number, node in enumerate(row)}

    @cached_property
    def forward_bytes(self) -> list[int]:
        """For each forward position, the bytes while its node runs if nothing is kept."""
        values = ((self.made_at[s], self.last_forward_use(s), self.sizes[s]) for s in self.choices)
        return list(map(add, alive_bytes(values, len(self.graph.forward)), self.forward_rest))

    @cached_property
    def use_keys(self) -> dict[int, tuple[int, ...]]:
        """For each choice, the keys of the backward nodes that read it, see `timeline`."""
        return {storage: tuple(at_node(position) for position in uses) for storage, uses in self.uses.items()}
