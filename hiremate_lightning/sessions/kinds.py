"""Kinds of steps: which captured graphs a step runs, in which order, and the programs that are planned for them.

A kind is only known for sure when the step has ended, since kinds may begin alike (a GAN's two, for example). So the
one that begins is foreseen from what came after the latest kind the last time, and a step that turns out another is
told apart: what was measured in it says nothing about a plan.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from ..running.program import Program

LENGTHS = (32, 16, 8, 4, 2, 1, 0)  # of what came before a step, by which it is foreseen
REMEMBERED = 4096  # sequences
ANY_SIZE = -1  # in place of the size of a step
CERTAIN = 64  # steps that came as foreseen, one after the other, after which the next one is trusted to

Kind = tuple[int, ...]  # the numbers of the captured graphs that a step runs forward, in order


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


class Order:
    """In which order kinds of steps come: what came after the latest ones, the last time, for a step of its size."""

    def __init__(self) -> None:
        self._numbers: dict[Kind, int] = {}
        self._recent: deque[int] = deque(maxlen=LENGTHS[0])
        self._followers: dict[tuple[int, ...], Kind] = {}  # by size and the latest kinds, few or many
        self._in_a_row = 0  # that came as foreseen

    @property
    def is_certain(self) -> bool:
        """Whether the latest steps came as foreseen, so many that the next one is trusted to."""
        return self._in_a_row >= CERTAIN

    def _contexts(self, size_bytes: int, *latest: Kind) -> Iterator[tuple[int, ...]]:
        """List what a step may be foreseen by: the longest sequence of kinds before it first, its size alone last."""
        recent = *self._recent, *(self._numbers.get(kind, -1) for kind in latest)
        for length in LENGTHS:
            if length <= len(recent):
                yield size_bytes, *recent[len(recent) - length :]

    def foresee(self, size_bytes: int) -> Iterator[Kind]:
        """List the kinds that a step of a size may be of, the likeliest first; nothing for sizes not seen before."""
        found = (self._followers.get(context) for context in self._contexts(size_bytes))
        return (kind for kind in found if kind is not None)

    def follower(self, kind: Kind) -> Kind | None:
        """Foresee what comes after a step of a kind that begins, whatever its size; None where nothing is known."""
        found = (self._followers.get(context) for context in self._contexts(ANY_SIZE, kind))
        return next((follower for follower in found if follower is not None), None)

    def note(self, kind: Kind, size_bytes: int) -> None:
        """Learn of a step that has ended."""
        self._in_a_row = self._in_a_row + 1 if kind == next(self.foresee(size_bytes), None) else 0
        for context in (*self._contexts(size_bytes), *self._contexts(ANY_SIZE)):
            self._followers.pop(context, None)
            self._followers[context] = kind
        while len(self._followers) > REMEMBERED:
            del self._followers[next(iter(self._followers))]
        self._recent.append(self._numbers.setdefault(kind, len(self._numbers)))


class Kinds:
    """The kinds of steps seen so far.

    Attributes:
        programs: Of each planned kind, the program for each place in its sequence of forwards.
        latest: The planned kind that ran last, None before there is one.
        sights: How often each kind has run.
        by_plans: Kinds that ran by plans throughout, be they of other kinds.
    """

    def __init__(self) -> None:
        self.programs: dict[Kind, Mapping[int, Program]] = {}
        self.latest: Kind | None = None
        self.sights: Counter[Kind] = Counter()
        self.by_plans: set[Kind] = set()
        self._order = Order()
        self._confused: dict[Kind, frozenset[Kind]] = {}  # the kinds that were taken for each other, by kind

    def clear(self) -> None:
        """Forget all kinds, between two steps."""
        self.latest = None
        self._order = Order()
        for known in (self.programs, self.sights, self.by_plans, self._confused):
            known.clear()

    def install(self, kind: Kind, programs: Mapping[int, Program]) -> None:
        """Take the programs of a planned kind; one that is planned for the first time has just ended."""
        if kind not in self.programs:
            self.latest = kind
        self.programs[kind] = programs

    def foresee(self, size_bytes: int) -> tuple[Kind, ...]:
        """List the kinds that a step may be of whose arguments have a size, the likeliest first."""
        return tuple(dict.fromkeys(self._order.foresee(size_bytes)))

    def likely(self, foreseen: Iterable[Kind]) -> Kind | None:
        """Return the planned kind that a step is likely to be of; None where nothing has a plan."""
        return next((kind for kind in foreseen if kind in self.programs), self.latest)

    def following(self, foreseen: Iterable[Kind]) -> Kind | None:
        """Return the planned kind that is likely to come after the step that begins; None where none is."""
        likely = self.likely(foreseen)
        kind = None if likely is None else self._order.follower(likely)
        return kind if kind in self.programs else None

    def all_likely(self, foreseen: Iterable[Kind]) -> frozenset[Kind]:
        """Return the kinds by whose plan a step may run: none before there is one."""
        likely = self.likely(foreseen)
        return frozenset() if likely is None else self.taken_for(likely)

    def taken_for(self, kind: Kind) -> frozenset[Kind]:
        """Return the kinds by whose plans a step of a kind may begin, itself included."""
        return frozenset({kind}) if self._order.is_certain else self._alike(kind)

    def confuse(self, one: Kind, other: Kind) -> None:
        """Learn that a step that began as one kind turned out another."""
        group = self._alike(one) | self._alike(other)
        self._confused |= dict.fromkeys(group, group)

    def _alike(self, kind: Kind) -> frozenset[Kind]:
        """Return the kinds that were confused with a kind, itself included."""
        return self._confused.get(kind, frozenset({kind}))

    def choose(self, ran: Kind, expected: Kind | None) -> tuple[Kind | None, Program | None]:
        """Choose the program of the graph that begins: of the expected kind, else of one that began like the step.

        Args:
            ran: The numbers of the captured graphs of the step, that of this one last.
            expected: The kind by whose plan the step begins, None for none.

        Returns:
            The kind, None where no planned one begins so; and the program, None where the graph has no backward.
        """
        candidates = (expected, *reversed(self.programs))
        kind = next((k for k in candidates if k in self.programs and k[: len(ran)] == ran), None)
        return kind, None if kind is None else self.programs[kind].get(len(ran) - 1)

    def ended(self, kind: Kind, size_bytes: int, is_by_plans: bool) -> None:
        """Learn of a step that ran captured, what its arguments took, and whether it ran by plans throughout."""
        self.sights[kind] += 1
        self.note(kind, size_bytes)
        if kind in self.programs:
            self.latest = kind
        if is_by_plans:
            self.by_plans.add(kind)

    def note(self, kind: Kind, size_bytes: int) -> None:
        """Learn in which order kinds come, from a step that has ended."""
        self._order.note(kind, size_bytes)
