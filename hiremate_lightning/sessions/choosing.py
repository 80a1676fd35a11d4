"""Which program a captured graph runs by: that of a plan, one taken over from another size, or that of least memory."""

from __future__ import annotations

from collections.abc import Callable

from ..measuring.resident import Resident
from ..records.costs import Profile
from ..running.execution import Part
from ..running.program import Program
from ..torch_private import runtime
from .first_steps import Given
from .parts import Parts
from .planned import PlannedKinds


class ProgramChoice:
    """Chooses the programs of the steps of one model.

    Args:
        name: Of the model.
        planned: The plans.
        parts: The captured graphs.
        resident: Counts what existed when the step under way began.
        spare_bytes: Tells the bytes that a first step may take beyond the budget.
    """

    def __init__(
        self,
        name: str,
        planned: PlannedKinds,
        parts: Parts,
        resident: Callable[[], Resident],
        spare_bytes: Callable[[], int],
    ) -> None:
        self._name, self._planned, self._parts = name, planned, parts
        self._resident, self._spare_bytes = resident, spare_bytes
        self._kinds, self._first_steps = planned.kinds, planned.first_steps

    def choose(self, part: Part, number: int, profile: Profile) -> tuple[Program, bool]:
        """Choose the program of a part that begins.

        Args:
            part: The part.
            number: Its number.
            profile: Costs of its operations.

        Returns:
            The program, and whether that is by a plan, be it of another step.
        """
        planned = self._kinds.choose(number) or self._kept(part) or self._taken_over(part, profile)
        return planned or self._least(part, profile), planned is not None

    def foresee(self, part: Part) -> Program:
        """Find the program that a part would run by now; the step under way does not notice."""
        number, profile = self._parts.prepare(part)
        with self._kinds.trying():
            return self.choose(part, number, profile)[0]

    def _kept(self, part: Part) -> Program | None:
        """Return the program that computes nothing again, for a forward without a backward in its step.

        That is where plain training would fit too, all that such forwards save counted; else None.
        """
        if not self._kinds.is_without_backward or not self._planned.has_room_for_waiting():
            return None
        return self._first_steps.kept(part)

    def _taken_over(self, part: Part, profile: Profile) -> Program | None:
        """Return the program of a part by a plan for other sizes, None where there is none that fits."""
        given = Given(self._resident, self._planned.foreseen, self._planned.budget_bytes)
        return self._first_steps.take_over(part, profile, tuple(self._kinds.ran), given)

    def _least(self, part: Part, profile: Profile) -> Program:
        """Return the program of least memory of a part.

        Where not even the captured part alone fits, training stops before it runs, or, if there is memory to run it
        once, after: what else the step takes, a second view of a picture or a loss that is a network, is known then.
        Where there are several processes it runs in any case: one that stops alone leaves the others waiting in a
        collective.
        """
        options, is_alone = self._planned.options, runtime.process_group_store() is None
        is_checked = is_alone and options.budget.share is None and options.plan.on_infeasible == "raise"
        budget_of = self._planned.budget_bytes if is_checked else None
        return self._first_steps.least(
            part, profile, self._resident, options.budget, budget_of, options.plan, self._name, self._spare_bytes
        )
