"""Replays of policies: their peak, the place of it, and their time.

`StepModel.replay` takes time in proportion to the difference from a policy that was replayed before. The independent
simulator has the last word on each plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .base import Problem
from .choices import LEAST_MS, Choices, Policy, Rows
from .lazy import Lazy, lazy_keeping_all, lazy_rows
from .timeline import Timeline, with_rows


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The peak and the time of a policy.

    Attributes:
        peak_bytes: Peak above resident bytes.
        recompute_ms: Time of recomputation.
        position: Position of the peak in the backward, or -1 in the forward.
        node: The node at the peak.
        timeline: The rows, and the choices in memory at each moment.
        peaks: For each backward position, and the end, most bytes while its node runs or values are recomputed for it.
        forward_position: Position of the forward where the forward's own peak is.
        forward_peak: Bytes there.
        lazy: The policy, with its rows before any ran in the forward's order; None where it has none.
    """

    peak_bytes: int
    recompute_ms: float
    position: int
    node: int
    timeline: Timeline
    peaks: np.ndarray
    forward_position: int
    forward_peak: int
    lazy: Lazy | None

    @property
    def rows(self) -> Rows:
        """Producers recomputed before each backward position, views left out."""
        return self.timeline.rows


class StepModel(Choices):
    """The choices of a problem, and replays of them."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._node_rest = np.array(self.gradients, dtype=np.int64)
        self._latest: Lazy | None = None

    def with_times(self, times_ms: Sequence[float]) -> StepModel:
        """Return the same step with other times of its nodes; work is counted for both together."""
        model = copy(self)
        model._latest = None
        model.cost_ms = {node: max(times_ms[node], LEAST_MS) for node in self.makes}
        return model

    def in_order(self, rows: Rows, position: int) -> Rows:
        """Sort the nodes recomputed before a backward position as the forward runs them."""
        return [*rows[:position], self._sorted(rows[position]), *rows[position + 1 :]]

    def _sorted(self, row: list[int]) -> list[int]:
        return sorted(row, key=self.order.__getitem__)

    @cached_property
    def keeping_all(self) -> Lazy:
        """The policy that keeps everything: other policies are replayed from it where none is nearer."""
        return lazy_keeping_all(self)

    def lazy(self, policy: Policy, near: Lazy | None = None) -> Lazy:
        """Return a policy with its rows, from those of a policy that differs little: by default the latest one."""
        before = near or min(
            self.keeping_all, self._latest or self.keeping_all, key=lambda lazy: policy.distance(lazy.policy)
        )
        drops, early, changed = lazy_rows(self, policy, before)
        self._latest = Lazy(policy, drops, early, with_rows(self, before.timeline, changed))
        return self._latest

    def replay(self, policy: Policy, near: Lazy | None = None) -> Replay:
        """Return the peak and the time of a policy, see `replay_lazy`."""
        return self.replay_lazy(self.lazy(policy, near))

    def replay_lazy(self, lazy: Lazy) -> Replay:
        """Return the peak and the time of a policy; the row at the peak runs as the forward does where that is less."""
        replay = self._replay(lazy.timeline, lazy)
        while replay.position >= 0 and replay.timeline.row_peaks[replay.position] == replay.peak_bytes:
            rows, position = replay.timeline.rows, replay.position
            row = self._sorted(rows[position])
            if row == rows[position]:
                break
            other = self._replay(with_rows(self, replay.timeline, {position: row}), lazy)
            if other.timeline.row_peaks[position] >= replay.peak_bytes:
                break
            replay = other
        return replay

    def replay_rows(self, rows: Rows) -> Replay:
        """Return the peak and the time of recomputing given producers before each backward position."""
        return self._replay(self._timeline(rows), None)

    def _timeline(self, rows: Rows) -> Timeline:
        changed = {position: list(row) for position, row in enumerate(rows) if row}
        return with_rows(self, self.keeping_all.timeline, changed)

    def _replay(self, timeline: Timeline, lazy: Lazy | None) -> Replay:
        forward, forward_position, forward_peak = timeline.forward_bytes, 0, -1
        if len(forward):
            forward_position = int(np.argmax(forward))
            forward_peak = int(forward[forward_position])
        peaks = np.append(timeline.node_bytes[:-1] + self._node_rest, 0)
        np.maximum(peaks, timeline.row_peaks, out=peaks)
        position = int(np.argmax(peaks))
        peak_bytes = max(forward_peak, int(peaks[position]))
        if forward_peak == peak_bytes:
            position = -1
            node = self.graph.forward[forward_position] if self.graph.forward else 0
        elif timeline.row_peaks[position] < peak_bytes:
            node = self.graph.backward[position]
        else:
            node = timeline.rows[position][timeline.row_bytes(self, position).index(peak_bytes)]
        return Replay(
            peak_bytes=peak_bytes,
            recompute_ms=timeline.recompute_ms,
            position=position,
            node=node,
            timeline=timeline,
            peaks=peaks,
            forward_position=forward_position,
            forward_peak=forward_peak,
            lazy=lazy,
        )

    def row_bytes(self, rows: Rows, position: int) -> list[int]:
        """Return the bytes while each value is recomputed before a backward position."""
        return self._timeline(rows).row_bytes(self, position)

    def live_at(self, rows: Rows, positions: Iterable[int]) -> tuple[frozenset[int], dict[int, frozenset[int]]]:
        """Return the choices in memory at the turn, and while the nodes of some backward positions run."""
        wanted, live_at = set(positions), {}
        live = set(self.returned)
        for position in reversed(range(len(rows))):
            if position < len(self.reads):
                live.update(self.reads[position])
            if position in wanted:
                live_at[position] = frozenset(live)
            for node in reversed(rows[position]):
                live.difference_update(self.makes[node])
                live.update(self.needs[node])
        return frozenset(live), live_at

    def kept_through_the_turn(self, rows: Rows) -> frozenset[int | None]:
        """Return the storages in memory as the backward starts that it, or a recomputation, reads."""
        return frozenset((*self._timeline(rows).kept(), *self.fixed, *self._held))
