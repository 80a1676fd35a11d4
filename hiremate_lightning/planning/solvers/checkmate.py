"""Checkmate in its reduced form: memory is checked at every node of the backward.

Source: Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica, Gonzalez, "Checkmate: Breaking the Memory Wall with
Optimal Tensor Rematerialization", MLSys 2020, arXiv 1910.02653. Changed: the forward is one phase and only forward
nodes are recomputed, values are storages, and nothing is said of when a value is freed, which the replay finds out
(research on python-mip: a seventh of the variables at the same optimum). The rows of memory between two positions are
added where the replay misses them.

The program has a variable for each value and position: beyond a few dozen positions no solver closes it, and its
rounded relaxation is what remains, without a promise to find anything: thresholds on S, R by recomputing lazily, the
cheapest that fits by replay.
"""

from __future__ import annotations

from .greedy import Found
from .incumbent import Search, searching
from .mip_backend import solve
from .phases import Checks, PhasedProgram
from .refine import refine

MOST_VARIABLES = 60_000  # of a program that is tried as a whole
MOST_INSTANTS = 24  # of the relaxation that is rounded
SLACK = 0.1  # of the budget that the relaxation leaves free, so that what it rounds to fits
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@searching("checkmate", needs_programs=True)
def checkmate(search: Search) -> None:
    """Solve the program with every position checked, or round its relaxation."""
    round_relaxation(search)
    positions = tuple(range(len(search.model.reads)))
    if len(positions) * len(search.model.choices) <= MOST_VARIABLES:
        refine(search, Checks(positions))


def round_relaxation(search: Search) -> None:
    """Solve the relaxation with some budget left free, and offer what its thresholds give."""
    program = PhasedProgram(search.model, int((1 - SLACK) * search.limit), Checks(search.model.neediest(MOST_INSTANTS)))
    result = solve(program.program, search.problem.options, max(1.0, 0.5 * search.left_s()), relax=True)
    for threshold in THRESHOLDS if result.values else ():
        policy = program.policy(result.values, threshold)
        search.offer(Found(policy, search.model.replay(policy)))
