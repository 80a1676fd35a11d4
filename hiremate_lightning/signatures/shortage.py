"""A budget that nothing fits: the bytes that are enough for all steps seen, found out before training stops.

The first step that does not fit is seldom the one that needs most. Optimizers may not have their state yet, gradients
may not be accumulated yet, the other steps of a GAN may not have run. So steps go on at the least memory until all of
that was seen, at most a few; the error then names what is enough for each of them, with all optimizer state.
"""

from __future__ import annotations

from dataclasses import replace

from ..measuring.resident import Resident
from ..measuring.resident_memory import ResidentMemory
from ..planning.headroom import AT_LEAST, Short

HELD_STEPS = 8  # that may run above a budget, to see what others need
SILENT_STEPS = 2  # of them, after which it is said: mostly the error comes before
SO_FAR = "The smallest budget found for the steps seen so far is"
ADVICE = "Raise the budget, make the batch smaller, or pass on_infeasible='warn' to train with the least memory."


class Shortage:
    """Whether some step does not fit the budget, and whether training goes on until more is known.

    Attributes:
        is_held: Whether some step does not fit the budget.
        are_measured: Whether code outside of the graphs was measured in all steps that were described.
        less_bytes: How much less another process of the training has for such a step.
    """

    def __init__(self) -> None:
        self.is_held, self.are_measured = False, True
        self.less_bytes = 0
        self._held_steps = 0
        self._updated = 0, 0  # optimizers' steps so far, and the bytes of their state then
        self._has_settled = False  # whether all optimizers have stepped, and their state grows no more
        self._waits = True  # whether more is to be seen; where no optimizer is known, nobody knows what that is
        self._had_stale = False  # whether there were gradients that the next backward was expected to find freed
        self._batch_bytes = 0  # of the largest batch

    def begin_step(self, resident: Resident, memory: ResidentMemory) -> None:
        """Learn what exists before a step."""
        steps, state_bytes = self._updated
        if memory.optimizer_steps > steps:
            has_appeared = not state_bytes and memory.has_state_of_each
            self._has_settled = memory.all_stepped and (has_appeared or resident.state_bytes <= state_bytes)
            self._updated = memory.optimizer_steps, resident.state_bytes
        is_new = resident.stale_bytes > 0 and not self._had_stale  # nobody has seen yet whether it is freed
        self._had_stale = self._had_stale or is_new
        self._has_settled = self._has_settled and not is_new
        self._batch_bytes = max(self._batch_bytes, resident.batch_bytes)
        self._held_steps += self.is_held
        self._waits = bool(memory.optimizers) and not self._has_settled

    def hold(self, short: Short) -> None:
        """Let training go on, though a step does not fit."""
        self.is_held = True
        self.less_bytes = max(self.less_bytes, short.need.less_bytes)

    @property
    def is_to_be_announced(self) -> bool:
        """Whether to say now that steps run above the budget, and that an error is to come."""
        return self.is_held and self._held_steps == SILENT_STEPS

    @property
    def is_to_be_raised(self) -> bool:
        """Whether training stops now: all was seen that may need more, or enough steps have run."""
        return not self._waits or self._held_steps >= HELD_STEPS

    @property
    def words(self) -> str:
        """How to begin the sentence that names the bytes."""
        return SO_FAR if self._has_settled and self.are_measured else AT_LEAST

    def with_all(self, resident: Resident) -> Resident:
        """Add to what existed what optimizers keep now, and what the largest batch takes more."""
        more_bytes = max(0, self._updated[1] - resident.state_bytes) + max(0, self._batch_bytes - resident.batch_bytes)
        return replace(resident, size_bytes=resident.size_bytes + more_bytes)
