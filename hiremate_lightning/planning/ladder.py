"""Decisions for the steps of one code at all sizes: a ladder between the least memory and keeping everything.

A schedule that fits at one size fits at all smaller ones, since bytes grow with sizes. So a few decisions serve all
sizes: a step takes the fastest that fit. Its loss against decisions of its own is estimated from decisions that don't
fit: a little less memory takes a little more time, and the fastest schedules lie below the line between any two. Once
steps have lost more time than solving takes, another rung pays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..records.step import Decisions, Step
from .headroom import Room
from .solvers import Solution

REMEMBERED = 16  # steps that lost time, the latest ones
WORTH_SAVING = 0.5  # share of the estimated saving: a rung that saves less was in vain

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chosen:
    """The fastest decisions that fit a step, the time of what they compute again, and the part that is lost by them.

    Lost is what decisions of the step's own would save at least, as estimated.
    """

    decisions: Decisions
    again_ms: float
    lost_ms: float


def fastest_that_fits(step: Step, room: Room, candidates: Iterable[Decisions]) -> Chosen | None:
    """Return, of decisions made for the same code at whatever sizes, the fastest that fit; None where none fit."""
    limit_bytes = room.solved_bytes
    too_large = list[tuple[int, float]]()
    for decisions in sorted(dict.fromkeys(candidates), key=step.again_ms):
        again_ms, peak_bytes = step.again_ms(decisions), step.peak_bytes(decisions)
        if peak_bytes <= limit_bytes:
            # What the limit would save, on the line between these decisions and each that are faster and too large.
            free_bytes = limit_bytes - peak_bytes
            saved = ((again_ms - fast_ms) * free_bytes / (size - peak_bytes) for size, fast_ms in too_large)
            return Chosen(decisions, again_ms, max(saved, default=0.0))
        too_large.append((peak_bytes, again_ms))
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Loss(Generic[T]):
    """The time that a step loses because it runs by decisions of other sizes.

    Attributes:
        ladder: The decisions for its code.
        plain_bytes: Bytes that it adds where it keeps everything.
        again_ms: Time of the nodes that it computes again.
        lost_ms: See `Chosen`.
    """

    ladder: Ladder[T]
    step: T
    room: Room
    plain_bytes: int
    again_ms: float
    lost_ms: float


@dataclass(eq=False)
class Ladder(Generic[T]):
    """The decisions for the steps of one code.

    Attributes:
        rungs: Decisions that were solved for steps that nothing fitted, or that had lost time.
        least: Decisions of the least memory, where no others could be made, or fit; else None.
        least_share: The largest room, as a share of the bytes of keeping everything, at which the least memory did not
            fit.
        losses: The latest steps that lost time.
        lost_ms: Time that all steps lost since the latest rung.
        vain: Rungs in a row that saved clearly less than was estimated.
    """

    rungs: list[Decisions] = field(default_factory=list)
    least: Decisions | None = None
    least_share: float = 0.0
    losses: deque[Loss[T]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    lost_ms: float = 0.0
    vain: int = 0

    @property
    def decisions(self) -> list[Decisions]:
        """All decisions so far."""
        return [*self.rungs, *(() if self.least is None else (self.least,))]

    def note(self, loss: Loss[T], price_ms: float) -> Loss[T] | None:
        """Add the loss of a step; return the step to solve another rung for, None where that does not pay yet.

        The price of a rung is the time that solving it takes.
        """
        self.losses.append(loss)
        self.lost_ms += loss.lost_ms
        if self.lost_ms <= price_ms * 2**self.vain:
            return None

        def saved_ms(loss: Loss[T]) -> float:  # by decisions of its own, which serve all smaller steps, too
            return loss.lost_ms * sum(other.plain_bytes <= loss.plain_bytes for other in self.losses)

        return max(self.losses, key=saved_ms)

    def solved(self, loss: Loss[T], solution: Solution) -> bool:
        """Add the solution for a step that had lost time, and count losses from 0 again.

        Returns:
            Whether the solution is another rung: it fits, and saves time.
        """
        saved_ms = loss.again_ms - solution.extra_ms if solution.peak_bytes <= loss.room.step_bytes else 0.0
        self.vain = 0 if saved_ms > WORTH_SAVING * loss.lost_ms else self.vain + 1
        self.losses.clear()
        self.lost_ms = 0.0
        if saved_ms <= 0:
            return False
        self.rungs.append(solution.recompute)
        return True
