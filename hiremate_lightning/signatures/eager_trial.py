"""Step signatures whose plan gains nothing: they are given back to eager PyTorch.

Where nothing fits the budget, a plan may take as much memory as no plan. Once a step without it has shown that, all
such steps run eager. Where the step fits the budget as the user wrote it, such a plan recomputes nothing. Whether
it costs time is measured: steps run planned and eager in turns, some of each. The lower quartiles decide, once for each
plan, since other programs on the machine only add to the time of a step. Both ways give the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import quantiles

from .. import thresholds

SETTLED_STEPS = 8  # of a signature that ran by its plan before eager steps are tried
SAMPLES = 12  # steps of each way that are timed
CLEARLY_SLOWER = 1.05  # a plan than eager PyTorch, or it stays
TRIES = 4  # eager steps to measure in a row, until one shows its peak


@dataclass
class EagerTrial:
    """Times a step signature with and without its plan, and decides whether that is given back."""

    planned_steps: int = 0  # how many ran by the plan, unwatched
    # By whether the step ran eager, the seconds of each.
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    # When the latest step began whose time is taken, in seconds, and whether it runs eager.
    began: tuple[float, bool] = 0.0, False
    is_given_back: bool | None = None  # whether they run eager from now on, None before that is decided
    tries: int = 0  # how many eager ones were measured that did not show their peak

    def runs_eager(self, saves_nothing: bool) -> bool:
        """Whether the next step, whose plan gains nothing, is to run eager.

        A plan that saves no memory is not timed: as soon as an eager step has shown that it takes no more, all run so.
        """
        if self.is_given_back is not None:
            return self.is_given_back
        return saves_nothing or (
            self.planned_steps >= SETTLED_STEPS and len(self.seconds[False]) > len(self.seconds[True])
        )

    def step_begins(self, is_eager: bool, is_watched: bool, now_s: float) -> bool:
        """Learn that a step begins. Return whether its time is taken: `next_begins` is due if it does not fail.

        What is watched is not timed.
        """
        self.planned_steps += not is_eager and not is_watched
        self.began = now_s, is_eager
        return self.is_given_back is None and self.planned_steps >= SETTLED_STEPS and not is_watched

    def next_begins(self, now_s: float) -> float | None:
        """Learn that the step after one that was timed begins.

        Return the time of the plan over that without it, where it is given back from now on; else None.
        """
        began_s, is_eager = self.began
        self.seconds[is_eager].append(now_s - began_s)
        if min(map(len, self.seconds.values())) < SAMPLES:
            return None
        planned_s, eager_s = (quantiles(self.seconds[is_eager])[0] for is_eager in (False, True))
        ratio = planned_s / eager_s
        self.is_given_back = ratio > CLEARLY_SLOWER
        return ratio if self.is_given_back else None

    def measured(self, peak_bytes: int | None, plan_bytes: int) -> bool | None:
        """Learn the peak of an eager step whose plan does not fit, None where the measurement did not see all.

        Return whether such steps run eager from now on; None as long as no eager step has shown its peak.
        """
        self.tries += 1
        if peak_bytes is not None or self.tries == TRIES:
            most_bytes = thresholds.current.released_peak * plan_bytes
            self.is_given_back = peak_bytes is not None and peak_bytes <= most_bytes
        return self.is_given_back
