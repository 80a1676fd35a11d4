"""Which steps are watched: their memory measured, their operations timed, or neither. One fixed schedule decides.

A reason to watch steps of a signature gets a few looks at once, then one after 64 steps of the signature, one after
128, 256, and so on. So watching takes ever less of the time, whatever step signatures come in whatever order. What code
outside of a plan takes is seen at little cost in all other steps (`between`): where it has grown, the next step is
measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..housekeeping import Latest
from ..planning.headroom import GUARD_BYTES, guard_bytes
from .step_signature import Reason, StepSignature, Watched

OFTEN = 2  # steps that came before one is measured for a higher prediction: gradients may be left to a step by chance
IN_A_ROW = 8  # steps that are measured at most until one of a signature comes whose frees are seen


class Saw(Enum):
    """What came of measuring a step."""

    NOTHING = "nothing of use for its plan"
    NO_FREES = "not what it freed, since the step before was not measured"
    PEAK = "its peak"


@dataclass(frozen=True, slots=True)
class LookSchedule:
    """When to look for a reason."""

    at_once: int  # looks that it gets at once
    first: int = 64  # steps of the signature after which it gets the next one, then twice as many, and so on

    def is_due(self, looks: int, steps: int) -> bool:
        """Whether there is another look after so many looks and steps."""
        return looks < self.at_once or steps >= self.first << (looks - self.at_once)


SCHEDULES = {
    Reason.PLAN: LookSchedule(at_once=16),
    Reason.PEAK: LookSchedule(at_once=4),
    Reason.TIME: LookSchedule(at_once=2),
    Reason.GROWN: LookSchedule(at_once=8),
    Reason.AGAIN: LookSchedule(at_once=0, first=8),
    Reason.ITERATION: LookSchedule(at_once=8),
}
TO_PLAN = LookSchedule(at_once=64)  # of all signatures and sizes
OF_NEW_PLAN = 2  # looks at the peak and the time of a plan, at once


@dataclass(frozen=True, slots=True)
class Look:
    """What is watched in a step."""

    reason: Reason | None = None  # why, None for no reason
    is_measured: bool = False  # whether its memory is measured
    is_timed: bool = False  # whether its operations are timed


class WatchPolicy:
    """Decides what is watched."""

    def __init__(self) -> None:
        self._without_plans = Watched()  # steps that came before there was any plan
        self._looks_to_plan = self._count = 0  # of steps that have ended
        self._missed = Latest[StepSignature, None](64)
        self._largest_bytes = 0
        self._unseen: tuple[StepSignature, Reason | None] | None = None  # of a look that saw no frees
        self._left_in_a_row = 0

    def step_begins(
        self,
        likely: StepSignature | None,
        foreseen: StepSignature | None,
        size_bytes: int,
        is_piece: bool = False,
        is_free: bool = True,
        is_on_host: bool = False,
    ) -> Look:
        """Decide about a step that begins now.

        Args:
            likely: The planned signature that it is likely to be of, None where nothing has a plan.
            foreseen: The signature that it is likely to be of, planned or not; None where nothing like it came before.
            size_bytes: Of what it is called with.
            is_piece: Whether graphs wait in its iteration, and what that makes beside them was not seen.
            is_free: Whether nobody measures already.
            is_on_host: Whether it runs on the CPU, where its operations can be timed while its memory is measured: a
                GPU's events would count how long it waits for the host.
        """
        is_new = size_bytes > self._largest_bytes or foreseen in self._missed
        reason = Reason.PLAN if likely is None or is_new else _reason(likely, is_piece, is_free)
        signature = foreseen if reason is Reason.PLAN else likely
        own = self._without_plans if signature is None else signature.watched
        is_any_left = reason is not Reason.PLAN or TO_PLAN.is_due(self._looks_to_plan, self._count)
        if reason is not None and is_any_left and SCHEDULES[reason].is_due(own.looks[reason], own.steps):
            own.looks[reason] += 1
            self._looks_to_plan += reason is Reason.PLAN
            is_measured = reason is not Reason.TIME
        else:
            reason = None if self._unseen is None else self._unseen[1]
            is_measured = self._unseen is not None
        if likely is not None and is_free:
            likely.watched.higher += _is_higher(likely)
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        return Look(reason, is_measured, reason is Reason.TIME or (is_measured and likely is None and is_on_host))

    def step_ended(self, look: Look, signature: StepSignature, saw: Saw = Saw.NOTHING) -> None:
        """Learn that a step has ended, and what came of measuring it; of one that failed nothing is learned."""
        self._count += 1
        signature.watched.steps += 1
        if saw is Saw.PEAK:
            signature.watched.has_grown = False
        self._left_in_a_row -= 1
        if self._unseen is None and saw is Saw.NO_FREES:
            self._unseen, self._left_in_a_row = (signature, look.reason), IN_A_ROW
        elif self._unseen is not None and (
            not self._left_in_a_row or (saw is Saw.PEAK and signature is self._unseen[0])
        ):
            self._unseen = None

    def planned(self, signature: StepSignature) -> None:
        """Learn that a step signature has another plan, whose peak and time are to be seen."""
        looks = signature.watched.looks
        for reason in (Reason.PEAK, Reason.TIME):
            looks[reason] = min(looks[reason], SCHEDULES[reason].at_once - OF_NEW_PLAN)

    def missed(self, signature: StepSignature) -> None:
        """Learn that a step was to be measured, for its signature to be planned, and was not."""
        self._missed[signature] = None

    def found(self, signature: StepSignature) -> None:
        """Learn that a step was measured whose signature has no plan."""
        self._missed.pop(signature, None)


def _reason(signature: StepSignature, is_piece: bool, is_free: bool) -> Reason | None:
    """Find why to watch a step that is likely of a planned signature, None for no reason."""
    measured, own = signature.own_plan.measured, signature.watched
    if measured.peak_bytes is None or (is_free and own.higher >= OFTEN and _is_higher(signature)):
        return Reason.PEAK
    if is_piece and is_free:
        return Reason.ITERATION
    if measured.step_ms is None:
        return Reason.TIME
    if own.has_grown and is_free:
        return Reason.GROWN
    return Reason.AGAIN if is_free and signature.recorded.outside_bytes > GUARD_BYTES else None


def _is_higher(signature: StepSignature) -> bool:
    """Whether clearly more is predicted for steps of a signature than for those whose peaks were measured."""
    plan, predicted_bytes = signature.own_plan, signature.own_plan.measured.predicted_bytes
    higher_bytes = 0 if predicted_bytes is None else plan.planned_peak_bytes - predicted_bytes
    return higher_bytes > guard_bytes(plan.budget_bytes)  # and not by a loss that is kept
