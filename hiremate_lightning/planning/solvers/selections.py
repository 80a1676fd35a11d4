"""Strategies that select what to keep by one pass over the values: `knapsack` and `twremat`.

They are here for comparison with what others ship, and as starts: neither looks at the whole timeline of the backward.
"""

from __future__ import annotations

import time

import numpy as np

from .greedy import Found
from .incumbent import Search, searching
from .model import Policy, Rows, StepModel

SLOTS = 500  # of memory in the knapsack's table
WORKING_BUDGETS = tuple(1.0 - 0.05 * number for number in range(15))
FRACTIONS = tuple(number / 40 for number in range(40, -1, -1))


def knapsack_policies(model: StepModel) -> list[Policy]:
    """Give, for each fraction of the saved bytes, the values that would take longest to recompute."""
    items = [s for s in model.choices if s in model.producer and s in model.uses and model.sizes[s]]
    total = sum(model.sizes[s] for s in items)
    weights = [-(-model.sizes[s] * SLOTS // max(1, total)) for s in items]
    best = np.zeros(SLOTS + 1)
    taken = np.zeros((len(items), SLOTS + 1), dtype=bool)
    for number, (storage, weight) in enumerate(zip(items, weights, strict=True)):
        value = model.cost_ms[model.producer[storage]]
        shifted = np.full(SLOTS + 1, -np.inf)
        shifted[weight:] = best[: SLOTS + 1 - weight] + value
        taken[number] = shifted > best
        best = np.maximum(best, shifted)
    free = frozenset(s for s in model.choices if s in model.uses and not model.sizes[s])
    policies = []
    for fraction in FRACTIONS:
        slots, chosen = int(fraction * SLOTS), set[int]()
        for number in reversed(range(len(items))):
            if taken[number, slots]:
                chosen.add(items[number])
                slots -= weights[number]
        policies.append(Policy(frozenset(chosen) | free))
    return policies


@searching("knapsack")
def knapsack(search: Search) -> None:
    """Do what PyTorch's `activation_memory_budget` does, with the largest fraction whose replay fits.

    Source: torch._functorch.partitioners and knapsack, as of PyTorch 2.13. Changed: the fraction is found here, since
    there the user has to; values are storages, and their times are the profiled ones.
    """
    try_fractions(search)


def try_fractions(search: Search) -> None:
    """Offer the largest fraction whose replay fits."""
    for policy in knapsack_policies(search.model):
        if search.offer(Found(policy, search.model.replay(policy))):
            return


def walk(model: StepModel, limit_bytes: float) -> Rows:
    """Walk through the backward with a limited memory, as TW-Remat's second stage does.

    Values are held as long as they fit; where a value doesn't, those of least time per byte that the running node
    doesn't read are given up, what is never needed again first.

    Args:
        model: The step.
        limit_bytes: Bytes for values, gradients and workspace.

    Returns:
        Producers recomputed before each backward position.
    """
    live = _held_at_turn(model, limit_bytes)
    rows: Rows = []
    for position, reads in enumerate(model.reads):
        row: list[int] = []
        room = limit_bytes - model.gradients[position]
        for storage in reads:
            _make(model, storage, live, row, room, set(reads))
        rows.append(row)
        live = {s for s in live if model.last_need(s) > position}
        _evict(model, live, room, set(reads))
    last: list[int] = []
    for storage in model.returned:
        _make(model, storage, live, last, limit_bytes, set(model.returned))
    return [*rows, last]


def _held_at_turn(model: StepModel, limit_bytes: float) -> set[int]:
    live = {s for s in model.choices if s in model.uses or s in model.fixed}
    _evict(model, live, limit_bytes - (model.gradients[0] if model.gradients else 0), set())
    return live


def _evict(model: StepModel, live: set[int], room: float, pinned: set[int]) -> None:
    total = sum(model.sizes[s] for s in live)
    if total <= room:
        return
    order = sorted(
        (s for s in live if s in model.producer and s not in pinned),
        key=lambda s: (model.cost_ms[model.producer[s]] / (model.sizes[s] + 1), s),
    )
    for storage in order:
        if total <= room:
            return
        live.discard(storage)
        total -= model.sizes[storage]


def _make(model: StepModel, storage: int, live: set[int], row: list[int], room: float, pinned: set[int]) -> None:
    for node, waiting in model.recompute(storage, live):
        row.append(node)
        sources = (d for s in waiting for d in _sources(model, s))
        _evict(model, live, room, {*pinned, *waiting, *model.makes[node], *sources})


def _sources(model: StepModel, storage: int) -> tuple[int, ...]:
    return model.needs[model.producer[storage]] if storage in model.producer else ()


@searching("twremat")
def twremat(search: Search) -> None:
    """Give up values as memory runs out, least time per byte first.

    Source: the budgeted stage (`memlimit`) of the public implementation of TW-Remat (Kumar, Purohit, Svitkina, Vee,
    Wang, "Efficient Rematerialization for Deep Networks", NeurIPS 2019). Changed: its first stage, the recursion over
    a tree decomposition, is replaced by recomputing from what is still held, which is what that stage's schedule
    becomes once values are held; times are the profiled ones. The budget is met by replay: working budgets are lowered
    until it is.
    """
    try_walks(search, search.within(1.0))


def try_walks(search: Search, deadline: float) -> None:
    """Offer what walks with several working budgets give."""
    for share in WORKING_BUDGETS:
        if time.monotonic() > deadline:
            return
        rows = walk(search.model, share * search.limit)
        policy = Policy(search.model.live_at(rows, ())[0])  # what it keeps; its rows say the rest
        search.offer(Found(policy, search.model.replay_rows(rows)))
