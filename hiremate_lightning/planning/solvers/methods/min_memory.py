"""Hong et al.: the checkpoints of a chain that give the least peak, in linear time.

Source: Hong, Tsai, Wang, Liu, Wu, "GPU Memory Usage Optimization for Backward Propagation in Deep Network Training",
2025, arXiv 2502.12499. `docs/formulation.md` has the recurrence M(i), derived here from the paper's objective; the
paper's own terms of U may differ.

Changed: layers are the links of `chain`, and U(i, j) = max_(i <= l < j) tape_i + ... + tape_l + rest_l. A skip over
several checkpoints counts in each. Everything after the last checkpoint is kept. The method uses neither times nor a
budget, and recomputes each value at most once; filling up uses the rest of the budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from ..chain import ChainBytes, ChainLink, ChainSpan, chains_of, policy_of
from ..choices import Policy
from ..search import Search, strategy

LENGTHS = (2000, 100, 50, 24, 12, 6)  # lengths of the chains to try


def checkpoints(inputs: Sequence[int], tapes: Sequence[int], rests: Sequence[int]) -> tuple[list[int], int]:
    """Choose the links whose input is kept so that the peak is least, in linear time; return them, and the peak M(0).

    The arguments are bytes by link: its input (d_i), its tape, and gradients and workspace in its backward. The chosen
    links ascend from 0.
    """
    count = len(inputs)
    ends = list(accumulate(tapes, initial=0))
    needs = [end + rest for end, rest in zip(ends[1:], rests, strict=True)]  # U(i, j) = max(needs[i:j]) - ends[i]
    least, following = [0] * (count + 1), [count] * (count + 1)
    queue = deque([count])  # candidates j, the nearest first: U rises, M falls
    last, before_last = _Window(needs), _Window(needs)
    for i in reversed(range(count)):
        while len(queue) > 1 and before_last.largest(i, queue[-2]) - ends[i] >= least[queue[-2]]:
            queue.pop()
        best = queue[-1]
        least[i] = max(last.largest(i, best) - ends[i], least[best])
        if len(queue) > 1 and least[queue[-2]] <= least[i]:
            best = queue[-2]  # for this j, M(j) exceeds U(i, j)
            least[i] = least[best]
        least[i] += inputs[i]
        following[i] = best
        while queue and least[queue[0]] >= least[i]:
            queue.popleft()
        queue.appendleft(i)
    chosen, link = list[int](), 0
    while link < count:
        chosen.append(link)
        link = following[link]
    return chosen, least[0]


class _Window:
    """The largest of numbers[i:j] in constant time on average, for i and j that never rise from call to call."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers, self._first = numbers, len(numbers)
        self._rising = deque[int]()  # positions from the first on, each with a larger number than all before it

    def largest(self, i: int, j: int) -> int:
        """Return max(numbers[i:j])."""
        while self._first > i:
            self._first -= 1
            while self._rising and self._numbers[self._rising[0]] <= self._numbers[self._first]:
                self._rising.popleft()
            self._rising.appendleft(self._first)
        while self._rising[-1] >= j:
            self._rising.pop()
        return self._numbers[self._rising[-1]]


@strategy("min_memory")
def propose(search: Search) -> Iterator[Policy]:
    """Propose the checkpoints of least peak for chains of several lengths."""
    model = search.model
    for chain in chains_of(search, "The programme of Hong et al.", LENGTHS):
        sizes = ChainBytes(model, chain)
        chosen, _ = checkpoints([sizes.of(link.input) for link in chain], sizes.tape, sizes.rest)
        yield policy_of(model, spans_between(chain, chosen))


def spans_between(chain: Sequence[ChainLink], chosen: Sequence[int]) -> dict[int, ChainSpan]:
    """Return the choices held in each part of the backward: inputs of earlier checkpoints, and its segment's tapes."""
    spans: dict[int, ChainSpan] = {}
    held = frozenset[int]()
    for first, end in pairwise([*chosen, len(chain)]):
        held |= chain[first].input
        segment = frozenset(s for link in chain[first:end] for s in link.tape)
        held |= segment if end == len(chain) else frozenset()
        spans.setdefault(chain[end - 1].begins, ChainSpan(held, segment))
    return spans
