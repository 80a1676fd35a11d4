"""The rows of a policy: each value is recomputed just before its first use that finds it missing.

They are found from the rows of a policy that differs little. A choice that is live in one policy alone matters only
where something reads, makes or drops it. The walk goes from one such place to the next, and ends where both policies
have the same values in memory for good.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from .choices import ROW, Choices, Policy
from .timeline import Timeline, keeping_all


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of a choice and a backward position.

    Attributes:
        at: The choices of each position, ascending.
        of: The positions of each choice, ascending.
    """

    at: Mapping[int, Sequence[int]]
    of: Mapping[int, Sequence[int]]

    def toggled(self, pairs: Iterable[tuple[int, int]]) -> Pairs:
        """Return these pairs with the membership of the given ones toggled."""
        at, of = dict[int, set[int]](), dict[int, set[int]]()
        for storage, position in pairs:
            at.setdefault(position, set()).add(storage)
            of.setdefault(storage, set()).add(position)
        return Pairs(_toggled(self.at, at), _toggled(self.of, of)) if at else self


def _toggled(before: Mapping[int, Sequence[int]], changes: Mapping[int, set[int]]) -> Mapping[int, Sequence[int]]:
    return {
        **before,
        **{key: sorted(values.symmetric_difference(before.get(key, ()))) for key, values in changes.items()},
    }


@dataclass(frozen=True, slots=True, eq=False)
class Lazy:
    """A policy, and its timeline.

    Attributes:
        policy: The policy.
        drops: Its drops, without those of choices that can't be dropped.
        early: The choices that it recomputes early.
        timeline: Its rows and their timeline.
    """

    policy: Policy
    drops: Pairs
    early: Pairs
    timeline: Timeline


def lazy_keeping_all(model: Choices) -> Lazy:
    """Return the policy that keeps everything."""
    nothing = Pairs({}, {})
    return Lazy(Policy(frozenset(model.choices)), nothing, nothing, keeping_all(model))


def lazy_rows(model: Choices, policy: Policy, near: Lazy) -> tuple[Pairs, Pairs, dict[int, list[int]]]:
    """Return the drops of a policy, its early choices, and its rows where they differ from those of another policy."""
    dropped = {
        (s, p) for s, p in policy.drops ^ near.policy.drops if s not in model.fixed and not model.is_pinned(s, p)
    }
    hurried = policy.early ^ near.policy.early
    drops, early = near.drops.toggled(dropped), near.early.toggled(hurried)
    walk = _Walk(model, near, drops, early)
    for storage in (policy.kept ^ near.policy.kept) - model.fixed:
        walk.change(storage, storage in policy.kept)
    for storage, position in (*dropped, *hurried):
        walk.visit(position, storage)
    return drops, early, walk.rows()


class _Live(set[int]):
    """The choices that live before a backward position: those recomputed for it, and those that a walk knows."""

    def __init__(self, walk: _Walk, position: int) -> None:
        super().__init__()
        self._walk, self._position = walk, position

    def __contains__(self, storage: object) -> bool:
        return super().__contains__(storage) or self._walk.lives(storage, self._position)  # type: ignore[arg-type]


class _Walk:
    """A walk through the backward, from one place that may differ to the next.

    The rows of the near policy are known; drops and early choices are those of the other one.
    """

    def __init__(self, model: Choices, near: Lazy, drops: Pairs, early: Pairs) -> None:
        self._model, self._near, self._drops, self._early = model, near, drops, early
        self._changed: dict[int, bool] = {}  # choices that live in one policy alone: whether in the new one
        self._places: list[tuple[int, int]] = []  # a heap of positions, and the choices to look at there
        self._places_of = [of for of in (model.uses, early.of, drops.of, near.drops.of) if of]

    def change(self, storage: int, lives: bool) -> None:
        """Note a choice that lives at the turn in one policy alone."""
        self._changed[storage] = lives
        self._go_on(storage, -1)

    def visit(self, position: int, storage: int) -> None:
        """Look at a position, because of a choice."""
        heappush(self._places, (position, storage))

    def rows(self) -> dict[int, list[int]]:
        """Return the rows that differ."""
        rows = dict[int, list[int]]()
        while self._places:
            position, storage = heappop(self._places)
            seen = {storage}
            while self._places and self._places[0][0] == position:
                seen.add(heappop(self._places)[1])
            row, before = self._row(position), self._near.timeline.rows[position]
            if row != before:
                rows[position] = row
            self._compare(position, row, before, seen)
        return rows

    def lives(self, storage: int, position: int) -> bool:
        """Whether a choice lives before anything is recomputed for a position."""
        return self._changed[storage] if storage in self._changed else self._lived(storage, position)

    def _lived(self, storage: int, position: int) -> bool:
        """Whether it lives there in the policy that is known."""
        makes, drops = self._near.timeline.makes.get(storage, ()), self._near.drops.of.get(storage, ())
        made = bisect_left(makes, position << ROW) if makes else 0
        dropped = bisect_left(drops, position) if drops else 0
        if dropped:
            return bool(made) and makes[made - 1] >> ROW > drops[dropped - 1]
        return bool(made) or storage in self._near.policy.kept or storage in self._model.fixed

    def _row(self, position: int) -> list[int]:
        """Return the nodes that are recomputed before a position."""
        live, row = _Live(self, position), list[int]()
        for storage in (*self._early.at.get(position, ()), *self._model.all_reads[position]):
            if storage not in live:
                row.extend(self._model.recompute(storage, live))
        return row

    def _compare(self, position: int, row: list[int], before: list[int], seen: set[int]) -> None:
        """Note which choices that are made or seen at a position live after it in one policy alone."""
        made = {storage for node in row for storage in self._model.makes[node]}
        made_before = {storage for node in before for storage in self._model.makes[node]}
        for storage in seen | made | made_before:
            lives = storage in made or self.lives(storage, position)
            lives = lives and position not in self._drops.of.get(storage, ())
            lived = storage in made_before or self._lived(storage, position)
            lived = lived and position not in self._near.drops.of.get(storage, ())
            if lives == lived:
                self._changed.pop(storage, None)
            else:
                self._changed[storage] = lives
                self._go_on(storage, position)

    def _go_on(self, storage: int, position: int) -> None:
        """Find the next position at which a choice that has changed is read, made or dropped."""
        nexts = list[int]()
        for places in self._places_of:
            if positions := places.get(storage):
                index = bisect_right(positions, position)
                nexts += positions[index : index + 1]
        if touches := self._near.timeline.touches.get(storage):
            index = bisect_left(touches, position + 1 << ROW)
            nexts += [key >> ROW for key in touches[index : index + 1]]
        if nexts:
            heappush(self._places, (min(nexts), storage))
