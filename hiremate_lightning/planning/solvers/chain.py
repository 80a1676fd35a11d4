"""The step as a chain of links, for methods that need chains.

A *link* (a stage in the papers) is a run of forward nodes between two cuts. Its *input* is the set of values that cross
the cut before it. Its *tape* is the set of values that it makes and the backward needs. Each link has a part of the
backward, which ends with the last read of the link's input before anything older is read; the *own* values are the part
of the tape that it reads. Cuts are placed where the fewest bytes cross. A cut between two modules costs less the higher
it is in the module tree, so that repeated blocks are cut in the same way. A skip across several cuts is part of the
input of each link that it crosses.

Only choices that can be recomputed count here; the fixed ones are always kept, and no decision changes their bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ...records.graph import Graph
from .choices import Policy, alive_bytes, crossing_bytes, spread
from .model import StepModel
from .search import Search

LARGE_SHARE = 0.25  # share of the largest value that crosses a cut: smaller values don't count in its width
MODULE_WEIGHT = 0.8  # factor on the bytes of a cut for each level of modules that it separates


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One link of a chain."""

    nodes: tuple[int, ...]  # its forward nodes; they start at the forward position `first`
    first: int
    input: frozenset[int]  # choices of earlier links that this link or a later one reads in the forward
    tape: tuple[int, ...]  # choices that it makes, in order
    own: frozenset[int]  # the part of the tape that its part of the backward reads: positions `begins` to `ends` - 1
    begins: int
    ends: int

    def handed_on(self, model: StepModel) -> frozenset[int]:
        """Return the choices that this link makes and later links read in the forward."""
        end = self.first + len(self.nodes)
        return frozenset(s for s in self.tape if model.last_forward_use(s) >= end)

    def nodes_for(self, model: StepModel, wanted: Iterable[int]) -> list[int]:
        """List the nodes of this link that recompute the wanted choices of its tape from its input."""
        inside = set(self.tape)
        needed = spread(set(), wanted, lambda storage: inside.intersection(model.sources(storage)))
        return list(dict.fromkeys(model.producer[s] for s in self.tape if s in needed))


@dataclass(frozen=True, slots=True)
class ChainSpan:
    """Choices in memory when a part of the backward begins (held), and those made and freed within it (own)."""

    held: frozenset[int]
    own: frozenset[int]


def links(model: StepModel, count: int) -> list[ChainLink]:
    """Cut a step into at most `count` links."""
    graph, made = model.graph, list[ChainLink]()
    works = list(accumulate(int(bool(graph.allocates[n])) for n in graph.forward))
    weights = _weights(graph)
    size = max(1, -(-works[-1] // max(1, count))) if works else 1
    while len(cuts := _cheapest_cuts(works, weights, size)) >= max(1, count):
        size = size * 5 // 4 + 1
    free, crossing = deque(s for s in model.choices if s in model.producer), set[int]()
    for first, last in pairwise([0, *cuts, len(graph.forward)]):
        crossing = {s for s in crossing if model.last_forward_use(s) >= first}
        tape = []
        while free and model.made_at[free[0]] < last:
            tape.append(free.popleft())
        made.append(ChainLink(graph.forward[first:last], first, frozenset(crossing), tuple(tape), frozenset(), 0, 0))
        crossing.update(tape)
    return _with_backwards(model, made)


def _with_backwards(model: StepModel, chain: Sequence[ChainLink]) -> list[ChainLink]:
    """Assign to each link its part of the backward, and the values of its tape that this part reads."""
    count = len(model.reads)
    link_of = {s: number for number, link in enumerate(chain) for s in link.tape}
    latest = [max((link_of[s] for s in reads if s in link_of), default=-1) for reads in model.reads]
    ends, reached = [0] * len(chain), -1
    for position in reversed(range(count)):  # `ends`: one past the last position that reads from a link or a later one
        for number in range(reached + 1, latest[position] + 1):
            ends[number] = position + 1
        reached = max(reached, latest[position])
    for number, link in enumerate(chain):
        for position in range(ends[number], count):
            older = {s for s in model.reads[position] if s in link_of}
            if not older <= link.input:
                break
            ends[number] = position + 1 if older else ends[number]
    begins = [*ends[1:], 0]
    ends[:1] = [count]
    made = []
    for link, first, end in zip(chain, begins, ends, strict=True):
        own = frozenset(s for s in link.tape if any(first <= use < end for use in model.uses.get(s, ())))
        made.append(replace(link, own=own, begins=first, ends=max(first, end)))
    return made


def chains_of(search: Search, name: str, lengths: Iterable[int]) -> list[list[ChainLink]]:
    """Cut a search's step into chains of several lengths; add a note with the method's name if the step is no chain."""
    graph = search.model.graph
    most = sum(map(bool, (graph.allocates[n] for n in graph.forward)))
    chains = [links(search.model, length) for length in dict.fromkeys(min(most, length) for length in lengths)]
    widths = list[list[int]]()
    for chain in chains:
        sizes = [[search.model.sizes[s] for s in link.input] for link in chain[1:]]
        # Count the large values that cross the cut before each link; masks, for example, are small.
        widths.append([sum(size >= LARGE_SHARE * max(crossing) for size in crossing) for crossing in sizes])
    if all(max(width, default=0) > 1 for width in widths):
        widest, cuts = max(map(max, widths)), sum(map(len, widths))
        wide = sum(width > 1 for each in widths for width in each)
        search.notes.append(
            f"{name} is made for chains, and this step is none: up to {widest} large values cross a cut, more than one "
            f"cross {100 * wide // cuts}% of the narrowest cuts. It was taken for a chain whose links hand on all of "
            "them."
        )
    return chains


# ---------------------------------------------------------------- where to cut


def _weights(graph: Graph) -> list[float]:
    """Return the cost of a cut before each forward position: the bytes that cross it, reduced where modules end."""
    modules = [tuple(graph.nodes[n].module.split(".")) for n in graph.forward]
    weights = []
    for position, crossing in enumerate(crossing_bytes(graph)):
        before, after = modules[max(0, position - 1)], modules[position]
        same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        levels = 0 if before == after else max(len(before), len(after)) - same
        weights.append((1 + crossing) * MODULE_WEIGHT**levels)
    return weights


def _cheapest_cuts(works: Sequence[int], weights: Sequence[float], most: int) -> list[int]:
    """Choose the positions of cuts so that no link has more than `most` allocating nodes, at the least total weight."""
    length = len(weights)
    best, begins = [0.0], [0]  # by end of a link: total weight of the cuts so far, and the start of the link
    window = [0]  # possible starts of the link, weights ascending
    for end in range(1, length + 1):
        while len(window) > 1 and works[end - 1] - (works[window[0] - 1] if window[0] else 0) > most:
            window.pop(0)
        best.append(best[window[0]] + (weights[end] if end < length else 0.0))
        begins.append(window[0])
        while window and best[window[-1]] >= best[end]:
            window.pop()
        window.append(end)
    cuts, end = list[int](), length
    while end > 0 and begins[end] > 0:
        end = begins[end]
        cuts.append(end)
    return cuts[::-1]


# ---------------------------------------------------------------- from held values to a policy


def last_needs(model: StepModel) -> dict[int, int]:
    """Return, for each choice, the last backward position that reads it or may recompute a value from it."""
    last, seen = dict[int, int](), set[int]()
    for position in reversed(range(len(model.all_reads))):
        spread(seen, model.all_reads[position], model.sources)
        last.update(dict.fromkeys(seen - last.keys(), position))
    return last


def policy_of(model: StepModel, spans: Mapping[int, ChainSpan]) -> Policy:
    """Return the policy that holds the values of each span of the backward from the span's first position on.

    The keys of `spans` are the backward positions at which they begin; one begins at 0, the turn.
    """
    last, fixed = last_needs(model), model.fixed
    kept = frozenset(s for s in spans[0].held if s in last) | fixed
    live, stays = set(kept), frozenset[int]()
    drops, early = set[tuple[int, int]](), set[tuple[int, int]]()

    def drop(position: int) -> None:
        gone = {s for s in live if s not in stays and s not in fixed}
        live.difference_update(gone)
        drops.update((s, position) for s in gone if last[s] > position)

    for position, reads in enumerate(model.all_reads):
        span = spans.get(position)
        if span is not None:
            stays = span.held | span.own
            if position:
                drop(position - 1)
            missing = [s for s in span.held - live if last.get(s, -1) >= position and s in model.producer]
            early.update((s, position) for s in missing)
            _compute(model, sorted(missing, key=model.made_at.__getitem__), live)
        _compute(model, reads, live)
        if span is not None:
            drop(position)
    return Policy(kept, frozenset(drops), frozenset(early))


def _compute(model: StepModel, wanted: Iterable[int], live: set[int]) -> None:
    for storage in wanted:
        for _ in model.recompute(storage, live):
            pass


# ---------------------------------------------------------------- bytes of a chain


class ChainBytes:
    """Bytes of a chain's values, and of its operations as they run: each list has one number per link."""

    def __init__(self, model: StepModel, chain: Sequence[ChainLink]) -> None:
        self._model, self.chain = model, chain
        last, sizes = last_needs(model), model.sizes
        fixed_after = alive_bytes(((0, last.get(s, 0), sizes[s]) for s in model.fixed), len(model.reads) + 1)
        gradients = [size + fixed_after[p] for p, size in enumerate(model.gradients)]
        self.tape = [self.of(link.tape) for link in chain]  # bytes of the tape
        self.own = [self.of(link.own) for link in chain]  # bytes of the own values
        # Bytes that no decision changes: the most in the link's part of the backward, and those just before this part.
        self.rest = [max(gradients[link.begins : link.ends], default=0) for link in chain]
        self.start = [model.live_gradients[link.begins] + fixed_after[link.begins] for link in chain]
        free = (s for s in model.choices if s not in model.fixed)
        lives = ((model.made_at[s], model.last_forward_use(s), sizes[s]) for s in free)
        self._alive = alive_bytes(lives, len(model.graph.forward))  # of choices, up to their last forward read
        kept = [0] * (len(model.graph.forward) + 1)
        for storage in model.fixed:
            kept[model.made_at[storage]] += sizes[storage]
        fixed_before = accumulate(kept)
        self._forward = [rest + fixed for rest, fixed in zip(model.forward_rest, fixed_before, strict=False)]
        # Most bytes besides choices while the link runs in the forward, and while it runs again.
        self.forward = [max(self._forward[link.first :][: len(link.nodes)], default=0) for link in chain]
        self.again = [max((model.transient[n] for n in link.nodes_for(model, link.tape)), default=0) for link in chain]

    def of(self, storages: Iterable[int]) -> int:
        """Return the bytes of these choices."""
        return sum(self._model.sizes[s] for s in storages)

    @property
    def others(self) -> Iterator[int]:
        """Yield all byte counts that exclude choices."""
        yield from (*self.rest, *self.start, *self._forward, *self.again)

    def sweeps(self, start: int) -> list[tuple[int, int]]:
        """Return the bytes that each link from `start` on takes while it runs, beyond the held input of link `start`.

        Each pair has the bytes in the forward, and the bytes when the link runs again in the backward. Dead values are
        freed at once.
        """
        model, chain, sizes = self._model, self.chain, list[tuple[int, int]]()
        held = sorted(chain[start].input, key=model.last_forward_use)
        ends = [model.last_forward_use(s) for s in held]
        gone = [0, *accumulate(model.sizes[s] for s in held)]
        for number, link in enumerate(chain[start:], start):
            forward = again = 0
            for position in range(link.first, link.first + len(link.nodes)):
                alive = self._alive[position] - (gone[-1] - gone[bisect_right(ends, position - 1)])
                forward, again = max(forward, alive + self._forward[position]), max(again, alive)
            sizes.append((forward, again + self.again[number]))
        return sizes
