"""Greedy moves on policies: evict at the peak until the step fits, keep more while it still fits.

Eviction is directed by the peak: of the values that live through it without being used there, the one that frees most
bytes for the least recomputation is given up until its next use. A value may be evicted again after it was recomputed,
so that the same node runs several times; models that recompute each value once find nothing where a network's peak is
dominated by a few large operations. Related: DTR's heuristic (Kirisame et al., "Dynamic Tensor Rematerialization",
ICLR 2021, arXiv 2006.09616), here with the whole future known. Heuristics: no bound on how far they are from the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .model import StepModel
from .policies import Near, Policy, Replay, Rows

LEAST_GAIN_MS = 1e-9  # of what is kept in place of being recomputed


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
class Found:
    """A policy with its replay."""

    policy: Policy
    replay: Replay

    @property
    def rank(self) -> tuple[float, int]:
        """Faster first, then smaller."""
        return (self.replay.recompute_ms, self.replay.peak_bytes)

    @property
    def near(self) -> Near:
        """What a policy that differs little is replayed from."""
        return self.policy, self.replay.lazy_rows


Order = Callable[[StepModel, Candidate, set[int]], float]


def cheapest(model: StepModel, candidate: Candidate, there: set[int]) -> float:
    """Order by the time of recomputation for each byte."""
    return _chain_ms(model, candidate.storage, there) / max(1, model.sizes[candidate.storage])


def largest(model: StepModel, candidate: Candidate, there: set[int]) -> float:
    """Order by bytes, whatever time it takes."""
    return -model.sizes[candidate.storage]


def evict(
    model: StepModel, policy: Policy, limit_bytes: int, deadline: float, order: Order = cheapest
) -> Iterator[Found]:
    """Give up values at the peak, one after the other.

    Args:
        model: The step.
        policy: Where to start.
        limit_bytes: Stop when the peak is within it.
        deadline: Stop when so much work was done.
        order: Which value to try first.

    Yields:
        Each policy on the way, the start included; the last one fits where any did.
    """
    current = Found(policy, model.replay(policy))
    yield current
    for _ in range(4 * len(model.choices)):
        if current.replay.peak_bytes <= limit_bytes or model.work.is_past(deadline):
            return
        moved = next(_evictions(model, current, order), None)
        if moved is None:
            return
        current = moved
        yield current


def _evictions(model: StepModel, current: Found, order: Order) -> Iterator[Found]:
    """Try the candidates at the peak, in that order; give those that lower the bytes there."""
    there = set(current.policy.kept | model.fixed)
    ranked = sorted(_candidates(model, current.replay), key=lambda c: (order(model, c, there), c.storage))
    for candidate in ranked[:8]:
        moved = _without(current.policy, candidate)
        if moved == current.policy:
            continue
        after = model.replay(moved, current.near)
        same_place = after.node == current.replay.node and after.position == current.replay.position
        if after.peak_bytes < current.replay.peak_bytes or not same_place:
            yield Found(moved, after)


def neighbours(model: StepModel, current: Found) -> Iterator[Policy]:
    """Return each policy that gives up one more value at the peak, whatever the peak is then."""
    for candidate in _candidates(model, current.replay):
        moved = _without(current.policy, candidate)
        if moved != current.policy:
            yield moved


def _without(policy: Policy, candidate: Candidate) -> Policy:
    if candidate.last_use is None:
        return replace(policy, kept=policy.kept - {candidate.storage})
    return replace(policy, drops=policy.drops | {(candidate.storage, candidate.last_use)})


def _candidates(model: StepModel, replay: Replay) -> list[Candidate]:
    """List what lives through the peak and is not used there."""
    last: dict[int, int] = {}
    then: dict[int, int] = {}  # position of the first use after the peak
    at_peak: set[int] = set()
    remade: set[int] = set()
    reached = replay.position < 0
    model.work.add_operations(len(model.reads))
    for position, node, reads, makes in _steps(model, replay):
        is_peak = position == replay.position and node == replay.node
        if is_peak:
            at_peak.update(reads, makes)
        for storage in () if is_peak else reads:
            if not reached:
                last[storage] = position
            elif storage not in remade:
                then.setdefault(storage, position)
        if reached:
            remade.update(makes)
        else:
            last.update((storage, position) for storage in makes)
        reached = reached or is_peak
    found = []
    for storage in model.choices:
        if storage in then and storage not in at_peak and storage not in model.fixed:
            use = last.get(storage)
            if use is None or use < replay.position or then[storage] > use:
                found.append(Candidate(storage, use))
    return found


def _steps(model: StepModel, replay: Replay) -> Iterator[tuple[int, int, Sequence[int], Sequence[int]]]:
    """Return position, node, storages read and storages made of all that runs in the backward."""
    for position, row in enumerate(replay.rows[: len(model.reads)]):
        for node in row:
            yield position, node, model.needs[node], model.makes[node]
        yield position, model.graph.backward[position], model.reads[position], ()


def _chain_ms(model: StepModel, storage: int, there: set[int]) -> float:
    """Return the time to recompute a value from what is kept."""
    total, stack, seen = 0.0, [storage], set[int]()
    while stack:
        top = stack.pop()
        node = model.producer.get(top)
        if node is None or node in seen:
            continue
        seen.add(node)
        total += model.cost_ms[node]
        stack.extend(s for s in model.needs[node] if s not in there)
    return total


def keep_more(model: StepModel, found: Found, limit_bytes: int, deadline: float) -> Found:
    """Keep more values, and drop fewer, as long as the peak stays within the limit; never slower than what came in.

    Args:
        model: The step.
        found: Where to start; it fits.
        limit_bytes: Most bytes at the peak.
        deadline: Stop when so much work was done.
    """
    for storage, position in sorted(found.policy.drops):
        if model.work.is_past(deadline):
            return found
        found = _take_if_better(model, found, limit_bytes, drops=found.policy.drops - {(storage, position)})
    before, recomputed = found, _run_again(found)
    missing = [s for s in model.producer if s not in found.policy.kept and model.producer[s] in recomputed]
    missing.sort(key=lambda s: (-model.cost_ms[model.producer[s]] / (model.sizes[s] + 1), s))
    for storage in missing:
        if model.work.is_past(deadline):
            return found
        if found is not before:
            before, recomputed = found, _run_again(found)
        if model.producer[storage] not in recomputed:  # since what read it is kept by now
            model.work.add_operations(len(model.reads))
            continue
        found = _take_if_better(model, found, limit_bytes, storage, kept=found.policy.kept | {storage})
    return found


def _run_again(found: Found) -> set[int]:
    return {node for row in found.replay.lazy_rows for node in row}


def _take_if_better(
    model: StepModel,
    found: Found,
    limit_bytes: int,
    added: int | None = None,
    **changes: frozenset,  # type: ignore[type-arg]
) -> Found:
    changed = replace(found.policy, **changes)
    rows, limit_ms = model.rows(changed, found.near), found.replay.recompute_ms - LEAST_GAIN_MS
    is_slower = model.recompute_ms(rows) >= limit_ms  # whatever its peak
    if is_slower or (added is not None and least_bytes_with(model, found, rows, added) > limit_bytes):
        model.work.add_operations(len(model.reads))
        return found
    after = model.replay_lazy(rows)
    better = after.peak_bytes <= limit_bytes and after.recompute_ms < limit_ms
    return Found(changed, after) if better else found


def least_bytes_with(model: StepModel, before: Found, rows: Rows, kept: int) -> int:
    """Return a peak that a policy is not below which keeps one value more, without a replay.

    In the forward, and up to the first recomputation that the value spares, all that lived lives on, beside the value;
    only what the spared nodes would have read may be gone.

    Args:
        model: The step.
        before: The policy that does not keep the value.
        rows: What the policy that does so recomputes.
        kept: The value.

    Returns:
        The bytes, 0 where they can't be told so easily.
    """
    replay, pairs = before.replay, list(zip(before.replay.lazy_rows, rows, strict=True))
    differing = [position for position, (old, new) in enumerate(pairs) if old != new]
    first = differing[0] if differing else 0
    running = {node for row in rows for node in row}
    read = {storage for row in rows[first:] for node in row for storage in model.needs[node]}

    def stays(storage: int) -> bool:
        """Whether a value lives from the turn to beyond the first difference: it is read then, and never made again."""
        is_read = storage in read or model.uses.get(storage, (-1,))[-1] >= first
        return is_read and model.producer.get(storage) not in running

    if not stays(kept):
        return 0
    spared = {node for p in differing for node in pairs[p][0] if pairs[p][0].count(node) > pairs[p][1].count(node)}
    made = {storage for row in rows[:first] for node in row for storage in model.makes[node]}
    there = made | before.policy.kept | model.fixed
    gone = {s for node in spared for s in model.needs[node] if s in there and not stays(s)}
    is_new = model.last_forward_use(kept) < replay.forward_position
    peak_bytes = max([*replay.node_peaks[:first], replay.forward_peak if is_new else 0])
    return peak_bytes + model.sizes[kept] - sum(model.sizes[storage] for storage in gone)
