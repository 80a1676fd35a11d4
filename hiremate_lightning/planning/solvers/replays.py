"""What a replay gives: peak and time of a policy, and where the peak is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .lazy import Lazy
from .policies import Rows
from .timeline import Timeline


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What a policy does.

    Attributes:
        peak_bytes: Peak above what is resident.
        recompute_ms: Time of what is recomputed.
        position: Where the peak is: a backward position, or -1 in the forward.
        node: The node at the peak.
        timeline: The rows, and what is in memory when.
        peaks: For each backward position, and the end, most bytes while its node runs or values are recomputed for it.
        forward_position: Position of the forward where the forward's own peak is.
        forward_peak: Bytes there.
        lazy: The policy, with its rows before any ran in the forward's order; None where it has none.
    """

    peak_bytes: int
    recompute_ms: float
    position: int
    node: int
    timeline: Timeline
    peaks: np.ndarray
    forward_position: int
    forward_peak: int
    lazy: Lazy | None

    @property
    def rows(self) -> Rows:
        """Producers recomputed before each backward position, views left out."""
        return self.timeline.rows
