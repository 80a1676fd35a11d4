"""Strategies for chains, applied to the links of any network: `min_memory` and `rotor`.

Both decide which link inputs are held when, by dynamic programmes over the chain that `links` cuts; the replay of
the real graph says what a decision needs, and chains of several lengths and several working budgets are tried, because
the links' model of memory is coarse. Heuristics on graphs that are no chains; on a chain whose links are single
nodes `rotor` is optimal among persistent schedules up to the rounding of bytes to slots.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .base import Problem, Solution, strategy
from .greedy import Found
from .incumbent import Search, begin, searching
from .links import Link, links, policy_of
from .model import Policy, StepModel

LENGTHS = (6, 10, 16, 24, 36, 50)  # of the chains that are tried
STATIC_LENGTH = 24  # of the longest chain for the O(n^3) programme
SLOTS = 400  # of memory in the tables of `rotor`
WORKING_BUDGETS = (1.0, 0.94, 1.06, 0.88, 1.12, 0.8, 1.25)  # of the real one

Array = npt.NDArray[np.float64]


# -------------------------------------------------------------------------------------------------- min_memory


def checkpoints(inputs: Sequence[int], segment_bytes: Array) -> list[int]:
    """Choose the links whose input is kept, so that the peak is least: Hong et al.'s progressive objective.

        M(i) = d_i + min over j > i of max(U(i, j), M(j)),  M(n) = 0

    Their O(n) programme needs U to grow with j and to shrink with i; its queue holds the candidates j, nearest first,
    on which M falls and U rises, so that the best is where they cross.

    Args:
        inputs: d_i, bytes of the input of each link.
        segment_bytes: U(i, j), bytes to rebuild and differentiate links i to j - 1 from the input of i.

    Returns:
        The chosen links, ascending, with 0.
    """
    count = len(inputs)
    least = [0.0] * (count + 1)
    following = [count] * (count + 1)
    queue = [count]
    for i in reversed(range(count)):
        while len(queue) > 1 and segment_bytes[i, queue[-2]] >= least[queue[-2]]:
            queue.pop()
        best = min(queue[-2:], key=lambda j: (max(segment_bytes[i, j], least[j]), j))
        least[i] = inputs[i] + max(float(segment_bytes[i, best]), least[best])
        following[i] = best
        while queue and least[queue[0]] >= least[i]:
            queue.pop(0)
        queue.insert(0, i)
    chosen, link = [], 0
    while link < count:
        chosen.append(link)
        link = following[link]
    return chosen


def static_checkpoints(sizes: Sequence[int]) -> list[int]:
    """Choose what to keep for the least of bytes kept plus the largest segment between: their first objective.

    For each possible size of the largest segment, the least bytes kept by dynamic programming; O(n^3) in all.

    Args:
        sizes: d_i, bytes of each layer.

    Returns:
        The layers to keep, ascending.
    """
    prefix = np.concatenate(([0.0], np.cumsum(sizes)))
    count = len(sizes)
    best_total, best = float("inf"), list[int]()
    for largest in sorted({prefix[j] - prefix[i] for i in range(count + 1) for j in range(i, count + 1)}):
        cost = [0.0] * (count + 2)
        before = [0] * (count + 2)
        for j in range(1, count + 2):
            reachable = [i for i in range(j) if prefix[j - 1] - prefix[i] <= largest]
            before[j] = min(reachable, key=lambda i: cost[i]) if reachable else -1
            size = sizes[j - 1] if j <= count else 0
            cost[j] = size + cost[before[j]] if reachable else float("inf")
        if cost[count + 1] + largest < best_total:
            best_total, best, at = cost[count + 1] + largest, [], before[count + 1]
            while at > 0:
                best.append(at - 1)
                at = before[at]
    return best[::-1]


def _segment_bytes(model: StepModel, chain: Sequence[Link]) -> Array:
    count = len(chain)
    tapes = np.concatenate(([0.0], np.cumsum([_bytes(model, s.tape) for s in chain])))
    table = np.zeros((count, count + 1))
    for i in range(count):
        worst = 0.0
        for j in range(i + 1, count + 1):
            worst = max(worst, tapes[j] - tapes[i] + chain[j - 1].rest_bytes)
            table[i, j] = worst
    return table


def _bytes(model: StepModel, storages: Sequence[int]) -> int:
    return sum(model.sizes[s] for s in storages)


def min_memory_policies(model: StepModel) -> Iterator[Policy]:
    """Give, for chains of several lengths, the policy of least memory by each of the two objectives."""
    for length in LENGTHS:
        chain = links(model, length)
        inputs = [_bytes(model, link.input) for link in chain]
        static = static_checkpoints(inputs[1:]) if len(chain) <= STATIC_LENGTH else []
        for chosen in (checkpoints(inputs, _segment_bytes(model, chain)), [i + 1 for i in static]):
            yield Policy(frozenset(s for i in chosen for s in chain[i].input))


@strategy("min_memory")
def min_memory(problem: Problem) -> Solution:
    """Keep the link inputs that give the least memory, whatever the time.

    Source: Hong, Tsai, Wang, Liu, Wu, 2025, arXiv 2502.12499; the formulas of the progressive objective are
        reconstructed.
    """
    search = begin(problem)
    found = [Found(policy, search.model.replay(policy)) for policy in min_memory_policies(search.model)]
    search.offer(min(found, key=lambda f: (f.replay.peak_bytes, f.rank)))
    return search.answer("min_memory")


# -------------------------------------------------------------------------------------------------- rotor


@dataclass(frozen=True, slots=True)
class Tape:
    """An option of a link: what of its tape is held from its last forward to its backward, and what that costs.

    Attributes:
        held: Choices that are held.
        extra_ms: Time to recompute the others.
    """

    held: frozenset[int]
    extra_ms: float


def tapes(model: StepModel, link: Link) -> list[Tape]:
    """Return options for a link: its whole tape, and less and less of it, what is cheap per byte first."""
    order = sorted(
        (s for s in link.tape if s in model.producer),
        key=lambda s: (model.cost_ms[model.producer[s]] / (model.sizes[s] + 1), s),
    )
    options, total = [Tape(frozenset(link.tape), 0.0)], _bytes(model, order)
    for share in (0.25, 0.5, 0.75):
        dropped, gone = set(), 0
        for storage in order:
            if gone + model.sizes[storage] <= share * total:
                dropped.add(storage)
                gone += model.sizes[storage]
        extra = sum(model.cost_ms[n] for n in dict.fromkeys(model.producer[s] for s in sorted(dropped)))
        if dropped:
            options.append(Tape(frozenset(link.tape) - dropped, extra))
    return options


class _Table:
    """C[s, t][m]: least time to run the backward of links s to t from the input of s with m slots, and how."""

    def __init__(self, model: StepModel, chain: Sequence[Link], budget_bytes: float) -> None:
        self.chain, self.model = chain, model
        self.slot = max(1.0, budget_bytes / SLOTS)
        self.options = [tapes(model, link) for link in chain]
        self.inputs = [self._slots(_bytes(model, link.input)) for link in chain]
        self.held = [[self._slots(_bytes(model, sorted(o.held))) for o in options] for options in self.options]
        count = len(chain)
        self.cost: dict[tuple[int, int], Array] = {}
        self.choice: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        for span in range(count):
            for s in range(count - span):
                self._fill(s, s + span)

    def _slots(self, size_bytes: float) -> int:
        return int(-(-size_bytes // self.slot))

    def _fill(self, s: int, t: int) -> None:
        """Take the better of holding a tape of s (choice -1 - o) and of restarting from the input of q (choice q)."""
        memory = np.arange(SLOTS + 1)
        cost = np.full(SLOTS + 1, np.inf)
        choice = np.zeros(SLOTS + 1, dtype=np.int64)
        link = self.chain[s]
        for number, option in enumerate(self.options[s]):
            need = self._slots(_bytes(self.model, link.tape) + link.rest_bytes)
            base = link.forward_ms + option.extra_ms
            rest = self._shifted(s + 1, t, self.held[s][number]) if s < t else np.zeros(SLOTS + 1)
            self._take(cost, choice, np.where(memory >= need, rest + base, np.inf), -1 - number)
        for q in range(s + 1, t + 1):
            sweep = sum(self.chain[k].forward_ms for k in range(s, q))
            self._take(cost, choice, sweep + self._shifted(q, t, self.inputs[q]) + self.cost[s, q - 1], q)
        self.cost[s, t], self.choice[s, t] = cost, choice

    @staticmethod
    def _take(cost: Array, choice: npt.NDArray[np.int64], other: Array, number: int) -> None:
        better = other < cost
        cost[better] = other[better]
        choice[better] = number

    def _shifted(self, s: int, t: int, slots: int) -> Array:
        """Return C[s, t] with some slots taken."""
        shifted = np.full(SLOTS + 1, np.inf)
        if slots <= SLOTS:
            shifted[slots:] = self.cost[s, t][: SLOTS + 1 - slots]
        return shifted

    def held_at(self) -> dict[int, frozenset[int]] | None:
        """Trace back what is held as the backward of each link begins, None where nothing fits."""
        first = 0
        if not np.isfinite(self.cost[0, len(self.chain) - 1][SLOTS - self.inputs[first] if self.inputs else SLOTS]):
            return None
        held: dict[int, frozenset[int]] = {}
        stack: list[tuple[int, int, int, frozenset[int]]] = [(0, len(self.chain) - 1, SLOTS, frozenset())]
        while stack:
            s, t, slots, outer = stack.pop()
            choice = int(self.choice[s, t][slots])
            here = outer | frozenset(self.chain[s].input)
            if choice < 0:
                option = -1 - choice
                with_tape = here | self.options[s][option].held
                held[s] = with_tape
                if s < t:
                    stack.append((s + 1, t, slots - self.held[s][option], with_tape))
            else:
                stack.append((choice, t, slots - self.inputs[choice], here))
                stack.append((s, choice - 1, slots, outer))
        return held


def rotor_policy(model: StepModel, chain: Sequence[Link], budget_bytes: float) -> Policy | None:
    """Solve a chain under a working budget; None where the table finds nothing."""
    held = _Table(model, chain, budget_bytes).held_at()
    if held is None:
        return None
    at = {chain[s].begins: held[s] for s in sorted(held) if s < len(chain) - 1}
    return policy_of(model, at, held[len(chain) - 1])


def try_rotor(search: Search, deadline: float) -> None:
    """Offer rotor's policies for several chains and working budgets."""
    limit = search.limit
    for length in LENGTHS:
        chain = links(search.model, length)
        for share in WORKING_BUDGETS:
            if time.monotonic() > deadline:
                return
            policy = rotor_policy(search.model, chain, share * limit)
            if policy is not None:
                search.offer(Found(policy, search.model.replay(policy)))


@searching("rotor")
def rotor(search: Search) -> None:
    """Hold link inputs and tapes by the persistent dynamic programme for chains with options.

    Sources: Herrmann, Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, "Optimal checkpointing for heterogeneous
    chains", 2019, arXiv 1911.13214; with options: Zhao et al., "Rockmate", ICML 2023. Changed: no thresholds for the
    forward within the table, which the replay checks; a tape may outlive the input of its link where the backward
    doesn't read that.
    """
    try_rotor(search, search.within(1.0))
