"""Replays of decisions: what they take in memory and time.

A *policy* says which choices are kept through the turn, and after which backward position a value is dropped although
it is used again, so that it is recomputed once more. `StepModel.replay` returns peak and time of a policy, in time
linear in what differs from one that was replayed before; the independent simulator has the last word on what leaves the
planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property

import numpy as np

from .base import Problem
from .choices import LEAST_MS, Choices
from .lazy import Lazy, lazy_keeping_all, lazy_rows
from .policies import Policy, Rows
from .replays import Replay
from .timeline import Timeline, with_rows


class StepModel(Choices):
    """The choices of a problem, and replays of them."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._latest: Lazy | None = None

    def with_times(self, times_ms: Sequence[float]) -> StepModel:
        """Return the same step with other times of its nodes; work is counted for both together."""
        model = copy(self)
        model._latest = None
        model.cost_ms = {node: max(times_ms[node], LEAST_MS) for node in self.makes}
        return model

    def in_order(self, rows: Rows, position: int) -> Rows:
        """Run what is recomputed before a backward position in the order of the forward."""
        return [*rows[:position], self._sorted(rows[position]), *rows[position + 1 :]]

    def _sorted(self, row: list[int]) -> list[int]:
        return sorted(row, key=self.order.__getitem__)

    @cached_property
    def keeping_all(self) -> Lazy:
        """The policy that keeps everything: others are found from it where nothing is nearer."""
        return lazy_keeping_all(self)

    def lazy(self, policy: Policy, near: Lazy | None = None) -> Lazy:
        """Return a policy with its rows, from those of one that differs little: by default the latest that was made."""
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
        found = self._replay(lazy.timeline, lazy)
        while found.position >= 0 and found.timeline.row_peaks[found.position] == found.peak_bytes:
            rows, position = found.timeline.rows, found.position
            row = self._sorted(rows[position])
            if row == rows[position]:
                break
            other = self._replay(with_rows(self, found.timeline, {position: row}), lazy)
            if other.timeline.row_peaks[position] >= found.peak_bytes:
                break
            found = other
        return found

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
        return Replay(
            peak_bytes=peak_bytes,
            recompute_ms=timeline.recompute_ms,
            position=position,
            node=self._node_at(peak_bytes, position, forward_position, timeline),
            timeline=timeline,
            peaks=peaks,
            forward_position=forward_position,
            forward_peak=forward_peak,
            lazy=lazy,
        )

    def _node_at(self, peak_bytes: int, position: int, forward_position: int, timeline: Timeline) -> int:
        """Find the node with a peak, at a backward position or, for -1, at one of the forward."""
        if position < 0:
            return self.graph.forward[forward_position] if self.graph.forward else 0
        if timeline.row_peaks[position] < peak_bytes:
            return self.graph.backward[position]
        return timeline.rows[position][timeline.row_bytes(self, position).index(peak_bytes)]

    def row_bytes(self, rows: Rows, position: int) -> list[int]:
        """Return the bytes while each value is recomputed before a backward position."""
        return self._timeline(rows).row_bytes(self, position)

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

    def kept_through_the_turn(self, rows: Rows) -> frozenset[int | None]:
        """Return the storages that lie in memory as the backward starts, of those that it or a recomputation reads."""
        return frozenset((*self._timeline(rows).kept(), *self.fixed, *self._held))

    @cached_property
    def _node_rest(self) -> np.ndarray:
        return np.array(self.gradients, dtype=np.int64)
