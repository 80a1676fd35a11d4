"""POFO: which values of a chain are held, recomputed, or offloaded to the host, by dynamic programming.

Source: Beaumont, Eyraud-Dubois, Shilova, "Efficient Combination of Rematerialization and Offloading for Training DNNs",
NeurIPS 2021. It extends Rotor's recurrence in the forward of the step by C_offload, see `docs/formulation.md`.

Changed: the paper's program knows when transfers end. Here an offloaded byte has a price, from nothing to its time on
the link; each price gives a schedule, and the second pass (`offload.py`) chooses the places of its copies. For a
problem without host memory, it is Rotor.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ....records.step import Decisions
from ..base import Problem
from ..chain import ChainBytes, chains_of, policy_of
from ..choices import Policy
from ..model import decisions
from ..offload import PROPOSALS
from ..search import Search, strategy
from .rotor import LENGTHS, Table, Tape, Tapes, over_chains, whole_tapes

NAME = "POFO"
CHAINS = 3  # how many of Rotor's lengths to try
PRICES = (0.0, 0.25, 0.5, 1.0)  # of an offloaded byte, in units of its time on the link
LIMIT_SHARE = 0.3  # of the time limit, for all chains and prices


@strategy("pofo")
def propose(search: Search) -> Iterator[Policy]:
    """Propose the persistent schedules of least time for chains, without offloading."""
    return over_chains(search, NAME, whole_tapes)


def schedules(problem: Problem) -> Iterator[Decisions]:
    """Yield schedules of chains that need offloading."""
    search = Search(problem)
    deadline = search.within(LIMIT_SHARE)
    for chain in chains_of(search, NAME, LENGTHS[:CHAINS]):
        sizes = ChainBytes(search.model, chain)
        for price in PRICES:
            if search.model.work.is_past(deadline):
                return
            spans = Table(search.model, sizes, priced(search, sizes, price), search.limit).spans()
            if spans:
                yield decisions(search.model, search.model.replay(policy_of(search.model, spans)).rows)


PROPOSALS["pofo"] = schedules


def priced(search: Search, sizes: ChainBytes, price: float) -> Tapes:
    """Return the options of each link: hold its backward's inputs on the device, or offload them at a price."""
    link = search.problem.profile.link
    assert link is not None, "where values may be offloaded there is a link"
    tapes = whole_tapes(search, sizes)
    for number, (here, following) in enumerate(pairwise(sizes.chain)):
        (held,) = tapes[number]
        offloaded = here.own | (following.input & frozenset(here.tape))
        if offloaded:
            size_bytes, later = sizes.of(offloaded), number + 1
            beside = max(sizes.tape[later] + sizes.forward[later], sizes.own[later] + sizes.rest[later])
            need_bytes = max(held.need_bytes, size_bytes + beside)
            tapes[number].append(Tape(held.held, price * link.in_ms(size_bytes), need_bytes, offloaded))
    return tapes
