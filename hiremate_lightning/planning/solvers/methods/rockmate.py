"""Rockmate: small programs give options of blocks, and Rotor's dynamic program chooses over the sequence of blocks.

Source: Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont, "Rockmate: an Efficient, Fast, Automatic and Generic Tool for
Re-materialization in PyTorch", ICML 2023, PMLR 202:42018-42045, arXiv 2307.01236. `docs/formulation.md` has the table.

Changed: blocks are the links of `chain`. The turn-point program of a link gives an option for each limit on saved
bytes; there is no limit on peaks, since each option is replayed. A block can't hold a value for another block, except
values that cross the cuts. Networks with long skips have wide cuts.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..chain import ChainBytes
from ..choices import Policy
from ..model import StepModel
from ..search import Search, strategy
from ..turn_point import options_of
from .hilp import structural_key
from .rotor import Tape, Tapes, over_chains

LENGTHS = (24, 12, 40, 6)  # lengths of the chains to try
OPTION_SHARE = 0.05  # of the time left, for one program


def options_of_blocks(search: Search, sizes: ChainBytes) -> Tapes:
    """Return the options of each block, the ones that save most first; solve equal blocks once."""
    model = search.model
    solved: dict[str, list[tuple[int, ...]]] = {}
    tapes = []
    for number, link in enumerate(sizes.chain):
        handed_on = frozenset(sizes.chain[number + 1].input) if number + 1 < len(sizes.chain) else frozenset[int]()
        key = structural_key(model.graph, link.nodes) + repr([s in handed_on for s in link.tape])
        if key not in solved:
            used, kept = ([s for s in link.tape if s in those] for those in (model.uses, handed_on))
            options = options_of(model, link.tape, used, kept, OPTION_SHARE * max(0.1, search.left_s()))
            held = dict.fromkeys([frozenset(link.tape), *options])
            solved[key] = [tuple(link.tape.index(s) for s in option) for option in held]
        chosen = (frozenset(link.tape[i] for i in option) for option in solved[key])
        tapes.append([_measured(model, sizes, number, held) for held in chosen])
    return tapes


def _measured(model: StepModel, sizes: ChainBytes, number: int, held: frozenset[int]) -> Tape:
    """Replay an option with everything else kept; return its recompute time, and its bytes in the block's backward."""
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


@strategy("rockmate", needs_programs=True)
def propose(search: Search) -> Iterator[Policy]:
    """Propose the best sequences of options of blocks."""
    return over_chains(search, "Rockmate", options_of_blocks, LENGTHS)
