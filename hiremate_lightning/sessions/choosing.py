"""Which program a captured graph runs by: that of a plan, one taken over from another size, or that of least memory."""

from __future__ import annotations

from collections.abc import Callable

from ..measuring.resident import Resident
from ..records.costs import Profile
from ..running.execution import Part
from ..running.program import Program
from ..torch_private import runtime
from .current_step import CurrentStep, Forward
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
        spare_bytes: Returns the bytes that a first step may take beyond the budget.
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
        self._first_steps = planned.first_steps

    def choose(self, step: CurrentStep, part: Part) -> Forward:
        """Choose the program of a part that is about to run in the step under way; nothing is noted in the step."""
        number, profile = self._parts.prepare(part)
        kind, program = self._planned.kinds.choose((*step.kind, number), step.expected)
        if program is None and kind is not None and self._planned.kinds.have_room_for_waiting():
            program = self._first_steps.kept(part)  # the forward has no backward in its step
        if program is None:
            given = Given(self._resident, self._planned.kinds.foreseen, self._planned.maker.budget_bytes)
            program = self._first_steps.take_over(step, part, number, profile, given)
        is_planned = program is not None
        return Forward(number, part.captured, profile, program or self._least(part, profile), kind, is_planned)

    def _least(self, part: Part, profile: Profile) -> Program:
        """Return the program of least memory of a part.

        Where not even the captured part alone fits, training stops before it runs, or, if there is memory to run it
        once, after: what else the step takes, a second view of a picture or a loss that is a network, is known then.
        Where there are several processes it runs in any case: one that stops alone leaves the others waiting in a
        collective.
        """
        options, is_alone = self._planned.options, runtime.process_group_store() is None
        is_checked = is_alone and options.budget.share is None and options.plan.on_infeasible == "raise"
        budget_of = self._planned.maker.budget_bytes if is_checked else None
        return self._first_steps.least(
            part, profile, self._resident, options.budget, budget_of, options.plan, self._name, self._spare_bytes
        )
