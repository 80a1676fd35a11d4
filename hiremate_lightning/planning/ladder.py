"""Decisions for the steps of one code at all sizes: a ladder between the least memory and keeping everything.

A schedule that fits at one size fits at all smaller ones, since bytes grow with sizes. So a few decisions serve all
sizes: a step takes the fastest that fit. Its loss against decisions of its own is estimated from decisions that don't
fit: a little less memory takes a little more time, and the fastest schedules lie below the line between any two. Once
steps have lost more time than solving takes, another rung pays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..records.step import Decisions, Step
from .headroom import Room
from .solvers import Solution

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
    """The time that a step loses because it runs by decisions of other sizes."""

    ladder: Ladder  # the decisions for its code
    step: T  # the step
    room: Room  # how many bytes it has
    chosen: Chosen  # what it runs by


@dataclass(eq=False)
class Ladder:
    """The decisions for the steps of one code."""

    # Decisions that were solved for steps that nothing fitted, or that had lost time.
    rungs: list[Decisions] = field(default_factory=list)
    least: Decisions | None = None  # decisions of the least memory, where no others could be made, or fit; else None
    # The largest room, as a share of what keeping everything takes, at which the least did not fit.
    least_share: float = 0.0
    lost_ms: float = 0.0  # time that all steps lost since the latest rung
    vain: int = 0  # rungs in a row that saved clearly less than was estimated

    @property
    def decisions(self) -> list[Decisions]:
        """All decisions so far."""
        return [*self.rungs, *(() if self.least is None else (self.least,))]

    def note(self, chosen: Chosen, price_ms: float) -> bool:
        """Learn what a step lost; return whether it pays to solve a rung for it, which takes the price.

        The step at which that shows is likely one that loses much, or of sizes that come often.
        """
        self.lost_ms += chosen.lost_ms
        return bool(self.lost_ms > price_ms * 2**self.vain)

    def solved(self, loss: Loss[T], solution: Solution) -> bool:
        """Add the solution for a step that had lost time, and count losses from 0 again.

        Returns:
            Whether the solution is another rung: it fits, and saves time.
        """
        saved_ms = loss.chosen.again_ms - solution.extra_ms if solution.peak_bytes <= loss.room.step_bytes else 0.0
        self.vain = 0 if saved_ms > WORTH_SAVING * loss.chosen.lost_ms else self.vain + 1
        self.lost_ms = 0.0
        if saved_ms > 0:
            self.rungs.append(solution.recompute)
        return saved_ms > 0
