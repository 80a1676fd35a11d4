"""Greedy moves on policies: start from segments, evict at the peak until the step fits, keep more while it still fits.

Segments (T. Chen et al., arXiv 1604.06174) are cut where the fewest bytes cross, for a range of segment counts. An
eviction drops the value at the peak that frees most bytes for the least recomputation, until its next use; a value can
be evicted several times. Related: DTR's heuristic (Kirisame et al., ICLR 2021, arXiv 2006.09616), which does not know
the future. There is no bound on how far these moves are from the optimum.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from .choices import ROW, Policy, at_node, crossing_bytes, lives_of
from .model import Replay, StepModel
from .timeline import Timeline

LEAST_GAIN_MS = 1e-9  # least time that keeping one more value must save
TRIES = 8  # most values to try at a peak: the first one that helps is evicted
PER_CHOICES, PER_CANDIDATE = 3, 12  # work of finding the values at a peak: 1 operation per 3 choices, 12 per value
SEGMENT_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96)

Order = Callable[[StepModel, int, set[int]], float]


def segment_policies(model: StepModel) -> list[Policy]:
    """Return a policy for each number of segments, which keeps the values between segments, and one that keeps all."""
    graph, choices, kept = model.graph, frozenset(model.choices), list[frozenset[int]]()
    lives, length, crossing = lives_of(graph), len(graph.forward), crossing_bytes(graph)
    for count in SEGMENT_COUNTS:
        if count > max(1, length):
            break
        cuts, reach = list[int](), length // count // 3
        for middle in (length * k // count for k in range(1, count)):
            near = range(max(0, middle - reach), min(length, middle + reach + 1))
            cuts.append(min(near, key=lambda position: (crossing[position], abs(position - middle))))
        between = (s for s, (made, last) in lives.items() if bisect_right(cuts, made) < bisect_right(cuts, last))
        kept.append(frozenset(between) & choices)
    return [Policy(values) for values in dict.fromkeys([*kept, choices])]


def cheapest(model: StepModel, storage: int, there: set[int]) -> float:
    """Rank by recompute time per byte, starting from the choices in memory."""
    total_ms, stack, seen = 0.0, [storage], set[int]()
    while stack:
        node = model.producer.get(stack.pop())
        if node is not None and node not in seen:
            seen.add(node)
            total_ms += model.cost_ms[node]
            stack.extend(s for s in model.needs[node] if s not in there)
    return total_ms / max(1, model.sizes[storage])


def largest(model: StepModel, storage: int, there: set[int]) -> float:
    """Rank by bytes, whatever the recompute time."""
    return -model.sizes[storage]


def evict(
    model: StepModel, policy: Policy, limit_bytes: int, deadline: float, order: Order = cheapest
) -> Iterator[Replay]:
    """Evict values at the peak, one after the other, until the peak is within a limit or the work reaches a deadline.

    The start and each policy on the way are yielded; if a policy fits, it is the last one.
    """
    current: Replay | None = model.replay(policy)
    for _ in range(4 * len(model.choices)):
        if current is None:
            return
        yield current
        if current.peak_bytes <= limit_bytes or model.work.is_past(deadline):
            return
        current = _lower(model, current, order)


def _lower(model: StepModel, current: Replay, order: Order) -> Replay | None:
    """Evict the first value, in a given order, whose eviction lowers the bytes at the peak."""
    there = set(current.policy.kept | model.fixed)
    for moved in islice(neighbours(model, current, lambda s: (order(model, s, there), s)), TRIES):
        after = model.replay(moved, current.lazy)
        same_place = after.node == current.node and after.position == current.position
        if after.peak_bytes < current.peak_bytes or not same_place:
            return after
    return None


def neighbours(
    model: StepModel, current: Replay, key: Callable[[int], tuple[float, int]] | None = None
) -> Iterator[Policy]:
    """Yield each policy that evicts one more value at the peak, whatever its own peak is.

    The values live through the peak unused, and are read after it before they are made again. They come in the order of
    `key`, by default in the order of production.
    """
    timeline, policy = current.timeline, current.policy
    place, at_peak = -1, set[int]()  # a peak in the forward is before all keys and uses no choices
    if current.position >= 0 and current.node in (row := current.rows[current.position]):
        place = (current.position << ROW) + row.index(current.node)
        at_peak = {*model.needs[current.node], *model.makes[current.node]}
    elif current.position >= 0:
        place, at_peak = at_node(current.position), set(model.reads[current.position])
    living = [s for s, b in timeline.blocks.items() if any(begin <= place < last for begin, last in b)]
    model.work.add_operations(len(model.choices) // PER_CHOICES + PER_CANDIDATE * len(living))
    living.sort(key=key or model.made_at.__getitem__)
    end = len(model.reads) << ROW
    for storage in living:
        if storage in at_peak or storage in model.fixed:
            continue
        before, then = _around(model, timeline, storage, place)
        if then is None or then >= end or then in (begin for begin, _ in timeline.blocks[storage]):
            continue
        use = None if before is None else before >> ROW
        if use is None and storage in policy.kept:
            yield replace(policy, kept=policy.kept - {storage})
        elif use is not None and (use < current.position or then >> ROW > use) and (storage, use) not in policy.drops:
            yield replace(policy, drops=policy.drops | {(storage, use)})


def _around(model: StepModel, timeline: Timeline, storage: int, key: int) -> tuple[int | None, int | None]:
    """Return the last key before `key`, and the first after it, at which a choice is read or made."""
    before, after = list[int](), list[int]()
    for keys in (model.use_keys.get(storage, ()), timeline.touches.get(storage, ())):
        index = bisect_left(keys, key)
        before += keys[max(0, index - 1) : index]
        index = bisect_right(keys, key)
        after += keys[index : index + 1]
    return max(before, default=None), min(after, default=None)


def keep_more(model: StepModel, start: Replay, limit_bytes: int | None, deadline: float) -> Replay:
    """Keep more values, and drop fewer, while the peak stays within the limit; the result is never slower.

    Without a limit, each change must not raise the peak, even if an earlier change lowered it.
    """
    current = start
    for storage, position in sorted(current.policy.drops):
        if model.work.is_past(deadline):
            return current
        current = _take_if_better(model, current, limit_bytes, drops=current.policy.drops - {(storage, position)})
    missing = [s for s in model.producer if s not in current.policy.kept and current.timeline.is_made(s)]
    missing.sort(key=lambda s: (-model.cost_ms[model.producer[s]] / (model.sizes[s] + 1), s))
    for storage in missing:
        if model.work.is_past(deadline):
            return current
        if current.timeline.is_made(storage):  # still recomputed: its readers may be kept by now
            current = _take_if_better(model, current, limit_bytes, kept=current.policy.kept | {storage})
    return current


def _take_if_better(
    model: StepModel,
    current: Replay,
    limit_bytes: int | None,
    **changes: frozenset,  # type: ignore[type-arg]
) -> Replay:
    lazy = model.lazy(replace(current.policy, **changes), current.lazy)
    limit_ms = current.recompute_ms - LEAST_GAIN_MS
    if lazy.timeline.recompute_ms >= limit_ms:  # too slow, whatever its peak
        return current
    after = model.replay_lazy(lazy)
    most_bytes = current.peak_bytes if limit_bytes is None else limit_bytes
    return after if after.peak_bytes <= most_bytes and after.recompute_ms < limit_ms else current
