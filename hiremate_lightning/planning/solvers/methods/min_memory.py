"""Hong et al.: the checkpoints of a chain that give the least peak.

Source: Hong, Tsai, Wang, Liu, Wu, "GPU Memory Usage Optimization for Backward Propagation in Deep Network Training",
2025, arXiv 2502.12499. `docs/formulation.md` has the recurrence M(i), derived here from the paper's objective; the
paper's own terms of U may differ.

Changed: layers are the links of `chain`, and U(i, j) = max_(i <= l < j) tape_i + ... + tape_l + rest_l. A skip over
several checkpoints counts in each. Everything after the last checkpoint is kept. The method uses neither times nor a
budget, and recomputes each value at most once; filling up uses the rest of the budget. The paper solves M(i) in linear
time; here each M(i) looks at all later links, which takes a few hundredths of a second for a chain of 2,000 links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from ..chain import ChainBytes, ChainLink, ChainSpan, chains_of, policy_of
from ..choices import Policy
from ..search import Search, strategy

LENGTHS = (2000, 100, 50, 24, 12, 6)  # lengths of the chains to try


def checkpoints(inputs: Sequence[int], tapes: Sequence[int], rests: Sequence[int]) -> tuple[list[int], int]:
    """Choose the links whose input is kept so that the peak is least; return them, and the peak M(0).

    The arguments are bytes by link: its input (d_i), its tape, and gradients and workspace in its backward. The chosen
    links ascend from 0.
    """
    count, ends = len(inputs), np.cumsum([0, *tapes])
    needs = ends[1:] + np.array(rests, dtype=np.int64)  # U(i, j) = max(needs[i:j]) - ends[i]
    least, following = np.zeros(count + 1, dtype=np.int64), list[int]()
    for i in reversed(range(count)):
        peaks = np.maximum(np.maximum.accumulate(needs[i:]) - ends[i], least[i + 1 :])  # for each next checkpoint j
        following.append(i + 1 + int(peaks.argmin()))  # of equal peaks, the nearest
        least[i] = inputs[i] + peaks.min()
    chosen, link = list[int](), 0
    while link < count:
        chosen.append(link)
        link = following[-1 - link]
    return chosen, int(least[0])


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
