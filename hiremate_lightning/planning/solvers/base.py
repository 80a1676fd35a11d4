"""The interface of all strategies: a `Problem` in, a `Solution` out.

The planner lowers and simulates every solution, and refuses it if the simulated peak passes the budget. So a strategy's
own memory model may be approximate. `Work` limits a search.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from time import monotonic

from ...errors import ConfigurationError, did_you_mean
from ...records.costs import Profile, step_time_ms
from ...records.graph import Graph
from ...records.offload import Host, Offload, with_offloads
from ...records.schedule import keep_all, lower
from ...records.simulation import Simulation, simulate
from ...records.step import Decisions

CLOCK_TIMES, CLOCK_MORE_S = 4.0, 10.0  # clock limit of a search: 4 times its limit of work, plus 10 s
OPERATION_S = 1.2e-6  # work of one operation in a replay
CLOCK = "the clock"  # `stopped_by` of a solve that a slow or busy machine could not finish in time
UNLIMITED = sys.maxsize  # a budget in bytes that everything fits


class Status(str, Enum):
    """How a solve ended."""

    OPTIMAL = "optimal"  # proven: no schedule of the class is faster
    FEASIBLE = "feasible"  # a schedule was found; the search ended before a proof
    INFEASIBLE = "infeasible"  # proven: no schedule of the class fits
    NOT_FOUND = "not found"  # no schedule was found, and none is proven impossible


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """How long and how hard to solve."""

    # Seconds of work on an idle core for the whole solve, see `Work`; it affects a plan's quality, never its validity.
    time_limit_s: float = 30.0
    # Gap, a share of the step time, at which solving stops; differences below 0.005 are hardly measurable.
    gap: float = 0.005
    backend: str = ""  # MIP solver of python-mip: "HIGHS", "CBC", or "" for the first one that works
    # Called during a solve with the incumbent's recompute time (infinite before the first one) and its proven bound, in
    # milliseconds.
    progress: Callable[[float, float], None] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Problem:
    """The task to choose what to recompute, so that the peak stays within the budget at the least time."""

    graph: Graph  # the step
    profile: Profile  # costs of the step
    budget_bytes: int  # bytes that the step may add to resident ones
    options: SolveOptions = SolveOptions()  # limits of the solve
    host: Host = Host(0)  # memory of the host that values may be offloaded to

    @property
    def step_ms(self) -> float:
        """Time of the step without recomputation."""
        return step_time_ms(self.graph, self.profile)

    @property
    def gap_ms(self) -> float:
        """The gap at which solving stops, in milliseconds."""
        return self.options.gap * self.step_ms


@dataclass(frozen=True, slots=True)
class Solution:
    """Decisions, their costs, and the proven bound."""

    strategy: str  # name of the strategy that solved
    status: Status  # how the solve ended
    recompute: tuple[tuple[int, ...], ...] = ()  # R, see `schedule.lower`; empty if not found
    recompute_ms: float = 0.0  # time of recomputation
    peak_bytes: int = 0  # simulated peak above resident bytes, 0 if none was found
    # Proven lower bound on the extra time of every schedule within the budget, 0 if none is known; if offloading is
    # allowed, it covers the schedules that offload.
    bound_ms: float = 0.0
    stopped_by: str = ""  # why solving ended, in words
    solve_s: float = 0.0  # seconds by the clock
    work_s: float = 0.0  # seconds of work, the same on each machine
    # For the method of a paper: recompute time of its own schedule, without repairs and improvements: the fastest that
    # fits, or else the one of the smallest peak.
    proposed_ms: float = 0.0
    proposed_bytes: int = 0  # peak of this schedule, 0 if there is none
    # What the method could not do, and what it did instead, in one line; empty if it did everything.
    note: str = ""
    offloads: tuple[Offload, ...] = ()  # storages that are offloaded to the host, and when, see `records.offload`
    wait_ms: float = 0.0  # time of waits for the copies

    @property
    def extra_ms(self) -> float:
        """Time of recomputation plus waits for copies."""
        return self.recompute_ms + self.wait_ms

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is recomputed, and nothing is offloaded."""
        return not (self.recompute_ms or self.offloads)

    @property
    def is_feasible(self) -> bool:
        """Whether there are decisions to lower."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)

    def gap(self, step_ms: float) -> float:
        """Return the proven gap: the plan is slower than the best one by at most this share of the step's time."""
        total = step_ms + self.extra_ms
        return max(0.0, self.extra_ms - self.bound_ms) / total if total else 0.0

    def with_bound(self, bound_ms: float, gap_ms: float) -> Solution:
        """Return a feasible solution with another bound; it is optimal if its extra time is within `gap_ms` of it."""
        is_proven = self.extra_ms <= bound_ms + gap_ms
        ended = "end of the search" if self.stopped_by in ("", "proof") else self.stopped_by
        return replace(
            self,
            status=Status.OPTIMAL if is_proven else Status.FEASIBLE,
            bound_ms=min(bound_ms, self.extra_ms),
            stopped_by="proof" if is_proven else ended,
        )


# ---------------------------------------------------------------- strategies by name

Strategy = Callable[[Problem], Solution]
_STRATEGIES: dict[str, tuple[Strategy, bool]] = {}  # by name: a strategy, and whether it solves programs


def register(name: str, strategy: Strategy, needs_programs: bool = False) -> None:
    """Register a strategy under a name, and whether it solves mixed-integer or linear programs."""
    _STRATEGIES[name] = strategy, needs_programs


def strategy_names() -> tuple[str, ...]:
    """List the registered strategies."""
    return tuple(sorted(_STRATEGIES))


def needs_programs(name: str) -> bool:
    """Whether a strategy solves mixed-integer or linear programs."""
    return _STRATEGIES[name][1]


def get_strategy(name: str) -> Strategy:
    """Look a strategy up by its name.

    Raises:
        ConfigurationError: If there is no strategy of that name; the text lists the names.
    """
    if name not in _STRATEGIES:
        hint = did_you_mean(str(name), _STRATEGIES)
        raise ConfigurationError(f"Unknown solver {name!r}.{hint} Choose one of: {', '.join(strategy_names())}")
    return _STRATEGIES[name][0]


# ---------------------------------------------------------------- replays by the simulator


def replay(problem: Problem, recompute: Decisions, offloads: Sequence[Offload] = ()) -> Simulation:
    """Lower decisions and simulate them."""
    schedule = with_offloads(problem.graph, lower(problem.graph, recompute), offloads)
    return simulate(problem.graph, problem.profile, schedule)


def replay_solution(problem: Problem, solution: Solution) -> Simulation:
    """Lower the decisions of a solution and simulate them."""
    return replay(problem, solution.recompute, solution.offloads)


def with_decisions(
    problem: Problem, solution: Solution, recompute: Decisions, offloads: Sequence[Offload] = ()
) -> Solution:
    """Return a solution with other decisions, and with their times and peak from the simulator."""
    simulation = replay(problem, recompute, offloads)
    return replace(
        solution,
        recompute=recompute,
        recompute_ms=simulation.recompute_ms,
        peak_bytes=simulation.peak_bytes,
        bound_ms=min(solution.bound_ms, simulation.extra_ms),
        offloads=tuple(offloads),
        wait_ms=simulation.wait_ms,
    )


def keeping_everything(problem: Problem) -> Solution:
    """Return the solution that keeps everything, as eager training does, whatever the budget: nothing is faster."""
    return with_decisions(problem, Solution("none", Status.OPTIMAL, stopped_by="proof"), keep_all(problem.graph))


# ---------------------------------------------------------------- work


class Work:
    """Counts the work of a search in seconds, by operations and not by the clock, so that a step gets the same plan.

    A second of work is about the work that an idle core of a server of 2024 does in a second. A replay counts its
    operations; a program counts its size and the iterations and nodes of its solver. Neither depends on the machine or
    its load: a busy machine does the same work more slowly, and finds the same plan.

    The clock cuts a search short if it takes several times as long as its work should (`is_cut`); the solution says so.
    Only then does a solution depend on the speed of the machine. Each search checks its limit of work itself.
    """

    def __init__(self, limit_s: float) -> None:
        self.done_s = 0.0
        self._limit_s, self._start = limit_s, monotonic()

    def add(self, seconds: float) -> None:
        """Count seconds of work."""
        self.done_s += seconds

    def add_operations(self, count: int) -> None:
        """Count the work of some operations of replays."""
        self.done_s += OPERATION_S * count

    def is_past(self, deadline: float) -> bool:
        """Whether the work has passed a deadline, or the clock has ended the search."""
        return self.done_s > deadline or self.is_cut

    def left_s(self, deadline: float) -> float:
        """Return the seconds of work left until a deadline, 0 if the clock has ended the search."""
        return 0.0 if self.is_cut else max(0.0, deadline - self.done_s)

    @property
    def is_cut(self) -> bool:
        """Whether the clock has ended the search."""
        return self.clock_left_s <= 0

    @property
    def clock_left_s(self) -> float:
        """Seconds until the clock ends the search."""
        return self._start + clock_limit_s(self._limit_s) - monotonic()


def clock_limit_s(limit_s: float) -> float:
    """Return the seconds by the clock after which a search of this limit of work is cut short."""
    return CLOCK_MORE_S + CLOCK_TIMES * limit_s
