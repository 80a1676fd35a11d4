"""Decisions for the steps of one code at all sizes: a ladder between the least memory and keeping everything.

A schedule that fits at one size fits at all smaller ones, since bytes grow with sizes. So a few decisions serve all
sizes: a step takes the fastest that fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..records.step import Decisions, Step
from .headroom import Room


def fastest_that_fits(step: Step, room: Room, candidates: Iterable[Decisions]) -> Decisions | None:
    """Return, of decisions made for the same code at whatever sizes, the fastest that fit; None where none fit."""
    by_time = sorted(dict.fromkeys(candidates), key=step.again_ms)
    return next((decisions for decisions in by_time if step.peak_bytes(decisions) <= room.solved_bytes), None)


@dataclass(eq=False)
class Ladder:
    """The decisions for the steps of one code."""

    rungs: list[Decisions] = field(default_factory=list)  # decisions that were solved for steps that nothing fitted
    least: Decisions | None = None  # decisions of the least memory, where no others could be made, or fit; else None
    # The largest room, as a share of what keeping everything takes, at which the least did not fit.
    least_share: float = 0.0

    @property
    def decisions(self) -> list[Decisions]:
        """All decisions so far."""
        return [*self.rungs, *(() if self.least is None else (self.least,))]
