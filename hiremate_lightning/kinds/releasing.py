"""Kinds of steps whose plan gains nothing: they are given back to eager PyTorch.

Where nothing fits the budget, a plan may take as much memory as no plan. Once a step without it has shown that, all
such steps run eager. Where the step fits the budget as the user wrote it, such a plan recomputes nothing. Whether
it costs time is measured: steps run planned and plain in turns, some of each. The lower quartiles decide, once for each
plan, since other programs on the machine only add to the time of a step. Both ways give the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import quantiles

from .. import thresholds
from .step_kind import StepKind

SETTLED_STEPS = 8  # of a kind that ran by its plan before plain steps are tried
SAMPLES = 12  # steps of each way that are timed
CLEARLY_SLOWER = 1.05  # a plan than eager PyTorch, or it stays
TRIES = 4  # plain steps to measure in a row, until one shows its peak


@dataclass(frozen=True, slots=True)
class Timing:
    """A step whose time is taken, to the beginning of the next one.

    Attributes:
        began_at: When it began, in seconds.
        kind: Its kind.
        is_plain: Whether it runs without its plan.
    """

    began_at: float
    kind: StepKind
    is_plain: bool


def gains_nothing(kind: StepKind, plain_bytes: int, free_bytes: Callable[[], int]) -> bool:
    """Whether a step needs no plan that was measured and timed.

    So it is where the plan recomputes nothing and the step fits without it. So it is too where nothing fits and the
    plan saves no memory. `plain_bytes` are what the step adds without its plan, `free_bytes` returns what the device
    could still hand out.
    """
    plan, step = kind.own_plan, kind.recorded
    if plan.measured.step_ms is None or step.waits:
        return False
    if plan.planned_peak_bytes > plan.budget_bytes:
        return saves_nothing(kind, plain_bytes, free_bytes)
    room = replace(plan.room, margin_bytes=step.margin_bytes)
    return plan.solution.is_plain and (plan.budget.is_whole or plain_bytes <= room.step_bytes)


def saves_nothing(kind: StepKind, plain_bytes: int, free_bytes: Callable[[], int]) -> bool:
    """Whether nothing fits, the plan saves no memory, and the device has memory to run without it.

    The arguments are those of `gains_nothing`.
    """
    if not kind.own_plan.saves_nothing or kind.recorded.waits:
        return False
    return kind.trial.is_released is not None or plain_bytes - kind.own_plan.planned.peak_bytes < free_bytes()


class Releases:
    """Times kinds of steps with and without their plans, and decides which are given back."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def runs_plain(self, kind: StepKind) -> bool:
        """Whether the next step of a kind, whose plan gains nothing, is to run plain.

        A plan that saves no memory is not timed: as soon as a plain step has shown that it takes no more, all run so.
        """
        trial = kind.trial
        if trial.is_released is not None:
            return trial.is_released
        if kind.plan is not None and kind.plan.saves_nothing:
            return True
        return trial.planned_steps >= SETTLED_STEPS and len(trial.seconds[False]) > len(trial.seconds[True])

    def step_begins(self, kind: StepKind, is_plain: bool, is_watched: bool) -> Timing | None:
        """Learn that a step begins; what is watched is not timed.

        Returns:
            What `next_begins` is to be given if the step does not fail; None where it is not timed.
        """
        trial = kind.trial
        trial.planned_steps += not is_plain and not is_watched
        is_timed = trial.is_released is None and trial.planned_steps >= SETTLED_STEPS and not is_watched
        return Timing(self._clock(), kind, is_plain) if is_timed else None

    def next_begins(self, timing: Timing) -> float | None:
        """Learn that the step after one that was timed begins.

        Returns:
            The time of the plan over that without it, where the kind is given back from now on; else None.
        """
        trial = timing.kind.trial
        trial.seconds[timing.is_plain].append(self._clock() - timing.began_at)
        if min(map(len, trial.seconds.values())) < SAMPLES:
            return None
        planned_s, plain_s = (quantiles(trial.seconds[is_plain])[0] for is_plain in (False, True))
        ratio = planned_s / plain_s
        trial.is_released = ratio > CLEARLY_SLOWER
        return ratio if trial.is_released else None

    def is_to_be_measured(self, kind: StepKind) -> bool:
        """Whether to measure a plain step of a kind whose plan does not fit: it may take more than the plan."""
        return kind.trial.is_released is None

    def measured(self, kind: StepKind, peak_bytes: int | None, plan_bytes: int) -> bool | None:
        """Learn what a plain step takes of a kind whose plan does not fit, and takes so much.

        Args:
            kind: The kind.
            peak_bytes: The peak of the plain step, None where the measurement did not see all.
            plan_bytes: The peak of its plan.

        Returns:
            Whether such steps run plain from now on; None as long as no plain step has shown its peak.
        """
        trial = kind.trial
        trial.tries += 1
        if peak_bytes is not None or trial.tries == TRIES:
            most_bytes = thresholds.current.released_peak * plan_bytes
            trial.is_released = peak_bytes is not None and peak_bytes <= most_bytes
        return trial.is_released

    def keep(self, kind: StepKind) -> None:
        """Learn that a kind takes more than its budget without its plan."""
        kind.trial.is_released = False
