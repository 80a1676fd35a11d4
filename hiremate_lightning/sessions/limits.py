"""What the steps of one kind may take, where gradients exist before some of them and not before others.

When gradients are accumulated, those of the parameters appear in the first backward, and the others add to them. So the
same step comes in several states, each with a graph of its own, and one plan has to do in all of them.
"""

from __future__ import annotations

from ..measuring.resident import Resident

WORTH_A_PLAN = 0.05  # of what a step may add: where the budget rises by more, it is planned once more


class Limits:
    """The budgets of the steps of one kind, and where nothing fits them, by the gradients that exist before a step.

    Args:
        is_share: Whether the budget is a share of what a step adds to what exists.
    """

    def __init__(self, is_share: bool) -> None:
        self._is_share = is_share
        self._budgets: dict[frozenset[int], int] = {}
        self._planned = 0, 0  # the budget that the latest plan was made for and its peak, without optimizers' state
        self._least: dict[frozenset[int], tuple[int, int]] = {}  # bytes that existed, and the least peak found
        self._state_bytes = 0  # of optimizers' state, when a budget was given last

    def budget_bytes(self, resident: Resident, own_bytes: int) -> int:
        """Give the budget of a step: the most that any state of it may take.

        A share is of what a step adds to what exists. Where gradients don't exist yet that gives fewer bytes, though
        more is added, and the bytes of the other states are there all the same. So they are where an optimizer has made
        its state since a step of another state was seen: it exists before all of them from then on.

        Args:
            resident: What exists before the step.
            own_bytes: The budget in this state alone, resident bytes included.
        """
        more_bytes = resident.state_bytes - self._state_bytes if self._is_share else 0
        self._budgets = {kept: size_bytes + more_bytes for kept, size_bytes in self._budgets.items()}
        self._state_bytes = resident.state_bytes
        self._budgets[resident.kept] = own_bytes
        return max(self._budgets.values())

    def planned(self, peak_bytes: int) -> None:
        """Note what a plan takes that was made for them."""
        self._planned = self._without_state(peak_bytes)

    def _without_state(self, peak_bytes: int) -> tuple[int, int]:
        return max(self._budgets.values()) - self._state_bytes, peak_bytes - self._state_bytes

    def nothing_fits(self, resident: Resident, least_bytes: int) -> None:
        """Note the least peak that was found in a state in which nothing fits."""
        self._least[resident.kept] = resident.size_bytes, least_bytes

    def stays(self, resident: Resident, peak_bytes: int, is_least: bool) -> bool:
        """Whether a plan may stay: it fits, or another one would not fit either, or takes as much in another state.

        Args:
            resident: What exists before the step.
            peak_bytes: What the plan takes then.
            is_least: Whether it was made in a state in which nothing fits.
        """
        least = [least_bytes for _, least_bytes in self._least.values()] if is_least else []
        if peak_bytes <= max((*self._budgets.values(), *least)):
            return True
        size_bytes, _ = self._least.get(resident.kept, (resident.size_bytes + 1, 0))
        return size_bytes <= resident.size_bytes

    def have_risen(self, resident: Resident, peak_bytes: int) -> bool:
        """Whether the budget is clearly more than a plan was made for, since another state was seen.

        That of the state without gradients is the smallest, and the first to be planned.

        Args:
            resident: What exists before the step.
            peak_bytes: What the plan takes then.
        """
        (budget_bytes, peak_bytes), (before_bytes, peak_before_bytes) = self._without_state(peak_bytes), self._planned
        risen_bytes = budget_bytes - before_bytes
        room_bytes = risen_bytes - (peak_bytes - peak_before_bytes)
        clearly_bytes = WORTH_A_PLAN * (max(self._budgets.values()) - resident.size_bytes)
        return self._is_share and min(risen_bytes, room_bytes) > clearly_bytes

    def forget_least(self) -> None:
        """Forget where nothing fits: the step itself has changed."""
        self._least.clear()
