"""Greedy moves on policies: evict at the peak until the step fits, keep more while it still fits.

Eviction is directed by the peak: of the values that live through it without being used there, the one that frees most
bytes for the least recomputation is given up until its next use. A value may be evicted again after it was recomputed,
so that the same node runs several times; models that recompute each value once find nothing where a network's peak is
dominated by a few large operations. Related: DTR's heuristic (Kirisame et al., "Dynamic Tensor Rematerialization",
ICLR 2021, arXiv 2006.09616), here with the whole future known. Heuristics: no bound on how far they are from the best.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from .choices import ROW, Policy, at_node
from .lazy import Lazy
from .model import Replay, StepModel
from .timeline import Timeline

LEAST_GAIN_MS = 1e-9  # of a value that is kept in place of being recomputed
TRIES = 8  # values at a peak: the first that helps is given up
PER_CHOICES, PER_CANDIDATE = 3, 12  # operations to find the values at a peak: one for 3 choices, 12 for each value


@dataclass(frozen=True, slots=True)
class Candidate:
    """A value that lives through the peak without being used there.

    Attributes:
        storage: Which one.
        last_use: Backward position of its last use before the peak, None where it comes from the forward unused.
    """

    storage: int
    last_use: int | None


@dataclass(frozen=True, slots=True)
class ReplayedPolicy:
    """A policy with its replay."""

    policy: Policy
    replay: Replay

    @property
    def rank(self) -> tuple[float, int]:
        """Faster first, then smaller."""
        return (self.replay.recompute_ms, self.replay.peak_bytes)

    @property
    def near(self) -> Lazy | None:
        """The rows from which a policy that differs little is replayed."""
        return self.replay.lazy


Order = Callable[[StepModel, int, set[int]], float]


def cheapest(model: StepModel, storage: int, there: set[int]) -> float:
    """Order by the time of recomputation, from the choices that are kept, for each byte."""
    total_ms, stack, seen = 0.0, [storage], set[int]()
    while stack:
        node = model.producer.get(stack.pop())
        if node is not None and node not in seen:
            seen.add(node)
            total_ms += model.cost_ms[node]
            stack.extend(s for s in model.needs[node] if s not in there)
    return total_ms / max(1, model.sizes[storage])


def largest(model: StepModel, storage: int, there: set[int]) -> float:
    """Order by bytes, whatever time it takes."""
    return -model.sizes[storage]


def evict(
    model: StepModel, policy: Policy, limit_bytes: int, deadline: float, order: Order = cheapest
) -> Iterator[ReplayedPolicy]:
    """Give up values at the peak, one after the other.

    Args:
        model: The step.
        policy: Where to start.
        limit_bytes: Stop when the peak is within it.
        deadline: Seconds of work at which to stop.
        order: Which value to try first.

    Yields:
        Each policy on the way, the start included; the last one fits where any did.
    """
    current = ReplayedPolicy(policy, model.replay(policy))
    yield current
    for _ in range(4 * len(model.choices)):
        if current.replay.peak_bytes <= limit_bytes or model.work.is_past(deadline):
            return
        moved = next(_evictions(model, current, order), None)
        if moved is None:
            return
        current = moved
        yield current


def _evictions(model: StepModel, current: ReplayedPolicy, order: Order) -> Iterator[ReplayedPolicy]:
    """Try the candidates at the peak in an order; yield those that lower the bytes there."""
    there = set(current.policy.kept | model.fixed)
    for candidate in islice(_candidates(model, current.replay, lambda s: (order(model, s, there), s)), TRIES):
        moved = _without(current.policy, candidate)
        if moved == current.policy:
            continue
        after = model.replay(moved, current.near)
        same_place = after.node == current.replay.node and after.position == current.replay.position
        if after.peak_bytes < current.replay.peak_bytes or not same_place:
            yield ReplayedPolicy(moved, after)


def neighbours(model: StepModel, current: ReplayedPolicy) -> Iterator[Policy]:
    """Return each policy that gives up one more value at the peak, whatever the peak is then."""
    for candidate in _candidates(model, current.replay):
        moved = _without(current.policy, candidate)
        if moved != current.policy:
            yield moved


def _without(policy: Policy, candidate: Candidate) -> Policy:
    if candidate.last_use is None:
        return replace(policy, kept=policy.kept - {candidate.storage})
    return replace(policy, drops=policy.drops | {(candidate.storage, candidate.last_use)})


def _candidates(
    model: StepModel, replay: Replay, key: Callable[[int], tuple[float, int]] | None = None
) -> Iterator[Candidate]:
    """Yield values that live through the peak unused: after it they are read before they are made again.

    The key orders the choices, by default as they are produced.
    """
    timeline, position = replay.timeline, replay.position
    place, at_peak = _place_of_peak(model, replay)
    living = [s for s, b in timeline.blocks.items() if any(begin <= place < last for begin, last in b)]
    model.work.add_operations(len(model.choices) // PER_CHOICES + PER_CANDIDATE * len(living))
    living.sort(key=key or model.made_at.__getitem__)
    end = len(model.reads) << ROW
    for storage in living:
        if storage in at_peak or storage in model.fixed:
            continue
        before, then = _around(model, timeline, storage, place)
        if then is None or then >= end or then in timeline.makes.get(storage, ()):
            continue
        use = None if before is None else before >> ROW
        if use is None or use < position or then >> ROW > use:
            yield Candidate(storage, use)


def _place_of_peak(model: StepModel, replay: Replay) -> tuple[int, Collection[int]]:
    """Return the key of the peak, and the choices that its node reads and makes.

    For a peak in the forward that is a key before all others, and no choices.
    """
    position, node = replay.position, replay.node
    if position < 0:
        return -1, ()
    row = replay.rows[position]
    if node in row:
        return (position << ROW) + row.index(node), {*model.needs[node], *model.makes[node]}
    return at_node(position), model.reads[position]


def _around(model: StepModel, timeline: Timeline, storage: int, key: int) -> tuple[int | None, int | None]:
    """Return the keys at which a choice is read or made last before a key, and first after it."""
    before, after = list[int](), list[int]()
    for keys in (model.use_keys.get(storage, ()), timeline.touches.get(storage, ())):
        index = bisect_left(keys, key)
        before += keys[max(0, index - 1) : index]
        index = bisect_right(keys, key)
        after += keys[index : index + 1]
    return max(before, default=None), min(after, default=None)


def keep_more(model: StepModel, start: ReplayedPolicy, limit_bytes: int | None, deadline: float) -> ReplayedPolicy:
    """Keep more values, and drop fewer, as long as the peak stays within the limit; the result is never slower.

    Args:
        model: The step.
        start: Where to start; it fits.
        limit_bytes: Most bytes at the peak; None for no more than it has, also where keeping something lowers it.
        deadline: Seconds of work at which to stop.
    """
    current = start
    for storage, position in sorted(current.policy.drops):
        if model.work.is_past(deadline):
            return current
        current = _take_if_better(model, current, limit_bytes, drops=current.policy.drops - {(storage, position)})
    missing = [s for s in model.producer if s not in current.policy.kept and _is_made(current, s)]
    missing.sort(key=lambda s: (-model.cost_ms[model.producer[s]] / (model.sizes[s] + 1), s))
    for storage in missing:
        if model.work.is_past(deadline):
            return current
        if _is_made(current, storage):  # and not spared since its readers are kept
            current = _take_if_better(model, current, limit_bytes, kept=current.policy.kept | {storage})
    return current


def _is_made(current: ReplayedPolicy, storage: int) -> bool:
    """Whether a choice is recomputed."""
    lazy = current.replay.lazy
    return lazy is not None and bool(lazy.timeline.makes.get(storage))


def _take_if_better(
    model: StepModel,
    current: ReplayedPolicy,
    limit_bytes: int | None,
    **changes: frozenset,  # type: ignore[type-arg]
) -> ReplayedPolicy:
    lazy = model.lazy(replace(current.policy, **changes), current.near)
    limit_ms = current.replay.recompute_ms - LEAST_GAIN_MS
    if lazy.timeline.recompute_ms >= limit_ms:  # whatever its peak
        return current
    after = model.replay_lazy(lazy)
    most_bytes = current.replay.peak_bytes if limit_bytes is None else limit_bytes
    better = after.peak_bytes <= most_bytes and after.recompute_ms < limit_ms
    return ReplayedPolicy(lazy.policy, after) if better else current
