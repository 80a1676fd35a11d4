"""The phased model refined until its own solution fits: few instants first, more where the replay says so.

Each round solves the program of `phases` and replays the solution. Where that passes the budget, memory is checked
from then on, and the next round starts; where it fits, it is the best schedule there is, up to the gap of the solve,
because the program is a relaxation. In between, solutions that don't fit are repaired by evictions, so that a schedule
is at hand at any time, and the program starts from the best one. Where values recomputed one after the other before a
single node pass the budget, memory is checked while each of them is recomputed (`row_memory`): first in a way that
holds for any order of them, then in the order of the forward, and from then on rounds no longer raise the bound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from .base import Status
from .greedy import ReplayedPolicy, keep_more
from .incumbent import Search, searching
from .mip_backend import Result, solve
from .model import Replay
from .phases import Checks, PhasedProgram, add_checks, first_checks
from .segments import try_segments
from .turn_point import prove

log = logging.getLogger("hiremate_lightning")
ROUNDS = 40
SHARE_OF_ROUND = 0.3  # of the time left: the most that one solve may take
SHARE_BESIDE_IMPROVING = 0.15  # the same, where other means take turns with the rounds
ALONE_SHARE = 0.45  # of the time limit: with less left, rounds alone take too long
IMPROVING_SHARE = 0.8  # of the time left
QUICK_SHARE = 0.15  # of the time limit: for the schedules to start from
Restriction = Callable[[PhasedProgram], None]
Improvement = Callable[[Checks, float], None]


def refine(
    search: Search,
    checks: Checks | None = None,
    restrict: Restriction | None = None,
    improve: Improvement | None = None,
    reserve_s: float = 0.0,
) -> None:
    """Run rounds until proof, time limit, or no more places to check.

    Args:
        search: Receives the solutions.
        checks: Where memory is checked in the first round; few places by default.
        restrict: Adds rows to each program; the bounds of a restricted program are not taken.
        improve: Improves the best schedule by other means until a deadline, between rounds that take long.
        reserve_s: Seconds of work to leave for others.
    """
    checks = checks or first_checks(search.model)
    share = SHARE_OF_ROUND if improve is None else SHARE_BESIDE_IMPROVING
    for number in range(ROUNDS):
        left = search.left_s() - reserve_s
        if search.is_done or left <= 0:
            return
        result, replay = _round(search, checks, number, restrict, min(left, max(1.0, share * left)))
        if replay is None:
            return
        is_cut = result.status is not Status.OPTIMAL
        if replay.peak_bytes > search.limit:
            more = add_checks(checks, search.model, replay, search.limit)
            if more == checks:
                return
            checks = more
        elif share == 1.0:
            return
        elif is_cut and improve is not None:
            share = min(1.0, 2 * share)
        else:
            share = 1.0  # enough is checked: where the solve was cut short, the rest of the time is for its proof
        left = search.left_s() - reserve_s
        is_late = left < ALONE_SHARE * search.problem.options.time_limit_s
        if improve is not None and search.best is not None and (is_cut or is_late):
            improve(checks, search.model.work.done_s + IMPROVING_SHARE * left)


def _round(
    search: Search, checks: Checks, number: int, restrict: Restriction | None, seconds: float
) -> tuple[Result, Replay | None]:
    """Solve once, take the bound, offer the solution; return its replay, where there is one."""
    program = PhasedProgram(search.model, search.limit, checks)
    start = program.start(search.best.replay.rows) if search.best is not None else ()
    if restrict is not None:
        restrict(program)
        start = ()  # the best found so far need not obey the restriction
    result = solve(
        program.program,
        search.problem.options,
        seconds,
        absolute_gap=search.gap_ms,
        start=start,
        work=search.model.work,
    )
    if restrict is None and not checks.in_order:
        if result.status is Status.INFEASIBLE:
            search.is_infeasible = search.best is None
        elif result.bound > 0:
            search.raise_bound(result.bound)
    if not result.values:
        return result, None
    policy = program.policy(result.values)
    replay = search.model.replay(policy)
    log.debug(
        "round %d: %d instants, %d variables, %.3f ms, bound %.3f ms, peak %d of %d",
        number, len(checks.instants), len(program.held) + len(program.run), result.objective, result.bound,
        replay.peak_bytes, search.limit,
    )  # fmt: skip
    if replay.peak_bytes <= search.limit:
        search.offer(ReplayedPolicy(policy, replay))
    elif replay.peak_bytes <= 1.1 * search.limit:
        search.repair(policy, search.within(0.1))
    return result, replay


def polish(search: Search) -> None:
    """Spend the remaining time, or half a second, on keeping more."""
    if search.best is not None and not search.is_done:
        deadline = search.model.work.done_s + max(0.5, search.left_s())
        search.offer(keep_more(search.model, search.best, search.limit, deadline))


@searching("phases", needs_programs=True, is_ablation=True)
def phases(search: Search) -> None:
    """Solve the phased model of the whole graph, refined where its replay passes the budget."""
    if prove(search):
        try_segments(search, search.within(QUICK_SHARE))
        refine(search)
        polish(search)
