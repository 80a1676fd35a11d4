"""The interface of all strategies: a `Problem` in, a `Solution` out.

A strategy proposes decisions; it does not promise them. The planner lowers every solution, simulates it, and refuses
it where the simulated peak passes the budget, so a strategy's own memory model may be approximate. The limit of a
search is `Work`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import is_
from time import monotonic

from ...errors import ConfigurationError, did_you_mean
from ...records.costs import Profile, step_time_ms
from ...records.graph import Graph
from ...records.offload import Host, Offload, with_offloads
from ...records.schedule import lower
from ...records.simulation import Simulation, simulate
from ...records.step import Decisions

CLOCK_TIMES, CLOCK_MORE_S = 4.0, 10.0  # of the limit of work, and seconds more, that a search may take by the clock
OPERATION_S = 1.2e-6  # to go through an operation in a replay
CLOCK = "the clock"  # stopped a solve that could not do its work on a slow or busy machine
UNLIMITED = sys.maxsize  # a budget in bytes that everything fits


class Status(str, Enum):
    """How a solve ended."""

    OPTIMAL = "optimal"  # proven: no schedule of the class is faster
    FEASIBLE = "feasible"  # a schedule was found, and stopped being improved before a proof
    INFEASIBLE = "infeasible"  # proven: no schedule of the class fits
    NOT_FOUND = "not found"  # none was found, none was excluded


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """How long and how hard to solve.

    Attributes:
        time_limit_s: Seconds for all of it on an idle core, counted in `Work`; the plan's quality, never its
            validity, depends on it.
        gap: Relative gap of the total step time at which solving stops; differences below .005 are hardly measurable.
        backend: MIP solver of python-mip: "HIGHS", "CBC", or "" for the first of them that works.
        progress: Called as solving goes on, with the least recompute time found (infinite before there is one) and the
            proven bound on it, in milliseconds.
    """

    time_limit_s: float = 30.0
    gap: float = 0.005
    backend: str = ""
    progress: Callable[[float, float], None] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Problem:
    """Choose what to recompute, so that the peak stays within the budget at the least time.

    Attributes:
        graph: The step.
        profile: Its costs.
        budget_bytes: Bytes that the step may add to resident ones.
        options: Limits of the solve.
        host: Memory of the host that values may be offloaded to; None where all stays on the device.
    """

    graph: Graph
    profile: Profile
    budget_bytes: int
    options: SolveOptions = SolveOptions()
    host: Host | None = None

    @property
    def step_ms(self) -> float:
        """Time of the step without recomputation."""
        return step_time_ms(self.graph, self.profile)


@dataclass(frozen=True, slots=True)
class Solution:
    """Decisions, with their costs and bounds.

    Attributes:
        strategy: Name of the strategy that found them.
        status: How the solve ended.
        recompute: R, see `schedule.lower`; empty where none was found.
        recompute_ms: Time of recomputation.
        peak_bytes: Simulated peak above resident bytes, 0 where none was found.
        bound_ms: Proven lower bound on the extra time of every schedule within the budget, 0 if none is known. Where
            values may be offloaded, it includes the schedules in which they do.
        stopped_by: Why solving ended, in words.
        solve_s: Seconds taken, by the clock.
        work_s: Seconds of work done, the same on each machine.
        proposed_ms: For a method of a paper, the time that its own schedule recomputes, before anything was evicted
            or kept beyond it: the fastest schedule that fits, or else the one of the smallest peak.
        proposed_bytes: The peak of that schedule, 0 where there is none.
        note: What the method could not serve, and the substitute that it took, in one line; empty where it served all.
        offloads: Storages that are offloaded to the host, and when, see `records.offload`.
        wait_ms: Time of waits for its copies.
    """

    strategy: str
    status: Status
    recompute: tuple[tuple[int, ...], ...] = ()
    recompute_ms: float = 0.0
    peak_bytes: int = 0
    bound_ms: float = 0.0
    stopped_by: str = ""
    solve_s: float = 0.0
    work_s: float = 0.0
    proposed_ms: float = 0.0
    proposed_bytes: int = 0
    note: str = ""
    offloads: tuple[Offload, ...] = ()
    wait_ms: float = 0.0

    @property
    def extra_ms(self) -> float:
        """Time of recomputation, and of waits for copies."""
        return self.recompute_ms + self.wait_ms

    @property
    def is_plain(self) -> bool:
        """Whether nothing is recomputed, and nothing is offloaded."""
        return not (self.recompute_ms or self.offloads)

    @property
    def is_feasible(self) -> bool:
        """Whether there are decisions to lower."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)

    def gap(self, step_ms: float) -> float:
        """Return the proven gap, a share of the step's time: the plan is at most so much slower than the best."""
        total = step_ms + self.extra_ms
        return max(0.0, self.extra_ms - self.bound_ms) / total if total else 0.0


# ---------------------------------------------------------------- strategies by name

Strategy = Callable[[Problem], Solution]
_STRATEGIES: dict[str, Strategy] = {}
_NEED_PROGRAMS: set[str] = set()


def strategy(name: str, needs_programs: bool = False) -> Callable[[Strategy], Strategy]:
    """Register a strategy under a name, and whether it solves mixed-integer or linear programs."""

    def register(function: Strategy) -> Strategy:
        _STRATEGIES[name] = function
        if needs_programs:
            _NEED_PROGRAMS.add(name)
        return function

    return register


def strategy_names() -> tuple[str, ...]:
    """List the registered strategies."""
    return tuple(sorted(_STRATEGIES))


def needs_programs(name: str) -> bool:
    """Whether a strategy solves mixed-integer or linear programs."""
    return name in _NEED_PROGRAMS


def get_strategy(name: str) -> Strategy:
    """Look a strategy up by its name.

    Raises:
        ConfigurationError: If there is none of that name; the text lists the names.
    """
    if name not in _STRATEGIES:
        hint = did_you_mean(str(name), _STRATEGIES)
        raise ConfigurationError(f"Unknown solver {name!r}.{hint} Choose one of: {', '.join(strategy_names())}")
    return _STRATEGIES[name]


# ---------------------------------------------------------------- replays by the simulator

_latest: tuple[tuple[object, ...], tuple[Offload, ...], Simulation] | None = None


def replay(problem: Problem, recompute: Decisions, offloads: Sequence[Offload] = ()) -> Simulation:
    """Lower decisions and simulate them; the latest ones are not simulated again."""
    global _latest
    inputs, offloaded, latest = (problem.graph, problem.profile, recompute), tuple(offloads), _latest
    if latest is not None and all(map(is_, latest[0], inputs)) and latest[1] == offloaded:
        return latest[2]  # inputs are compared by identity: to compare thousands of nodes takes as long as a replay
    schedule = with_offloads(problem.graph, lower(problem.graph, recompute), offloaded)
    simulation = simulate(problem.graph, problem.profile, schedule)
    _latest = inputs, offloaded, simulation
    return simulation


def replay_solution(problem: Problem, solution: Solution) -> Simulation:
    """Lower the decisions of a solution and simulate them."""
    return replay(problem, solution.recompute, solution.offloads)


def with_decisions(
    problem: Problem, solution: Solution, recompute: Decisions, offloads: Sequence[Offload] = ()
) -> Solution:
    """Return a solution with other decisions, and the times and the peak that the simulator finds for them."""
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


# ---------------------------------------------------------------- work


class Work:
    """Counts the work of a search, in seconds: by operations, not by the clock, so that a step gets the same plan.

    A second of work is about the work of an idle core of a server of 2024 in a second. Replays count by the operations
    that they go through, programs by their size and by the iterations and nodes that a solver needs for them. None of
    that depends on the machine or on its load: a busy machine does the same work, later, and finds the same.

    The clock has the last word. Where a search takes several times as long as its work should, it is cut short, and its
    answer says so: `is_cut`. Only then does an answer depend on how fast the machine is. A search asks for its limit of
    work itself.
    """

    def __init__(self, limit_s: float) -> None:
        self.done_s = 0.0
        self._limit_s, self._start = limit_s, monotonic()
        self._is_cut = False

    def add(self, seconds: float) -> None:
        """Count seconds of work."""
        self.done_s += seconds

    def add_operations(self, count: int) -> None:
        """Count operations that were gone through."""
        self.done_s += OPERATION_S * count

    def is_past(self, deadline: float) -> bool:
        """Whether more work was done than up to a deadline, or the clock has ended the search."""
        return self.done_s > deadline or self.is_cut

    def left_s(self, deadline: float) -> float:
        """Return the seconds of work up to a deadline, 0 where the clock has ended the search."""
        return 0.0 if self.is_cut else max(0.0, deadline - self.done_s)

    @property
    def is_cut(self) -> bool:
        """Whether the clock has ended the search."""
        self._is_cut = self._is_cut or self.clock_left_s <= 0
        return self._is_cut

    @property
    def clock_left_s(self) -> float:
        """Seconds until the clock ends the search."""
        return self._start + clock_limit_s(self._limit_s) - monotonic()


def clock_limit_s(limit_s: float) -> float:
    """Return the seconds by the clock after which a search with this limit of work is cut short."""
    return CLOCK_MORE_S + CLOCK_TIMES * limit_s
