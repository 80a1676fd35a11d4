"""The step as a chain of links: what the strategies for chains see of any network.

A link, a stage in the papers on chains, is a run of forward nodes between two cuts. Its *input* is what crosses the cut
before it, its *tape* what it makes and the backward reads. A skip that crosses several cuts is part of the input of
each link on its way; it is counted each time, so networks with long skips look larger than they are, and the replay
tells the truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..partition import backward_starts, cut_runs
from .model import Policy, StepModel


@dataclass(frozen=True, slots=True)
class Link:
    """One link of the chain.

    Attributes:
        nodes: Its forward nodes.
        input: Choices made before it that it, or what follows, reads in the forward.
        tape: Choices that it makes.
        begins: Backward position from which on nothing of later links is read.
        forward_ms: Time to recompute its tape.
        rest_bytes: Most bytes of gradients and workspace in its part of the backward.
    """

    nodes: tuple[int, ...]
    input: tuple[int, ...]
    tape: tuple[int, ...]
    begins: int
    forward_ms: float
    rest_bytes: int


def links(model: StepModel, count: int) -> list[Link]:
    """Cut a step into at most so many links."""
    runs = cut_runs(model.graph, count)
    cuts = [0]
    for run in runs:
        cuts.append(cuts[-1] + len(run))
    starts = backward_starts(model.graph, cuts[:-1])
    begins = [0, *reversed(starts[1:])][::-1]  # of link l: where nothing made after its end is read any more
    made = []
    for number, run in enumerate(runs):
        first, last = cuts[number], cuts[number + 1]
        crossing = [s for s in model.choices if model.made_at[s] < first <= model.last_forward_use(s)]
        tape = [s for s in model.choices if first <= model.made_at[s] < last]
        nodes = dict.fromkeys(model.producer[s] for s in tape if s in model.producer)
        span = range(begins[number], max(begins[number] + 1, starts[number]))
        rest = max((model.gradients[p] for p in span if p < len(model.gradients)), default=0)
        time_ms = sum(model.cost_ms[n] for n in nodes)
        made.append(Link(run, tuple(crossing), tuple(tape), begins[number], time_ms, rest))
    return made


def policy_of(model: StepModel, held: Mapping[int, frozenset[int]], kept: frozenset[int]) -> Policy:
    """Return the policy that holds given choices at the start of some backward positions, and no others.

    Args:
        model: The step.
        held: By backward position, what is in memory just before it.
        kept: What is kept through the turn.
    """
    drops, early = set[tuple[int, int]](), set[tuple[int, int]]()
    before = kept
    for position in sorted(held):
        now = held[position]
        if position > 0:
            drops.update((s, position - 1) for s in model.choices if s not in now and _is_used(model, s, position))
        early.update((s, position) for s in now - before if s in model.producer and _is_used(model, s, position))
        before = now
    return Policy(kept | model.fixed, frozenset(drops), frozenset(early))


def _is_used(model: StepModel, storage: int, position: int) -> bool:
    """Whether a choice may be read at or after a position: directly, or to recompute another one."""
    return storage not in model.fixed and model.last_need(storage) >= position
