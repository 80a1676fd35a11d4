"""Kinds of steps: which captured graphs a step runs, in which order, and the programs that are planned for them.

A kind is only known for sure when the step has ended, since kinds may begin alike (a GAN's two, for example). So the
one that begins is foreseen from what came after the latest kind the last time, and a step that turns out another is
told apart: what was measured in it says nothing about a plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ..measuring.resident import Resident
from ..planning.plan import Plan
from ..records.step import Decisions
from ..running.program import Program
from .known import Known

LENGTHS = (32, 16, 8, 4, 2, 1, 0)  # of what came before a step, by which it is foreseen
REMEMBERED = 4096  # sequences
ANY_START = -1  # in place of how a step starts
CERTAIN = 64  # steps that came as foreseen, one after the other, after which the next one is trusted to

Kind = tuple[int, ...]  # the numbers of the captured graphs that a step runs forward, in order
Start = tuple[int, int]  # of a step: bytes of its arguments, and how many graphs of earlier steps wait then


class Order:
    """In which order kinds of steps come: what came after the latest ones, the last time, for a step that starts so."""

    def __init__(self) -> None:
        self._numbers: dict[Kind, int] = {}
        self._recent: deque[int] = deque(maxlen=LENGTHS[0])
        self._followers: dict[tuple[Hashable, ...], Kind] = {}  # by start and the latest kinds, few or many
        self._in_a_row = 0  # that came as foreseen

    @property
    def is_certain(self) -> bool:
        """Whether the latest steps came as foreseen, so many that the next one is trusted to."""
        return self._in_a_row >= CERTAIN

    def _contexts(self, start: Hashable, *latest: Kind) -> Iterator[tuple[Hashable, ...]]:
        """List what a step may be foreseen by: the longest sequence of kinds before it first, its start alone last."""
        recent = *self._recent, *(self._numbers.get(kind, -1) for kind in latest)
        for length in LENGTHS:
            if length <= len(recent):
                yield start, *recent[len(recent) - length :]

    def foresee(self, start: Hashable) -> Iterator[Kind]:
        """List the kinds that a step may be of, the likeliest first; nothing where none has started so."""
        found = (self._followers.get(context) for context in self._contexts(start))
        return (kind for kind in found if kind is not None)

    def follower(self, kind: Kind) -> Kind | None:
        """Foresee what comes after a step of a kind that begins, however it starts; None where nothing is known."""
        found = (self._followers.get(context) for context in self._contexts(ANY_START, kind))
        return next((follower for follower in found if follower is not None), None)

    def note(self, kind: Kind, start: Hashable) -> None:
        """Learn of a step that has ended."""
        self._in_a_row = self._in_a_row + 1 if kind == next(self.foresee(start), None) else 0
        for context in (*self._contexts(start), *self._contexts(ANY_START)):
            self._followers.pop(context, None)
            self._followers[context] = kind
        while len(self._followers) > REMEMBERED:
            del self._followers[next(iter(self._followers))]
        self._recent.append(self._numbers.setdefault(kind, len(self._numbers)))


class PlanState(Enum):
    """What is known of a kind of step."""

    SEEN = "it has run, and has no plan"
    PLANNED = "it has a plan, whose peak was not measured"
    MEASURED = "the peak of its plan was measured"
    TIMED = "the peak and the time of its plan were measured"


@dataclass(frozen=True, slots=True)
class KindRecord:
    """All that is known of one kind of step.

    Attributes:
        sights: How often it has run.
        is_by_plans: Whether every forward of some step ran by a plan, of this or another kind.
        known: What it runs; None before that was described.
        plan: Its plan, None before there is one.
        programs: The program for each place in its sequence of forwards.
        before: What existed before its steps, by the parameters whose gradients existed.
        is_unfit: Whether its plan counts on gradients to be freed that are not.
        is_searching: Whether its next step is the first in which cuDNN chooses algorithms.
        seen_bytes: The largest predicted peak of the states of its plan whose peak was measured; None for none.
        taken_for: The kinds that were confused with it.
        waited: How many graphs of earlier steps waited for their backward as its steps began.
    """

    sights: int = 0
    is_by_plans: bool = False
    known: Known | None = None
    plan: Plan | None = None
    programs: Mapping[int, Program] = field(default_factory=dict)
    before: Mapping[frozenset[int], Resident] = field(default_factory=dict)
    is_unfit: bool = False
    is_searching: bool = False
    seen_bytes: int | None = None
    taken_for: frozenset[Kind] = frozenset()
    waited: frozenset[int] = frozenset()

    @property
    def status(self) -> PlanState:
        """What is known of its plan."""
        if self.plan is None:
            return PlanState.SEEN
        if self.plan.measured.peak_bytes is None:
            return PlanState.PLANNED
        return PlanState.MEASURED if self.plan.measured.step_ms is None else PlanState.TIMED


class Kinds:
    """The kinds of steps seen so far.

    Attributes:
        latest: The planned kind that ran last, None before there is one.
    """

    def __init__(self) -> None:
        self.latest: Kind | None = None
        self._records: dict[Kind, KindRecord] = {}  # those that were described last, in the order of that
        self._order = Order()
        self._plans: dict[Kind, Plan] | None = None

    def __getitem__(self, kind: Kind) -> KindRecord:
        record = self._records.get(kind)
        return KindRecord() if record is None else record

    @property
    def plans(self) -> Mapping[Kind, Plan]:
        """The plans so far."""
        if self._plans is None:
            self._plans = {kind: record.plan for kind, record in self._records.items() if record.plan is not None}
        return self._plans

    @property
    def known(self) -> dict[Kind, Known]:
        """What the kinds run that were described."""
        return {kind: record.known for kind, record in self._records.items() if record.known is not None}

    def described(self, kind: Kind) -> Known:
        """Return what a kind runs that was described."""
        known = self[kind].known
        assert known is not None, "only kinds that were described are planned"
        return known

    @property
    def plan_count(self) -> int:
        """The number of plans; what is the same step at the same sizes has one."""
        return len({id(known.solve) for known in self.known.values()})

    @property
    def records(self) -> dict[Kind, KindRecord]:
        """A copy of all that is known."""
        return dict(self._records)

    def restore(self, records: Mapping[Kind, KindRecord]) -> None:
        """Take back all that has changed since these were all that was known."""
        self._records, self._plans = dict(records), None

    def change(self, kind: Kind, **changes: Any) -> None:
        """Learn something of a kind."""
        self._records[kind] = replace(self[kind], **changes)
        if "plan" in changes:
            self._plans = None

    def describe(self, kind: Kind, known: Known) -> None:
        """Learn what a kind runs; where nobody knew, it comes after all others from now on."""
        record = self[kind] if self[kind].known is not None else self._records.pop(kind, KindRecord())
        self._records[kind] = replace(record, known=known)

    def clear(self) -> None:
        """Forget all kinds between two steps, except for what existed before them."""
        self.latest, self._order, self._plans = None, Order(), None
        for kind, record in self._records.items():
            self._records[kind] = KindRecord(before=record.before)

    def install(self, kind: Kind, plan: Plan, programs: Mapping[int, Program], **changes: Any) -> None:
        """Take the plan of a kind and its programs; a kind that is planned for the first time has just ended."""
        if self[kind].plan is None:
            self.latest = kind
        self.change(kind, plan=plan, programs=programs, seen_bytes=None, **changes)

    def foresee(self, start: Start) -> tuple[Kind, ...]:
        """List the kinds that a step may be of, the likeliest first."""
        return tuple(dict.fromkeys(self._order.foresee(start)))

    def likely(self, foreseen: Iterable[Kind]) -> Kind | None:
        """Return the planned kind that a step is likely to be of; None where nothing has a plan."""
        return next((kind for kind in foreseen if kind in self.plans), self.latest)

    def following(self, foreseen: Iterable[Kind]) -> Kind | None:
        """Return the planned kind that is likely to come after the step that begins; None where none is."""
        likely = self.likely(foreseen)
        kind = None if likely is None else self._order.follower(likely)
        return kind if kind in self.plans else None

    def all_likely(self, foreseen: Iterable[Kind]) -> frozenset[Kind]:
        """Return the planned kinds by whose plan a step may run: none before there is one."""
        likely = self.likely(foreseen)
        return frozenset() if likely is None else self.taken_for(likely) & self.plans.keys()

    def taken_for(self, kind: Kind) -> frozenset[Kind]:
        """Return the kinds by whose plans a step of a kind may begin, itself included."""
        return frozenset({kind}) if self._order.is_certain else self[kind].taken_for | {kind}

    def confuse(self, one: Kind, other: Kind) -> None:
        """Learn that a step that began as one kind turned out another."""
        group = self[one].taken_for | self[other].taken_for | {one, other}
        for kind in group:
            self.change(kind, taken_for=group)

    def choose(self, ran: Kind, expected: Kind | None, start: Start) -> tuple[Kind | None, Program | None]:
        """Choose the program of the graph that begins: of the expected kind, else of one that began like the step.

        Args:
            ran: The numbers of the captured graphs of the step, that of this one last.
            expected: The kind by whose plan the step begins, None for none.
            start: How the step has started.

        Returns:
            The kind, None where no planned one begins so; and the program, None where the graph has no backward.
        """
        plans, count = self.plans, len(ran)
        for kind in (expected, *reversed([*plans])):
            if kind is not None and kind[:count] == ran and kind in plans and self.starts_so(kind, start):
                return kind, self[kind].programs.get(count - 1)
        return None, None

    def starts_so(self, kind: Kind, start: Start) -> bool:
        """Whether as many graphs wait as a step starts as did before a step of a kind."""
        return start[1] in self[kind].waited

    def ended(self, kind: Kind, start: Start, is_by_plans: bool) -> None:
        """Learn of a step that ran captured, how it started, and whether it ran by plans throughout."""
        self.note(kind, start)
        if kind in self.plans:
            self.latest = kind
        record = self[kind]
        is_by_plans = record.is_by_plans or is_by_plans
        self.change(kind, sights=record.sights + 1, is_by_plans=is_by_plans, waited=record.waited | {start[1]})

    def note(self, kind: Kind, start: Start) -> None:
        """Learn in which order kinds come, from a step that has ended."""
        self._order.note(kind, start)

    def decided(self) -> Iterator[tuple[Known, Decisions]]:
        """List what each planned kind runs, and what its plan recomputes."""
        return ((self.described(kind), plan.solution.recompute) for kind, plan in self.plans.items())

    def same_code(self, step: Kind | Known) -> Kind:
        """Return the first known kind of step that runs the code of a known step, at whatever sizes."""
        own = step if isinstance(step, Known) else self.described(step)
        return next(other for other, known in self.known.items() if known is own or known.goes_on_as(own, 0))

    def any_is_unfit(self, foreseen: Iterable[Kind]) -> bool:
        """Whether a step of these kinds may run by a plan that counts on gradients to die which do not."""
        return any(self[kind].is_unfit for kind in self.all_likely(foreseen))
