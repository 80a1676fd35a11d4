"""The rows of a policy, and the spans in which choices are in memory while these rows run.

Each value is recomputed just before the first use that finds it missing. Most policies of a search differ little from
an earlier one. So a new policy's rows are computed from that policy's rows: a choice that is live in only one of both
policies matters only where it is read, made or dropped, and a walk goes from one such place to the next. Only values
that changed rows read or make are laid out again, so the work of a replay is proportional to the change. The result
does not depend on the earlier policy: bytes are integers, and times are added up by row, always in the same order.

A *block* is the span of keys (`choices`) in which one computation of a value is in memory, from the first to the last
key; it begins at -1 if the value is kept through the turn, else at the key that makes the value.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from .choices import LAST, ROW, Choices, Policy, Rows

EACH, PER_ROWS, PER_CHOICE = 150, 24, 10  # operations to lay out: 150, 1 per 24 rows, 10 per choice
Block = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """The rows of a replay, with their bytes and times."""

    rows: Rows  # producers recomputed before each backward position, and before the end
    touches: Mapping[int, tuple[int, ...]]  # for each choice, the keys at which rows read or make it, ascending
    blocks: Mapping[int, tuple[Block, ...]]  # for each choice, the spans in which it is in memory
    node_bytes: np.ndarray  # bytes of choices in memory while each node of the backward runs, and at the end
    row_peaks: np.ndarray  # for each backward position and the end, most bytes while values are recomputed before it
    row_ms: np.ndarray  # for each backward position and the end, the time of recomputation before it
    forward_bytes: np.ndarray  # for each position of the forward, bytes while its node runs

    @property
    def recompute_ms(self) -> float:
        """Total recompute time, rounded to a picosecond, so that sums in another order are equal."""
        return round(float(self.row_ms.sum()), 9)

    def is_made(self, storage: int) -> bool:
        """Whether a row makes a choice."""
        return any(begin >= 0 for begin, _ in self.blocks.get(storage, ()))

    def row_bytes(self, model: Choices, position: int) -> list[int]:
        """Return the bytes while each node of a row runs; they are counted from the end of the row."""
        row, rest, peaks = self.rows[position], model.live_gradients[position], list[int]()
        live = int(self.node_bytes[position])
        for key in range((position << ROW) + len(row) - 1, (position << ROW) - 1, -1):
            node, begins = row[key & LAST], 0
            for storage in (*model.needs[node], *model.makes[node]):
                for begin, end in self.blocks[storage]:
                    live += model.sizes[storage] if end == key else 0
                    begins += model.sizes[storage] if begin == key else 0
            peaks.append(live + model.transient[node] + rest)
            live -= begins
        return peaks[::-1]


def with_rows(model: Choices, before: Timeline, changed: Mapping[int, list[int]]) -> Timeline:
    """Return the timeline of a step in which the rows at some positions differ from those of an earlier timeline."""
    if not changed:
        return before
    touched = set[int]()
    for position, row in changed.items():
        for node in (*before.rows[position], *row):
            touched.update(model.needs[node], model.makes[node])
    return _laid_out(model, before, changed, touched)


def _laid_out(model: Choices, before: Timeline, changed: Mapping[int, list[int]], touched: Collection[int]) -> Timeline:
    """Return a timeline with the `touched` choices laid out again; they include those of all changed rows."""
    rows, row_ms = list(before.rows), before.row_ms.copy()
    for position, row in changed.items():
        rows[position], row_ms[position] = row, sum(model.cost_ms[node] for node in row)
    touches = _with_keys(model, before.touches, changed, touched)
    blocks, change = dict(before.blocks), _Change(model, changed)
    for storage in touched:
        old = blocks.get(storage, ())
        blocks[storage] = new = _blocks_of(model, rows, storage, touches[storage])
        if new != old:
            change.replace(storage, old, new)
    delta = _summed(change.backward, len(rows))
    node_bytes, row_peaks = before.node_bytes + delta, before.row_peaks + delta * (row_ms > 0.0)
    forward_bytes = before.forward_bytes + _summed(change.forward, len(before.forward_bytes))
    timeline = Timeline(rows, touches, blocks, node_bytes, row_peaks, row_ms, forward_bytes)
    for position in change.rows:
        row_peaks[position] = max(timeline.row_bytes(model, position), default=0)
    model.work.add_operations(EACH + len(rows) // PER_ROWS + PER_CHOICE * len(touched))
    return timeline


def _with_keys(
    model: Choices, before: Mapping[int, tuple[int, ...]], changed: Mapping[int, list[int]], touched: Iterable[int]
) -> dict[int, tuple[int, ...]]:
    """Return the keys of each choice, with new keys of the `touched` choices in the changed rows."""
    fresh = defaultdict[int, list[int]](list)
    for position, row in changed.items():
        for key, node in enumerate(row, start=position << ROW):
            for storage in (*model.needs[node], *model.makes[node]):
                fresh[storage].append(key)
    keys = dict(before)
    for storage in touched:
        stay = [key for key in keys.get(storage, ()) if key >> ROW not in changed]
        keys[storage] = tuple(sorted([*stay, *fresh[storage]]))
    return keys


def _blocks_of(model: Choices, rows: Rows, storage: int, touches: tuple[int, ...]) -> tuple[Block, ...]:
    """Return the blocks of a choice; the block of a retained choice kept through the turn lasts to the end."""
    maker = model.producer.get(storage)
    uses, is_retained = model.use_keys.get(storage, ()), storage in model.retained
    end_of_all = len(model.reads) << ROW | LAST
    if not (uses or touches):
        return ()
    blocks, begin, end = list[Block](), None, 0
    for key in sorted((*uses, *touches)):
        position = key >> ROW
        if key & LAST != LAST and rows[position][key & LAST] == maker:
            if begin is not None and begin < 0 and is_retained:
                blocks.append((begin, end_of_all))
            elif begin is not None:  # views may still hold the value
                pins = model.pins.get(storage, ())
                end = max((until << ROW | LAST for first, until in pins if first < position <= until), default=end)
                blocks.append((begin, end))
            begin = end = key
            continue
        viewed = model.seen_from[position].get(storage) if key & LAST == LAST else None
        if viewed is None or begin is None or begin <= viewed << ROW | LAST:  # else it reads a view of an older block
            begin, end = -1 if begin is None else begin, key
    assert begin is not None, "what is touched is read or made"
    blocks.append((begin, end_of_all if begin < 0 and is_retained else end))
    return tuple(blocks)


class _Change:
    """Collects the changes of bytes at positions of backward and forward, from changes of blocks."""

    def __init__(self, model: Choices, rows: Iterable[int]) -> None:
        self._model, self.rows = model, set(rows)  # positions whose rows must be counted again
        # Pairs of a position of the backward (or of the forward) and the change of bytes there.
        self.backward, self.forward = list[tuple[int, int]](), list[tuple[int, int]]()

    def replace(self, storage: int, old: tuple[Block, ...], new: tuple[Block, ...]) -> None:
        """Add the change of bytes when new blocks of a choice replace the old ones."""
        size = self._model.sizes[storage]
        changes = [(b, -size) for b in old if b not in new] + [(b, size) for b in new if b not in old]
        for (begin, end), size_bytes in changes:
            first, last = begin >> ROW, end >> ROW
            if begin < 0:  # kept through the turn: counted in the forward after its last use
                first = 0
                self.forward.append((self._model.last_forward_use(storage) + 1, size_bytes))
            else:
                self.rows.add(first)
            if end & LAST != LAST:  # ends within a row: not in memory at this position's node
                self.rows.add(last)
                last -= 1
            self.backward += (first, size_bytes), (last + 1, -size_bytes)


def _summed(changes: Sequence[tuple[int, int]], count: int) -> np.ndarray:
    change = np.zeros(count + 1, dtype=np.int64)
    for position, size_bytes in changes:
        change[position] += size_bytes
    return change.cumsum()[:count]


# ---------------------------------------------------------------- the rows of a policy


Groups = Mapping[int, Sequence[int]]  # pairs of integers: by the first integers, the second ones, ascending


def _toggled(before: Groups, pairs: Iterable[tuple[int, int]]) -> Groups:
    """Return the symmetric difference with other pairs."""
    changes = defaultdict[int, set[int]](set)
    for first, second in pairs:
        changes[first].add(second)
    after = {first: sorted(seconds.symmetric_difference(before.get(first, ()))) for first, seconds in changes.items()}
    return {**before, **after} if after else before


@dataclass(frozen=True, slots=True, eq=False)
class Lazy:
    """A policy with its effective drops, its early recomputations, and its timeline."""

    policy: Policy
    drops: Groups  # the positions of each choice
    early: Groups  # the positions of each choice
    early_at: Groups  # the choices at each position
    timeline: Timeline


def keeping_all(model: Choices) -> Lazy:
    """Return the policy that keeps everything, laid out."""
    count = len(model.all_reads)
    empty, forward = np.zeros(count, dtype=np.int64), np.array(model.forward_bytes, dtype=np.int64)
    before = Timeline([[] for _ in range(count)], {}, {}, empty, empty, np.zeros(count), forward)
    timeline = _laid_out(model, before, {}, model.choices)
    return Lazy(Policy(frozenset(model.choices)), {}, {}, {}, timeline)


def lazily(model: Choices, policy: Policy, near: Lazy) -> Lazy:
    """Return a policy laid out from a similar one, `near`."""
    dropped = {
        (s, p) for s, p in policy.drops ^ near.policy.drops if s not in model.fixed and not model.is_pinned(s, p)
    }
    hurried = policy.early ^ near.policy.early
    drops, early = _toggled(near.drops, dropped), _toggled(near.early, hurried)
    early_at = _toggled(near.early_at, ((position, storage) for storage, position in hurried))
    walk = _Walk(model, near, drops, early, early_at)
    for storage in (policy.kept ^ near.policy.kept) - model.fixed:
        walk.change(storage, storage in policy.kept, -1)
    for storage, position in (*dropped, *hurried):
        heappush(walk.places, (position, storage))
    return Lazy(policy, drops, early, early_at, with_rows(model, near.timeline, walk.rows()))


class _Live(set[int]):
    """The live choices before a backward position: those recomputed for it, and those that the walk finds live."""

    def __init__(self, walk: _Walk, position: int) -> None:
        super().__init__()
        self._walk, self._position = walk, position

    def __contains__(self, storage: object) -> bool:
        return super().__contains__(storage) or self._walk.lives(storage, self._position)  # type: ignore[arg-type]


class _Walk:
    """A walk through the backward, from one place where two policies may differ to the next.

    `near` is the policy with known rows; `drops`, `early` and `early_at` are those of the new policy.
    """

    def __init__(self, model: Choices, near: Lazy, drops: Groups, early: Groups, early_at: Groups) -> None:
        self._model, self._near, self._drops, self._early_at = model, near, drops, early_at
        self._changed: dict[int, bool] = {}  # choices that live in only one policy: whether in the new one
        self.places: list[tuple[int, int]] = []  # a heap of positions, each with a choice to examine there
        self._places_of = [of for of in (model.uses, early, drops, near.drops) if of]

    def change(self, storage: int, lives: bool, position: int) -> None:
        """Store a choice that lives in only one policy after a position; push its next read, production or drop."""
        self._changed[storage] = lives
        nexts = list[int]()
        for places in self._places_of:
            if positions := places.get(storage):
                index = bisect_right(positions, position)
                nexts += positions[index : index + 1]
        if touches := self._near.timeline.touches.get(storage):
            index = bisect_left(touches, position + 1 << ROW)
            nexts += [key >> ROW for key in touches[index : index + 1]]
        if nexts:
            heappush(self.places, (min(nexts), storage))

    def rows(self) -> dict[int, list[int]]:
        """Return the rows of the new policy that differ, by position."""
        rows = dict[int, list[int]]()
        while self.places:
            position, storage = heappop(self.places)
            seen = {storage}
            while self.places and self.places[0][0] == position:
                seen.add(heappop(self.places)[1])
            live, row, before = _Live(self, position), list[int](), self._near.timeline.rows[position]
            for wanted in (*self._early_at.get(position, ()), *self._model.all_reads[position]):
                if wanted not in live:
                    row.extend(self._model.recompute(wanted, live))
            if row != before:
                rows[position] = row
            self._compare(position, row, before, seen)
        return rows

    def lives(self, storage: int, position: int) -> bool:
        """Whether a choice lives in the new policy before anything is recomputed for a position."""
        return self._changed[storage] if storage in self._changed else self._lived(storage, position)

    def _lived(self, storage: int, position: int) -> bool:
        """Whether a choice lives there in the near policy."""
        blocks, drops = self._near.timeline.blocks.get(storage, ()), self._near.drops.get(storage, ())
        made = bisect_left(blocks, (position << ROW,)) if blocks else 0
        dropped = bisect_left(drops, position) if drops else 0
        if dropped:
            return bool(made) and blocks[made - 1][0] >> ROW > drops[dropped - 1]
        return bool(made) or storage in self._near.policy.kept or storage in self._model.fixed

    def _compare(self, position: int, row: list[int], before: list[int], seen: set[int]) -> None:
        """Store by `change` which choices made or seen at a position live after it in only one policy."""
        made = {storage for node in row for storage in self._model.makes[node]}
        made_before = {storage for node in before for storage in self._model.makes[node]}
        for storage in seen | made | made_before:
            lives = storage in made or self.lives(storage, position)
            lives = lives and position not in self._drops.get(storage, ())
            lived = storage in made_before or self._lived(storage, position)
            lived = lived and position not in self._near.drops.get(storage, ())
            if lives == lived:
                self._changed.pop(storage, None)
            else:
                self.change(storage, lives, position)
