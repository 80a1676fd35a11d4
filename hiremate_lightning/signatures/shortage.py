"""A budget that nothing fits: training goes on for a few steps, to find a budget that is enough for all of them.

The first step that does not fit is seldom the one that needs most. Optimizers may not have their state yet, gradients
may not be accumulated yet, the other steps of a GAN may not have run. So steps go on at the least memory until all of
these were seen, at most `HELD_STEPS`; the error then names a budget that is enough for each, with all optimizer state.
"""

from __future__ import annotations

from dataclasses import replace

from ..measuring.resident import Resident
from ..measuring.resident_memory import ResidentMemory
from ..planning.headroom import AT_LEAST, Short

HELD_STEPS = 8  # most steps that run above the budget before the error
SILENT_STEPS = 2  # warn after so many steps above the budget; usually the error comes earlier
SO_FAR = "The smallest budget found for the steps seen so far is"
ALL_ADVICE = "Raise the budget, make the batch smaller, or pass on_infeasible='warn' to train with the least memory."


class Shortage:
    """The state of a budget that nothing fits: which needs were seen so far, and when training stops.

    Attributes:
        trains_on: Whether some step does not fit the budget, and training goes on.
        are_measured: Whether memory of code outside of captured graphs was measured in all recorded steps.
        less_bytes: Bytes by which another process has less room for such a step.
    """

    def __init__(self) -> None:
        self.trains_on, self.are_measured = False, True
        self.less_bytes = 0
        self._steps_over = 0
        self._updated = 0, 0  # number of optimizer steps so far, and the bytes of optimizer state then
        self._has_settled = False  # whether all optimizers have stepped, and their state grows no more
        self._waits = True  # whether optimizers are known that have not settled
        self._had_stale = False  # whether there were gradients that should be freed before the next backward
        self._batch_bytes = 0  # bytes of the largest batch

    def begin_step(self, resident: Resident, memory: ResidentMemory) -> None:
        """Compare optimizer state, stale gradients and batch with earlier steps; count the step if training is held."""
        steps, state_bytes = self._updated
        if memory.optimizer_steps > steps:
            has_appeared = not state_bytes and memory.has_state_of_each
            self._has_settled = memory.all_stepped and (has_appeared or resident.state_bytes <= state_bytes)
            self._updated = memory.optimizer_steps, resident.state_bytes
        is_new = resident.stale_bytes > 0 and not self._had_stale  # whether these are freed was not seen yet
        self._had_stale = self._had_stale or is_new
        self._has_settled = self._has_settled and not is_new
        self._batch_bytes = max(self._batch_bytes, resident.batch_bytes)
        self._steps_over += self.trains_on
        self._waits = bool(memory.optimizers) and not self._has_settled

    def train_on(self, short: Short) -> None:
        """Set `trains_on`, so that training goes on though a step does not fit."""
        self.trains_on = True
        self.less_bytes = max(self.less_bytes, short.need.less_bytes)

    @property
    def is_to_be_warned_of(self) -> bool:
        """Whether to warn now that steps run above the budget, and that an error will follow."""
        return self.trains_on and self._steps_over == SILENT_STEPS

    @property
    def is_to_be_raised(self) -> bool:
        """Whether training stops now: optimizer state has settled, or `HELD_STEPS` steps have run."""
        return not self._waits or self._steps_over >= HELD_STEPS

    @property
    def words(self) -> str:
        """The beginning of the sentence that names the bytes."""
        return SO_FAR if self._has_settled and self.are_measured else AT_LEAST

    def with_all(self, resident: Resident) -> Resident:
        """Return the memory before a step with the present optimizer state and the largest batch."""
        more_bytes = max(0, self._updated[1] - resident.state_bytes) + max(0, self._batch_bytes - resident.batch_bytes)
        return replace(resident, size_bytes=resident.size_bytes + more_bytes)
