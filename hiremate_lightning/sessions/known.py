"""What a kind of step runs, as described by the record of one such step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ..capturing.capture import Captured
from ..measuring.resident import Resident
from ..memory.allocator import in_blocks
from ..planning.solvers.base import Strategy
from ..records.costs import Profile
from ..records.graph import Graph
from ..records.scaling import at_size, difference, is_no_larger
from ..records.step import Call, Step, merge
from ..running.execution import Part
from .limits import Limits


@dataclass(frozen=True)
class Known:
    """A kind of step that has been seen.

    Attributes:
        calls: What it runs.
        order: Order of the backwards.
        parts: The part of each call.
        captured: What of it each call runs.
        places: For each call, its place among all forwards of the step.
        missing: For each call, positions of the gradients of outputs that don't arrive.
        added: For each call, gradients that are only added to those of parameters, with the parameters' storages.
        resident: What existed when it began, as planned.
        solve: What solves it, and remembers.
        limits: Its budgets.
        margin_bytes: By how much an earlier plan was measured above what it predicted.
        corrections: How often it was planned again for such a margin.
        without_backward_bytes: What its forwards without a backward would save more if they computed nothing again.
    """

    calls: tuple[Call, ...]
    order: tuple[int, ...]
    parts: tuple[Part, ...]
    captured: tuple[Captured, ...]
    places: tuple[int, ...]
    missing: tuple[frozenset[int], ...]
    added: tuple[Mapping[int, frozenset[int]], ...]
    resident: Resident
    solve: Strategy
    limits: Limits
    margin_bytes: int = 0
    corrections: int = 0
    without_backward_bytes: int = 0

    @property
    def more_bytes(self) -> int:
        """What graphs that wait would hold more if nothing of them were computed again: before this step and in it."""
        before = self.resident
        return self.without_backward_bytes + before.plain_waiting_bytes - before.waiting_bytes

    def merge(self) -> Step:
        """Put it into one graph, as allocated, in which gradients that are added to those that exist die at once."""
        calls = [
            call.without_gradients({t for t, storages in added.items() if storages <= self.resident.kept})
            for call, added in zip(self.calls, self.added, strict=True)
        ]
        step = merge(calls, self.order, self.resident.stale_bytes, self.resident.left_bytes)
        return replace(step, graph=in_blocks(step.graph, self.captured[0].device))

    def runs_at(self, place: int, captured: Captured) -> bool:
        """Whether the code of its forward at a place is that captured, at whatever size.

        Of forwards without a backward nothing is known.
        """
        if place not in self.places:
            return place < self.places[-1]
        own = self.captured[self.places.index(place)]
        return own is captured or difference(own.graph, captured.graph) is None

    def goes_on_as(self, other: Known, place: int) -> bool:
        """Whether it is the same code as another step from a place on."""
        pairs = zip(self.places, other.captured, strict=False)
        return (self.places, self.order) == (other.places, other.order) and all(
            self.runs_at(at, captured) for at, captured in pairs if at >= place
        )

    def at_sizes(
        self,
        begun: Sequence[Captured],
        as_run: Callable[[int, frozenset[int]], tuple[Graph, Profile]],
        resident: Resident,
    ) -> Known | None:
        """Foresee the step from its first calls at other sizes; the others take what they take here.

        Args:
            begun: What these calls run, of the same code as here.
            as_run: Gives the graph of one of them, and its costs, without what these missing gradients would bring.
            resident: What exists before the step.

        Returns:
            The step; None where what remains of a call without what is missing is other code.
        """
        calls, others = list(self.calls), self.captured[len(begun) :]
        for index in range(len(begun)):
            call = at_size(calls[index], *as_run(index, self.missing[index]))
            if call is None:
                return None
            calls[index] = call
        return replace(self, calls=tuple(calls), captured=(*begun, *others), resident=resident)

    def is_no_smaller(self, begun: Sequence[Captured]) -> bool:
        """Whether its first calls are nowhere smaller than these, of the same code."""
        return all(is_no_larger(one.graph, own.graph) for one, own in zip(begun, self.captured, strict=False))

    def bytes_from(self, call: int) -> int:
        """Add up the bytes of all values of a call and those after it."""
        return sum(sum(later.graph.sizes) for later in self.calls[call:])

    @property
    def outside_bytes(self) -> int:
        """Add up what runs outside of its calls, each at its peak."""
        return sum(call.outside_bytes for call in self.calls)

    def returning(self, part: Part, positions: Collection[int]) -> Known:
        """Know that gradients of a part are not only added; the same where that was known."""
        found, values = {part.captured.backward_outputs[position] for position in positions}, part.captured.fx_values
        added = tuple(
            {t: storages for t, storages in added.items() if own is not part or values[t] not in found}
            for own, added in zip(self.parts, self.added, strict=True)
        )
        return self if added == self.added else replace(self, added=added)
