"""The bytes that a step may add, the bytes that it needs, and the error if it needs more.

A planner returns a plan or `Short`. A caller that can't continue with `Short` raises its error by `unless_short`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from ..records.costs import Profile
from ..records.graph import OUTSIDE, Graph, Node, bytes_of
from ..records.offload import with_offloads
from ..records.schedule import Schedule, lower
from ..records.simulation import Simulation, blocks, simulate_eager
from ..records.step import Decisions
from ..units import Budget, format_bytes
from .solutions import Solutions
from .solvers.base import Problem, Solution, Status, replay_solution, with_decisions
from .solvers.least_memory import SEARCH_S, solve_least_memory
from .solvers.offload import least_with_offloads

if TYPE_CHECKING:
    from ..out_of_memory import InfeasibleBudgetError

AUTO_MARGIN = 0.08  # share of the free bytes that "auto" leaves for fragmentation and uncaptured code
GUARD_BYTES = 2**16  # bytes left free for scalars outside of the planned modules,
GUARD_PARTS = 200  # but at most the budget divided by this number
DECIDED = "decided"  # strategy name of a solution whose decisions were given
NAMING_SHARE = 0.5  # of a search's work: a later run with the budget that the error names does the whole search

SMALLEST, AT_LEAST = "The smallest budget found is", "It needs at least"
LARGE = 0.25  # share of a step's peak: an error names a value or workspace that is at least as large
ADVICE = "Raise the budget, or make the batch smaller."

T = TypeVar("T")


def resolve(budget: Budget, resident_bytes: int, unplanned_bytes: int, free_bytes: int) -> int:
    """Return the most bytes that may be allocated at any moment of a step, resident bytes included.

    Given are the bytes before the step, the bytes that the eager step adds at its peak, and the device's free bytes.
    """
    if budget.size_bytes is not None:
        return budget.size_bytes
    if budget.share is not None:
        return resident_bytes + int(budget.share * unplanned_bytes)
    return resident_bytes + int(free_bytes * (1 - AUTO_MARGIN))


def guard_bytes(budget_bytes: int) -> int:
    """Return the bytes of a budget to leave free for scalars outside of the planned modules."""
    return min(GUARD_BYTES, budget_bytes // GUARD_PARTS)


@dataclass(frozen=True, slots=True)
class Room:
    """A budget, and the bytes that a step may add within it."""

    budget: Budget  # the budget as the user gave it
    budget_bytes: int  # the budget in bytes, resident bytes included
    resident_bytes: int = 0  # bytes that exist before the step
    margin_bytes: int = 0  # bytes to leave free: an earlier plan was measured this much above the budget

    @property
    def step_bytes(self) -> int:
        """The bytes that the step may add: the budget less resident bytes and margin, at least 0."""
        return max(0, self.budget_bytes - self.resident_bytes - self.margin_bytes)

    @property
    def solved_bytes(self) -> int:
        """`step_bytes` less the bytes left free for scalars outside of the planned modules."""
        return self.step_bytes - guard_bytes(self.step_bytes)


# ---------------------------------------------------------------- what a step needs


def as_decided(problem: Problem, decided: Decisions) -> Solution:
    """Return the solution of a step whose decisions are given."""
    return with_decisions(problem, Solution(DECIDED, Status.FEASIBLE, stopped_by="decided before"), decided)


@dataclass(frozen=True, slots=True)
class Need:
    """The least memory that was found for a step."""

    problem: Problem  # the step
    smallest: Solution  # the solution of least memory
    resident_bytes: int  # bytes that exist before the step
    # Resident bytes held by graphs that wait for a later backward: now, and in eager training.
    waiting_bytes: tuple[int, int] = (0, 0)
    is_guarded: bool = False  # whether to add bytes for scalars outside of the planned modules
    less_bytes: int = 0  # how many bytes fewer another process of the training has for this step

    @property
    def peak_bytes(self) -> int:
        """Bytes allocated at the step's peak, resident bytes included."""
        guard = guard_bytes(self.smallest.peak_bytes) if self.is_guarded else 0
        return self.resident_bytes + self.smallest.peak_bytes + self.less_bytes + guard

    @property
    def share(self) -> float:
        """The needed bytes / the bytes that the eager step adds, rounded up to 0.001.

        The ratio is at most 1, unless another process has fewer bytes.
        """
        waiting_bytes, eager_waiting_bytes = self.waiting_bytes
        added_bytes = self.peak_bytes - self.resident_bytes + waiting_bytes
        eager_bytes = simulate_eager(self.problem.graph, self.problem.profile).peak_bytes + eager_waiting_bytes
        share = (added_bytes + 1) / eager_bytes
        return math.ceil(1000 * (share if self.less_bytes else min(share, 1.0))) / 1000


def least_need(
    problem: Problem, resident_bytes: int, decided: Decisions | None = None, solutions: Solutions = Solutions()
) -> Need:
    """Find the least memory of a step, for an error to name; if decisions are given, find their memory.

    A run with the named budget finds this solution again, since it does this search and more. The solution is also
    stored, in this process and in the folder of plans.
    """
    if decided is not None:
        return Need(problem, as_decided(problem, decided), resident_bytes)
    limit_s = NAMING_SHARE * min(problem.options.time_limit_s, SEARCH_S)
    hurried = replace(problem, budget_bytes=0, options=replace(problem.options, time_limit_s=limit_s))
    smallest = solve_least_memory(hurried)
    solutions.remember(problem, smallest)
    return Need(problem, least_with_offloads(problem, smallest), resident_bytes)


@dataclass(frozen=True, slots=True)
class Short:
    """The result of planning if nothing fits the budget."""

    needs: tuple[Need, ...]  # the needs of all steps that must fit
    room: Room  # the bytes that a step may add
    target: str  # path of the planned module
    words: str = SMALLEST  # beginning of the sentence that names the needed bytes
    advice: str = ADVICE  # what the user can do

    @property
    def need(self) -> Need:
        """The largest need of all steps."""
        return max(self.needs, key=lambda need: need.peak_bytes)

    def error(self) -> InfeasibleBudgetError:
        """Return the error, which names a sufficient budget and the place of the peak."""
        from ..out_of_memory import InfeasibleBudgetError  # loads torch, which planning must not

        need, graph, budget_bytes = self.need, self.need.problem.graph, self.room.budget_bytes
        simulation = replay_solution(need.problem, need.smallest)
        schedule = with_offloads(graph, lower(graph, need.smallest.recompute), need.smallest.offloads)
        largest = largest_words(graph, need.problem.profile, schedule, simulation)
        share = whose = offloads = ""
        if need.less_bytes:
            less = format_bytes(need.less_bytes)
            whose = f"Another process of this training has {less} less than this one for its step. "
        if need.smallest.offloads:
            offloads = f"puts {format_bytes(simulation.host_bytes)} in the host's memory and "
        if self.room.budget.is_share:
            share = f", {100 * max(need.share for need in self.needs):.1f}% of what the unplanned step adds"
        return InfeasibleBudgetError(
            f"The budget {self.room.budget} ({budget_bytes:,} bytes) is too small for {self.target or 'this model'}. "
            f"{self.words} {format_bytes(need.peak_bytes, up=True)} ({need.peak_bytes:,} bytes{share}), "
            f"of which {format_bytes(need.resident_bytes)} are resident (parameters, gradients, optimizer state, "
            f"batch). {whose}"
            f"Such a plan {offloads}takes at most {simulation.overhead:.0%} more time. "
            f"The peak is {_place_of(simulation, graph)}.{largest} {self.advice}",
            budget_bytes=budget_bytes,
            smallest_bytes=need.peak_bytes,
            module=graph.nodes[simulation.peak_moment.node].module,
            less_bytes=need.less_bytes,
            device=need.problem.profile.device,
        )

    def __str__(self) -> str:
        return str(self.error())


def unless_short(outcome: T | Short) -> T:
    """Return the outcome of planning if it fits.

    Raises:
        InfeasibleBudgetError: If the outcome is `Short`.
    """
    if isinstance(outcome, Short):
        raise outcome.error()
    return outcome


def first_short(outcomes: Iterable[Short | None]) -> Short | None:
    """Return the first `Short`, None if there is none; don't evaluate the outcomes after it."""
    return next((outcome for outcome in outcomes if outcome is not None), None)


def _place_of(simulation: Simulation, graph: Graph) -> str:
    """Describe the place of a peak: the node that runs, or outside code if it runs or holds most of the bytes."""
    node = graph.nodes[simulation.peak_moment.node]
    outside = {n for n, other in enumerate(graph.nodes) if other.op == OUTSIDE}
    held_bytes = bytes_of(graph, (t for t in graph.held if graph.tensors[t].producer in outside))
    if node.op == OUTSIDE or 2 * held_bytes > simulation.peak_bytes:
        return "in the code outside of the planned modules"
    return f"at {_call_words(node)}"


def _call_words(node: Node) -> str:
    return f"{node.op} in {f'module {node.module!r}' if node.module else 'the code of the planned module itself'}"


def largest_words(graph: Graph, profile: Profile, schedule: Schedule, simulation: Simulation) -> str:
    """Return a sentence that names the largest workspace or value at a peak; "" if none is large."""
    moment = simulation.peak_moment
    peak, workspace_bytes = simulation.timeline.index(moment), profile.workspace_bytes[moment.node]
    live = [storage for storage, first, last in blocks(graph, schedule) if first <= peak <= last]
    storage = max(live, key=lambda storage: graph.sizes[storage], default=None)
    value_bytes = 0 if storage is None else graph.sizes[storage]
    if max(value_bytes, workspace_bytes) < LARGE * simulation.peak_bytes:
        return ""
    if workspace_bytes > value_bytes:
        needs = f"{graph.nodes[moment.node].op} needs while it runs"
        return f" {format_bytes(workspace_bytes)} of it are what {needs}."
    made = next((node for node in graph.nodes if storage in (graph.tensors[t].storage for t in node.outputs)), None)
    if made is None or made.op == OUTSIDE:
        return ""
    place = f"at {'/'.join(made.source.split('/')[-3:])} ({made.op})" if made.source else f"by {_call_words(made)}"
    return f" {format_bytes(value_bytes)} of it are one value, made {place}."
