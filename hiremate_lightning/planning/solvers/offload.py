"""Which saved values are offloaded to the host, and when: a second pass over the decisions of a strategy.

A strategy first solves for the budget without offloading. Then it solves for a few larger budgets. The excess of each
of them, and of keeping everything, is offloaded, and the fastest plan wins if it gains more than the gap. A heuristic
chooses the storages; places for their copies are found if there are any. `docs/formulation.md` has the places of
copies, and the proof of `offload_bound`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from itertools import pairwise

import numpy as np

from ...errors import ConfigurationError
from ...records.offload import Host, Idle, Offload, idle_storages
from ...records.schedule import Schedule, keep_all, lower
from ...records.simulation import Simulation, simulate
from ...records.step import Decisions
from .base import Problem, Solution, Status, Strategy, replay, with_decisions
from .least_memory import solve_least_memory
from .model import StepModel
from .turn_point import lower_bound

INTERVALS = 8  # of offloaded bytes, for the bound
SHARES = (0.25, 0.5, 0.75)  # larger budgets to solve for: shares of the bytes that may be offloaded
SOLVES_SHARE, BOUND_SHARE = 0.5, 0.2  # of the time limit: for all these solves together, and for the bound
MOST_SHARE = 2.0  # of the time limit, for a whole answer, proposals of a paper's method included

PROPOSALS: dict[str, Callable[[Problem], Iterator[Decisions]]] = {}
"""By name of a strategy: a function that yields its schedules above the budget, for offloading."""


def fastest_choice(problem: Problem, candidates: Iterable[Decisions], solution: Solution) -> Solution | None:
    """Offload the excess of each candidate; return `solution` with the fastest decisions that fit, None if none fit.

    Of equally fast decisions, those that offload the fewest bytes win.
    """
    choices, sizes = list[Solution](), problem.graph.sizes
    for recompute in dict.fromkeys(candidates):
        for offloads in _ways(problem, lower(problem.graph, recompute)):
            if problem.host.holds(problem.graph, offloads):
                choices.append(with_decisions(problem, solution, recompute, offloads))
    fitting = (choice for choice in choices if choice.peak_bytes <= problem.budget_bytes)
    fastest = min(fitting, key=lambda c: (c.extra_ms, sum(sizes[o.storage] for o in c.offloads)), default=None)
    return fastest and replace(fastest, status=Status.FEASIBLE)


def least_bytes(problem: Problem, candidates: Iterable[Decisions]) -> int | None:
    """Return the smallest budget for which `fastest_choice` finds a choice; None if the host is too small.

    It is the peak if all possible storages are offloaded, each between its last forward and its first backward use;
    the host must hold them all.
    """
    peaks = list[int]()
    for recompute in dict.fromkeys(candidates):
        idle = idle_storages(problem.graph, lower(problem.graph, recompute), problem.host.pinned)
        offloads = [Offload(i.storage, i.made, i.last, i.first) for i in idle]
        if problem.host.holds(problem.graph, offloads):
            peaks.append(replay(problem, recompute, offloads).peak_bytes)
    return min(peaks, default=None)


def _ways(problem: Problem, schedule: Schedule) -> Iterable[tuple[Offload, ...]]:
    """Yield sets of offloads by which a schedule may fit the budget; nothing if no set is enough."""
    kept = simulate(problem.graph, problem.profile, schedule)
    over = np.array([moment.peak_bytes for moment in kept.timeline], dtype=np.int64) - problem.budget_bytes
    if over.max(initial=0) <= 0:
        yield ()
        return
    step = _Step(problem, kept, idle_storages(problem.graph, schedule, problem.host.pinned), over)
    tried = set[frozenset[int]]()
    for rank in (step.covered, step.idle_ms, step.size_bytes):
        chosen = step.choose(rank)
        if chosen is None:
            return  # not even all storages are enough, in any order
        names = frozenset(idle.storage for idle in chosen)
        if names not in tried:
            tried.add(names)
            yield step.place(chosen)


class _Step:
    """A schedule without offloads, the storages that may be offloaded, and the excess at each moment."""

    def __init__(self, problem: Problem, kept: Simulation, idle: Sequence[Idle], over: np.ndarray) -> None:
        self.idle, self.over, self.turn = idle, over, kept.turn
        self._sizes = problem.graph.sizes
        times = [problem.profile.time_ms[moment.node] for moment in kept.timeline]
        self._start_ms = np.concatenate(([0.0], np.cumsum(times)))

    def window(self, idle: Idle) -> slice:
        """Return the moments at which a storage can be offloaded."""
        return slice(idle.last, self.turn + idle.first)

    def covered(self, idle: Idle, over: np.ndarray) -> float:
        """Rank by how much excess each byte removes, over all moments."""
        size_bytes = self._sizes[idle.storage]
        return float(np.clip(over[self.window(idle)], 0, size_bytes).sum()) / size_bytes

    def idle_ms(self, idle: Idle, over: np.ndarray) -> float:
        """Rank by the time that a storage is idle."""
        window = self.window(idle)
        return float(self._start_ms[window.stop] - self._start_ms[window.start])

    def size_bytes(self, idle: Idle, over: np.ndarray) -> float:
        """Rank by size, for few copies."""
        return self._sizes[idle.storage]

    def choose(self, rank: Callable[[Idle, np.ndarray], float]) -> list[Idle] | None:
        """Choose storages in order of rank at the moment of the largest excess; None if all together are not enough."""
        over, chosen = self.over.copy(), dict[int, Idle]()
        while over.max() > 0:
            worst = int(over.argmax())
            there = (i for i in self.idle if i.storage not in chosen and i.last <= worst < self.turn + i.first)
            best = max(there, key=lambda i: (rank(i, over), -i.storage), default=None)
            if best is None:
                return None
            chosen[best.storage] = best
            over[self.window(best)] -= self._sizes[best.storage]
        for idle in sorted(chosen.values(), key=lambda i: (-self._sizes[i.storage], i.storage)):
            window, size_bytes = self.window(idle), self._sizes[idle.storage]
            if over[window].max(initial=-size_bytes) + size_bytes <= 0:  # the other storages are enough
                del chosen[idle.storage]
                over[window] += size_bytes
        return list(chosen.values())

    def place(self, chosen: Sequence[Idle]) -> tuple[Offload, ...]:
        """Choose the places of each copy; return the offloads in the order of their first use in the backward."""
        gone, back = self._gone(chosen), self._back(chosen)
        in_order = sorted(chosen, key=lambda i: (i.first, i.made, i.storage))
        return tuple(Offload(i.storage, i.made, gone[i.storage], back[i.storage]) for i in in_order)

    def _gone(self, chosen: Sequence[Idle]) -> dict[int, int]:
        """Return where to wait for each copy out: when the call's forward ends, earlier if a moment needs the bytes."""
        over = np.append(self.over[: self.turn], 0)
        waiting = sorted(chosen, key=lambda i: (i.made, i.storage))
        gone = dict[int, int]()
        for moment in range(self.turn + 1):
            for idle in [i for i in waiting if i.last <= moment]:
                if moment == idle.end or over[moment] > 0:
                    gone[idle.storage] = moment
                    over[moment:] -= self._sizes[idle.storage]
                    waiting.remove(idle)
        return gone

    def _back(self, chosen: Sequence[Idle]) -> dict[int, int]:
        """Return where to begin each copy in: as early as its bytes fit from then on, in the order of first uses."""
        over = self.over[self.turn :].copy()
        for idle in chosen:
            over[: idle.first] -= self._sizes[idle.storage]
        back, earliest = dict[int, int](), 0
        for idle in sorted(chosen, key=lambda i: (i.first, i.made, i.storage)):
            place, size_bytes = idle.first, self._sizes[idle.storage]
            while place > max(earliest, idle.start) and over[place - 1] + size_bytes <= 0:
                place -= 1
            over[place : idle.first] += size_bytes
            back[idle.storage] = earliest = place
        return back


def offload_bound(model: StepModel, budget_bytes: int, deadline: float) -> float | None:
    """Return a lower bound on the extra time, in ms, of every schedule within a budget, offloading included.

    It is None if no schedule fits. A deadline of work that cuts the proof short makes the bound weaker.
    """
    link = model.problem.profile.link
    if link is None:
        raise ConfigurationError(
            "Nothing can be offloaded without the speed of copies: give the profile a link (costs.Link)"
        )
    if budget_bytes < model.least_bytes:  # a node's inputs and outputs are on the device while it runs
        return None
    excess, host_bytes = max(0, model.keep_all_bytes - budget_bytes), model.problem.host.size_bytes
    ends = [min(host_bytes, excess) * number // INTERVALS for number in range(INTERVALS + 1)]
    halves, times_ms = (model.graph.forward, model.graph.backward), model.problem.profile.time_ms
    forward_ms, backward_ms = (sum(times_ms[node] for node in half) for half in halves)

    def extra_ms(offloaded_bytes: int, recompute_ms: float) -> float:
        out_ms = max(0.0, offloaded_bytes / link.out_bytes_per_ms - forward_ms)
        return out_ms + max(recompute_ms, offloaded_bytes / link.in_bytes_per_ms - backward_ms)

    least_ms = extra_ms(excess, 0.0) if host_bytes >= excess else math.inf
    for start, end in pairwise(ends):
        recompute_ms = 0.0 if end >= excess else lower_bound(model, budget_bytes + end, deadline)
        if recompute_ms is not None:
            least_ms = min(least_ms, extra_ms(start, recompute_ms))
    return None if math.isinf(least_ms) else least_ms


# ---------------------------------------------------------------- strategies whose answers may have values offloaded


def with_offloading(strategy: Strategy) -> Strategy:
    """Wrap a strategy so that its solutions may offload values if the problem has host memory."""

    @wraps(strategy)
    def solve(problem: Problem) -> Solution:
        alone = strategy(replace(problem, host=Host(0)))
        if not can_offload(problem) or (alone.is_feasible and alone.keeps_all):
            return alone
        return _improved(StepModel(problem), strategy, alone)

    return solve


def can_offload(problem: Problem) -> bool:
    """Whether a problem has host memory and a link to it."""
    return problem.host.size_bytes > 0 and problem.profile.link is not None


def least_with_offloads(problem: Problem, smallest: Solution) -> Solution:
    """Return the solution of least memory with offloads; `smallest`, the one without, if offloading gains nothing."""
    if not can_offload(problem):
        return smallest
    candidates = [keep_all(problem.graph), smallest.recompute]
    least = least_bytes(problem, candidates)
    if least is None or least >= smallest.peak_bytes:
        return smallest
    return fastest_choice(replace(problem, budget_bytes=least), candidates, smallest) or smallest


def _improved(model: StepModel, strategy: Strategy, alone: Solution) -> Solution:
    """Return the solution without offloads (`alone`), or one with offloads that gains more than the gap.

    The bound covers all plans, with offloads too.
    """
    problem, work, solved, best = model.problem, model.work, [alone], alone
    bound_ms = offload_bound(model, problem.budget_bytes, work.done_s + BOUND_SHARE * problem.options.time_limit_s)
    if bound_ms is not None and not (alone.is_feasible and alone.extra_ms <= bound_ms + problem.gap_ms):
        choice = fastest_choice(problem, _candidates(model, strategy, solved), alone)
        if choice is not None and (not alone.is_feasible or choice.extra_ms < alone.extra_ms - problem.gap_ms):
            best = choice
    work_s = work.done_s + sum(solution.work_s for solution in solved)
    best = replace(best, work_s=work_s, solve_s=sum(solution.solve_s for solution in solved))
    if not best.is_feasible:
        status = Status.INFEASIBLE if bound_ms is None else Status.NOT_FOUND
        return replace(best, status=status, bound_ms=bound_ms or 0.0)
    return best.with_bound(bound_ms or 0.0, problem.gap_ms)


def _candidates(model: StepModel, strategy: Strategy, solved: list[Solution]) -> Iterator[Decisions]:
    """Yield decisions whose excess over the budget is to be offloaded; add solutions for larger budgets to `solved`."""
    (alone,), problem, lower_bytes = solved, model.problem, model.problem.budget_bytes
    yield keep_all(problem.graph)
    if alone.is_feasible:
        yield alone.recompute
    else:
        smallest = solve_least_memory(replace(problem, host=Host(0)))
        lower_bytes = max(lower_bytes, smallest.peak_bytes)
        yield smallest.recompute
    yield from PROPOSALS[alone.strategy](problem) if alone.strategy in PROPOSALS else ()
    limit_s = SOLVES_SHARE * problem.options.time_limit_s / len(SHARES)
    each = replace(problem, options=replace(problem.options, time_limit_s=limit_s, progress=None), host=Host(0))
    most_bytes = _most_bytes(model, alone)
    for share in SHARES:
        larger_bytes = lower_bytes + int(share * (most_bytes - lower_bytes))
        if larger_bytes > lower_bytes:
            solved.append(strategy(replace(each, budget_bytes=larger_bytes)))
            if solved[-1].is_feasible:
                yield solved[-1].recompute


def _most_bytes(model: StepModel, alone: Solution) -> int:
    """Return the largest budget whose excess can be copied in less time than offloading can save."""
    problem, link, offloaded_bytes = model.problem, model.problem.profile.link, model.problem.host.size_bytes
    assert link is not None, "can_offload has looked"
    if alone.is_feasible:
        halves = (problem.graph.forward, link.out_bytes_per_ms), (problem.graph.backward, link.in_bytes_per_ms)
        for nodes, bytes_per_ms in halves:
            half_ms = sum(problem.profile.time_ms[node] for node in nodes) + alone.extra_ms
            offloaded_bytes = min(offloaded_bytes, int(half_ms * bytes_per_ms))
    return min(model.keep_all_bytes, problem.budget_bytes + offloaded_bytes)
