"""The interface of all strategies: a `Problem` in, a `Solution` out.

A strategy proposes decisions; it does not promise them. The planner lowers every solution, simulates it, and refuses
it where the simulated peak passes the budget, so a strategy's own memory model may be approximate.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ...errors import ConfigurationError, did_you_mean
from ...records.costs import Profile, step_time_ms
from ...records.graph import Graph
from ...records.offload import Host, Offload, with_offloads
from ...records.schedule import lower
from ...records.simulation import Simulation, simulate
from ...records.step import Decisions

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
        time_limit_s: Seconds for all of it on an idle core, counted in work (`work.py`); the plan's quality, never its
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


Strategy = Callable[[Problem], Solution]
OffloadProposals = Callable[[Problem], Iterator[Decisions]]
_STRATEGIES: dict[str, Strategy] = {}
_OFFLOAD_PROPOSALS: dict[str, OffloadProposals] = {}
_NEED_PROGRAMS: set[str] = set()
_ABLATIONS: set[str] = set()


def strategy(name: str, needs_programs: bool = False, is_ablation: bool = False) -> Callable[[Strategy], Strategy]:
    """Register a strategy under a name.

    Args:
        name: Name to look it up by.
        needs_programs: Whether it solves mixed-integer or linear programs.
        is_ablation: Whether it is a part of the default by itself, which no list of strategies names.
    """

    def register(function: Strategy) -> Strategy:
        _STRATEGIES[name] = function
        if needs_programs:
            _NEED_PROGRAMS.add(name)
        if is_ablation:
            _ABLATIONS.add(name)
        return function

    return register


def proposing_offloads(name: str) -> Callable[[OffloadProposals], OffloadProposals]:
    """Register a strategy's proposals where values may be offloaded: schedules over the budget if all is kept."""

    def register(function: OffloadProposals) -> OffloadProposals:
        _OFFLOAD_PROPOSALS[name] = function
        return function

    return register


def offload_proposals(name: str, problem: Problem) -> Iterator[Decisions]:
    """Yield a strategy's proposals where values may be offloaded; most strategies have none."""
    if name in _OFFLOAD_PROPOSALS:
        yield from _OFFLOAD_PROPOSALS[name](problem)


def strategy_names(with_ablations: bool = False) -> tuple[str, ...]:
    """List the registered strategies, with the parts of the default where these are asked for."""
    return tuple(sorted(name for name in _STRATEGIES if with_ablations or name not in _ABLATIONS))


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


@dataclass(frozen=True, slots=True)
class _Replayed:
    """A replay with its inputs, which are compared by identity: to compare thousands of nodes takes as long as it."""

    graph: Graph
    profile: Profile
    recompute: Decisions
    offloads: tuple[Offload, ...]
    simulation: Simulation

    def is_of(self, problem: Problem, recompute: Decisions, offloads: tuple[Offload, ...]) -> bool:
        is_same_step = self.graph is problem.graph and self.profile is problem.profile
        return is_same_step and self.recompute is recompute and self.offloads == offloads


_latest: _Replayed | None = None


def replay(problem: Problem, recompute: Decisions, offloads: Sequence[Offload] = ()) -> Simulation:
    """Lower decisions and simulate them; the latest ones are not simulated again."""
    global _latest
    latest, offloaded = _latest, tuple(offloads)
    if latest is not None and latest.is_of(problem, recompute, offloaded):
        return latest.simulation
    schedule = with_offloads(problem.graph, lower(problem.graph, recompute), offloaded)
    simulation = simulate(problem.graph, problem.profile, schedule)
    _latest = _Replayed(problem.graph, problem.profile, recompute, offloaded, simulation)
    return simulation


def replay_solution(problem: Problem, solution: Solution) -> Simulation:
    """Lower the decisions of a solution and simulate them."""
    return replay(problem, solution.recompute, solution.offloads)
