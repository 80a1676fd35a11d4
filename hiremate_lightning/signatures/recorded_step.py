"""The recorded step of a signature: its calls, forward and backward, as one measured step ran them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from ..capturing.absent import without_missing
from ..capturing.capture import Captured
from ..housekeeping import Latest
from ..measuring.resident import Resident
from ..memory.allocator import in_blocks
from ..planning.headroom import Room
from ..planning.solvers.base import Strategy
from ..records.costs import Profile
from ..records.graph import Graph, StorageKind
from ..records.schedule import Schedule
from ..records.step import Call, Decisions, MergedStep, holding, merge
from ..running.execution import GraphRuntime
from ..units import Budget
from .limits import Limits


def no_graphs() -> Latest[object, MergedStep]:
    """Return a store for a few graphs of one step, by the memory that existed before the step."""
    return Latest(4)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a recorded step."""

    call: Call  # its graph, forward and backward, and memory of code outside around it
    runtime: GraphRuntime  # the captured graph, as it runs
    captured: Captured  # the captured graph as it was then
    place: int  # its place among all forwards of the step
    missing: frozenset[int]  # positions of the gradients of outputs that don't arrive
    # Gradients that are only accumulated into those of parameters, each with the storages of these parameters.
    added: Mapping[int, frozenset[int]]

    @property
    def code(self) -> Hashable:
        """A key, equal for calls of made code from the same samples; None if the call was traced."""
        made_from = self.captured.made_from
        return None if made_from is None else (made_from, self.captured.overwritten, self.missing)

    def beside(self, kept: frozenset[int]) -> Call:
        """Return the call if gradients of some parameters exist: those accumulated into them are freed at once."""
        return self.call.without_gradients({t for t, storages in self.added.items() if storages <= kept})

    def runs(self, captured: Captured) -> bool:
        """Whether a captured graph has the same code, at any sizes."""
        return self.captured.graph.code == captured.graph.code


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step, with the memory before it, its budgets, and the constraints on its plan."""

    calls: tuple[RecordedCall, ...]  # its calls that have a backward, in the order of their forwards
    order: tuple[int, ...]  # order of the backwards
    resident: Resident  # the memory that exists when it begins, as its plan counts it
    solve: Strategy  # the solver, which remembers solutions
    limits: Limits  # its budgets
    # Bytes of the budget that its plan leaves free: the excess of a measured peak over the prediction; 0 if no plan can
    # leave that much.
    margin_bytes: int = 0
    corrections: int = 0  # number of plans made again for peaks above the budget
    # Whether nothing is offloaded to the host: a plan with offloads was measured above the budget, and no margin was
    # enough.
    keeps_on_device: bool = False
    # The forwards whose backward comes in a later step, each with the schedule by which it ran.
    unfinished: tuple[tuple[GraphRuntime, Schedule], ...] = ()
    unfinished_bytes: int = 0  # bytes that unfinished forwards save beyond those that they saved in the recorded step
    others_bytes: int = 0  # most bytes that a backward of an earlier step's graph takes in this step
    # Whether its plan counts gradients as freed that later steps keep allocated; until the plan is adapted.
    counts_on_freed_gradients: bool = False
    # Whether later steps take less: forwards whose backward never comes saved more in the recorded one.
    is_provisional: bool = False
    decided: tuple[Decisions, ...] = ()  # the nodes that each call recomputes, if these are fixed; else empty
    # The step as one graph, by the memory that existed before it (`state`).
    merged: Latest[object, MergedStep] = field(default_factory=no_graphs, compare=False, repr=False)

    @property
    def places(self) -> tuple[int, ...]:
        """The place of each call among all forwards of the step."""
        return tuple(call.place for call in self.calls)

    @property
    def waits(self) -> bool:
        """Whether graphs wait for a later backward: before this step, or after it."""
        return bool(self.unfinished or self.resident.waiting)

    def room(self, budget: Budget, budget_bytes: int) -> Room:
        """Return the bytes that it may take within a budget."""
        return Room(budget, budget_bytes, self.resident.size_bytes, self.margin_bytes)

    @property
    def state(self) -> tuple[object, ...]:
        """A key of the memory around it on which its merged graph depends."""
        before = self.resident
        of_others = self.waits, self.unfinished_bytes, self.others_bytes
        return before.kept, before.stale_bytes, before.left_bytes, *of_others

    def merge(self) -> MergedStep:
        """Return the step as one graph, with bytes rounded to the blocks of the allocator."""
        return self.merged.get_or(self.state, self._merge)

    def _merge(self) -> MergedStep:
        before, calls = self.resident, [call.beside(self.resident.kept) for call in self.calls]
        if self.waits:
            calls = [call.with_gaps(lambda gap: gap.taking(self.others_bytes)) for call in calls]
            calls = holding(calls, self.unfinished_bytes)
        step = merge(calls, self.order, before.stale_bytes, before.left_bytes)
        return replace(step, graph=in_blocks(step.graph, self.calls[0].captured.device))

    def begins_as(self, captured: Sequence[Captured]) -> bool:
        """Whether its first forwards run this code, at any sizes; forwards without a backward are not compared."""
        begun = (call for call in self.calls if call.place < len(captured))
        return len(captured) <= self.calls[-1].place + 1 and all(call.runs(captured[call.place]) for call in begun)

    def goes_on_as(self, other: RecordedStep, place: int) -> bool:
        """Whether it runs the same code as another step from a place on, with the same order of backwards."""
        pairs = zip(self.calls, other.calls, strict=False)
        is_alike = (self.places, self.order) == (other.places, other.order)
        return is_alike and all(one.runs(call.captured) for one, call in pairs if one.place >= place)

    def at_sizes(
        self,
        begun: Sequence[Captured],
        as_run: Callable[[int, frozenset[int]], tuple[Graph, Profile]],
        resident: Resident,
    ) -> RecordedStep | None:
        """Return the step with its first calls at other sizes; the other calls keep the sizes of this step.

        `as_run` returns graph and costs of one of the first calls without what missing gradients would need.
        Return None if the rest of such a graph is other code than here.
        """
        calls = list(self.calls)
        for index, captured in enumerate(begun):
            call = calls[index].call.at_size(*as_run(index, calls[index].missing))
            if call is None:
                return None
            calls[index] = replace(calls[index], call=call, captured=captured)
        return replace(self, calls=tuple(calls), resident=resident, merged=no_graphs())

    def is_no_smaller(self, begun: Sequence[Captured]) -> bool:
        """Whether no tensor of its first calls is smaller than in these graphs of the same code."""
        pairs = zip(begun, self.calls, strict=False)
        return all(captured.graph.is_no_larger(call.captured.graph) for captured, call in pairs)

    def bytes_from(self, call: int) -> int:
        """Return the bytes of all values of a call and of the calls after it."""
        return sum(sum(later.call.graph.sizes) for later in self.calls[call:])

    @property
    def given_bytes(self) -> int:
        """The bytes of the inputs that its calls are given from outside, weights left out."""
        calls = [recorded.call for recorded in self.calls]
        inputs_of = (
            (call.graph, {call.graph.tensors[t].storage for t in call.graph.inputs if t not in call.links})
            for call in calls
        )
        storages = [graph.storages[s] for graph, inputs in inputs_of for s in inputs if s is not None]
        return sum(storage.size_bytes for storage in storages if storage.kind is StorageKind.INPUT)

    @property
    def hands_on(self) -> bool:
        """Whether each output of a call that is an input of another call has the same shape in both."""
        calls = [recorded.call for recorded in self.calls]
        links = ((call, t, calls[giver], result) for call in calls for t, (giver, result) in call.links.items())
        return all(call.graph.tensors[t].shape == giver.graph.tensors[r].shape for call, t, giver, r in links)

    @property
    def outside_bytes(self) -> int:
        """The sum over its calls of the peak bytes of code outside."""
        return sum(recorded.call.outside_bytes for recorded in self.calls)

    def returning(self, runtime: GraphRuntime, positions: Collection[int]) -> RecordedStep:
        """Return the step with some gradients of a graph not accumulated in place; itself if that was known."""
        returned = {runtime.captured.backward_outputs[position] for position in positions}
        values = runtime.captured.fx_values
        calls = tuple(
            call
            if call.runtime is not runtime
            else replace(call, added={t: of for t, of in call.added.items() if values[t] not in returned})
            for call in self.calls
        )
        if all(call.added == before.added for call, before in zip(calls, self.calls, strict=True)):
            return self
        return replace(self, calls=calls, counts_on_freed_gradients=True, merged=no_graphs())


def foresee(
    steps: Sequence[RecordedStep], calls: Sequence[tuple[Captured, Profile]], resident: Resident
) -> RecordedStep | None:
    """Foresee the step under way: its later calls are those of the smallest known step that is no smaller so far.

    Args:
        steps: The planned steps that run the same code so far.
        calls: Its calls so far, the one about to run, and later ones whose sizes are known for sure; with their costs.
        resident: The memory that exists before it.

    Returns:
        The step; None if it is larger so far than all known steps, since its later calls may be larger too.
    """
    codes = [captured for captured, _ in calls]

    @cache
    def as_run(index: int, missing: frozenset[int]) -> tuple[Graph, Profile]:
        captured, costs = calls[index]
        return without_missing(captured, missing, costs)

    count = len(calls)
    if count < len(steps[0].calls):
        steps = [step for step in steps if step.is_no_smaller(codes)]
        least_bytes = min((step.bytes_from(count) for step in steps), default=0)
        steps = [step for step in steps if step.bytes_from(count) == least_bytes]
    at_sizes = (step.at_sizes(codes, as_run, resident) for step in steps)
    foreseen = [step for step in at_sizes if step is not None]
    return max(foreseen, key=lambda step: step.outside_bytes, default=None)
