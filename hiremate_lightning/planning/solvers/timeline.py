"""When the choices of a step are in memory, as values are recomputed.

Most replays of a search differ from the one before in a few rows. Only the values that these rows read and make are
laid out again; bytes and times of all else are taken over. So a replay takes as long as its change is large, and a
search that tries each value of a step once takes time in proportion to the step. The result does not depend on what it
was laid out from: bytes are whole numbers, and times are added up by row, in the same order each time.

A *block* is a span of keys (`choices`), from the first to the last at which one computation of a value is in memory; it
begins at -1 where that is kept through the turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .choices import LAST, ROW, Choices, Rows

EACH, PER_ROWS, PER_CHOICE = 150, 24, 10  # operations of laying out: 150, one for 24 rows, and 10 for each choice
Block = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """The rows of a replay, and the bytes and times that follow from them.

    Attributes:
        rows: Producers recomputed before each backward position, and before the end.
        touches: For each choice, the keys at which rows read or make it, ascending.
        makes: For each choice, the keys at which rows make it, ascending.
        blocks: For each choice, the spans in which it is in memory.
        node_bytes: Bytes of choices in memory while each node of the backward runs, and at the end.
        row_peaks: For each backward position and the end, most bytes while values are recomputed before it.
        row_ms: For each backward position and the end, the time of recomputation before it.
        forward_bytes: For each position of the forward, bytes while its node runs.
    """

    rows: Rows
    touches: Mapping[int, tuple[int, ...]]
    makes: Mapping[int, tuple[int, ...]]
    blocks: Mapping[int, tuple[Block, ...]]
    node_bytes: np.ndarray
    row_peaks: np.ndarray
    row_ms: np.ndarray
    forward_bytes: np.ndarray

    @property
    def recompute_ms(self) -> float:
        """Time of all that is recomputed, to a picosecond: sums of the same times in another order are equal."""
        return round(float(self.row_ms.sum()), 9)

    def row_bytes(self, model: Choices, position: int) -> list[int]:
        """Return the bytes while each value is recomputed before a backward position."""
        return _row_bytes(model, self.rows[position], position, self.node_bytes, self.blocks)

    def kept(self) -> list[int]:
        """List the choices that are in memory as the backward starts."""
        return [storage for storage, blocks in self.blocks.items() if blocks and blocks[0][0] < 0]


def keeping_all(model: Choices) -> Timeline:
    """Lay out the step in which nothing is recomputed."""
    count = len(model.all_reads)
    empty = np.zeros(count, dtype=np.int64)
    forward = np.array(model.forward_bytes, dtype=np.int64)
    nothing = Timeline([[] for _ in range(count)], {}, {}, {}, empty, empty, np.zeros(count), forward)
    return _laid_out(model, nothing, {}, model.choices)


def with_rows(model: Choices, before: Timeline, changed: Mapping[int, list[int]]) -> Timeline:
    """Lay out a step in which some rows, by position, differ from those of an earlier timeline of it."""
    if not changed:
        return before
    touched = set[int]()
    for position, row in changed.items():
        for node in (*before.rows[position], *row):
            touched.update(model.needs[node], model.makes[node])
    return _laid_out(model, before, changed, touched)


def _laid_out(model: Choices, before: Timeline, changed: Mapping[int, list[int]], touched: Collection[int]) -> Timeline:
    """Lay out some choices anew, among them those of all changed rows."""
    rows, touches, makes = list(before.rows), dict(before.touches), dict(before.makes)
    fresh, made = _keys_of(model, changed)
    blocks, change = dict(before.blocks), _Change(model, changed)
    for storage in touched:
        if changed:
            touches[storage] = _with_keys(touches.get(storage, ()), changed, fresh.get(storage))
            makes[storage] = _with_keys(makes.get(storage, ()), changed, made.get(storage))
        old = blocks.get(storage, ())
        blocks[storage] = new = _blocks_of(model, storage, touches.get(storage, ()), makes.get(storage, ()))
        if new != old:
            change.replace(storage, old, new)
    row_ms = before.row_ms.copy()
    for position, row in changed.items():
        rows[position] = row
        row_ms[position] = sum(model.cost_ms[node] for node in row)
    node_bytes, row_peaks = before.node_bytes, before.row_peaks.copy()
    if change.positions:
        delta = change.by_position(len(rows))
        node_bytes = node_bytes + delta
        row_peaks += delta * (row_ms > 0.0)
    for position in change.rows:
        row_peaks[position] = max(_row_bytes(model, rows[position], position, node_bytes, blocks), default=0)
    forward_bytes = change.of_forward(before.forward_bytes)
    model.work.add_operations(EACH + len(rows) // PER_ROWS + PER_CHOICE * len(touched))
    return Timeline(rows, touches, makes, blocks, node_bytes, row_peaks, row_ms, forward_bytes)


def _keys_of(model: Choices, changed: Mapping[int, list[int]]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return the keys at which rows touch choices, and those at which they make them."""
    touches, makes = dict[int, list[int]](), dict[int, list[int]]()
    for position in sorted(changed):
        for key, node in enumerate(changed[position], start=position << ROW):
            for storage in model.needs[node]:
                touches.setdefault(storage, []).append(key)
            for storage in model.makes[node]:
                touches.setdefault(storage, []).append(key)
                makes.setdefault(storage, []).append(key)
    return touches, makes


def _with_keys(keys: tuple[int, ...], changed: Mapping[int, list[int]], fresh: Sequence[int] | None) -> tuple[int, ...]:
    """Replace the keys in rows that have changed by fresh ones."""
    stay = [key for key in keys if key >> ROW not in changed] if keys else []
    return tuple(sorted([*stay, *fresh]) if fresh and stay else fresh or stay)


def _blocks_of(model: Choices, storage: int, touches: tuple[int, ...], makes: tuple[int, ...]) -> tuple[Block, ...]:
    """Return the spans of a choice in memory; one that is kept through the turn and retained stays to the end."""
    uses, is_retained = model.use_keys.get(storage, ()), storage in model.retained
    end_of_all = len(model.reads) << ROW | LAST
    if not (uses or touches):
        return ()
    if not makes:  # kept
        return ((-1, end_of_all if is_retained else max((*uses[-1:], *touches[-1:]))),)
    if len(makes) == 1 and makes[0] <= min((*uses[:1], touches[0])) and storage not in model.viewed:
        return ((makes[0], max((*uses[-1:], touches[-1]))),)
    blocks, begin, end = list[Block](), None, 0
    for key in sorted((*uses, *touches)):
        position = key >> ROW
        if key in makes:
            if begin is not None and begin < 0 and is_retained:
                blocks.append((begin, end_of_all))
            elif begin is not None:  # views may need the value still
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


def _row_bytes(
    model: Choices,
    row: Sequence[int],
    position: int,
    node_bytes: np.ndarray,
    blocks: Mapping[int, tuple[Block, ...]],
) -> list[int]:
    """Return the bytes while each value is recomputed before a backward position: from the node there backward."""
    live, rest, peaks = int(node_bytes[position]), model.live_gradients[position], list[int]()
    for key in range((position << ROW) + len(row) - 1, (position << ROW) - 1, -1):
        node, begins = row[key & LAST], 0
        for storage in (*model.needs[node], *model.makes[node]):
            for begin, end in blocks[storage]:
                live += model.sizes[storage] if end == key else 0
                begins += model.sizes[storage] if begin == key else 0
        peaks.append(live + model.transient[node] + rest)
        live -= begins
    return peaks[::-1]


class _Change:
    """The change of bytes where blocks change.

    Attributes:
        positions: Backward positions at which bytes come or go.
        bytes: The bytes that come or go there.
        rows: Positions whose rows must be counted again.
    """

    def __init__(self, model: Choices, rows: Iterable[int]) -> None:
        self._model, self.rows = model, set(rows)
        self.positions, self.bytes = list[int](), list[int]()
        self._kept: list[tuple[int, int]] = []

    def replace(self, storage: int, old: tuple[Block, ...], new: tuple[Block, ...]) -> None:
        """Put the new blocks of a choice in the place of the old ones."""
        size = self._model.sizes[storage]
        for block in old:
            if block not in new:
                self._add(storage, *block, -size)
        for block in new:
            if block not in old:
                self._add(storage, *block, size)

    def _add(self, storage: int, begin: int, end: int, size: int) -> None:
        first, last = begin >> ROW, end >> ROW
        if begin < 0:
            first = 0
            self._kept.append((self._model.last_forward_use(storage) + 1, size))
        else:
            self.rows.add(first)
        if end & LAST != LAST:  # within a row: the node after it runs without
            self.rows.add(last)
            last -= 1
        self.positions += first, last + 1
        self.bytes += size, -size

    def by_position(self, count: int) -> np.ndarray:
        """Return the change of the bytes while each node of the backward runs."""
        return _summed(self.positions, self.bytes, count)

    def of_forward(self, before: np.ndarray) -> np.ndarray:
        """Return the bytes of the forward, where kept choices live to its end."""
        if not self._kept or not len(before):
            return before
        positions, sizes = zip(*self._kept, strict=True)
        after: np.ndarray = before + _summed(positions, sizes, len(before))
        return after


def _summed(positions: Sequence[int], sizes: Sequence[int], count: int) -> np.ndarray:
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, np.array(positions), np.array(sizes, dtype=np.int64))
    return change.cumsum()[:count]
