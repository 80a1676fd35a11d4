"""Decisions by storage, and what a replay of them gives: what the strategies hand to each other."""

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


@dataclass(frozen=True, slots=True)
class Replay:
    """What a policy does.

    Attributes:
        peak_bytes: Peak above what is resident.
        recompute_ms: Time of what is recomputed.
        position: Where the peak is: a backward position, or -1 in the forward.
        node: The node at the peak.
        rows: Producers recomputed before each backward position, views left out.
        node_peaks: For each backward position, bytes while its own node runs.
        row_peaks: For each backward position, most bytes while values are recomputed before it, 0 where none are.
        forward_position: Position of the forward where the forward's own peak is.
        forward_peak: Bytes there.
        lazy_rows: The rows as `StepModel.rows` gives them, before any ran in the forward's order.
    """

    peak_bytes: int
    recompute_ms: float
    position: int
    node: int
    rows: Rows
    node_peaks: list[int]
    row_peaks: list[int]
    forward_position: int
    forward_peak: int
    lazy_rows: Rows


Near = tuple[Policy, Rows]  # a policy, and its rows as `StepModel.rows` gives them
