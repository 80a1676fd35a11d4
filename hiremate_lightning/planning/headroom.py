"""How many bytes a step has, how many it needs, and the error that says so where it has too few.

A planner returns a plan, or `Short`. Whoever can't go on with `Short` raises its error, as `unless_short` does.
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
from .solvers import smallest_budget
from .solvers.base import Problem, Solution, Status, replay_solution, with_decisions
from .solvers.least_memory import SEARCH_S
from .solvers.offload import least_with_offloads

if TYPE_CHECKING:
    from ..out_of_memory import InfeasibleBudgetError

AUTO_MARGIN = 0.08  # share of the free bytes that "auto" leaves for fragmentation and for code outside
GUARD_BYTES = 2**16  # left free for scalars that come and go outside of the planned modules,
GUARD_PARTS = 200  # and at most this part of the budget
DECIDED = "decided"  # in place of a strategy's name, where nothing is to be chosen
NAMING_SHARE = 0.5  # of the work of a search: a run that is given the named budget does all of it

SMALLEST, AT_LEAST = "The smallest budget found is", "It needs at least"
LARGE = 0.25  # of what a step adds at its peak: a value that holds as much is named
ADVICE = "Raise the budget, or make the batch smaller."

T = TypeVar("T")


def resolve(budget: Budget, resident_bytes: int, unplanned_bytes: int, free_bytes: int) -> int:
    """Return the most bytes that may be allocated at any moment of a step, resident bytes included.

    Resident bytes exist before it, the unplanned step adds some at its peak, and the device could hand out free ones.
    """
    if budget.size_bytes is not None:
        return budget.size_bytes
    if budget.share is not None:
        return resident_bytes + int(budget.share * unplanned_bytes)
    return resident_bytes + int(free_bytes * (1 - AUTO_MARGIN))


def guard_bytes(budget_bytes: int) -> int:
    """Return the bytes of a budget that are left free for scalars outside of the planned modules."""
    return min(GUARD_BYTES, budget_bytes // GUARD_PARTS)


@dataclass(frozen=True, slots=True)
class Room:
    """How many bytes a step has."""

    budget: Budget  # the budget as asked for
    budget_bytes: int  # the same in bytes, resident bytes included
    resident_bytes: int = 0  # bytes that exist before the step
    margin_bytes: int = 0  # bytes of the budget to leave free, because an earlier plan was measured that much above it

    @property
    def step_bytes(self) -> int:
        """The bytes that the step may add: those that neither exist already nor are left as a margin."""
        return max(0, self.budget_bytes - self.resident_bytes - self.margin_bytes)

    @property
    def solved_bytes(self) -> int:
        """The same without the bytes that are left free for scalars outside of the planned modules."""
        return self.step_bytes - guard_bytes(self.step_bytes)


# ---------------------------------------------------------------- what a step needs


def as_decided(problem: Problem, decided: Decisions) -> Solution:
    """Return the solution of a step in which nothing is to be chosen."""
    return with_decisions(problem, Solution(DECIDED, Status.FEASIBLE, stopped_by="decided before"), decided)


@dataclass(frozen=True, slots=True)
class Need:
    """The least memory that was found for a step."""

    problem: Problem  # the step
    smallest: Solution  # the solution of least memory
    resident_bytes: int  # bytes that exist before it
    # The part of these that graphs hold which wait for a later backward, and its size in plain training.
    waiting_bytes: tuple[int, int] = (0, 0)
    is_guarded: bool = False  # whether to add bytes for scalars that come and go outside of the planned modules
    less_bytes: int = 0  # bytes that another process of the training has less for the same step, within the same budget

    @property
    def peak_bytes(self) -> int:
        """Bytes allocated at its peak, resident bytes included."""
        guard = guard_bytes(self.smallest.peak_bytes) if self.is_guarded else 0
        return self.resident_bytes + self.smallest.peak_bytes + self.less_bytes + guard

    @property
    def share(self) -> float:
        """The needed share of the bytes that the unplanned step adds, rounded up to a tenth of a per cent.

        It is at most 1, unless another process has less.
        """
        waiting_bytes, eager_waiting_bytes = self.waiting_bytes
        added_bytes = self.peak_bytes - self.resident_bytes + waiting_bytes
        plain_bytes = simulate_eager(self.problem.graph, self.problem.profile).peak_bytes + eager_waiting_bytes
        share = (added_bytes + 1) / plain_bytes
        return math.ceil(1000 * (share if self.less_bytes else min(share, 1.0))) / 1000


def least_need(
    problem: Problem, resident_bytes: int, decided: Decisions | None = None, solutions: Solutions = Solutions()
) -> Need:
    """Find the least memory of a step for an error to name; where all is decided, the memory of that.

    A run that is given the named budget finds this solution again: it does the same search and more. The solution is
    also remembered, in this process and in the folder of plans.
    """
    if decided is not None:
        return Need(problem, as_decided(problem, decided), resident_bytes)
    limit_s = NAMING_SHARE * min(problem.options.time_limit_s, SEARCH_S)
    hurried = replace(problem, budget_bytes=0, options=replace(problem.options, time_limit_s=limit_s))
    smallest = smallest_budget(hurried)
    solutions.remember(problem, smallest)
    return Need(problem, least_with_offloads(problem, smallest), resident_bytes)


@dataclass(frozen=True, slots=True)
class Short:
    """Nothing fits the budget."""

    needs: tuple[Need, ...]  # the needs of all steps that are to fit
    room: Room  # how many bytes there are
    target: str  # path of the planned module
    words: str = SMALLEST  # how to begin the sentence that names the bytes
    advice: str = ADVICE  # what to do

    @property
    def need(self) -> Need:
        """The need of the step that needs most."""
        return max(self.needs, key=lambda need: need.peak_bytes)

    def error(self) -> InfeasibleBudgetError:
        """Build the error that names the budget that is enough, and the place of the peak."""
        from ..out_of_memory import InfeasibleBudgetError  # it is one of torch's, which planning does not load

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
        if self.room.budget.share is not None:
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
    """Return what fits.

    Raises:
        InfeasibleBudgetError: If nothing does.
    """
    if isinstance(outcome, Short):
        raise outcome.error()
    return outcome


def first_short(outcomes: Iterable[Short | None]) -> Short | None:
    """Return the first that is short; what follows it is not tried."""
    return next((outcome for outcome in outcomes if outcome is not None), None)


def _place_of(simulation: Simulation, graph: Graph) -> str:
    """Describe where a peak is: at the node that runs, or in the code outside that holds the most."""
    node = graph.nodes[simulation.peak_moment.node]
    outside = {n for n, other in enumerate(graph.nodes) if other.op == OUTSIDE}
    held_bytes = bytes_of(graph, (t for t in graph.held if graph.tensors[t].producer in outside))
    if node.op == OUTSIDE or 2 * held_bytes > simulation.peak_bytes:
        return "in the code outside of the planned modules"
    return f"at {_call_words(node)}"


def _call_words(node: Node) -> str:
    return f"{node.op} in {f'module {node.module!r}' if node.module else 'the code of the planned module itself'}"


def largest_words(graph: Graph, profile: Profile, schedule: Schedule, simulation: Simulation) -> str:
    """Name, as a sentence or "", what holds much of a peak: the operation that runs, or a value, a buffer say."""
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
