"""The budgets of the steps of one signature, if gradients exist before some of them and not before others.

With gradient accumulation, the first backward allocates the gradients of parameters, and later ones add to them. So the
same step comes in several states, each with a graph of its own, and one plan has to fit all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..measuring.resident import GradientState, Resident

CLEARLY_RISEN = 0.05  # plan again if the budget rises by more than this share of what a step may add


@dataclass(frozen=True, slots=True)
class Limits:
    """The budgets of steps of one signature, and the least peaks if nothing fits, by state: the existing gradients."""

    is_share: bool  # whether the budget is a share of what a step adds to what exists
    budgets: Mapping[GradientState, int] = field(default_factory=dict)  # the budget in each state that was seen
    of_others: int = 0  # the largest budget of the other step signatures, in bytes; 0 unless the budget is a share
    # Resident bytes and the least peak found, in bytes, for each state in which nothing fits.
    least_peaks: Mapping[GradientState, tuple[int, int]] = field(default_factory=dict)
    state_bytes: int = 0  # bytes of optimizer state before the latest step
    # The budget for which the latest plan was made, and the peak of the plan, in bytes without optimizer state.
    of_plan: tuple[int, int] = (0, 0)

    @property
    def budget_bytes(self) -> int:
        """The budget of a step, in bytes: the largest of its states and of other signatures."""
        return max(self.own_bytes, self.of_others)

    @property
    def own_bytes(self) -> int:
        """The largest budget of its own states, in bytes; 0 if none was seen."""
        return max(self.budgets.values(), default=0)

    def meeting(self, resident: Resident, own_bytes: int) -> Limits:
        """Return the limits with the budget of a step in its state: `own_bytes`, resident bytes included.

        If the budget is a share of what a step adds, it is smaller without existing gradients, since less is resident;
        the larger budget of another state stays valid. If an optimizer has allocated its state since, the budgets of
        all states grow by that: it exists before each step from then on.
        """
        more_bytes = resident.state_bytes - self.state_bytes if self.is_share else 0
        budgets = {kept: size_bytes + more_bytes for kept, size_bytes in self.budgets.items()}
        return replace(self, budgets={**budgets, resident.gradients: own_bytes}, state_bytes=resident.state_bytes)

    def with_plan(self, peak_bytes: int) -> Limits:
        """Return the limits after a plan with this peak was made for them."""
        return replace(self, of_plan=self._without_state(peak_bytes))

    def _without_state(self, peak_bytes: int) -> tuple[int, int]:
        return self.budget_bytes - self.state_bytes, peak_bytes - self.state_bytes

    def with_least(self, resident: Resident, least_bytes: int) -> Limits:
        """Return the limits with the least peak that was found in a state in which nothing fits."""
        return replace(self, least_peaks={**self.least_peaks, resident.gradients: (resident.size_bytes, least_bytes)})

    def without_least(self) -> Limits:
        """Return the limits without least peaks: the step has changed, so that a plan may fit."""
        return replace(self, least_peaks={})

    def stays(self, resident: Resident, peak_bytes: int, is_least: bool) -> bool:
        """Whether a plan may stay: it fits, or no other plan would, or it takes no more than the least of some state.

        `is_least` says that the plan was made in a state in which nothing fits.
        """
        least = [least_bytes for _, least_bytes in self.least_peaks.values()] if is_least else []
        if peak_bytes <= max((self.budget_bytes, *least)):
            return True
        size_bytes, _ = self.least_peaks.get(resident.gradients, (resident.size_bytes + 1, 0))
        return size_bytes <= resident.size_bytes

    def have_risen(self, resident: Resident, peak_bytes: int) -> bool:
        """Whether the budget has risen since the plan was made, by so much that a new plan pays.

        It rises as gradients come to exist: the first plan is made without them, for the smallest budget.
        """
        (budget_bytes, peak_bytes), (before_bytes, peak_before_bytes) = self._without_state(peak_bytes), self.of_plan
        risen_bytes = budget_bytes - before_bytes
        room_bytes = risen_bytes - (peak_bytes - peak_before_bytes)
        clearly_bytes = CLEARLY_RISEN * (self.budget_bytes - resident.size_bytes)
        return self.is_share and min(risen_bytes, room_bytes) > clearly_bytes
