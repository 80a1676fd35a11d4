"""Replays of policies: a policy's peak, the place of the peak, its recompute time, and its decisions.

`StepModel.replay` takes time in proportion to the difference from a policy that was replayed before. Each plan is
checked by the independent simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...records.graph import Direction
from ...records.schedule import ensure
from ...records.step import Decisions
from .base import Problem
from .choices import LEAST_MS, Choices, Policy, Rows
from .timeline import Lazy, Timeline, keeping_all, lazily, with_rows


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The peak and the time of a policy."""

    peak_bytes: int  # peak above resident bytes
    recompute_ms: float  # time of recomputation
    position: int  # position of the peak in the backward, or -1 in the forward; `node` is the node there
    node: int
    timeline: Timeline  # the rows, and the choices in memory at each moment
    # For each backward position, and the end: most bytes while its node runs or values are recomputed for it.
    peaks: np.ndarray
    lazy: Lazy  # the policy, with its rows before `replay_lazy` reordered any

    @property
    def policy(self) -> Policy:
        """The policy."""
        return self.lazy.policy

    @property
    def rows(self) -> Rows:
        """Producers recomputed before each backward position, views left out."""
        return self.timeline.rows

    @property
    def rank(self) -> tuple[float, int]:
        """Sort key: less recompute time first, then the smaller peak."""
        return self.recompute_ms, self.peak_bytes


class StepModel(Choices):
    """The choices of a problem, and replays of them."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._node_rest = np.array(self.gradients, dtype=np.int64)
        self._latest: Lazy | None = None

    def with_times(self, times_ms: Sequence[float]) -> StepModel:
        """Return a model of the same step with other times of its nodes; both share one count of work."""
        model = copy(self)
        model._latest = None
        model.cost_ms = {node: max(times_ms[node], LEAST_MS) for node in self.makes}
        return model

    @cached_property
    def keeping_all(self) -> Lazy:
        """The policy that keeps everything: the start of a replay if no other policy is nearer."""
        return keeping_all(self)

    def lazy(self, policy: Policy, near: Lazy | None = None) -> Lazy:
        """Return a policy with its rows, changed from a similar policy: `near`, else the latest or `keeping_all`."""
        before = near or min(
            self.keeping_all, self._latest or self.keeping_all, key=lambda lazy: policy.distance(lazy.policy)
        )
        self._latest = lazily(self, policy, before)
        return self._latest

    def replay(self, policy: Policy, near: Lazy | None = None) -> Replay:
        """Return the peak and the time of a policy, see `replay_lazy`."""
        return self.replay_lazy(self.lazy(policy, near))

    def replay_lazy(self, lazy: Lazy) -> Replay:
        """Return peak and time of a policy; put the row at the peak in the forward's order if that lowers the peak."""
        replay = self._replay(lazy.timeline, lazy)
        while replay.position >= 0 and replay.timeline.row_peaks[replay.position] == replay.peak_bytes:
            rows, position = replay.timeline.rows, replay.position
            row = sorted(rows[position], key=self.order.__getitem__)
            if row == rows[position]:
                break
            other = self._replay(with_rows(self, replay.timeline, {position: row}), lazy)
            if other.timeline.row_peaks[position] >= replay.peak_bytes:
                break
            replay = other
        return replay

    def _replay(self, timeline: Timeline, lazy: Lazy) -> Replay:
        forward, forward_peak = timeline.forward_bytes, int(timeline.forward_bytes.max(initial=-1))
        peaks = np.append(timeline.node_bytes[:-1] + self._node_rest, 0)
        np.maximum(peaks, timeline.row_peaks, out=peaks)
        position = int(np.argmax(peaks))
        peak_bytes = max(forward_peak, int(peaks[position]))
        if forward_peak == peak_bytes:
            position = -1
            node = self.graph.forward[int(np.argmax(forward))] if self.graph.forward else 0
        elif timeline.row_peaks[position] < peak_bytes:
            node = self.graph.backward[position]
        else:
            node = timeline.rows[position][timeline.row_bytes(self, position).index(peak_bytes)]
        return Replay(peak_bytes, timeline.recompute_ms, position, node, timeline, peaks, lazy)

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

    def always_there(self, rows: Rows) -> set[int]:
        """List forward tensors that need no recomputation: on kept, held and resident storages, or without storage."""
        changed = {position: list(row) for position, row in enumerate(rows) if row}
        blocks = with_rows(self, self.keeping_all.timeline, changed).blocks
        at_turn = {storage for storage, spans in blocks.items() if spans and spans[0][0] < 0}
        graph, kept = self.graph, {None, *at_turn, *self.fixed, *self._held}
        tensors = {t: self.storage_of[t] for node in graph.forward for t in graph.nodes[node].outputs}
        return {t for t, s in tensors.items() if s in kept or s not in self.made_at or graph.recomputers[t] is None}


def decisions(model: StepModel, rows: Rows) -> Decisions:
    """Return the nodes to run before each backward position: the rows of a replay, with their views added."""
    graph, lowered = model.graph, list[tuple[int, ...]]()
    on: dict[int | None, list[int]] = {}  # the forward's tensors on each storage
    for tensor, storage in enumerate(model.storage_of):
        producer = graph.tensors[tensor].producer
        if producer is not None and graph.nodes[producer].direction is not Direction.BACKWARD:
            on.setdefault(storage, []).append(tensor)
    available = {*graph.inputs, *graph.tangents, *model.always_there(rows)}
    ends = [(graph.nodes[node].inputs, graph.nodes[node].outputs) for node in graph.backward]
    for row, (read, made_after) in zip(rows, [*ends, (graph.gradients, ())], strict=True):
        before = list[int]()
        for node in row:
            for tensor in graph.nodes[node].inputs:
                ensure(graph, tensor, available, before)
            before.append(node)
            made = set(graph.nodes[node].outputs)
            for storage in {model.storage_of[t] for t in made} - {None}:  # views of the earlier values no longer count
                available.difference_update([t for t in on.get(storage, ()) if t not in made])
            available.update(made)
        for tensor in read:
            ensure(graph, tensor, available, before)
        available.update(made_after)
        lowered.append(tuple(before))
    return tuple(lowered)
