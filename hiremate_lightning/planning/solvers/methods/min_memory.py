"""Hong et al.: the checkpoints of a chain that give the least peak, in linear time.

Source: Hong, Tsai, Wang, Liu, Wu, "GPU Memory Usage Optimization for Backward Propagation in Deep Network Training",
2025, arXiv 2502.12499. `docs/formulation.md` has the recurrence M(i), derived anew from the objective as the paper
describes it; its own terms of U may differ.

Changed: layers are the links of `chain`, and U(i, j) = max_(i <= l < j) tape_i + ... + tape_l + rest_l. A skip over
several checkpoints counts in each. What follows the last checkpoint is kept. It knows neither time nor budget, and
recomputes each value at most once; what the budget leaves is filled up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from ..chain import ChainBytes, ChainLink, ChainSpan, chains_of, policy_of
from ..choices import Policy
from ..search import Search, strategy

LENGTHS = (2000, 100, 50, 24, 12, 6)  # of the chains that are tried


def checkpoints(inputs: Sequence[int], tapes: Sequence[int], rests: Sequence[int]) -> tuple[list[int], int]:
    """Choose the links whose input is kept, so that the peak is least; in linear time.

    Given are the bytes of each link's input, d_i, of what it makes for its backward, and of the gradients and workspace
    in that. The chosen links ascend from 0; M(0) comes with them.
    """
    count = len(inputs)
    ends = list(accumulate(tapes, initial=0))
    needs = [end + rest for end, rest in zip(ends[1:], rests, strict=True)]  # U(i, j) is their largest, less ends[i]
    least, following = [0] * (count + 1), [count] * (count + 1)
    queue = deque([count])  # candidates j, the nearest first: U rises, M falls
    last, before_last = _Window(needs), _Window(needs)
    for i in reversed(range(count)):
        while len(queue) > 1 and before_last.largest(i, queue[-2]) - ends[i] >= least[queue[-2]]:
            queue.pop()
        best = queue[-1]
        least[i] = max(last.largest(i, best) - ends[i], least[best])
        if len(queue) > 1 and least[queue[-2]] <= least[i]:
            best = queue[-2]  # there M is larger than U
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
    """The largest of some numbers from i to j - 1, where neither i nor j ever rises: in constant time on average."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers, self._first = numbers, len(numbers)
        self._rising = deque[int]()  # positions of which none has one before it with as large a number

    def largest(self, i: int, j: int) -> int:
        """Return the largest of them."""
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
    """Propose the checkpoints of least peak, of chains of several lengths."""
    model = search.model
    for chain in chains_of(search, "The programme of Hong et al.", LENGTHS):
        sizes = ChainBytes(model, chain)
        chosen, _ = checkpoints([sizes.of(link.input) for link in chain], sizes.tape, sizes.rest)
        yield policy_of(model, spans_between(chain, chosen))


def spans_between(chain: Sequence[ChainLink], chosen: Sequence[int]) -> dict[int, ChainSpan]:
    """Return the choices that the backward holds: inputs of the checkpoints so far, and all of its present segment."""
    spans: dict[int, ChainSpan] = {}
    held = frozenset[int]()
    for first, end in pairwise([*chosen, len(chain)]):
        held |= chain[first].input
        own = frozenset(s for link in chain[first:end] for s in link.tape)
        held |= own if end == len(chain) else frozenset()
        spans.setdefault(chain[end - 1].begins, ChainSpan(held, own))
    return spans
