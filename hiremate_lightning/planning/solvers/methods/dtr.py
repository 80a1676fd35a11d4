"""DTR: evict when memory runs out, by a heuristic that does not know the future; recompute missing values.

Source: Kirisame, Lyubomirsky, Haan, Brennan, He, Roesch, Chen, Tatlock, "Dynamic Tensor Rematerialization", ICLR 2021,
arXiv 2006.09616. If an allocation exceeds the budget, the value of least h_DTR is evicted, see `docs/formulation.md`.

Changed: it runs on the recorded step with the profiled times, and its actions become the schedule. Values that the
forward reads later stay, and values that nothing will read are freed. A value that would be computed twice before one
operation is held in between. It can't look ahead: near the smallest budgets it recomputes the same values many times.
If the replay of its schedule exceeds the budget, it runs again with a smaller working budget.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator

from ..chain import last_needs
from ..choices import Policy, spread
from ..model import StepModel
from ..search import PROPOSING_SHARE, Search, strategy

WORKING_BUDGETS = (1.0, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6)  # of the real budget, in turn until a schedule fits
LEAST_STALENESS_MS = 1e-6
SCORED_TIMES = 2  # work of scoring a value, in operations of a replay


@strategy("dtr")
def propose(search: Search) -> Iterator[Policy]:
    """Propose the heuristic's schedule under the budget, and under smaller budgets until one fits."""
    deadline = search.within(PROPOSING_SHARE)
    for share in WORKING_BUDGETS:
        policy = DtrRun(search.model, int(share * search.limit), deadline).policy()
        if policy is None:
            return
        yield policy
        if search.best is not None:
            return


class DtrRun:
    """One run of the heuristic on a step, with a limit of bytes and a deadline of work."""

    def __init__(self, model: StepModel, limit_bytes: int, deadline: float) -> None:
        self._model, self._limit, self._deadline = model, limit_bytes, deadline
        self._last_need = last_needs(self._model)
        sources, results = {s: model.sources(s) for s in model.choices}, defaultdict[int, list[int]](list)
        for storage in model.choices:
            for source in sources[storage]:
                results[source].append(storage)
        self._neighbours = sources, results  # of each choice: those that its producer reads, and those made from it
        self._evicted = set[int]()
        self.live = set[int]()
        self._live_bytes, self._clock_ms = 0, 0.0
        self._read_ms: dict[int, float] = {}
        self._read_at: dict[int, int] = {}
        self._drops = set[tuple[int, int]]()

    def policy(self) -> Policy | None:
        """Run the heuristic; return its policy, None if the deadline ended the run."""
        if not self._forward():
            return None
        kept = set(self.live)
        for position in range(len(self._model.all_reads)):
            if self._model.work.is_past(self._deadline):
                return None
            self._backward(position)
        kept.difference_update(s for s, position in self._drops if position < 0)
        drops = frozenset((s, position) for s, position in self._drops if position >= 0)
        return Policy(frozenset(kept), drops)

    def _forward(self) -> bool:
        """Run the forward; return whether time was left."""
        model, graph = self._model, self._model.graph
        wanted = set(model.choices)
        for position, node in enumerate(graph.forward):
            if self._model.work.is_past(self._deadline):
                return False
            reads = {s for t in graph.nodes[node].inputs if (s := model.storage_of[t]) in wanted}
            made = [s for s in graph.allocates[node] if s in wanted]
            read_later = {s for s in self.live if model.last_forward_use(s) >= position}
            self._add(made)
            self._evict(-1, model.forward_rest[position], {*reads, *made, *read_later})
            self._read(-1, node, {*reads, *made})
        return True

    def _backward(self, position: int) -> None:
        """Recompute the missing choices that a backward node reads, and run the node."""
        model = self._model
        reads = model.all_reads[position]
        for storage in reads:
            waiting = list[int]()
            there = set(self.live)
            for node in model.recompute(storage, there, waiting):
                needed = {s for w in waiting for s in (w, *model.needs.get(model.producer.get(w, -1), ()))}
                pinned = {*reads, *needed, *model.needs[node], *model.makes[node]}
                self._add(model.makes[node])
                self._evict(position, model.transient[node] + model.live_gradients[position], pinned)
                self._read(position, node, {*model.needs[node], *model.makes[node]})
                there.intersection_update(self.live)
        if position < len(model.reads):
            self._evict(position, model.gradients[position], set(reads))
            self._read(position, model.graph.backward[position], reads)
        dead = [s for s in self.live if self._last_need.get(s, -1) <= position and s not in model.fixed]
        self._remove(dead)

    def _read(self, position: int, node: int, storages: Iterable[int]) -> None:
        """Advance the clock by the time of a node, and store it as the last access of the node's choices."""
        self._model.work.add_operations(1)
        self._clock_ms += self._model.problem.profile.time_ms[node]
        for storage in storages:
            self._read_ms[storage], self._read_at[storage] = self._clock_ms, position

    def _add(self, storages: Iterable[int]) -> None:
        for storage in storages:
            if storage not in self.live:
                self.live.add(storage)
                self._live_bytes += self._model.sizes[storage]
                self._evicted.discard(storage)

    def _remove(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self.live.discard(storage)
            self._live_bytes -= self._model.sizes[storage]

    def _evict(self, position: int, rest_bytes: int, pinned: Container[int]) -> None:
        """Evict until the live choices and the rest are within the limit, or nothing is left to evict."""
        model = self._model
        while self._live_bytes + rest_bytes > self._limit:
            free = (s for s in self.live if s in model.producer and s not in pinned and model.sizes[s])
            storage = min(free, key=lambda s: (self._score(s), s), default=None)
            if storage is None:
                return
            model.work.add_operations(SCORED_TIMES * len(self.live))
            self._remove([storage])
            self._evicted.add(storage)
            if position >= 0:
                is_read = self._read_at[storage] == position
                self._drops.add((storage, position if is_read else position - 1))

    def _score(self, storage: int) -> float:
        """Return h_DTR of a choice, with the time to recompute it and the values of its evicted neighbourhood e*."""
        staleness_ms = max(LEAST_STALENESS_MS, self._clock_ms - self._read_ms.get(storage, 0.0))
        ways = (lambda s, on=on: self._evicted.intersection(on[s]) for on in self._neighbours)
        near = set[int]().union(*(spread(set(), [storage], way) for way in ways))
        nodes = {self._model.producer[s] for s in near if s in self._model.producer}
        cost_ms = sum(self._model.cost_ms[node] for node in sorted(nodes))
        return cost_ms / (self._model.sizes[storage] * staleness_ms)
