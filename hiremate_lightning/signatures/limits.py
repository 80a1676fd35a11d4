"""What the steps of one signature may take, where gradients exist before some of them and not before others.

When gradients are accumulated, those of the parameters appear in the first backward, and the others add to them. So the
same step comes in several states, each with a graph of its own, and one plan has to do in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..measuring.resident import GradientState, Resident

WORTH_A_PLAN = 0.05  # of what a step may add: where the budget rises by more, it is planned once more


@dataclass(frozen=True, slots=True)
class Limits:
    """The budgets of steps of one signature, and where nothing fits them, by the gradients that exist before a step."""

    is_share: bool  # whether the budget is a share of what a step adds to what exists
    budgets: Mapping[GradientState, int] = field(default_factory=dict)  # the budget in each state that was seen
    of_others: int = 0  # the largest budget of the other step signatures, which all have where budgets are shares
    # Where nothing fits: bytes that existed, and the least peak found.
    least: Mapping[GradientState, tuple[int, int]] = field(default_factory=dict)
    state_bytes: int = 0  # bytes of optimizers' state before the latest step
    # The budget that the latest plan was made for, and its peak, without optimizers' state.
    of_plan: tuple[int, int] = (0, 0)

    @property
    def budget_bytes(self) -> int:
        """The budget of a step: the most that any state of it, or of other signatures, may take."""
        return max(self.own_bytes, self.of_others)

    @property
    def own_bytes(self) -> int:
        """The most that any state of its own may take; 0 where none was seen."""
        return max(self.budgets.values(), default=0)

    def meeting(self, resident: Resident, own_bytes: int) -> Limits:
        """Return the limits with the budget of a step.

        A share is of what a step adds to what exists. Where gradients don't exist yet that gives fewer bytes, though
        more is added, and the bytes of the other states are there all the same. So they are where an optimizer has made
        its state since a step of another state was seen: it exists before all of them from then on. The step's own
        budget is that in its state alone, resident bytes included.
        """
        more_bytes = resident.state_bytes - self.state_bytes if self.is_share else 0
        budgets = {kept: size_bytes + more_bytes for kept, size_bytes in self.budgets.items()}
        return replace(self, budgets={**budgets, resident.gradients: own_bytes}, state_bytes=resident.state_bytes)

    def with_plan(self, peak_bytes: int) -> Limits:
        """Return the limits where a plan was made for them that takes so much."""
        return replace(self, of_plan=self._without_state(peak_bytes))

    def _without_state(self, peak_bytes: int) -> tuple[int, int]:
        return self.budget_bytes - self.state_bytes, peak_bytes - self.state_bytes

    def with_least(self, resident: Resident, least_bytes: int) -> Limits:
        """Return the limits where nothing fits in a state, and so much is the least peak that was found."""
        return replace(self, least={**self.least, resident.gradients: (resident.size_bytes, least_bytes)})

    def without_least(self) -> Limits:
        """Return the limits of a step that has changed, so that something may fit."""
        return replace(self, least={})

    def stays(self, resident: Resident, peak_bytes: int, is_least: bool) -> bool:
        """Whether a plan may stay: it fits, or another one would not fit either, or takes as much in another state.

        `is_least` tells that it was made in a state in which nothing fits.
        """
        least = [least_bytes for _, least_bytes in self.least.values()] if is_least else []
        if peak_bytes <= max((self.budget_bytes, *least)):
            return True
        size_bytes, _ = self.least.get(resident.gradients, (resident.size_bytes + 1, 0))
        return size_bytes <= resident.size_bytes

    def have_risen(self, resident: Resident, peak_bytes: int) -> bool:
        """Whether a state seen since has raised the budget by so much that a new plan pays.

        That of the state without gradients is the smallest, and the first to be planned.
        """
        (budget_bytes, peak_bytes), (before_bytes, peak_before_bytes) = self._without_state(peak_bytes), self.of_plan
        risen_bytes = budget_bytes - before_bytes
        room_bytes = risen_bytes - (peak_bytes - peak_before_bytes)
        clearly_bytes = WORTH_A_PLAN * (self.budget_bytes - resident.size_bytes)
        return self.is_share and min(risen_bytes, room_bytes) > clearly_bytes
