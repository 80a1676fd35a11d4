"""The hierarchical program: small programs give options of clusters, and the phased model chooses among them.

Source: Gusak, Zhao, Le Hellard, Beaumont, Eyraud-Dubois, Shilova et al., "HiRemate: Hierarchical Approach for Efficient
Re-materialization of Neural Networks", ICML 2025, PMLR 267. `docs/formulation.md` has the programs and the partition.

Changed: an option is the set of values of a cluster that are kept through the turn. It needs no estimated peak, since
the top program, the phased model, counts every storage. The partition takes one round, walks regions from the inputs,
and drops a candidate that would close a cycle. It can't mix two options of one cluster, except that filling up may keep
more. It may find no schedule if the budget is small.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

from ....records.graph import Graph
from ..choices import Policy
from ..model import StepModel
from ..phases import PhasedProgram
from ..refine import Restriction, refine
from ..search import Search, strategy, try_segments
from ..turn_point import options_of, prove

MAX_NODES = 20  # most allocating nodes of a cluster; HiRemate's M_l
ALPHA = 0.5  # exponent of the number of nodes in the score; HiRemate's default
OPTION_LIMIT_S = 2.0
RESERVED_SHARE = 0.1  # of the time limit, for segments and to fill up

Frontier = tuple[frozenset[int], ...]


def frontiers(model: StepModel, clusters: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Frontier]]:
    """Yield the own values and the options of each cluster that has own values, the option that saves most first.

    An option is the set of values that are kept. Equal clusters are solved once.
    """
    solved: dict[str, tuple[tuple[int, ...], ...]] = {}
    for cluster in clusters:
        inside = values_of(model, cluster)
        if not inside:
            continue
        key = structural_key(model.graph, cluster)
        if key not in solved:
            place = {s: i for i, s in enumerate(inside)}
            used = [s for s in inside if s in model.uses]
            options = options_of(model, inside, used, (), OPTION_LIMIT_S) or [frozenset(inside)]
            solved[key] = tuple(tuple(place[s] for s in sorted(option)) for option in options)
        yield inside, tuple(frozenset(inside[i] for i in option) for option in solved[key])


def values_of(model: StepModel, cluster: Sequence[int]) -> list[int]:
    """Return the choices that a cluster makes and that no other cluster reads in the forward."""
    nodes, made = set(cluster), {s for n in cluster for s in model.graph.allocates[n]}
    others = (model.graph.nodes[n].inputs for n in model.graph.forward if n not in nodes)
    outside = {model.storage_of[t] for inputs in others for t in inputs}
    return [s for s in model.choices if s in made and s not in outside and s in model.producer]


def restriction(options: Sequence[tuple[list[int], Frontier]]) -> Restriction:
    """Return a function that adds (7) and (8) to a phased program, for the values and options of each cluster."""

    def restrict(phased: PhasedProgram) -> None:
        program = phased.program
        for number, (values, frontier) in enumerate(options):
            chosen = [program.variable(0.0) for _ in frontier]
            program.row(f"7_{number}", [(f, 1.0) for f in chosen], lower=1.0, upper=1.0)
            for storage in values:
                if (0, storage) in phased.held:
                    keeping = [(f, 1.0) for f, option in zip(chosen, frontier, strict=True) if storage in option]
                    terms = [*keeping, (phased.held[0, storage], -1.0)]
                    program.row(f"8_{number}_{storage}", terms, lower=0.0, upper=0.0)

    return restrict


@strategy("hilp", needs_programs=True)
def propose(search: Search) -> Iterator[Policy]:
    """Propose the best combination of the clusters' options; add a note if segments are faster."""
    if not prove(search):
        return
    options = list(frontiers(search.model, partition(search.model.graph)))
    refine(search, restrict=restriction(options), reserve_s=RESERVED_SHARE * search.left_s())
    if search.best is not None:
        chosen = search.best
        yield chosen.policy
        try_segments(search, search.within(0.5))
        if search.best is not chosen:
            search.notes.append("Segments, filled up, are faster here than the choice among the options of clusters.")


# ---------------------------------------------------------------- the partition


def structural_key(graph: Graph, nodes: Sequence[int]) -> str:
    """Hash the work of a set of nodes: operations, scalar arguments, shapes and wiring, without names and places."""
    local: dict[int, int] = {}
    read_back = set(graph.needed)
    digest = hashlib.sha256()
    for index in nodes:
        node = graph.nodes[index]
        for tensor in (*node.inputs, *node.outputs):
            local.setdefault(tensor, len(local))
        storages = [graph.tensors[t].storage for t in node.outputs]
        sizes = [0 if storage is None else graph.storages[storage].size_bytes for storage in storages]
        saved = [t in read_back for t in node.outputs]
        wiring = [local[t] for t in node.inputs], [local[t] for t in node.outputs]
        digest.update(repr((node.key or node.op, wiring, sizes, saved)).encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of nodes to contract: at first one node that allocates or joins storages, with its views."""

    parts: tuple[tuple[int, ...], ...]  # the nodes of each group that was joined
    positions: tuple[int, ...]  # forward positions of all nodes
    size: int  # number of forward nodes that allocate
    made: frozenset[int]  # storages that the group makes
    read: frozenset[int]  # storages that the group reads and does not make

    @classmethod
    def of(cls, groups: Sequence[_Group]) -> _Group:
        """Join groups."""
        made = frozenset[int]().union(*(g.made for g in groups))
        read = frozenset[int]().union(*(g.read for g in groups)) - made
        parts = tuple(sorted(part for g in groups for part in g.parts))
        return cls(parts, tuple(p for g in groups for p in g.positions), sum(g.size for g in groups), made, read)


def partition(graph: Graph, max_nodes: int = MAX_NODES) -> list[tuple[int, ...]]:
    """Partition the forward of a step into clusters, in the order of their first nodes.

    A cluster is a tuple of forward nodes in their order, at most `max_nodes` of which allocate, with their views. The
    backward nodes that read their outputs belong to the cluster too.
    """
    groups = _Contraction(graph, _single_nodes(graph), max_nodes).run()
    return [tuple(sorted(node for part in group.parts for node in part)) for group in groups]


def _single_nodes(graph: Graph) -> list[_Group]:
    """Return one group for each node that allocates or joins storages; a view is part of its base's group."""
    storage_of = [t.storage for t in graph.tensors]
    owner: dict[int | None, int] = {}
    parts, waiting = list[list[int]](), list[int]()
    for node in graph.forward:
        read = [s for t in graph.nodes[node].inputs if (s := storage_of[t]) in owner]
        if graph.allocates[node] or len(set(read)) > 1:
            owner.update((s, len(parts)) for s in graph.allocates[node])
            parts.append([*waiting, node])
            waiting = []
        elif read:
            parts[owner[read[0]]].append(node)
        else:  # a view of a storage that exists before the step
            waiting.append(node)
    if waiting:
        parts[-1:] = [[*chain.from_iterable(parts[-1:]), *waiting]]
    place = {node: position for position, node in enumerate(graph.forward)}
    groups = []
    for nodes in parts:
        made = frozenset(s for n in nodes for s in graph.allocates[n])
        read_here = {s for n in nodes for t in graph.nodes[n].inputs if (s := storage_of[t]) in owner and s is not None}
        size = sum(bool(graph.allocates[n]) for n in nodes)
        groups.append(_Group((tuple(nodes),), tuple(place[n] for n in nodes), size, made, frozenset(read_here - made)))
    return groups


class _Contraction:
    """Contracts groups until no candidate is left."""

    def __init__(self, graph: Graph, groups: list[_Group], max_nodes: int) -> None:
        self.sizes, self.max_nodes = graph.sizes, max_nodes
        self.groups = dict(enumerate(groups))
        self.group_of = list(range(len(groups)))  # for each group of the beginning, the one that it is in now
        self.maker = {s: i for i, group in enumerate(groups) for s in group.made}
        self.readers: dict[int, list[int]] = {}
        for i, group in enumerate(groups):
            for storage in group.read:
                self.readers.setdefault(storage, []).append(i)

    def run(self) -> list[_Group]:
        """Contract groups; return the remaining ones in the order of their first nodes."""
        candidates = (c for item in self.groups for c in (*self._chains(item), *self._regions(item)))
        heap = [self._entry(candidate) for candidate in dict.fromkeys(candidates)]
        heapq.heapify(heap)
        while heap:
            _, _, members = heapq.heappop(heap)
            now = tuple(sorted({self.group_of[m] for m in members}))
            if len(now) < 2 or sum(len(self.groups[m].parts) for m in now) > self.max_nodes:
                continue
            if now != members:
                heapq.heappush(heap, self._entry(now))
            elif self._is_convex(now):
                self.group_of = [now[0] if group in now else group for group in self.group_of]
                self.groups[now[0]] = _Group.of([self.groups.pop(member) for member in now])
        return [self.groups[item] for item in sorted(self.groups, key=self._first)]

    def _successors(self, item: int) -> list[int]:
        readers = {self.group_of[r] for s in self.groups[item].made for r in self.readers.get(s, ())}
        return sorted(readers - {item})

    def _predecessors(self, item: int) -> list[int]:
        return sorted({self.group_of[self.maker[s]] for s in self.groups[item].read} - {item})

    def _chains(self, first: int) -> Iterator[tuple[int, ...]]:
        """Yield the pieces of the chain that begins at an item, each of at most `max_nodes`."""
        before = self._predecessors(first)
        if len(before) == 1 and len(self._successors(before[0])) == 1:
            return
        chain = [first]
        while len(after := self._successors(chain[-1])) == 1 and len(self._predecessors(after[0])) == 1:
            chain.append(after[0])
        pieces = -(-len(chain) // self.max_nodes)
        for piece in range(pieces):
            members = chain[len(chain) * piece // pieces : len(chain) * (piece + 1) // pieces]
            if len(members) > 1:
                yield tuple(sorted(members))

    def _regions(self, opening: int) -> Iterator[tuple[int, ...]]:
        """Yield the region from an item to where its branches meet again, with and without the two ends."""
        frontier, inside = set(self._successors(opening)), [opening]
        while len(frontier) > 1 and len(inside) <= self.max_nodes + 1:
            nearest = min(frontier, key=lambda i: self._first(i))
            frontier.remove(nearest)
            inside.append(nearest)
            frontier.update(self._successors(nearest))
        if len(frontier) != 1 or len(inside) < 2:
            return
        closing = frontier.pop()
        for with_opening, with_closing in product((True, False), repeat=2):
            members = {*inside[not with_opening :], *([closing] if with_closing else [])}
            if 1 < len(members) <= self.max_nodes:
                yield tuple(sorted(members))

    def _entry(self, members: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
        made = {s for m in members for s in self.groups[m].made}
        read = {s for m in members for s in self.groups[m].read} - made
        inside = set(members)
        passed = {s for s in made if any(self.group_of[r] not in inside for r in self.readers.get(s, ()))}
        nodes = sum(self.groups[m].size for m in members)
        score = sum(self.sizes[s] for s in read | passed) * max(1, nodes) ** ALPHA
        return score, min(map(self._first, members)), members

    def _is_convex(self, members: tuple[int, ...]) -> bool:
        """Whether no path leaves the members and comes back: contracting them then closes no cycle."""
        inside, last = set(members), max(max(self.groups[m].positions) for m in members)
        stack = [s for m in members for s in self._successors(m) if s not in inside]
        seen = set(stack)
        while stack:
            for after in self._successors(stack.pop()):
                if after in inside:
                    return False
                if after not in seen and self._first(after) <= last:
                    seen.add(after)
                    stack.append(after)
        return True

    def _first(self, item: int) -> int:
        return min(self.groups[item].positions)
