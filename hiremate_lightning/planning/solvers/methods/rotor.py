"""Rotor: the persistent schedule of least time for a chain, by dynamic programming.

Source: Herrmann, Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how
to train deep neural networks with limited memory", 2019, arXiv 1911.13214. `docs/formulation.md` has the recurrence of
C(s, t)(m), the least time from the input of link s and the gradient of t to the gradient of the input of s.

Changed: stages are the links of `chain`; the first forward costs nothing; bytes of gradients and workspace are those of
the recorded backward, rounded up to slots. Chains of several lengths are tried, and budgets around the real one, since
the table has only the largest need of each link. It can't do better than persistent schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from ..chain import ChainBytes, ChainLink, ChainSpan, chains_of, policy_of
from ..choices import Policy
from ..model import StepModel
from ..search import Search, strategy

LENGTHS = (50, 24, 36, 16, 10, 6)  # lengths of the chains to try
SLOTS = 500  # most slots of memory in the table
CHOICE_S, SLOT_S = 6e-6, 4e-9  # work to compare a choice with the best so far: fixed, and per slot
LARGER, SMALLER = (1.06, 1.12, 1.25, 1.5), (0.94, 0.88, 0.8, 0.7)  # working budgets, as shares of the real one

Array = npt.NDArray[np.float64]
Choices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tape:
    """An option of a link: the part of its tape held from its last forward to its backward, and the cost."""

    held: frozenset[int]  # choices that are held
    extra_ms: float  # time to recompute the other values of the tape
    need_bytes: int  # most bytes in the link's part of the backward, besides its input
    # Choices on the host while later links run; only in the first forward.
    offloaded: frozenset[int] = frozenset()


Tapes = list[list[Tape]]


def whole_tapes(search: Search, sizes: ChainBytes) -> Tapes:
    """Return Rotor's only option for each link: to hold all values that its backward reads."""
    return [
        [Tape(link.own, 0.0, own + rest)] for link, own, rest in zip(sizes.chain, sizes.own, sizes.rest, strict=True)
    ]


class Table:
    """C(s, t, m) of a chain, and the choices that attain it."""

    def __init__(self, model: StepModel, sizes: ChainBytes, tapes: Tapes, budget_bytes: int) -> None:
        self.chain, self.tapes = sizes.chain, tapes
        self._model, self._sizes = model, sizes
        through = [_time_ms(model, link.nodes_for(model, link.handed_on(model))) for link in self.chain]
        self._through_ms = np.concatenate(([0.0], np.cumsum(through)))
        unit = math.gcd(*(model.sizes[s] for s in model.choices), *sizes.others) or 1
        if budget_bytes > SLOTS * unit:
            unit = -(-budget_bytes // SLOTS)
        self._unit, self._count = unit, max(0, budget_bytes // unit)  # bytes of a slot, and number of slots
        self.cost: dict[tuple[int, int], Array] = {}  # by (s, t): the least time for each number of slots
        # By (s, t), for each number of slots: q to restart from the input of q, -1 - o to hold option o of s.
        self.choice: dict[tuple[int, int], Choices] = {}
        self._memory = np.arange(self._count + 1)
        for s in reversed(range(len(self.chain))):
            self._fill_from(s)

    def _slots(self, size_bytes: int) -> int:
        """Round bytes up to slots."""
        return max(0, -(-size_bytes // self._unit))

    def _fill_from(self, s: int) -> None:
        """Fill C(s, t) for each t."""
        chain, sizes = self.chain, self._sizes
        sweeps, again = sizes.sweeps(s), [self._run(chain[s], is_last) for is_last in (False, True)]
        taken = [self._taken(s, link.input) for link in chain[s:]]  # slots of a_q, besides the input of s
        for t in range(s, len(chain)):
            is_forward = t == len(chain) - 1
            cost, choice = np.full(self._count + 1, np.inf), np.zeros(self._count + 1, dtype=np.int64)
            start = 0 if is_forward else sizes.start[t]
            run, run_ms = (sizes.tape[s] + sizes.forward[s], 0.0) if is_forward else again[s == t]
            for number, option in enumerate(self.tapes[s]):
                if option.offloaded and not is_forward:
                    continue
                need = max(option.need_bytes, start + run)
                held = option.held if s == t else (option.held | chain[s + 1].input) - option.offloaded
                rest = self._with_less(s + 1, t, self._taken(s, held)) if s < t else np.zeros(self._count + 1)
                total = rest + option.extra_ms + run_ms
                self._take(cost, choice, total, need, -1 - number)
            need = 0
            for q in range(s + 1, t + 1):
                need = max(need, start + sweeps[q - 1 - s][0 if is_forward else 1])
                sweep_ms = 0.0 if is_forward else self._through_ms[q] - self._through_ms[s]
                total = sweep_ms + self._with_less(q, t, taken[q - s]) + self.cost[s, q - 1]
                self._take(cost, choice, total, need, q)
            self.cost[s, t], self.choice[s, t] = cost, choice

    def _run(self, link: ChainLink, is_last: bool) -> tuple[int, float]:
        """Return the bytes and the time of running a link again, with the values kept that its backward reads.

        The last link of a run (`is_last`) need not compute values for later links.
        """
        model = self._model
        nodes = link.nodes_for(model, link.own if is_last else link.own | link.handed_on(model))
        made = self._sizes.of({d for n in nodes for d in model.makes[n]})
        return made + max((model.transient[n] for n in nodes), default=0), _time_ms(model, nodes)

    def _take(self, cost: Array, choice: Choices, total: Array, need_bytes: int, number: int) -> None:
        """Store a choice for each number of slots at which it is faster and fits; change `cost` and `choice`."""
        self._model.work.add(CHOICE_S + SLOT_S * len(cost))
        better = (total < cost) & (self._memory >= self._slots(need_bytes))
        cost[better] = total[better]
        choice[better] = number

    def _with_less(self, s: int, t: int, slots: int) -> Array:
        """Return C(s, t) with fewer slots: entry m is C(s, t)(m - slots), infinite below."""
        shifted = np.full(self._count + 1, np.inf)
        if slots <= self._count:
            shifted[slots:] = self.cost[s, t][: self._count + 1 - slots]
        return shifted

    @property
    def least_ms(self) -> float:
        """The recompute time of the best schedule, infinite if none fits."""
        return float(self.cost[0, len(self.chain) - 1][self._count])

    def spans(self) -> dict[int, ChainSpan]:
        """Trace back the values in memory in the backward of each link; return {} if no schedule fits."""
        spans: list[tuple[int, ChainSpan]] = []
        if not np.isfinite(self.least_ms):
            return {}
        stack = [(0, len(self.chain) - 1, self._count, frozenset[int]())]
        while stack:
            s, t, slots, outer = stack.pop()
            link, choice = self.chain[s], int(self.choice[s, t][slots])
            here = outer | link.input
            if choice < 0:
                option = self.tapes[s][-1 - choice]
                held = option.held
                if s < t:
                    later = held | self.chain[s + 1].input
                    stack.append((s + 1, t, slots - self._taken(s, later - option.offloaded), here | later))
                spans.append((s, ChainSpan(here | held, frozenset(link.tape))))
            else:
                later = self.chain[choice].input
                stack.append((s, choice - 1, slots, outer))
                stack.append((choice, t, slots - self._taken(s, later), here))
        # Only the first of links that begin together has own positions: sorted last, it overwrites the others.
        return {self.chain[s].begins: span for s, span in sorted(spans, key=itemgetter(0), reverse=True)}

    def _taken(self, s: int, held: frozenset[int]) -> int:
        """Return the slots of held values that are not in the input of a link."""
        return self._slots(self._sizes.of(held - self.chain[s].input))


def _time_ms(model: StepModel, nodes: Sequence[int]) -> float:
    return sum(model.cost_ms[n] for n in nodes)


def over_chains(
    search: Search, name: str, tapes_of: Callable[[Search, ChainBytes], Tapes], lengths: Sequence[int] = LENGTHS
) -> Iterator[Policy]:
    """Yield the best schedules of chains of several lengths, under several working budgets, from options of links."""
    for chain in chains_of(search, name, lengths):
        sizes = ChainBytes(search.model, chain)
        yield from _under_budgets(search, sizes, tapes_of(search, sizes))


def _under_budgets(search: Search, sizes: ChainBytes, tapes: Tapes) -> Iterator[Policy]:
    """Yield schedules for larger and larger working budgets while they fit the real one, else for smaller ones."""

    def best(share: float) -> Policy | None:
        spans = Table(search.model, sizes, tapes, int(share * search.limit)).spans()
        return policy_of(search.model, spans) if spans else None

    share = 1.0
    for share in (1.0, *LARGER):
        policy = best(share)
        if policy is not None:
            yield policy
            if search.model.replay(policy).peak_bytes > search.limit:
                break
    if share > 1.0:
        return
    for share in SMALLER:
        policy = best(share)
        if policy is None:
            return
        yield policy
        if search.model.replay(policy).peak_bytes <= search.limit:
            return


@strategy("rotor")
def propose(search: Search) -> Iterator[Policy]:
    """Propose the persistent schedules of least time for chains."""
    return over_chains(search, "Rotor", whole_tapes)
