"""The history of a model's steps: the kinds that have come, in which order, and which one is likely to come next.

Which kind a step is of shows for sure when it has ended, since kinds may begin alike (a GAN's two, for example). So the
one that begins is foreseen from what came after the latest kind the last time, and a step that turns out another is
told apart: what was measured in it says nothing about a plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from ..planning.plan import Plan
from ..running.program import Program
from .recorded_step import RecordedStep
from .step_kind import GraphNumbers, Start, StepKind

LENGTHS = (32, 16, 8, 4, 2, 1, 0)  # of what came before a step, by which it is foreseen
REMEMBERED = 4096  # sequences
CERTAIN = 64  # steps that came as foreseen, one after the other, after which the next one is trusted to

K = TypeVar("K", bound=Hashable)


class Order(Generic[K]):
    """In which order kinds of steps come: what came after the latest ones, the last time, for a step that starts so."""

    def __init__(self) -> None:
        self._recent: deque[K] = deque(maxlen=LENGTHS[0])
        self._followers: dict[tuple[Hashable, ...], K] = {}  # by start and the latest kinds, few or many
        self._in_a_row = 0  # that came as foreseen

    @property
    def is_certain(self) -> bool:
        """Whether the latest steps came as foreseen, so many that the next one is trusted to."""
        return self._in_a_row >= CERTAIN

    def _contexts(self, start: Hashable) -> Iterator[tuple[Hashable, ...]]:
        """List what a step may be foreseen by: the longest sequence of kinds before it first, its start alone last."""
        recent = tuple(self._recent)
        for length in LENGTHS:
            if length <= len(recent):
                yield start, *recent[len(recent) - length :]

    def foresee(self, start: Hashable) -> Iterator[K]:
        """List the kinds that a step may be of, the likeliest first; nothing where none has started so."""
        return self._following(self._contexts(start))

    def _following(self, contexts: Iterable[tuple[Hashable, ...]]) -> Iterator[K]:
        return (kind for context in contexts if (kind := self._followers.get(context)) is not None)

    def note(self, kind: K, start: Hashable) -> None:
        """Learn of a step that has ended."""
        contexts = tuple(self._contexts(start))
        self._in_a_row = self._in_a_row + 1 if kind == next(self._following(contexts), None) else 0
        for context in contexts:
            self._followers.pop(context, None)
            self._followers[context] = kind
        while len(self._followers) > REMEMBERED:
            del self._followers[next(iter(self._followers))]
        self._recent.append(kind)


class History:
    """The kinds of steps that a session has seen. It makes them, and is the only one that keeps them.

    Attributes:
        latest: The planned kind that ran last, None before there is one.
        margin_bytes: By how much steps of sizes that were not traced were measured above what was predicted for them.
    """

    def __init__(self) -> None:
        self.latest: StepKind | None = None
        self.margin_bytes = 0
        self._kinds: dict[GraphNumbers, StepKind] = {}  # those that were recorded last, in the order of that
        self._order = Order[StepKind]()
        self._confusing = set[GraphNumbers]()  # first graphs of kinds that were mistaken for each other
        self._planned: tuple[StepKind, ...] | None = None

    def __getitem__(self, graphs: GraphNumbers) -> StepKind:
        """Return the kind that runs some captured graphs; it is made the first time."""
        kind = self._kinds.get(graphs)
        if kind is None:
            kind = self._kinds[graphs] = StepKind(graphs)
        return kind

    def __iter__(self) -> Iterator[StepKind]:
        return iter(tuple(self._kinds.values()))

    @property
    def planned(self) -> tuple[StepKind, ...]:
        """The kinds that have a plan, in the order in which they were recorded."""
        if self._planned is None:
            self._planned = tuple(kind for kind in self._kinds.values() if kind.plan is not None)
        return self._planned

    @property
    def plans(self) -> Mapping[GraphNumbers, Plan]:
        """The plans so far, by the captured graphs of their steps."""
        return {kind.graphs: kind.own_plan for kind in self.planned}

    @property
    def recorded(self) -> list[StepKind]:
        """The kinds whose step was recorded, in the order of that."""
        return [kind for kind in self._kinds.values() if kind.step is not None]

    @property
    def plan_count(self) -> int:
        """The number of plans, those for all sizes included; what is the same step at the same sizes has one."""
        return len({id(kind.recorded.solve) for kind in self.recorded}) + sum(len(kind.ladder.rungs) for kind in self)

    # ---------------------------------------------------------------- what is learned of kinds

    def record(self, kind: StepKind, step: RecordedStep) -> None:
        """Learn what a kind runs; where nobody knew, it comes after all others from now on."""
        if kind.step is None:
            self._kinds[kind.graphs] = self._kinds.pop(kind.graphs, kind)
            self._planned = None
        kind.step = step

    def install(self, kind: StepKind, plan: Plan, programs: Mapping[int, Program]) -> None:
        """Take the plan of a kind and its programs; a kind that is planned for the first time has just ended."""
        if kind.plan is None:
            self.latest, self._planned = kind, None
        kind.plan, kind.programs = plan, programs

    def drop(self, kind: StepKind) -> None:
        """Drop what a kind runs and its plan: its next step is recorded anew."""
        kind.forget_step()
        self.latest, self._planned = None if self.latest is kind else self.latest, None

    def ended(self, kind: StepKind, start: Start, is_by_plans: bool) -> None:
        """Learn of a step that ran captured, how it started, and whether it ran by plans throughout."""
        self.note(kind, start)
        if kind.plan is not None:
            self.latest = kind
        sights = kind.sights
        sights.count, sights.waited = sights.count + 1, sights.waited | {start[1]}
        sights.is_by_plans = sights.is_by_plans or is_by_plans

    def note(self, kind: StepKind, start: Start) -> None:
        """Learn in which order kinds come, from a step that has ended."""
        self._order.note(kind, start)

    def confuse(self, expected: StepKind) -> None:
        """Learn that a step that began as a kind turned out another: so may all that begin with the same graph."""
        self._confusing.add(expected.graphs[:1])

    # ---------------------------------------------------------------- which kind a step is of

    def foresee(self, start: Start) -> tuple[StepKind, ...]:
        """List the kinds that a step may be of, the likeliest first."""
        return tuple(dict.fromkeys(self._order.foresee(start)))

    def likely(self, foreseen: Iterable[StepKind]) -> StepKind | None:
        """Return the planned kind that a step is likely to be of; None where nothing has a plan."""
        return next((kind for kind in foreseen if kind.plan is not None), self.latest)

    def all_likely(self, foreseen: Iterable[StepKind]) -> tuple[StepKind, ...]:
        """Return the planned kinds by whose plan a step may run: none before there is one."""
        likely = self.likely(foreseen)
        if likely is None:
            return ()
        kinds = self.taken_for(likely)
        return tuple(kind for kind in self.planned if kind in kinds)

    def taken_for(self, kind: StepKind) -> frozenset[StepKind]:
        """Return the kinds by whose plans a step of a kind may begin, itself included."""
        if self._order.is_certain or kind.graphs[:1] not in self._confusing:
            return frozenset({kind})
        return frozenset(other for other in self if other.graphs[:1] == kind.graphs[:1])

    def begins_unknown(self, foreseen: Iterable[StepKind], expected: StepKind) -> bool:
        """Whether a step is likely of a kind without a plan that runs more than the kind by whose plan it begins."""
        kind = next(iter(foreseen), expected)
        is_like = kind.graphs[:1] == expected.graphs[:1] and not kind.sights.is_by_plans
        return kind.plan is None and is_like and place_in(expected, kind.graphs) is None

    def choose(
        self, ran: GraphNumbers, expected: StepKind | None, start: Start, fits: Callable[[StepKind], bool]
    ) -> tuple[StepKind | None, Program | None]:
        """Choose the program of the graph that begins: of the expected kind, else of one that began like the step.

        A step that runs a part of what the expected kind runs, in the same order, takes no more than that one: it goes
        on by the same plan.

        Args:
            ran: The captured graphs of the step so far, this one last.
            expected: The kind by whose plan the step begins, None for none.
            start: How the step has started.
            fits: Whether a step of a kind fits that has begun as this one has.

        Returns:
            The kind, None where no planned one begins so; and the program, None where the graph has no backward.
        """
        is_begun = expected is not None and expected.plan is not None and expected.graphs[:1] == ran[:1]
        if expected is not None and is_begun and starts_so(expected, start):
            place = len(ran) - 1 if expected.graphs[: len(ran)] == ran else place_in(expected, ran)
            if place is not None:
                return expected, expected.programs.get(place)
        alike = [kind for kind in self.planned if kind.graphs[: len(ran)] == ran and starts_so(kind, start)]
        taken = self.taken_for(alike[-1]) if alike else ()
        by_need = sorted((kind for kind in alike if kind in taken), key=lambda kind: kind.own_plan.unplanned_peak_bytes)
        kind = next((kind for kind in reversed(by_need) if fits(kind)), None)
        return kind, None if kind is None else kind.programs.get(len(ran) - 1)

    def any_counts_on_freed_gradients(self, foreseen: Iterable[StepKind]) -> bool:
        """Whether a step of these kinds may run by a plan that counts on gradients to die which do not."""
        return any(kind.counts_on_freed_gradients for kind in self.all_likely(foreseen))

    # ---------------------------------------------------------------- what they run

    def same_code(self, step: RecordedStep) -> StepKind:
        """Return the first kind that runs the code of a recorded step, at whatever sizes."""
        return next(kind for kind in self.recorded if kind.step is step or kind.recorded.goes_on_as(step, 0))


def starts_so(kind: StepKind, start: Start) -> bool:
    """Whether as many graphs wait as a step starts as did before a step of a kind."""
    return start[1] in kind.sights.waited


def place_in(kind: StepKind, ran: GraphNumbers) -> int | None:
    """Return where the last of some graphs runs in a step of a kind that runs all of them in this order, and others.

    None where it does not, or where graphs wait for a later backward in it.
    """
    if kind.step is None or kind.step.waits:
        return None
    place = -1
    for number in ran:
        if number not in kind.graphs[place + 1 :]:
            return None
        place = kind.graphs.index(number, place + 1)
    return place
