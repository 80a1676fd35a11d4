"""Kinds of steps whose plan recomputes nothing and that are faster without it: they are given back to eager PyTorch.

Such a plan saves nothing that the budget needs where the step fits as the user wrote it. Whether it costs time is
measured: steps run planned and plain in turns, some of each, and the medians decide, once for each plan. Both give the
same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from .kinds import Kind

SETTLED_STEPS = 8  # of a kind that ran by its plan before plain steps are tried
SAMPLES = 6  # steps of each way that are timed
CLEARLY_SLOWER = 1.15  # a plan than eager PyTorch, or it stays


@dataclass
class _Timings:
    """What is known of a kind of step.

    Attributes:
        settled: How many steps ran by its plan, unwatched.
        seconds: Of steps that ran plain, and of those that ran by the plan.
        is_released: Whether it runs plain from now on, None before that is decided.
    """

    settled: int = 0
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    is_released: bool | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """A step whose time is taken, to the beginning of the next one.

    Attributes:
        began_at: When it began, in seconds.
        kind: Its kind.
        is_plain: Whether it runs without its plan.
    """

    began_at: float
    kind: Kind
    is_plain: bool


class Releases:
    """Times kinds of steps with and without their plans, and decides which are given back.

    Args:
        clock: Tells the seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._trials: dict[Kind, _Timings] = {}

    def runs_plain(self, kind: Kind) -> bool:
        """Whether the next step of a kind, whose plan recomputes nothing and which fits plainly, is to run plain."""
        trial = self._trials.get(kind, _Timings())
        if trial.is_released is not None:
            return trial.is_released
        return trial.settled >= SETTLED_STEPS and len(trial.seconds[False]) > len(trial.seconds[True])

    def step_begins(self, kind: Kind, is_plain: bool, is_watched: bool) -> Timing | None:
        """Learn that a step begins; what is watched is not timed.

        Returns:
            What `next_begins` is to be given if the step does not fail; None where it is not timed.
        """
        trial = self._trials.setdefault(kind, _Timings())
        trial.settled += not is_plain and not is_watched
        is_timed = trial.is_released is None and trial.settled >= SETTLED_STEPS and not is_watched
        return Timing(self._clock(), kind, is_plain) if is_timed else None

    def next_begins(self, timing: Timing) -> float | None:
        """Learn that the step after one that was timed begins.

        Returns:
            The time of the plan over that without it, where the kind is given back from now on; else None.
        """
        trial = self._trials[timing.kind]
        trial.seconds[timing.is_plain].append(self._clock() - timing.began_at)
        if min(map(len, trial.seconds.values())) < SAMPLES:
            return None
        ratio = median(trial.seconds[False]) / median(trial.seconds[True])
        trial.is_released = ratio > CLEARLY_SLOWER
        return ratio if trial.is_released else None

    def keep(self, kind: Kind) -> None:
        """Learn that a kind takes more than its budget without its plan."""
        self._trials.setdefault(kind, _Timings()).is_released = False
