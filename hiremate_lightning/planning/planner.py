"""From a step and a budget to a plan: solve, lower, simulate, and refuse solutions that do not fit.

A plan leaves this module only if its simulated peak is within the budget, whichever strategy proposed it, or if the
caller asked for the least memory where nothing fits (`on_infeasible="warn"`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..errors import did_you_mean
from ..housekeeping import Once, log
from ..options import OPTIONS, SessionOptions
from ..records.costs import Profile
from ..records.offload import Host
from ..records.step import Decisions, MergedStep
from ..units import Budget, parse_budget
from .headroom import AT_LEAST, Need, Room, Short, as_decided, least_need
from .plan import Plan, PlanningTime
from .shared_solving import agreed
from .solutions import Solutions
from .solvers.base import CLOCK, Problem, Solution, SolveOptions, Status, Strategy, keeping_everything, replay_solution
from .solvers.least_memory import solve_least_memory
from .solvers.offload import least_with_offloads
from .solvers.worker import apart, check_strategy

_warn_once = Once(log.warning)
LEAST = "least memory at once"  # the "strategy" of first solutions in the cache
ANY_GAP = 1e6  # a gap so large that a solve ends at the first schedule that fits
CUT_SHORT = (
    "Solving was cut short after %d s, in which this machine did the work of %d s of an idle core: it is too busy, or "
    "slow. The plan fits the budget. It may be slower than the plan of another run. Free some cores, or pass a "
    "time_limit_s above %g."
)


def make_options(budget: int | float | str | Budget, **values: Any) -> SessionOptions:
    """Check the options of planning and return them; an option that is left out has its default.

    Raises:
        BudgetError: If the budget can't be read.
        ConfigurationError: If an option is out of its range; the text names it. Or if no MIP solver works.
        TypeError: If there is no option of that name.
    """
    for name in values:
        if name not in OPTIONS:
            raise TypeError(
                f"there is no option {name!r}.{did_you_mean(name, OPTIONS)} Choose from: {', '.join(OPTIONS)}"
            )
    read = {name: OPTIONS[name].value_of(value) for name, value in values.items()}
    options = SessionOptions(budget=parse_budget(budget), **read)
    check_strategy(options.solver)  # last, since this starts a process
    return options


def make_plan(
    step: MergedStep,
    room: Room,
    options: SessionOptions,
    target: str = "",
    solve: Strategy | None = None,
    progress: Callable[[float, float], None] | None = None,
    decided: Decisions | None = None,
    host: Host = Host(0),
) -> Plan | Short:
    """Solve a merged step under a budget.

    `solve` is by default the strategy that the options name, in a separate process. If `decided` has the nodes to
    recompute, nothing is solved or offloaded. Otherwise values may be offloaded if `host` has memory.

    Returns:
        A plan whose simulated peak is within the budget. If none was found, `Short` with the smallest budget found, or
        with `on_infeasible="warn"` the plan with the smallest peak found.
    """
    log.debug("planning")
    start = time.perf_counter()
    strategy = solve or apart(options.solver)
    limits = SolveOptions(time_limit_s=options.time_limit_s, progress=progress)
    rank_problem = Problem(step.graph, step.profile, room.step_bytes, limits, host if decided is None else Host(0))
    problem = agreed(rank_problem, strategy)
    less_bytes = rank_problem.budget_bytes - problem.budget_bytes
    shared_room = replace(room, budget_bytes=room.budget_bytes - less_bytes)
    profile = problem.profile
    keeping_all = keeping_everything(problem)
    if decided is not None:
        solution = as_decided(problem, decided)
    elif keeping_all.peak_bytes <= problem.budget_bytes:
        solution = keeping_all
    else:
        guarded = replace(problem, budget_bytes=shared_room.solved_bytes)
        solution, profile = _solve(guarded, options, strategy, problem is rank_problem)
    if not _fits(problem, solution):
        if decided is None:
            smallest = solve_least_memory(problem)
            if smallest.peak_bytes > problem.budget_bytes:
                smallest = least_with_offloads(problem, smallest)
            solution = replace(smallest, stopped_by=solution.stopped_by or smallest.stopped_by)
        if solution.peak_bytes > problem.budget_bytes and options.on_infeasible == "raise":
            need = least_need(problem, room.resident_bytes, decided, Solutions(options.cache_dir))
            if need.smallest.peak_bytes > problem.budget_bytes:
                return Short((replace(need, less_bytes=less_bytes),), shared_room, target)
            solution = replace(need.smallest, status=Status.FEASIBLE, stopped_by=solution.stopped_by)
        if decided is None:
            solution, profile = _fastest_within_its_peak(problem, solution, options, strategy, problem is rank_problem)
    if solution.stopped_by == CLOCK:
        log.warning(CUT_SHORT, round(solution.solve_s), round(solution.work_s), options.time_limit_s)
    if solution.note:
        _warn_once(solution.note)  # what the method of a paper could not do, and what it did instead
    profile = step.profile if profile is problem.profile else profile
    planning = PlanningTime(solve_s=time.perf_counter() - start)
    return Plan(target, step.graph, profile, solution, room.budget, room.budget_bytes, room.resident_bytes, planning)


def _solve(problem: Problem, options: SessionOptions, strategy: Strategy, is_alone: bool) -> tuple[Solution, Profile]:
    """Read the solution of an earlier run, or solve; return the solution, and the profile that it was solved for.

    If the search ends without a proof, a better earlier solution of the same step replaces the new one. That is left
    out if several processes agreed on the problem (not `is_alone`), since all of them must run the same plan.
    """
    solutions = Solutions(options.cache_dir)
    if (stored := solutions.read(problem, options.solver)) is not None:
        return stored
    solution = strategy(problem)
    if is_alone:
        solution = solutions.at_least(problem, solution)
    if _fits(problem, solution):
        if not solution.offloads:
            solutions.remember(problem, solution)
        solutions.write(problem, options.solver, solution)
    return solution, problem.profile


def first_solution(
    step: MergedStep,
    room: Room,
    options: SessionOptions,
    target: str,
    progress: Callable[[float, float], None] | None = None,
    free_bytes: Callable[[], int] = lambda: 0,
    host: Host = Host(0),
) -> Solution | Short:
    """Find a schedule for the first run of a captured graph; return `Short` if it can't run.

    The fast search for the least memory comes first. If its schedule exceeds the budget, a solve follows, which ends at
    the first schedule that fits. If none fits, the graph still runs at the least memory if the device has it: only a
    step that has run shows which budget is enough. `free_bytes` returns the bytes that the device has for the step.
    """
    log.debug("searching for a first schedule")
    limits = SolveOptions(time_limit_s=options.time_limit_s, gap=ANY_GAP, progress=progress)
    problem = Problem(step.graph, step.profile, room.step_bytes, limits, host)
    solutions = Solutions(options.cache_dir)
    if (stored := solutions.read(problem, LEAST)) is not None:
        return stored[0]
    smallest = solve_least_memory(problem)
    if _fits(problem, smallest):
        solutions.write(problem, LEAST, smallest)
        return smallest
    solved = apart(options.solver)(problem)
    if _fits(problem, solved):
        return solved
    beyond_bytes = free_bytes()
    if smallest.peak_bytes > beyond_bytes:
        smallest = least_with_offloads(problem, smallest)
    if smallest.peak_bytes > beyond_bytes:
        return Short((Need(problem, smallest, room.resident_bytes),), room, target, AT_LEAST)
    return smallest


def _fits(problem: Problem, solution: Solution) -> bool:
    """Whether the independent simulator finds a solution within the budget; the strategy's own peak doesn't count."""
    return solution.is_feasible and replay_solution(problem, solution).peak_bytes <= problem.budget_bytes


def _fastest_within_its_peak(
    problem: Problem, smallest: Solution, options: SessionOptions, strategy: Strategy, is_alone: bool
) -> tuple[Solution, Profile]:
    """Solve for time within the peak of the least-memory solution; return the faster of both, with its profile."""
    enough = replace(problem, budget_bytes=max(smallest.peak_bytes, problem.budget_bytes))
    solution, profile = _solve(enough, options, strategy, is_alone)
    if _fits(enough, solution) and solution.extra_ms < smallest.extra_ms:
        return solution, profile
    return smallest, problem.profile
