"""What steps of sizes without a plan cost, where they fit only with less memory: measured, and said once.

Plain PyTorch's time at such a size can't be measured, since it does not fit. It follows from whole steps that were
timed: those that ran plain at other sizes, or, where there are few, those that ran by plans, without what these
recompute. A line through their times, by what their values take in memory, gives the time of any other size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from ..units import format_bytes

STEPS = 16  # of sizes without a plan that are timed before anything is said
BASE = 4  # steps of plain PyTorch, or of plans, that a line goes through
REMEMBERED = 32  # steps of each
CLEARLY_LONGER = 1.25  # than plain PyTorch, or nothing is said


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A whole step that was timed.

    Attributes:
        size_bytes: What the captured graph takes at its sizes with nothing computed again.
        seconds: From its beginning to that of the next one.
    """

    size_bytes: int
    seconds: float


class Line:
    """A line through the times of steps by their sizes, by medians: single slow steps don't bend it.

    Args:
        steps: At least one.
    """

    def __init__(self, steps: Sequence[TimedStep]) -> None:
        pairs = [(a, b) for a, b in combinations(steps, 2) if a.size_bytes != b.size_bytes]
        slopes = [(b.seconds - a.seconds) / (b.size_bytes - a.size_bytes) for a, b in pairs]
        steepest = min(step.seconds / step.size_bytes for step in steps)  # through the origin
        self._slope = min(steepest, max(0.0, median(slopes))) if slopes else steepest
        self._start = median(step.seconds - self._slope * step.size_bytes for step in steps)

    def at(self, size_bytes: int) -> float:
        """Return the seconds of a step of a size."""
        return self._start + self._slope * size_bytes


class NewSizes:
    """Times steps of sizes without a plan, and says what they cost.

    Args:
        name: Of the model.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._plain, self._planned = (deque[TimedStep](maxlen=REMEMBERED) for _ in range(2))
        self._saving = deque[TimedStep](maxlen=REMEMBERED)
        self._enough_bytes = 0  # for all steps so far to run plain
        self._is_said = False

    def ran_plain(self, step: TimedStep) -> None:
        """Learn of a step that ran as plain PyTorch does."""
        self._plain.append(step)

    def ran_planned(self, step: TimedStep, recompute_s: float) -> None:
        """Learn of a step that ran by its plan, which recomputes for so many seconds."""
        self._planned.append(TimedStep(step.size_bytes, max(0.0, step.seconds - recompute_s)))

    def saved_memory(self, step: TimedStep, enough_bytes: int) -> str | None:
        """Learn of a step without a plan that ran with less memory than plain PyTorch.

        Args:
            step: The step.
            enough_bytes: A budget within which plain PyTorch runs it.

        Returns:
            What to say of such steps, once; else None.
        """
        self._saving.append(step)
        self._enough_bytes = max(self._enough_bytes, enough_bytes)
        base = self._plain if len(self._plain) >= BASE else self._planned
        if self._is_said or len(self._saving) < STEPS or len(base) < BASE:
            return None
        line = Line(base)
        ratio = median(step.seconds / max(line.at(step.size_bytes), 1e-9) for step in self._saving)
        if ratio <= CLEARLY_LONGER:
            return None
        self._is_said = True
        other = "that ran without a plan" if base is self._plain else "that ran by plans, without what these recompute"
        return (
            f"Steps of {self._name} whose sizes have no plan, and that fit only with less memory, take {ratio:.1f} "
            f"times plain PyTorch's time (the median of {len(self._saving)}; plain PyTorch's time follows from "
            f"{len(base)} steps {other}, by size). A budget of {format_bytes(self._enough_bytes)} would avoid it for "
            "the sizes so far. So would fewer sizes, which get plans: pad to a few."
        )
