"""Hong et al.: the checkpoints of a chain that give the least peak, in linear time.

Source: Hong, Tsai, Wang, Liu, Wu, "GPU Memory Usage Optimization for Backward Propagation in Deep Network Training",
2025, arXiv 2502.12499. Of the layers 1 to n of a chain some are checkpoints, kept in the forward; the backward computes
what is between two of them again. While it is between checkpoints i and j, those after j are gone. With d_i bytes of
what layer i hands on, and U(i, j) bytes to compute again and differentiate what follows i up to j, the peak is

    max over neighbours i, j of  sum_(c <= i) d_c + U(i, j)

    M(i) = d_i + min_(j > i) max(U(i, j), M(j)),    M(n) = 0,    and M(0) is the least peak

U grows with j and shrinks with i. So of i < j with M(i) <= M(j), j is never best for what comes before i; on the queue
of the other candidates U rises and M falls, and the best is where they cross, which moves towards the front as i falls.
Each layer enters and leaves the queue once: O(n). The paper's O(n^3) programme is the oracle of the tests. The formulas
are derived anew from the objective as its abstract and outline describe it; its own terms of U may differ.

Changed: layers are the links of `chain`, d are the bytes that cross the cut before a link, and U counts what the links
make that their backward needs, with gradients and workspace of the recorded step:

    U(i, j) = max_(i <= l < j) tape_i + ... + tape_l + rest_l

Bytes are of storages, but a skip over several checkpoints counts in each of them. What can't be recomputed is kept.

What follows the last checkpoint is kept, since its backward comes at once. It knows neither time nor budget, and
recomputes each value at most once. What the budget leaves is filled up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from ..chain import ChainBytes, ChainLink, ChainSpan, chains_of, policy_of
from ..choices import Policy
from ..search import Search, method

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


@method("min_memory")
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
