"""Which steps are watched: their memory measured, their operations timed, or neither. One policy decides.

To watch a step takes time. A few steps of each kind are watched whatever that takes, to plan it and to see how its plan
does. All other watching takes at most 1 % of the time of any 500 steps, whatever kinds of steps come in whatever order.
So peaks get glances then. A look that alone takes more waits until it is 1 % of the time that has passed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from statistics import median

from .step_kind import PlanState, Reason, StepKind, Watched

SHARE = 0.01  # of the time of so many steps that watching may take
STEPS = 500
OFTEN = 2  # such steps that came before: gradients may be left to a step by chance
REMEMBERED = 64  # kinds that were missed


class Watch(Enum):
    """What is done in a step beside running it."""

    NOTHING = "nothing"
    TIME = "time"
    GLANCE = "glance"  # its memory is measured, without a look at all objects of the process
    MEASURE = "measure"


MEASURED = (Watch.GLANCE, Watch.MEASURE)


class Saw(Enum):
    """What came of measuring a step."""

    NOTHING = "nothing of use for its plan"
    NO_FREES = "not what it freed, since the step before was not measured"
    PEAK = "its peak"


OF_PEAKS = (Reason.PEAK, Reason.AGAIN, Reason.ITERATION)
DEAR = 5  # times of a step that watching is taken for, before that was seen
FREE = {
    Reason.PLAN: 16,
    Reason.PEAK: 4,
    Reason.TIME: 2,
    Reason.AGAIN: 2,
    Reason.ITERATION: 8,
}  # looks of each kind, whatever they take
FREE_OF_KIND = 24  # looks in all, be it planned anew ever so often
FIRST = 64  # steps of each kind, after which no look at it is free
FREE_TO_PLAN = 64  # looks in all, whatever sizes come


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of a step that begins.

    Attributes:
        kind: The planned kind that it is likely to be of, None where nothing has a plan.
        foreseen: The kind that it is likely to be of, planned or not; None where nothing like it came before.
        size_bytes: Of what it is called with.
        status: What is known of that kind.
        may_grow: Whether code outside of its plan takes memory, which may come to be more.
        is_higher: Whether more is predicted for it than for the steps of its plan whose peaks were measured.
        is_piece: Whether graphs wait in its iteration, and what that makes beside them was not seen.
        is_on_host: Whether it runs on the CPU, where its operations can be timed while its memory is measured: a GPU's
            events would count how long it waits for the host.
        following: What is known of the step that is likely to come after it, None for nothing.
    """

    kind: StepKind | None
    foreseen: StepKind | None
    size_bytes: int
    status: PlanState = PlanState.PLANNED
    may_grow: bool = False
    is_higher: bool = False
    is_piece: bool = False
    is_on_host: bool = False
    following: Expected | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """What is watched in a step.

    Attributes:
        began_at: When the step began, in seconds.
        watch: What is done beside running it.
        reason: Why, None for no reason.
        is_timed: Whether its operations are timed.
        for_next: The kind that is to follow, where the step is measured to see what that frees; else None.
    """

    began_at: float
    watch: Watch
    reason: Reason | None
    is_timed: bool
    for_next: StepKind | None

    @property
    def is_measured(self) -> bool:
        """Whether its memory is measured."""
        return self.watch in MEASURED


class WatchPolicy:
    """Decides what is watched, and keeps account of what that took.

    Args:
        clock: Tells the seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._account = _Account()
        self._without_plans = Watched()  # steps that came before there was any plan
        self._looks_to_plan = self._count = 0  # of steps that have ended
        self._missed: dict[StepKind, None] = {}
        self._largest_bytes = 0
        self._before: Look | None = None  # the step before
        self._ended: tuple[float, Watch, StepKind] | None = None  # the step before, until the next one begins

    # ---------------------------------------------------------------- the decision

    def reason(self, expected: Expected) -> Reason | None:
        """Find why to watch the step that begins, None for no reason."""
        own = self._of(expected.kind)
        is_larger = expected.size_bytes > self._largest_bytes
        if expected.kind is None or is_larger or expected.foreseen in self._missed:
            return Reason.PLAN
        if expected.status is PlanState.PLANNED or (expected.is_higher and own.higher >= OFTEN):
            return Reason.PEAK
        if expected.is_piece:
            return Reason.ITERATION
        if expected.status is PlanState.MEASURED:
            return Reason.TIME
        return Reason.AGAIN if expected.may_grow and own.since >= own.gap else None

    def _decide(self, expected: Expected) -> tuple[Watch, Reason | None, Expected]:
        """Return what to watch, why, and for which step: it may be the next one, whose peak is to be seen."""
        reason, following, count = self.reason(expected), expected.following, 1
        if reason in OF_PEAKS and self._needs_step_before(expected):
            before = self._before
            if before is not None and before.for_next == expected.kind:
                return before.watch, reason, expected
            reason = reason if before is not None and before.is_measured else None  # else its peak would not be seen
        if reason is None and following is not None and self._needs_step_before(following):
            expected, reason, count = following, self.reason(following), 2
            reason = reason if reason in OF_PEAKS else None
        if reason is None:
            return Watch.NOTHING, None, expected
        is_free = self._is_free(reason, expected)
        watch = Watch.MEASURE if is_free or reason not in OF_PEAKS else Watch.GLANCE
        watch = Watch.TIME if reason is Reason.TIME else watch
        return (watch if is_free or self._account.affords(watch, count) else Watch.NOTHING), reason, expected

    def _needs_step_before(self, expected: Expected) -> bool:
        """Whether the peak of a kind is seen only where the step before was measured."""
        return self._of(expected.kind).needs_step_before

    def _is_free(self, reason: Reason, expected: Expected) -> bool:
        """Whether the kind, or the size, has not used up the looks that it has whatever they take."""
        own = self._of(expected.foreseen if reason is Reason.PLAN else expected.kind)
        if reason is Reason.PLAN:
            return own.looks[reason] < FREE[reason] and self._looks_to_plan < FREE_TO_PLAN
        if reason is Reason.AGAIN and self._count > STEPS:
            return False
        return own.looks[reason] < FREE[reason] and own.looks_in_all < FREE_OF_KIND and own.steps < FIRST

    # ---------------------------------------------------------------- what it learns

    def _of(self, kind: StepKind | None) -> Watched:
        return self._without_plans if kind is None else kind.watched

    def step_begins(self, expected: Expected) -> Look:
        """Decide about a step that begins now."""
        watch, reason, wanted = self._decide(expected)
        if watch is not Watch.NOTHING and reason is not None:
            self._of(wanted.foreseen if reason is Reason.PLAN else wanted.kind).looks[reason] += 1
            self._looks_to_plan += reason is Reason.PLAN
            self._of(wanted.kind).looks_in_all += 1
        self._of(expected.kind).higher += expected.is_higher
        self._largest_bytes = max(self._largest_bytes, expected.size_bytes)
        self._before = None
        is_first = watch is Watch.MEASURE and expected.kind is None
        is_timed = watch is Watch.TIME or (is_first and expected.is_on_host)
        for_next = wanted.kind if watch in MEASURED and wanted is expected.following else None
        return Look(self._clock(), watch, reason, is_timed, for_next)

    def plain_step_begins(self, is_informative: bool) -> Look:
        """Decide about a step that begins now and runs as the user wrote it: it is measured where that says more."""
        self._before = None
        return Look(self._clock(), Watch.MEASURE if is_informative else Watch.NOTHING, None, False, None)

    def step_ended(self, look: Look, kind: StepKind, saw: Saw = Saw.NOTHING, is_usual: bool = True) -> None:
        """Learn that a step has ended; of one that failed nothing is learned.

        Args:
            look: What was watched in it.
            kind: What it was.
            saw: What came of measuring it.
            is_usual: Whether it did nothing else that takes time, as capturing does.
        """
        self._before = look
        self._ended = (look.began_at, look.watch, kind) if is_usual else None
        own = self._of(kind)
        own.steps, own.since = own.steps + 1, own.since + 1
        self._count += 1
        own.needs_step_before = own.needs_step_before or saw is Saw.NO_FREES
        if saw is Saw.PEAK and look.reason is Reason.AGAIN:
            own.since, own.gap = 0, 2 * own.gap

    def account_for_last_step(self) -> None:
        """Put the time of the step that has ended into the account; to be called as the next one begins."""
        if self._ended is not None:
            began_at, watch, kind = self._ended
            self._ended = None
            self._account.add(self._clock() - began_at, watch, kind)

    def planned(self, kind: StepKind) -> None:
        """Learn that a kind of step has another plan, whose peak and time are to be seen."""
        looks = self._of(kind).looks
        for reason in (Reason.PEAK, Reason.TIME):
            looks[reason] = min(looks[reason], FREE[reason] - 2)

    def missed(self, kind: StepKind) -> None:
        """Learn that a step was to be measured, for its kind to be planned, and was not."""
        self._missed.pop(kind, None)
        self._missed[kind] = None
        if len(self._missed) > REMEMBERED:
            del self._missed[next(iter(self._missed))]

    def found(self, kind: StepKind) -> None:
        """Learn that a step was measured whose kind has no plan."""
        self._missed.pop(kind, None)


class _Account:
    """What the latest steps took, and how much of that was for watching them."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS)  # seconds of each, and those for watching
        self._extra = {watch: deque[float](maxlen=5) for watch in (Watch.TIME, *MEASURED)}
        self._unwatched_s = 0.0  # since a step was watched

    def add(self, seconds: float, watch: Watch, kind: StepKind) -> None:
        """Add a step."""
        if watch is Watch.NOTHING:
            kind.watched.usual_s = seconds
            self._unwatched_s += seconds
            self._steps.append((seconds, 0.0))
            return
        usual_s = min(seconds, self._mean_s() if kind.watched.usual_s is None else kind.watched.usual_s)
        self._extra[watch].append(seconds - usual_s)
        self._unwatched_s = 0.0
        self._steps.append((usual_s, seconds - usual_s))

    def _mean_s(self) -> float:
        return sum(usual for usual, _ in self._steps) / len(self._steps) if self._steps else 0.0

    def _foresee_s(self, watch: Watch) -> float:
        """Return the seconds that watching a step takes; a glance takes no more than a look."""
        if self._extra[watch]:
            return median(self._extra[watch])
        looks = self._extra[Watch.MEASURE] if watch is Watch.GLANCE else ()
        return min(DEAR * self._mean_s(), median(looks) if looks else float("inf"))

    def affords(self, watch: Watch, count: int) -> bool:
        """Whether so many more steps may be watched."""
        extra_s = count * self._foresee_s(watch)
        allowed_s = SHARE * STEPS * self._mean_s()
        if not allowed_s:
            return False  # what a step takes was not seen yet
        if extra_s > allowed_s:
            return extra_s <= SHARE * self._unwatched_s
        return sum(spent for _, spent in self._steps) + extra_s <= allowed_s
