"""The memory of calls without gradients in training mode, up to the next call with gradients.

GradCache computes a contrastive loss of a large batch so (Gao et al., Scaling Deep Contrastive Learning Batch Size
under Memory Limited Setup, 2021, arXiv 2101.06983): first all embeddings without gradients and the loss of all of them,
then calls with gradients, chunk by chunk. The first half is not captured, so no plan lowers its memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..memory.metering import MemoryMeter
from ..planning.plan import Plan
from ..units import format_bytes
from .planned_model import PlannedModel

MOST_CALLS = 100  # measure at most so many calls in a row; a validation in training mode has more, and each adds events


class CallsWithoutGradients:
    """Measures runs of such calls, up to the next call with gradients, and warns if they exceed the budget.

    It measures the 1st, 2nd, 4th, 8th run and so on.
    """

    def __init__(self, model: PlannedModel) -> None:
        self._model, self._memory = model, model.memory
        self._runs = self._calls = 0  # runs so far, and calls of `_first` in the latest run
        self._first = ""  # path of the module that the latest run called first
        self._meter: MemoryMeter | None = None
        self._existing_bytes = 0  # bytes that existed before the latest run
        self._peak_bytes = 0  # peak of the run that has ended; 0 once it was compared

    def begins(self, name: str, arguments: Sequence[torch.Tensor]) -> None:
        """Count a call of a module that begins; if it is the first one of a run, begin to measure."""
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
        """End the run and store its peak, since a call with gradients begins."""
        meter, self._calls = self._meter, 0
        if meter is not None:
            self.drop()
            self._peak_bytes = self._existing_bytes + max(interval.peak_bytes for interval in meter.intervals)

    def compare(self, plan: Plan | None) -> None:
        """Warn if the run that has ended took more than the budget of the plan of the call with gradients.

        If that budget is a share, it includes the optimizers' state, which may be new since the last step.
        """
        peak_bytes, self._peak_bytes = self._peak_bytes, 0
        if plan is not None and peak_bytes > plan.budget_bytes:
            self._model.messages.warn(
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
