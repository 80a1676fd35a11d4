"""The history of a model's steps: the signatures that have come, in which order, and which one is likely to come next.

The signature of a step is known for sure only when the step has ended, since signatures may begin alike (the two of a
GAN, for example). Until then these words say what it may be:

- foreseen: all signatures that it may have, planned or not, the likeliest first; they followed the latest signatures
  before (`History.foresee`);
- likely: the first of these that has a plan (`History.likely`);
- taken for: the signatures that begin with the same graph, once one of them was mistaken for another
  (`History.taken_for`);
- all likely: the planned signatures that the likely one may be taken for (`History.all_likely`);
- expected: the one of these whose eager step needs most (`History.expect`); the step begins by its plan.

A step that turns out to have another signature than the expected one is not compared with the plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ..calls.module_call import ModuleCall
from ..housekeeping import Latest
from ..planning.plan import Plan
from ..running.program import Program
from .recorded_step import RecordedStep
from .step_signature import GraphNumbers, Start, StepSignature

LENGTHS = (32, 16, 8, 4, 2, 1, 0)  # numbers of latest signatures by which the next one is foreseen
SEEN = 1024  # most signatures without a record that are kept: new sizes may never end
CERTAIN = 64  # trust the forecast after so many consecutive steps that came as foreseen


class Order:
    """The order of step signatures: which one last followed the latest ones, by how the step started."""

    def __init__(self) -> None:
        self._recent: deque[StepSignature] = deque(maxlen=LENGTHS[0])
        self._followers = Latest[tuple[object, ...], StepSignature](4096)  # by start and the latest signatures
        self._in_a_row = 0  # consecutive steps that came as foreseen

    @property
    def is_certain(self) -> bool:
        """Whether the latest `CERTAIN` steps came as foreseen."""
        return self._in_a_row >= CERTAIN

    def _contexts(self, start: Start) -> Iterator[tuple[object, ...]]:
        """Yield keys to foresee a step by: its start with the latest signatures, from 32 of them down to none."""
        recent = tuple(self._recent)
        for length in LENGTHS:
            if length <= len(recent):
                yield start, *recent[len(recent) - length :]

    def foresee(self, start: Start) -> Iterator[StepSignature]:
        """Yield the signatures that a step may have, the likeliest first; none if no step has started so."""
        return self._following(self._contexts(start))

    def _following(self, contexts: Iterable[tuple[object, ...]]) -> Iterator[StepSignature]:
        return (signature for context in contexts if (signature := self._followers.get(context)) is not None)

    def note(self, signature: StepSignature, start: Start) -> None:
        """Store which signatures a step that has ended has followed."""
        contexts = tuple(self._contexts(start))
        self._in_a_row = self._in_a_row + 1 if signature == next(self._following(contexts), None) else 0
        for context in contexts:
            self._followers[context] = signature
        self._recent.append(signature)


class History:
    """The step signatures that a session has seen. It makes them, and sets their steps and plans.

    Attributes:
        latest: The planned signature that ran last, None before there is one.
        margin_bytes: Most bytes by which a step of sizes never traced was measured above its prediction.
    """

    def __init__(self) -> None:
        self.latest: StepSignature | None = None
        self._dropped_plan: Plan | None = None  # `latest_plan` when a signature was dropped last
        self.margin_bytes = 0
        self._recorded: dict[GraphNumbers, StepSignature] = {}  # in the order in which they were recorded
        self._seen = Latest[GraphNumbers, StepSignature](SEEN)  # signatures without a record
        self._order = Order()
        self._confusing = set[GraphNumbers]()  # the first graph of signatures that were mistaken for each other

    def get_or_make(self, graphs: GraphNumbers) -> StepSignature:
        """Return the signature that runs some captured graphs; it is made the first time."""
        return self._recorded.get(graphs) or self._seen.get_or(graphs, lambda: StepSignature(graphs))

    def __iter__(self) -> Iterator[StepSignature]:
        return iter((*self._recorded.values(), *self._seen.values()))

    @property
    def planned(self) -> list[StepSignature]:
        """The signatures that have a plan, in the order in which they were recorded."""
        return [signature for signature in self._recorded.values() if signature.plan is not None]

    @property
    def recorded(self) -> list[StepSignature]:
        """The signatures that have a recorded step, in the order in which they were recorded."""
        return [signature for signature in self._recorded.values() if signature.step is not None]

    @property
    def plan_count(self) -> int:
        """The number of plans, with the rungs of all ladders."""
        return len(self.recorded) + sum(len(signature.ladder.rungs) for signature in self._recorded.values())

    @property
    def latest_plan(self) -> Plan | None:
        """The plan of the latest signature, even if it was dropped since; None before there is one."""
        return self._dropped_plan if self.latest is None else self.latest.own_plan

    # ---------------------------------------------------------------- changes of signatures

    def record(self, signature: StepSignature, step: RecordedStep) -> None:
        """Store the recorded step of a signature, new or changed; a new one makes it the last of `recorded`."""
        if signature.step is None:
            self._seen.pop(signature.graphs, None)
            self._recorded.pop(signature.graphs, None)
            self._recorded[signature.graphs] = signature
        signature.step = step

    def install(self, signature: StepSignature, plan: Plan, programs: Mapping[int, Program]) -> None:
        """Store the plan of a signature, new or changed, and its programs; with its first plan it becomes `latest`."""
        if signature.plan is None:
            self.latest = signature
        signature.plan, signature.programs = plan, programs

    def drop(self, signature: StepSignature) -> None:
        """Drop the recorded step and the plan of a signature: its next step is recorded again."""
        self._dropped_plan = self.latest_plan
        signature.step, signature.plan, signature.programs = None, None, {}
        if self.latest is signature:
            self.latest = None

    def ended(self, signature: StepSignature, start: Start, is_by_plans: bool, fits_nothing: bool) -> None:
        """Count a captured step of a signature, with its start and the facts that `PastSteps` describes."""
        self.note(signature, start)
        if signature.plan is not None:
            self.latest = signature
        past = signature.past
        past.count, past.waited = past.count + 1, past.waited | {start[1]}
        past.is_by_plans = past.is_by_plans or is_by_plans
        past.fits_nothing = past.fits_nothing or fits_nothing

    def note(self, signature: StepSignature, start: Start) -> None:
        """Store in which order signatures come, after a step that has ended."""
        self._order.note(signature, start)

    def confuse(self, expected: StepSignature) -> None:
        """Remember the first graph of a signature that was mistaken for another: all that begin so may be confused."""
        self._confusing.add(expected.graphs[:1])

    # ---------------------------------------------------------------- which signature a step is of

    def foresee(self, start: Start) -> tuple[StepSignature, ...]:
        """Return the signatures that a step may have, the likeliest first."""
        return tuple(dict.fromkeys(self._order.foresee(start)))

    def likely(self, foreseen: Iterable[StepSignature]) -> StepSignature | None:
        """Return the planned signature that a step is likely to have; None if none has a plan."""
        return next((signature for signature in foreseen if signature.plan is not None), self.latest)

    def all_likely(self, foreseen: Iterable[StepSignature]) -> list[StepSignature]:
        """List the planned signatures by whose plan a step may run."""
        likely = self.likely(foreseen)
        taken_for = frozenset[StepSignature]() if likely is None else self.taken_for(likely)
        return [signature for signature in self.planned if signature in taken_for]

    def taken_for(self, signature: StepSignature) -> frozenset[StepSignature]:
        """Return the signatures by whose plans a step of a signature may begin, itself included."""
        if self._order.is_certain or signature.graphs[:1] not in self._confusing:
            return frozenset({signature})
        return frozenset(other for other in self if other.graphs[:1] == signature.graphs[:1])

    def expect(self, foreseen: Iterable[StepSignature]) -> StepSignature | None:
        """Choose the signature by whose plan a step begins; None if there is no plan."""
        all_likely = self.all_likely(foreseen)
        return max(all_likely, key=lambda signature: signature.own_plan.unplanned_peak_bytes, default=None)

    def begins_unknown(self, foreseen: Iterable[StepSignature], expected: StepSignature | None) -> bool:
        """Whether a step likely has a signature without a plan that runs more than the expected one."""
        if expected is None:
            return False
        signature = next(iter(foreseen), expected)
        is_like = signature.graphs[:1] == expected.graphs[:1] and not signature.past.is_by_plans
        return signature.plan is None and is_like and place_in(expected, signature.graphs) is None

    def choose(
        self, ran: GraphNumbers, expected: StepSignature | None, start: Start, fits: Callable[[StepSignature], bool]
    ) -> tuple[StepSignature | None, Program | None]:
        """Choose the program of the graph that begins: of the expected signature, else of one that began like the step.

        A step that runs only some graphs of the expected signature, in the same order, goes on by its plan: it takes no
        more memory.

        Args:
            ran: The captured graphs of the step so far, the one that begins last.
            expected: The signature by whose plan the step begins, None for none.
            start: How the step has started.
            fits: Returns whether the step fits if it goes on by the plan of a signature.

        Returns:
            The signature, None if no planned one begins so; and the program, None if the graph has no backward in it.
        """
        is_planned = expected is not None and expected.plan is not None
        if expected is not None and is_planned and expected.graphs[:1] == ran[:1] and starts_so(expected, start):
            place = len(ran) - 1 if expected.graphs[: len(ran)] == ran else place_in(expected, ran)
            if place is not None:
                return expected, expected.programs.get(place)
        alike = [one for one in self.planned if one.graphs[: len(ran)] == ran and starts_so(one, start)]
        taken = self.taken_for(alike[-1]) if alike else ()
        by_need = sorted(
            (signature for signature in alike if signature in taken),
            key=lambda signature: signature.own_plan.unplanned_peak_bytes,
        )
        signature = next((signature for signature in reversed(by_need) if fits(signature)), None)
        return signature, None if signature is None else signature.programs.get(len(ran) - 1)

    # ---------------------------------------------------------------- their code

    def store_calls(self, signature: StepSignature, calls: Sequence[ModuleCall]) -> None:
        """Store the calls of a planned signature, and its code: eager steps of other sizes are predicted from them."""
        signature.calls, signature.code = tuple(calls), self.same_code(signature.recorded)
        if signature.largest is not None:
            larger, becomes = signature.largest
            larger.calls, larger.code = tuple(call.at(becomes) for call in calls), self.same_code(larger.recorded)

    def same_code(self, step: RecordedStep) -> StepSignature:
        """Return the first recorded signature that runs the code of a recorded step, at any sizes."""
        return next(
            signature for signature in self.recorded if signature.step is step or signature.recorded.goes_on_as(step, 0)
        )


def starts_so(signature: StepSignature, start: Start) -> bool:
    """Whether as many graphs wait at this start as before some step of the signature."""
    return start[1] in signature.past.waited


def place_in(signature: StepSignature, ran: GraphNumbers) -> int | None:
    """Return the place of the last graph of `ran` in a signature that runs all of them in this order, among others.

    Return None if it does not, or if graphs wait for a later backward in its steps.
    """
    if signature.step is None or signature.step.waits:
        return None
    place = -1
    for number in ran:
        if number not in signature.graphs[place + 1 :]:
            return None
        place = signature.graphs.index(number, place + 1)
    return place
