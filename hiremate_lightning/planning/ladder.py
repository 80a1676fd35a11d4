"""Decisions that steps of one code share at all sizes: a ladder from the least memory to keeping everything.

A schedule that fits at one size fits at all smaller sizes, since bytes grow with sizes. So a few decisions serve all
sizes: each step takes the fastest decisions that fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..records.step import Decisions, MergedStep
from .headroom import Room


def fastest_that_fits(step: MergedStep, room: Room, candidates: Iterable[Decisions]) -> Decisions | None:
    """Return the fastest decisions that fit, None if none fit; they may be solved for other sizes of the same code."""
    by_time = sorted(dict.fromkeys(candidates), key=step.again_ms)
    return next((decisions for decisions in by_time if step.peak_bytes(decisions) <= room.solved_bytes), None)


@dataclass(eq=False)
class Ladder:
    """The decisions that steps of one code share."""

    rungs: list[Decisions] = field(default_factory=list)  # decisions solved for steps that no earlier decisions fitted
    least: Decisions | None = None  # decisions of least memory, if no rung could be added; else None
    # The largest budget that `least` exceeded, as a share of the bytes of keeping everything.
    least_share: float = 0.0

    @property
    def decisions(self) -> list[Decisions]:
        """All decisions so far."""
        return [*self.rungs, *(() if self.least is None else (self.least,))]
