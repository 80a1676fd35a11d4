"""Calls without gradients in training mode, and what a script computes from them until the next call with gradients.

A contrastive loss over a large batch is made so (GradCache: Gao et al., Scaling Deep Contrastive Learning Batch Size
under Memory Limited Setup, 2021, arXiv 2101.06983): first all embeddings without gradients and a loss of all of them,
then calls with gradients, chunk by chunk. Nothing of the first half is captured, so no plan lowers what it takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..memory.metering import MemoryMeter
from ..planning.plan import Plan
from ..units import format_bytes
from .planned_model import PlannedModel

MOST_CALLS = 100  # in a row that are watched: a validation in training mode has more, and each has its events


class CallsWithoutGradients:
    """Measures runs of such calls, up to the next call with gradients, and warns where they exceed the budget.

    The first run, the second, the fourth, the eighth and so on are measured.
    """

    def __init__(self, model: PlannedModel) -> None:
        self._model, self._memory = model, model.memory
        self._runs = self._calls = 0  # so far, and calls in the latest run of what was called first
        self._first = ""  # that
        self._meter: MemoryMeter | None = None
        self._existing_bytes = 0  # before the latest run
        self._peak_bytes = 0  # of a run that has ended, until it is compared

    def begins(self, name: str, arguments: Sequence[torch.Tensor]) -> None:
        """Learn that a call of a module begins: the first one of a run, or a further one."""
        if self._calls:
            self._calls += name == self._first
            if self._calls > MOST_CALLS:
                self.drop()
            return
        self._first, self._calls, self._runs = name, 1, self._runs + 1
        device = self._memory.device
        if self._runs.bit_count() > 1 or MemoryMeter.is_running(device) or not MemoryMeter.is_available(device):
            return
        existing = self._memory.count(arguments)
        self._existing_bytes = existing.size_bytes + existing.stale_bytes
        self._meter = MemoryMeter(device)
        self._meter.start()

    def end(self) -> None:
        """End a run, since a call with gradients begins."""
        meter, self._calls = self._meter, 0
        if meter is not None:
            self.drop()
            self._peak_bytes = self._existing_bytes + max(interval.peak_bytes for interval in meter.intervals)

    def compare(self, plan: Plan | None) -> None:
        """Warn where a run that has ended took more than the budget of the plan that the call with gradients begins by.

        A share of that budget counts what optimizers made before.
        """
        peak_bytes, self._peak_bytes = self._peak_bytes, 0
        if plan is not None and peak_bytes > plan.budget_bytes:
            self._model.announcements.say(
                f"Calls of {self._model.name} without gradients, and what was computed until the next call with "
                f"gradients, took {format_bytes(peak_bytes)}, {format_bytes(peak_bytes - plan.budget_bytes)} above the "
                "budget. No plan can lower that: compute a loss of many embeddings in parts, or call .eval() before "
                "calls that don't belong to training.",
                topic="without gradients",
            )

    def drop(self) -> None:
        """Stop measuring a run."""
        if self._meter is not None:
            self._meter.stop()
            self._meter = None
