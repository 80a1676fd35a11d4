"""The step as the strategies see it: storages that may be kept or recomputed, and a fast replay of such decisions.

A *choice* is a forward storage that the backward needs, or that recomputing such a one needs. Views cost nothing and
are left out here; `decisions` puts them back. A *policy* says which choices are kept through the turn, and after
which backward position a value is dropped although it is used again, so that it is recomputed once more.
`StepModel.replay` returns peak and time of a policy in time linear in the graph; the independent simulator has the last
word on what leaves the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from operator import add

from ...records.schedule import keep_all, lower, must_run
from ...records.simulation import simulate
from .base import Problem
from .policies import Near, Policy, Replay, Rows
from .work import Work

LEAST_MS = 1e-6  # that recomputing anything counts as


def _by_position(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for storage, position in sorted(pairs):
        found.setdefault(position, []).append(storage)
    return found


def _first_row(rows: Rows, storages_of: Mapping[int, Sequence[int]], storage: int) -> int:
    """Find the first row in which a node has a storage among its own; the number of rows where there is none."""
    found = (position for position, row in enumerate(rows) if any(storage in storages_of[node] for node in row))
    return next(found, len(rows))


class StepModel:
    """Arrays made once from a problem.

    Attributes:
        problem: The problem.
        choices: Storages to decide on, in order of production.
        fixed: Choices that can't be recomputed: always kept.
        producer: For each choice, the node that recomputes it; fixed ones have none.
        makes: For each producer, the choices that it makes.
        needs: For each producer, the choices that it reads.
        uses: For each choice, the backward positions that read it directly.
        reads: For each backward position, the choices that it reads.
        returned: The choices that are returned as gradients.
        gradients: For each backward position, bytes of gradients and workspace while its node runs.
        live_gradients: For each backward position, and the end, bytes that no decision changes just before it.
        transient: For each producer, bytes that only it needs, while it runs.
        work: Counts what is done with it.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.work = problem, Work(problem.options.time_limit_s)
        graph = self.graph = problem.graph
        self.sizes = graph.sizes
        self.storage_of = [t.storage for t in graph.tensors]
        self.made_at = {s: i for i, n in enumerate(graph.forward) for s in graph.allocates[n]}
        self._held = {self.storage_of[t] for t in graph.held}
        self._retained = {self.storage_of[t] for t in graph.retained}
        self.reads = [self._forward_storages(graph.nodes[n].inputs) for n in graph.backward]
        self.returned = self._forward_storages(graph.gradients)
        self._all_reads = [*self.reads, self.returned]
        self.uses: dict[int, list[int]] = {}
        for position, storages in enumerate(self._all_reads):
            for storage in storages:
                self.uses.setdefault(storage, []).append(position)
        self._collect_choices()
        self._collect_pins()
        self._measure_the_rest()

    def _forward_storages(self, tensors: Iterable[int]) -> tuple[int, ...]:
        found = dict.fromkeys(self.storage_of[t] for t in tensors)
        return tuple(s for s in found if s is not None and s in self.made_at and s not in self._held)

    def _collect_choices(self) -> None:
        self._passed_on = self._find_passed_on()
        graph, self.producer, self.needs = self.graph, dict[int, int](), dict[int, tuple[int, ...]]()
        fixed, stack, seen = set(), list(self.uses), set(self.uses)
        while stack:
            storage = stack.pop()
            node = self._recomputer(storage)
            if node is None:
                fixed.add(storage)
                continue
            self.producer[storage] = node
            if node not in self.needs:
                own = set(graph.allocates[node])
                needs = self._forward_storages(graph.nodes[node].inputs)
                self.needs[node] = tuple(s for s in needs if s not in own)
            fresh = [s for s in self.needs[node] if s not in seen]
            seen.update(fresh)
            stack.extend(fresh)
        self.choices = tuple(sorted(seen, key=lambda s: self.made_at[s]))
        self.fixed = frozenset(fixed)
        self.makes: dict[int, list[int]] = {}
        for storage in self.choices:
            if storage in self.producer:
                self.makes.setdefault(self.producer[storage], []).append(storage)
        times = self.problem.profile.time_ms
        self.cost_ms = {node: max(times[node], LEAST_MS) for node in self.makes}

    def _find_passed_on(self) -> set[int | None]:
        """Find the storages that a later call reads as an input, in its backward or to compute something again."""
        graph = self.graph
        again = {t for node in set(graph.recomputers) if node is not None for t in graph.nodes[node].inputs}
        handed = {t for t in again if graph.tensors[t].producer is None}
        return {self.storage_of[t] for t in (*graph.needed, *handed) if graph.recomputers[t] is None}

    def _collect_pins(self) -> None:
        """Find the spans in which views made by the backward hold forward storages."""
        made: dict[int, int] = {}
        last: dict[int, int] = {}
        for position, index in enumerate(self.graph.backward):
            node = self.graph.nodes[index]
            made.update((t, position) for t in node.outputs if self.storage_of[t] in self.made_at)
            last.update((t, position) for t in node.inputs if t in made)
        last.update((t, len(self.graph.backward)) for t in self.graph.gradients if t in made)
        self._pins: dict[int, list[tuple[int, int]]] = {}
        for tensor, position in last.items():
            storage = self.storage_of[tensor]
            assert storage is not None
            self._pins.setdefault(storage, []).append((made[tensor], position))
        self._seen_from = [
            self._views_read(node.inputs, made) for node in (self.graph.nodes[n] for n in self.graph.backward)
        ]
        self._seen_from.append(self._views_read(self.graph.gradients, made))

    def _views_read(self, tensors: tuple[int, ...], made: dict[int, int]) -> dict[int, int]:
        """Find the storages read only through views that the backward made, and the positions of these."""
        direct = {self.storage_of[t] for t in tensors if t not in made}
        found = {self.storage_of[t]: made[t] for t in tensors if t in made}
        return {s: position for s, position in found.items() if s is not None and s not in direct}

    def _recomputer(self, storage: int) -> int | None:
        """Find what computes a storage again: the recomputer of the tensor that its first producer puts on it.

        None where a later call reads it as an input: that call can't run what an earlier one ran.
        """
        if storage in self._passed_on:
            return None
        node = self.graph.nodes[self.graph.forward[self.made_at[storage]]]
        first = next(t for t in node.outputs if self.storage_of[t] == storage)
        return self.graph.recomputers[first]

    def _measure_the_rest(self) -> None:
        """Measure what no decision changes, by replaying plain training with all choices of size zero."""
        chosen = set(self.choices)
        others = (t for t in self.graph.retained if self.storage_of[t] not in chosen)
        graph = replace(self.graph, retained=tuple(others))
        schedule = lower(graph, keep_all(graph))
        everything = simulate(graph, self.problem.profile, schedule)
        is_all = graph.retained == self.graph.retained
        kept = everything if is_all else simulate(self.graph, self.problem.profile, schedule)
        self.keep_all_bytes = kept.peak_bytes
        forward, backward = len(graph.forward), len(graph.backward)
        change = [0] * (forward + backward + 2)
        ends = [max(self.uses.get(s, [-1])) for s in self.choices]
        for storage, end in zip(self.choices, ends, strict=True):
            last = forward + end if end >= 0 else self.last_forward_use(storage)
            change[self.made_at[storage]] += self.sizes[storage]
            change[last + 1] -= self.sizes[storage]
        self.forward_rest, self.gradients, self.live_gradients = [], [], []
        held, before = 0, self._rest_at_the_turn(schedule.saved)
        for position, moment in enumerate(everything.timeline):
            held += change[position]
            rest = moment.peak_bytes - held
            if position < forward:
                self.forward_rest.append(rest)
            else:
                self.gradients.append(rest)
                self.live_gradients.append(before)
            before = moment.live_bytes - held - change[position + 1]
            if position == forward - 1:
                before = self._rest_at_the_turn(schedule.saved)
        self.live_gradients.append(before)
        self.transient = {
            node: self.problem.profile.workspace_bytes[node]
            + sum(self.sizes[s] for s in graph.allocates[node] if s not in self.producer)
            for node in self.makes
        }

    def _rest_at_the_turn(self, saved: tuple[int, ...]) -> int:
        """Count what lives as the backward starts and is no choice: what is held or always saved, and tangents."""
        graph, chosen = self.graph, set(self.choices)
        read = {t for node in graph.backward for t in graph.nodes[node].inputs} | set(graph.gradients)
        lasting = (*saved, *graph.held, *(t for t in graph.tangents if t in read))
        storages = dict.fromkeys(self.storage_of[t] for t in lasting)
        return sum(self.sizes[s] for s in storages if s is not None and s not in chosen)

    @cached_property
    def forward_readers(self) -> dict[int, list[int]]:
        """For each tensor, the forward nodes that read it."""
        readers: dict[int, list[int]] = {}
        for node in self.graph.forward:
            for tensor in self.graph.nodes[node].inputs:
                readers.setdefault(tensor, []).append(node)
        return readers

    @cached_property
    def need_bytes(self) -> list[int]:
        """For each backward position, the bytes that no decision spares while its node runs."""
        return [
            rest + sum(self.sizes[s] for s in reads) for rest, reads in zip(self.gradients, self.reads, strict=True)
        ]

    @cached_property
    def least_bytes(self) -> int:
        """A peak that no schedule is below: what some node needs while it runs, whatever is kept."""
        chosen, peak_bytes = set(self.choices), max(self.need_bytes, default=0)
        for rest, node in zip(self.forward_rest, self.graph.forward, strict=True):
            own = {*self._forward_storages(self.graph.nodes[node].inputs), *self.graph.allocates[node]}
            peak_bytes = max(peak_bytes, rest + sum(self.sizes[s] for s in own & chosen))
        return peak_bytes

    def neediest(self, parts: int) -> tuple[int, ...]:
        """Find the neediest position of each of so many equal parts of the backward."""
        count = len(self.reads)
        ranges = (range(count * i // parts, count * (i + 1) // parts) for i in range(parts))
        return tuple(max(part, key=self.need_bytes.__getitem__) for part in ranges if part)

    def add_sources(self, found: set[int], choices: Iterable[int]) -> None:
        """Add choices to what was found before, and all that recomputing them may read."""
        stack = [s for s in choices if s not in found]
        found.update(stack)
        while stack:
            node = self.producer.get(stack.pop())
            fresh = [s for s in self.needs[node] if s not in found] if node is not None else []
            found.update(fresh)
            stack.extend(fresh)

    @cached_property
    def _last_forward_use(self) -> dict[int, int]:
        """For each storage that the forward reads, the last position that does."""
        reads = enumerate(self._forward_storages(self.graph.nodes[n].inputs) for n in self.graph.forward)
        return {storage: position for position, storages in reads for storage in storages}

    def last_forward_use(self, storage: int) -> int:
        """Return the last forward position that reads a choice, its own where none does."""
        return self._last_forward_use.get(storage, self.made_at[storage])

    # ---------------------------------------------------------------- replay

    def rows(self, policy: Policy, near: Near | None = None) -> Rows:
        """Recompute lazily: each value just before its first use that finds it missing.

        Args:
            policy: What to keep and to drop.
            near: A policy that differs little, with its rows, of which the first ones are the same.
        """
        live = set(policy.kept) | self.fixed
        dropped, early = _by_position(policy.drops), _by_position(policy.early)

        def drop(position: int) -> None:
            gone = (s for s in dropped[position] if s not in self.fixed and not self._is_pinned(s, position))
            live.difference_update(gone)

        rows: Rows = [] if near is None else near[1][: self._first_difference(policy, *near)]
        for position, row in enumerate(rows):
            for node in row:
                live.update(self.makes[node])
            if position in dropped:
                drop(position)
        for position, reads in enumerate(self._all_reads[len(rows) :], start=len(rows)):
            row = []
            if position in early:
                reads = (*early[position], *reads)
            if not live.issuperset(reads):
                for storage in reads:
                    row.extend(self.recompute(storage, live))
            rows.append(row)
            if position in dropped:
                drop(position)
        return rows

    def _first_difference(self, policy: Policy, other: Policy, rows: Rows) -> int:
        """Find a backward position before which the rows of a policy are those of another one."""
        positions = [len(rows)]
        positions += [position for _, position in policy.early ^ other.early]
        positions += [position + 1 for _, position in policy.drops ^ other.drops]
        for storage in other.kept - policy.kept:  # where it is used first
            positions += self.uses.get(storage, ())[:1]
            positions += [position for early, position in policy.early if early == storage]
            positions.append(_first_row(rows[: min(positions)], self.needs, storage))
        for storage in policy.kept - other.kept:  # where it is there first
            positions.append(_first_row(rows[: min(positions)], self.makes, storage))
        return min(positions)

    def _is_pinned(self, storage: int, position: int) -> bool:
        """Whether a view that the backward made holds a storage beyond a position."""
        return any(first <= position < last for first, last in self._pins.get(storage, ()))

    def recompute(self, storage: int, live: set[int], waiting: list[int] | None = None) -> Iterator[int]:
        """Yield the nodes that recompute a choice from what is live; what they make is live from then on.

        Args:
            storage: The choice.
            live: What is live.
            waiting: Takes the choices that wait for the node that is yielded.
        """
        return must_run(storage, live, self.producer, self.needs, self.makes, waiting)

    @cached_property
    def order(self) -> dict[int, int]:
        """Number the producers as the forward runs them, each after what it reads."""
        live, row = set(self.fixed), list[int]()
        for storage in self.choices:
            if storage not in live:
                row.extend(self.recompute(storage, live))
        return {node: number for number, node in enumerate(row)}

    def in_order(self, rows: Rows, position: int) -> Rows:
        """Run what is recomputed before a backward position in the order of the forward."""
        return [*rows[:position], sorted(rows[position], key=self.order.__getitem__), *rows[position + 1 :]]

    def replay(self, policy: Policy, near: Near | None = None) -> Replay:
        """Return the peak and the time of a policy, see `rows` and `replay_lazy`."""
        return self.replay_lazy(self.rows(policy, near))

    def replay_lazy(self, lazy_rows: Rows) -> Replay:
        """Return the peak and the time of rows; the row at the peak runs as the forward does where that is less."""
        found = self.replay_rows(lazy_rows)
        while found.position >= 0 and found.row_peaks[found.position] == found.peak_bytes:
            rows = self.in_order(found.rows, found.position)
            other = found if rows == found.rows else self.replay_rows(rows)
            if other.row_peaks[found.position] >= found.peak_bytes:
                break
            found = other
        return replace(found, lazy_rows=lazy_rows)

    def replay_rows(self, rows: Rows) -> Replay:
        """Return the peak and the time of recomputing given producers before each backward position."""
        at = self._indices(rows)
        self.work.add_operations(len(self.graph.forward) + at[-1])
        kept, change = self._lay_out(rows, at)
        forward_peak, forward_position = self._forward_peak(kept)
        count = len(self.gradients)
        live = self._live(kept, change)
        node_peaks = [live[index] + rest for index, rest in zip(at, self.gradients, strict=False)]
        node_peaks.append(0)
        row_peaks = [0] * (count + 1)
        for position, row in enumerate(rows):
            if row:
                row_peaks[position] = max(self._row_bytes(rows, position, at, live))
        peak = max(forward_peak, max(node_peaks), max(row_peaks))
        position, node = self._place(peak, rows, at, live, (forward_peak, forward_position), node_peaks, row_peaks)
        return Replay(
            peak,
            self.recompute_ms(rows),
            position,
            node,
            rows,
            node_peaks,
            row_peaks,
            forward_position,
            forward_peak,
            rows,
        )

    def recompute_ms(self, rows: Rows) -> float:
        """Return the time of recomputing given producers."""
        return sum(self.cost_ms[node] for row in rows for node in row)

    def _place(
        self,
        peak: int,
        rows: Rows,
        at: list[int],
        live: list[int],
        forward: tuple[int, int],
        node_peaks: list[int],
        row_peaks: list[int],
    ) -> tuple[int, int]:
        """Find the first position and node with a peak, -1 for the position in the forward."""
        forward_peak, forward_position = forward
        if forward_peak == peak:
            return -1, self.graph.forward[forward_position] if self.graph.forward else 0
        position = next(p for p, peaks in enumerate(zip(node_peaks, row_peaks, strict=True)) if peak in peaks)
        if row_peaks[position] < peak:
            return position, self.graph.backward[position]
        found = self._row_bytes(rows, position, at, live)
        return position, rows[position][found.index(peak)]

    def _row_bytes(self, rows: Rows, position: int, at: list[int], live: list[int]) -> list[int]:
        """Return the bytes while each value is recomputed before a backward position."""
        row = rows[position]
        first, rest = at[position] - len(row), self.live_gradients[position]
        return [live[first + i] + self.transient[k] + rest for i, k in enumerate(row)]

    def row_bytes(self, rows: Rows, position: int) -> list[int]:
        """Return the bytes while each value is recomputed before a backward position."""
        at = self._indices(rows)
        return self._row_bytes(rows, position, at, self._live(*self._lay_out(rows, at)))

    def _live(self, kept: list[int], change: list[int]) -> list[int]:
        return list(accumulate(change, initial=sum(self.sizes[s] for s in kept)))[1:]

    def _indices(self, rows: Rows) -> list[int]:
        """Number what runs in the backward, and give the number of each backward node and of the end."""
        return list(map(add, accumulate(map(len, rows)), range(len(rows))))

    def live_at(self, rows: Rows, positions: Iterable[int]) -> tuple[frozenset[int], dict[int, frozenset[int]]]:
        """Return the choices in memory at the turn, and while the nodes of some backward positions run."""
        wanted, found = set(positions), {}
        live = set(self.returned)
        for position in reversed(range(len(rows))):
            if position < len(self.reads):
                live.update(self.reads[position])
            if position in wanted:
                found[position] = frozenset(live)
            for node in reversed(rows[position]):
                live.difference_update(self.makes[node])
                live.update(self.needs[node])
        return frozenset(live), found

    def _lay_out(self, rows: Rows, at: list[int]) -> tuple[list[int], list[int]]:
        """Find what is read before it is recomputed, and how many bytes of choices come and go with each node.

        What is kept through the turn stays to the end where it is retained.
        """
        begin: dict[int, int] = {}
        end: dict[int, int] = {}
        kept: list[int] = []
        sizes, retained, change, index = self.sizes, self._retained, [0] * (at[-1] + 2), 0
        needs, makes = self.needs, self.makes
        for position, (row, reads) in enumerate(zip(rows, self._all_reads, strict=False)):
            for node in row:
                for storage in needs[node]:
                    if storage not in begin:
                        begin[storage] = -1
                        kept.append(storage)
                    end[storage] = index
                for storage in makes[node]:
                    if storage in begin and (begin[storage] >= 0 or storage not in retained):
                        change[self._end_of_block(storage, position, end[storage], at) + 1] -= sizes[storage]
                    begin[storage] = end[storage] = index
                    change[index] += sizes[storage]
                index += 1
            if self._seen_from[position]:
                reads = self._reads_of_block(position, at, begin)
            for storage in reads:
                if storage not in begin:
                    begin[storage] = -1
                    kept.append(storage)
                end[storage] = index
            index += 1
        for storage, last in end.items():
            if begin[storage] >= 0 or storage not in retained:
                change[last + 1] -= sizes[storage]
        return kept, change

    def _end_of_block(self, storage: int, position: int, last: int, at: list[int]) -> int:
        """Return the last node that needs a block which is recomputed at a position: views may need it still."""
        return max((at[u] for b, u in self._pins.get(storage, ()) if b < position <= u), default=last)

    def _reads_of_block(self, position: int, at: list[int], begin: dict[int, int]) -> tuple[int, ...]:
        """List what a position reads, less what it reads through views of a block that was recomputed since."""
        reads, seen_from = self._all_reads[position], self._seen_from[position]
        return tuple(s for s in reads if s not in seen_from or begin.get(s, -1) < at[seen_from[s]])

    def kept_through_the_turn(self, rows: Rows) -> frozenset[int | None]:
        """Return the storages that lie in memory as the backward starts, of those that it or a recomputation reads."""
        return frozenset((*self._lay_out(rows, self._indices(rows))[0], *self.fixed, *self._held))

    def _forward_peak(self, kept: list[int]) -> tuple[int, int]:
        """Return the peak of the forward, where what is kept lives to its end, and its position."""
        if not self.graph.forward:
            return -1, 0
        change = list(self._forward_change)
        for storage in kept:
            change[self.last_forward_use(storage) + 1] += self.sizes[storage]
        peaks = list(map(add, accumulate(change), self.forward_rest))
        peak = max(peaks)
        return peak, peaks.index(peak)

    @cached_property
    def _forward_change(self) -> list[int]:
        """For each forward position, bytes of choices that come and go there if nothing is kept."""
        change = [0] * (len(self.graph.forward) + 1)
        for storage in self.choices:
            change[self.made_at[storage]] += self.sizes[storage]
            change[self.last_forward_use(storage) + 1] -= self.sizes[storage]
        return change
