"""Checkmate: an integer program in which memory is checked at every node of the backward; and its rounded relaxation.

Source: Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica, Gonzalez, "Checkmate: Breaking the Memory Wall with
Optimal Tensor Rematerialization", MLSys 2020, arXiv 1910.02653. Its two-phase rounding is `checkmate_lp` here.

Changed: the forward is one stage, values are storages, and the replay finds out when they are freed (a seventh of the
variables at the same optimum): rows (1) to (5) of `phases` with every position an instant. Beyond a few dozen positions
no solver proves an optimum; beyond `Thresholds.program_variables` only the rounded relaxation, at a few instants, runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from .... import thresholds
from ..choices import Policy
from ..mip_backend import solve
from ..phases import Checks, PhasedProgram
from ..refine import refine
from ..search import Search, strategy

MOST_INSTANTS = 24  # most instants of the relaxation to round
SLACK = 0.1  # share of the budget that the relaxation leaves free, so that its rounding fits
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@strategy("checkmate", needs_programs=True)
def propose(search: Search) -> Iterator[Policy]:
    """Propose the rounded relaxation, then the solution of the program with every position checked."""
    yield from rounded(search)
    positions = tuple(range(len(search.model.reads)))
    count = len(positions) * len(search.model.choices)
    if count > thresholds.current.program_variables:
        search.notes.append(f"Checkmate's program has {count:,} variables here: only its relaxation was rounded.")
        return
    refine(search, Checks(positions))
    if search.best is not None:
        yield search.best.policy


@strategy("checkmate_lp", needs_programs=True)
def rounded(search: Search) -> Iterator[Policy]:
    """Propose the relaxation, solved with some budget left free, rounded at several thresholds."""
    program = PhasedProgram(search.model, int((1 - SLACK) * search.limit), Checks(search.model.neediest(MOST_INSTANTS)))
    left_s = max(1.0, 0.5 * search.left_s())
    result = solve(program.program.relaxed(), search.problem.options, left_s, work=search.model.work)
    for threshold in THRESHOLDS if result.values else ():
        yield program.policy(result.values, threshold)
