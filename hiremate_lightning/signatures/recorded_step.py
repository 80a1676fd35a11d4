"""What a step signature runs, as the record of one such step shows it."""

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
from ..records.step import Call, Decisions, Step, holding, merge
from ..running.execution import Part
from ..units import Budget
from .limits import Limits


def no_graphs() -> Latest[object, Step]:
    """Return a store for a few graphs of one step, by what existed before the step."""
    return Latest(4)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a recorded step."""

    call: Call  # what it runs, forward and backward, and what runs outside around it
    part: Part  # its part
    captured: Captured  # what of the part it runs
    place: int  # its place among all forwards of the step
    missing: frozenset[int]  # positions of the gradients of outputs that don't arrive
    # Gradients that are only added to those of parameters, with the parameters' storages.
    added: Mapping[int, frozenset[int]]

    @property
    def code(self) -> Hashable:
        """Equal for calls that run the same code, of sizes that the same traces tell; None where it was traced."""
        made_from = self.captured.made_from
        return None if made_from is None else (made_from, self.captured.overwritten, self.missing)

    def beside(self, kept: frozenset[int]) -> Call:
        """Return the call where gradients of some parameters exist: those that are added to them die at once."""
        return self.call.without_gradients({t for t, storages in self.added.items() if storages <= kept})

    def runs(self, captured: Captured) -> bool:
        """Whether its code is that captured, at whatever size."""
        return self.captured.graph.code == captured.graph.code


@dataclass(frozen=True)
class RecordedStep:
    """A step as it was recorded, and what a plan of it has to keep to."""

    calls: tuple[RecordedCall, ...]  # its calls that have a backward, in the order of their forwards
    order: tuple[int, ...]  # order of the backwards
    resident: Resident  # what existed when it began, as planned
    solve: Strategy  # what solves it, and remembers
    limits: Limits  # its budgets
    # Bytes of the budget that its plan leaves free: by how much an earlier plan was measured above its prediction,
    # none where no plan leaves that much.
    margin_bytes: int = 0
    corrections: int = 0  # how often it was planned again for such a margin
    # Whether nothing is offloaded to the host, since a plan by which it did was measured above the budget, and no
    # margin was enough.
    keeps_on_device: bool = False
    # Its forwards whose backward is not part of it, and the schedules by which these ran.
    unfinished: tuple[tuple[Part, Schedule], ...] = ()
    unfinished_bytes: int = 0  # bytes that unfinished forwards save beyond what they saved when the step was recorded
    others_bytes: int = 0  # what the backwards of graphs of earlier steps take that run in it
    # Whether its next step takes less than the recorded one, by forwards whose backward never comes.
    is_provisional: bool = False
    decided: tuple[Decisions, ...] = ()  # for each call, what it computes again, where that is not to be chosen
    # The graphs that its calls were put into, by what existed before the step.
    merged: Latest[object, Step] = field(default_factory=no_graphs, compare=False, repr=False)

    @property
    def places(self) -> tuple[int, ...]:
        """For each call, its place among all forwards of the step."""
        return tuple(call.place for call in self.calls)

    @property
    def waits(self) -> bool:
        """Whether graphs wait for a later backward: before this step, or after it."""
        return bool(self.unfinished or self.resident.waiting)

    def room(self, budget: Budget, budget_bytes: int) -> Room:
        """Return how many bytes it has within a budget."""
        return Room(budget, budget_bytes, self.resident.size_bytes, self.margin_bytes)

    @property
    def state(self) -> tuple[object, ...]:
        """What changes the graph of its calls from step to step."""
        before = self.resident
        of_others = self.waits, self.unfinished_bytes, self.others_bytes
        return before.kept, before.stale_bytes, before.left_bytes, *of_others

    def merge(self) -> Step:
        """Put it into one graph, as allocated."""
        return self.merged.get_or(self.state, self._merge)

    def _merge(self) -> Step:
        before, calls = self.resident, [call.beside(self.resident.kept) for call in self.calls]
        if self.waits:
            calls = [call.with_gaps(lambda gap: gap.taking(self.others_bytes)) for call in calls]
            calls = holding(calls, self.unfinished_bytes)
        step = merge(calls, self.order, before.stale_bytes, before.left_bytes)
        return replace(step, graph=in_blocks(step.graph, self.calls[0].captured.device))

    def begins_as(self, captured: Sequence[Captured]) -> bool:
        """Whether its first forwards run this code, at whatever sizes; of those without a backward nothing is known."""
        begun = (call for call in self.calls if call.place < len(captured))
        return len(captured) <= self.calls[-1].place + 1 and all(call.runs(captured[call.place]) for call in begun)

    def goes_on_as(self, other: RecordedStep, place: int) -> bool:
        """Whether it is the same code as another step from a place on."""
        pairs = zip(self.calls, other.calls, strict=False)
        is_alike = (self.places, self.order) == (other.places, other.order)
        return is_alike and all(one.runs(call.captured) for one, call in pairs if one.place >= place)

    def at_sizes(
        self,
        begun: Sequence[Captured],
        as_run: Callable[[int, frozenset[int]], tuple[Graph, Profile]],
        resident: Resident,
    ) -> RecordedStep | None:
        """Foresee the step from its first calls at other sizes; the others take what they take here.

        `as_run` returns the graph of one of these calls, and its costs, without what these missing gradients would
        bring. The step is None where what remains of a call without that is other code.
        """
        calls = list(self.calls)
        for index, captured in enumerate(begun):
            call = calls[index].call.at_size(*as_run(index, calls[index].missing))
            if call is None:
                return None
            calls[index] = replace(calls[index], call=call, captured=captured)
        return replace(self, calls=tuple(calls), resident=resident, merged=no_graphs())

    def is_no_smaller(self, begun: Sequence[Captured]) -> bool:
        """Whether its first calls are nowhere smaller than these, of the same code."""
        pairs = zip(begun, self.calls, strict=False)
        return all(captured.graph.is_no_larger(call.captured.graph) for captured, call in pairs)

    def bytes_from(self, call: int) -> int:
        """Add up the bytes of all values of a call and those after it."""
        return sum(sum(later.call.graph.sizes) for later in self.calls[call:])

    @property
    def given_bytes(self) -> int:
        """Add up the bytes that its calls are given from outside, weights aside."""
        calls = [recorded.call for recorded in self.calls]
        inputs_of = (
            (call.graph, {call.graph.tensors[t].storage for t in call.graph.inputs if t not in call.links})
            for call in calls
        )
        storages = [graph.storages[s] for graph, inputs in inputs_of for s in inputs if s is not None]
        return sum(storage.size_bytes for storage in storages if storage.kind is StorageKind.INPUT)

    @property
    def hands_on(self) -> bool:
        """Whether what its calls return has the same sizes where other calls are given it."""
        calls = [recorded.call for recorded in self.calls]
        links = ((call, t, calls[giver], result) for call in calls for t, (giver, result) in call.links.items())
        return all(call.graph.tensors[t].shape == giver.graph.tensors[r].shape for call, t, giver, r in links)

    @property
    def outside_bytes(self) -> int:
        """Add up what runs outside of its calls, each at its peak."""
        return sum(recorded.call.outside_bytes for recorded in self.calls)

    def returning(self, part: Part, positions: Collection[int]) -> RecordedStep:
        """Know that gradients of a part are not only added; the same where that was known."""
        returned = {part.captured.backward_outputs[position] for position in positions}
        values = part.captured.fx_values
        calls = tuple(
            call
            if call.part is not part
            else replace(call, added={t: of for t, of in call.added.items() if values[t] not in returned})
            for call in self.calls
        )
        is_same = all(call.added == before.added for call, before in zip(calls, self.calls, strict=True))
        return self if is_same else replace(self, calls=calls, merged=no_graphs())


def foresee(
    steps: Sequence[RecordedStep], calls: Sequence[tuple[Captured, Profile]], resident: Resident
) -> RecordedStep | None:
    """Foresee the step under way: what is still to come as in the smallest known step that is not smaller so far.

    Args:
        steps: The planned steps that run the same code so far.
        calls: What has run of it, and is about to run, with the costs; of what is to come, what is known for sure.
        resident: What exists before it.

    Returns:
        The step; None where it is larger than all that is known: what is still to come may be larger too.
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
