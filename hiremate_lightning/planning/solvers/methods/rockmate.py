"""Rockmate: options of blocks in the small, Rotor's dynamic programme over the sequence of blocks.

Source: Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont, "Rockmate: an Efficient, Fast, Automatic and Generic Tool for
Re-materialization in PyTorch", ICML 2023, PMLR 202:42018-42045, arXiv 2307.01236. The network is cut into a sequence of
blocks; equal ones are solved once. For each block an integer program under a grid of budgets gives options: what of its
values is kept from its forward to its backward. rk-Rotor is Rotor's recurrence with the best option in place of F_all:

    C_all(s, t, m) = min_o u_s + e_o + C(s + 1, t, m - saved_(s,o))    where m >= what option o needs of s

Changed: blocks are the links of `chain`. An option is the turn-point program of a link, its inputs taken to be there,
under a grid of limits on the saved bytes only; the peak of each option is replayed on the recorded step, so there is no
second grid. What else `rotor` says it has changed is changed here, too.

It can't hold a value of one block for another one, but for what the cuts hand on, nor choose among peaks of an option.
Networks with long skips make wide cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...partition import structural_key
from ..base import Status
from ..chain import ChainBytes, ChainLink
from ..choices import Policy
from ..incumbent import Search
from ..mip_backend import solve
from ..model import StepModel
from ..proposals import method
from ..turn_point import keeping_program
from .rotor import Tape, Tapes, over_chains

LENGTHS = (24, 12, 40, 6)  # of the chains that are tried
SAVED_SHARES = (1.0, 0.8, 0.6, 0.45, 0.3, 0.2, 0.1, 0.0)  # of a block's bytes: limits of its options
OPTION_SHARE = 0.05  # of the time left, for one program
MS_PER_BYTE = 1e-15  # so that of options of the same time the one that saves least is chosen


def options_of_blocks(search: Search, sizes: ChainBytes) -> Tapes:
    """Return the options of each block, those that save most first; equal blocks are solved once."""
    model = search.model
    solved: dict[str, list[tuple[int, ...]]] = {}
    tapes = []
    for number, link in enumerate(sizes.chain):
        handed_on = frozenset(sizes.chain[number + 1].input) if number + 1 < len(sizes.chain) else frozenset[int]()
        key = structural_key(model.graph, link.nodes) + repr([s in handed_on for s in link.tape])
        if key not in solved:
            solved[key] = [tuple(link.tape.index(s) for s in o) for o in _options(search, link, handed_on)]
        chosen = (frozenset(link.tape[i] for i in option) for option in solved[key])
        tapes.append([_measured(model, sizes, number, held) for held in chosen])
    return tapes


def _options(search: Search, link: ChainLink, handed_on: frozenset[int]) -> list[Sequence[int]]:
    """Solve the turn-point program of a block under several limits; options that save as much appear once."""
    model = search.model
    used = [s for s in link.tape if s in model.uses]
    stays = sum(model.sizes[s] for s in link.tape if s in handed_on)
    total = sum(model.sizes[s] for s in link.tape)
    operands = [s for s in link.tape if s in handed_on]
    options: dict[Sequence[int], None] = {link.tape: None}
    for share in SAVED_SHARES:
        limit = stays + share * (total - stays)
        program, keep = keeping_program(model, link.tape, used, limit, operands, MS_PER_BYTE)
        result = solve(program, model.problem.options, OPTION_SHARE * max(0.1, search.left_s()), work=model.work)
        if result.status is Status.INFEASIBLE:
            break
        if result.values:
            options[tuple(s for s in link.tape if result.values[keep[s]] >= 0.5)] = None
    return list(options)


def _measured(model: StepModel, sizes: ChainBytes, number: int, held: frozenset[int]) -> Tape:
    """Replay an option, all else kept; return its recomputation, and the bytes of the block's part of the backward."""
    link = sizes.chain[number]
    if held.issuperset(link.tape):
        return Tape(held, 0.0, sizes.tape[number] + sizes.rest[number])
    own = frozenset(link.tape)
    replayed = model.replay(Policy(frozenset(model.choices) - own | held))
    _, live = model.live_at(replayed.rows, range(link.begins, link.ends))
    need = sizes.start[number]
    for position, there in live.items():
        need = max(need, int(replayed.peaks[position]) - sizes.of(there - own - model.fixed))
    return Tape(held, replayed.recompute_ms, need)


@method("rockmate", needs_programs=True)
def propose(search: Search) -> Iterator[Policy]:
    """Propose the best sequences of options of blocks."""
    return over_chains(search, "Rockmate", options_of_blocks, LENGTHS)
