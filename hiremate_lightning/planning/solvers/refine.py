"""The phased model, refined until its own solution fits; large neighbourhoods improve the incumbent in between.

Each round solves the program and replays its solution. If the replay exceeds the budget somewhere, later rounds check
memory there; if it fits, it is optimal up to the gap of the solve. A *neighbourhood* fixes most decisions of the
incumbent, and solves for the others in tenths of a second (`docs/formulation.md`). Sources: Shaw,
"Using Constraint Programming and Local Search Methods to Solve Vehicle Routing Problems", CP 1998; Danna, Rothberg, Le
Pape, "Exploring relaxation induced neighborhoods to improve MIP solutions", Mathematical Programming 102, 2005.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterator, Sequence

from .base import Status
from .mip_backend import Result, solve
from .model import Replay
from .phases import Checks, PhasedProgram, add_checks, first_checks
from .search import Search

ROUNDS = 40
SHARE_OF_ROUND = 0.3  # of the time left, for one round at most
SHARE_BESIDE_IMPROVING = 0.15  # the same, if neighbourhoods take turns with the rounds
ALONE_SHARE = 0.45  # of the time limit: with less left, neighbourhoods run between all rounds
IMPROVING_SHARE = 0.8  # of the time left, for neighbourhoods
TURN_S = 0.5  # first limit of one neighbourhood; it grows if nothing is gained
SHARE, LEAST_SHARE, GROWTH = 0.2, 0.05, 1.2  # of the values that are free; grows after a solve in time
REPAIRED_EXCESS, REPAIR_S = 0.05, 0.3  # repair a solution at most 5% above the limit
PIECES = 40  # number of pieces of the forward in `_pieces`
PATIENCE = 4  # rounds of all three neighbourhoods in a row that gain less than the gap
Restriction = Callable[[PhasedProgram], None]


def refine(
    search: Search,
    checks: Checks | None = None,
    restrict: Restriction | None = None,
    has_neighbourhoods: bool = False,
    reserve_s: float = 0.0,
) -> None:
    """Run rounds until a proof, the time limit, or no more places to check; offer the solutions to the search.

    By default the first round checks memory in two places. `restrict` adds rows to each program; its bounds then don't
    count. Neighbourhoods improve the incumbent between long rounds. `reserve_s` of work is left at the end.
    """
    checks = checks or first_checks(search.model)
    neighbourhoods = Neighbourhoods(search)
    share = SHARE_BESIDE_IMPROVING if has_neighbourhoods else SHARE_OF_ROUND
    for _ in range(ROUNDS):
        left = search.left_s() - reserve_s
        if search.is_done or left <= 0:
            return
        result, replay = _round(search, checks, restrict, min(left, max(1.0, share * left)))
        if replay is None:
            return
        is_cut, is_all_checked = result.status is not Status.OPTIMAL, False
        if replay.peak_bytes > search.limit:
            more = add_checks(checks, search.model, replay, search.limit)
            checks, is_all_checked = more, more == checks
        elif share == 1.0:
            return
        elif is_cut and has_neighbourhoods:
            share = min(1.0, 2 * share)
        else:
            share = 1.0  # enough is checked: one more solve, with all of the time left, for the proof
        left = search.left_s() - reserve_s
        is_late = left < ALONE_SHARE * search.problem.options.time_limit_s
        if has_neighbourhoods and search.best is not None and (is_cut or is_late or is_all_checked):
            neighbourhoods.improve(checks, search.model.work.done_s + IMPROVING_SHARE * left)
        if is_all_checked:
            return


def _round(
    search: Search, checks: Checks, restrict: Restriction | None, seconds: float
) -> tuple[Result, Replay | None]:
    """Solve once, store the bound, offer the solution; return the result, and the replay if there is a solution."""
    program = PhasedProgram(search.model, search.limit, checks)
    start = program.start(search.best.rows) if search.best is not None else ()
    if restrict is not None:
        restrict(program)
        start = ()  # the incumbent need not obey the restriction
    options, work = search.problem.options, search.model.work
    result = solve(program.program, options, seconds, absolute_gap=search.problem.gap_ms, start=start, work=work)
    if restrict is None:
        if result.status is Status.INFEASIBLE:
            search.is_infeasible = search.best is None
        elif result.bound > 0:
            search.raise_bound(result.bound)
    if not result.values:
        return result, None
    return result, search.take(program.policy(result.values), 0.1, search.within(0.1))


class Neighbourhoods:
    """The neighbourhoods of the incumbent, in a program that grows with the places where memory is checked."""

    def __init__(self, search: Search) -> None:
        self._search, self._draw, self._share = search, random.Random(0), SHARE
        self._checks: Checks | None = None
        self._turn_s = TURN_S

    def improve(self, checks: Checks, deadline: float) -> None:
        """Improve the incumbent, which must exist, until a deadline of work or until little is gained.

        `checks` count in the first call only; later checks are added as needed, and stay.
        """
        if self._checks is None:
            self._check(checks)
        before, idle = self._best_ms, 0
        while idle < PATIENCE:
            for find in (self._differing, self._stretch, self._pieces):
                left = self._search.model.work.left_s(deadline)
                if left <= 0 or self._search.is_done or self._share >= 1.0:
                    return
                result = self._solve(find, min(left, self._turn_s))
                if find != self._differing:
                    self._share *= GROWTH if result.status is Status.OPTIMAL else 1 / GROWTH
                    self._share = max(LEAST_SHARE, self._share)
            idle = 0 if before - self._best_ms > self._search.problem.gap_ms else idle + 1
            self._turn_s *= GROWTH**2 if idle else 1.0
            before = self._best_ms

    @property
    def _best_ms(self) -> float:
        assert self._search.best is not None
        return self._search.best.recompute_ms

    def _check(self, checks: Checks) -> None:
        search = self._search
        self._checks = checks
        self._phased = PhasedProgram(search.model, search.limit, checks)
        program, options, work = self._phased.program, search.problem.options, search.model.work
        self._relaxed = solve(program.relaxed(), options, search.left_s(), work=work).values

    def _solve(self, find: Callable[[Sequence[float]], Iterator[int]], seconds: float) -> Result:
        """Solve for one neighbourhood and offer the solution."""
        search = self._search
        assert search.best is not None
        start = self._phased.start(search.best.rows)
        part = self._phased.program.with_fixed(start, set(find(start)))
        options, work = search.problem.options, search.model.work
        result = solve(part, options, seconds, absolute_gap=search.problem.gap_ms / 4, start=start, work=work)
        if result.values and result.objective < self._best_ms:
            replay = search.take(self._phased.policy(result.values), REPAIRED_EXCESS, work.done_s + REPAIR_S)
            if replay.peak_bytes > search.limit:  # check memory there from now on
                checks = add_checks(self._phased.checks, search.model, replay, search.limit)
                if checks != self._checks:
                    self._check(checks)
        return result

    # ---------------------------------------------------------------- which variables are free

    def _differing(self, start: Sequence[float]) -> Iterator[int]:
        """Free the variables whose value differs from the relaxation."""
        if self._relaxed:
            yield from (v for v, value in enumerate(start) if abs(self._relaxed[v] - value) > 1e-6)

    def _stretch(self, _: Sequence[float]) -> Iterator[int]:
        """Free the values made in one random stretch of the forward."""
        count = len(self._search.model.graph.forward)
        length = int(self._share * count)
        first = self._draw.randrange(-length // 2, count - length // 2)
        return self._made_in(range(first, first + length))

    def _pieces(self, _: Sequence[float]) -> Iterator[int]:
        """Free the values made in random pieces of the forward."""
        count = len(self._search.model.graph.forward)
        length = max(1, count // PIECES)
        chosen = (first for first in range(0, count, length) if self._draw.random() < self._share)
        return self._made_in({p for first in chosen for p in range(first, first + length)})

    def _made_in(self, positions: Container[int]) -> Iterator[int]:
        model, phased = self._search.model, self._phased
        yield from (v for (_, storage), v in phased.held.items() if model.made_at[storage] in positions)
        yield from (v for (_, k), v in phased.run.items() if model.made_at[model.makes[k][0]] in positions)
