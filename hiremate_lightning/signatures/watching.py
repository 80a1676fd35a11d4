"""Which steps are watched, that is, their memory measured or their operations timed: by a fixed schedule.

For each reason, a few steps of a signature are watched at once, then one after 64 steps of the signature, after 128,
256, and so on. So the share of time spent on watching falls, whatever the order of signatures. All other steps show at
little cost whether code outside of the plan allocates more (`memory.metering.Between`); if so, the next step is
measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..housekeeping import Latest
from ..planning.headroom import GUARD_BYTES, guard_bytes
from .step_signature import Reason, StepSignature, Watched

OFTEN = 2  # measure a higher prediction again after so many steps: gradients may exist before one step by chance
IN_A_ROW = 8  # most consecutive steps to measure until one of the signature shows what it frees


class Shown(Enum):
    """What the measurement of a step has shown."""

    NOTHING = "nothing of use for its plan"
    NO_FREES = "not what it freed, since the step before was not measured"
    PEAK = "its peak"


@dataclass(frozen=True, slots=True)
class LookSchedule:
    """How many steps to watch for one reason, and when."""

    at_once: int  # number of steps to watch at once
    first: int = 64  # watch the next one after so many steps of the signature, then after twice as many, and so on

    def is_due(self, looks: int, steps: int) -> bool:
        """Whether to watch another step, after so many watched steps of so many."""
        return looks < self.at_once or steps >= self.first << (looks - self.at_once)


SCHEDULES = {
    Reason.PLAN: LookSchedule(at_once=16),
    Reason.PEAK: LookSchedule(at_once=4),
    Reason.TIME: LookSchedule(at_once=2),
    Reason.GROWN: LookSchedule(at_once=8),
    Reason.AGAIN: LookSchedule(at_once=0, first=8),
    Reason.ITERATION: LookSchedule(at_once=8),
}
TO_PLAN = LookSchedule(at_once=64)  # measured to make plans, for all signatures and sizes together
OF_NEW_PLAN = 2  # least number of steps to watch for the peak of a new plan, and for its time


@dataclass(frozen=True, slots=True)
class Look:
    """Whether a step is measured or timed."""

    reason: Reason | None = None  # why; None if it is not watched
    is_measured: bool = False  # whether its memory is measured
    is_timed: bool = False  # whether its operations are timed


@dataclass(frozen=True, slots=True)
class WatchFacts:
    """What decides whether a step that begins is measured or timed."""

    likely: StepSignature | None  # the planned signature that it likely has; None if there is no plan
    foreseen: StepSignature | None  # the signature that it likely has, planned or not; None if none started like it
    size_bytes: int  # bytes of its arguments
    needs_iteration: bool = False  # whether graphs wait in its iteration, whose added memory was not measured
    is_free: bool = True  # whether memory is not being measured already
    # Whether it runs on the CPU, where its operations can be timed while its memory is measured: on a GPU the events
    # would include time in which it waits for the host.
    is_on_host: bool = False


class WatchPolicy:
    """Decides which steps are measured or timed."""

    def __init__(self) -> None:
        self._without_plans = Watched()  # watched steps before there was any plan
        self._looks_to_plan = self._count = 0  # steps measured to make plans, and all steps that have ended
        self._missed = Latest[StepSignature, None](64)  # signatures to plan whose step was not measured
        self._largest_bytes = 0  # most bytes of arguments of a step
        # Signature and reason of a step whose frees were not seen: the next steps are measured too.
        self._unseen: tuple[StepSignature, Reason | None] | None = None
        self._left_in_a_row = 0  # how many of them

    def choose_look(self, step: WatchFacts) -> Look:
        """Decide whether to measure or time a step; the step counts as watched then."""
        likely = step.likely
        is_new = step.size_bytes > self._largest_bytes or step.foreseen in self._missed
        reason = Reason.PLAN if likely is None or is_new else _reason(likely, step)
        signature = step.foreseen if reason is Reason.PLAN else likely
        watched = self._without_plans if signature is None else signature.watched
        is_any_left = reason is not Reason.PLAN or TO_PLAN.is_due(self._looks_to_plan, self._count)
        if reason is not None and is_any_left and SCHEDULES[reason].is_due(watched.looks[reason], watched.steps):
            watched.looks[reason] += 1
            self._looks_to_plan += reason is Reason.PLAN
            is_measured = reason is not Reason.TIME
        else:
            reason = None if self._unseen is None else self._unseen[1]
            is_measured = self._unseen is not None
        if likely is not None and step.is_free:
            likely.watched.higher += _is_higher(likely)
        self._largest_bytes = max(self._largest_bytes, step.size_bytes)
        is_timed = reason is Reason.TIME or (is_measured and likely is None and step.is_on_host)
        return Look(reason, is_measured, is_timed)

    def step_ended(self, look: Look, signature: StepSignature, shown: Shown = Shown.NOTHING) -> None:
        """Count a step that has ended, with what its measurement has shown; not called for a step that failed."""
        self._count += 1
        signature.watched.steps += 1
        if shown is Shown.PEAK:
            signature.watched.has_grown = False
        self._left_in_a_row -= 1
        if self._unseen is None and shown is Shown.NO_FREES:
            self._unseen, self._left_in_a_row = (signature, look.reason), IN_A_ROW
        elif self._unseen is not None and (
            not self._left_in_a_row or (shown is Shown.PEAK and signature is self._unseen[0])
        ):
            self._unseen = None

    def planned(self, signature: StepSignature) -> None:
        """Watch steps of a signature again, for the peak and the time of its new plan."""
        looks = signature.watched.looks
        for reason in (Reason.PEAK, Reason.TIME):
            looks[reason] = min(looks[reason], SCHEDULES[reason].at_once - OF_NEW_PLAN)

    def missed(self, signature: StepSignature) -> None:
        """Measure the next step of a signature, which is to be planned but was not measured."""
        self._missed[signature] = None

    def found(self, signature: StepSignature) -> None:
        """Cancel `missed` for a signature: a step of it was measured."""
        self._missed.pop(signature, None)


def _reason(signature: StepSignature, step: WatchFacts) -> Reason | None:
    """Return why to watch a step that likely has this planned signature; None for no reason."""
    measured, watched = signature.own_plan.measured, signature.watched
    if measured.peak_bytes is None or (step.is_free and watched.higher >= OFTEN and _is_higher(signature)):
        return Reason.PEAK
    if step.needs_iteration and step.is_free:
        return Reason.ITERATION
    if measured.step_ms is None:
        return Reason.TIME
    if watched.has_grown and step.is_free:
        return Reason.GROWN
    return Reason.AGAIN if step.is_free and signature.recorded.outside_bytes > GUARD_BYTES else None


def _is_higher(signature: StepSignature) -> bool:
    """Whether the predicted peak of a signature is clearly above that of its measured steps."""
    plan, predicted_bytes = signature.own_plan, signature.own_plan.measured.predicted_bytes
    higher_bytes = 0 if predicted_bytes is None else plan.planned_peak_bytes - predicted_bytes
    return higher_bytes > guard_bytes(plan.budget_bytes)  # a loss that is kept is smaller
