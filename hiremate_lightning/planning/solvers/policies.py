"""Decisions by storage: what the strategies hand to each other."""

from __future__ import annotations

from dataclasses import dataclass

Rows = list[list[int]]


@dataclass(frozen=True)
class Policy:
    """Decisions by storage.

    Attributes:
        kept: Choices kept through the turn.
        drops: Pairs of choice and backward position: dropped after that position, and recomputed before its next use.
        early: Pairs of choice and backward position: recomputed before that position, although its first use is later.
    """

    kept: frozenset[int]
    drops: frozenset[tuple[int, int]] = frozenset()
    early: frozenset[tuple[int, int]] = frozenset()

    def distance(self, other: Policy) -> int:
        """Count the decisions that differ from those of another policy."""
        return len(self.kept ^ other.kept) + len(self.drops ^ other.drops) + len(self.early ^ other.early)
