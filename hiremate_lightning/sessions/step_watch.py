"""What is watched of a step: what is expected of it, and the measurement that begins with it."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..kinds.step_kind import StepKind
from ..kinds.watching import Expected, Watch, WatchPolicy
from ..measuring.profiling import TimedRun
from ..measuring.recording import Existing, StepRecord
from ..measuring.resident_memory import ALL, LITTERED_STEPS, YOUNG
from ..memory.metering import MemoryMeter
from ..planning.planner import GUARD_BYTES, guard_bytes
from ..torch_private import backward_pass
from .current_step import CurrentStep
from .planned_model import PlannedModel
from .unplanned import UnplannedSteps


class StepWatch:
    """Begins to watch steps as the policy decides.

    Args:
        model: The planned model.
        unplanned: Knows which steps are to be measured that run as the user wrote them.
        watching: Decides which steps are measured.

    Attributes:
        next_is_timed: Whether the operations of the next step are timed, whatever else is watched in it.
    """

    def __init__(self, model: PlannedModel, unplanned: UnplannedSteps, watching: WatchPolicy) -> None:
        self._memory, self._history, self._announcements = model.memory, model.history, model.announcements
        self._unplanned, self._watching = unplanned, watching
        self.next_is_timed = False

    def begin(self, step: CurrentStep, arguments: list[torch.Tensor]) -> None:
        """Choose by whose plan a step begins, and begin to watch it."""
        if step.plain is not None:
            step.look = self._watching.plain_step_begins(self._unplanned.is_to_be_measured(step.plain))
        else:
            all_likely = self._history.all_likely(step.foreseen)
            step.expected = max(all_likely, key=lambda kind: kind.own_plan.unplanned_peak_bytes, default=None)
            step.is_unknown = step.expected is not None and self._history.begins_unknown(step.foreseen, step.expected)
            step.look = self._watching.step_begins(self._expect(step))
        if step.look.is_measured:
            step.record = self._begin_record(step, arguments)
        if step.look.is_timed or self.next_is_timed:
            step.timed, self.next_is_timed = TimedRun(self._memory.device), False

    def _expect(self, step: CurrentStep) -> Expected:
        """Return what is known of a step that begins."""
        kind, following = self._history.likely(step.foreseen), self._history.following(step.foreseen)
        foreseen = next(iter(step.foreseen), None)
        if kind is None:
            is_on_host = self._memory.device.type == "cpu"
            return Expected(None, foreseen, step.size_bytes, is_on_host=is_on_host)
        next_one = None if following is None else self._expect_planned(following, following, 0)
        return replace(self._expect_planned(kind, foreseen, step.size_bytes), following=next_one)

    def _expect_planned(self, kind: StepKind, foreseen: StepKind | None, size_bytes: int) -> Expected:
        """Return what is known of a step of a planned kind."""
        plan = kind.own_plan
        higher_bytes = 0 if kind.seen_bytes is None else plan.planned_peak_bytes - kind.seen_bytes
        may_grow = kind.recorded.outside_bytes > GUARD_BYTES
        is_higher = higher_bytes > guard_bytes(plan.budget_bytes)  # and not by a loss that is kept
        is_piece = self._memory.iterations.needs_measured_steps
        is_free = (may_grow or is_higher or is_piece) and not MemoryMeter.is_running(self._memory.device)
        return Expected(
            kind,
            foreseen,
            size_bytes,
            kind.state,
            may_grow=is_free and may_grow,
            is_higher=is_free and is_higher,
            is_piece=is_free and is_piece,
        )

    def _begin_record(self, step: CurrentStep, arguments: list[torch.Tensor]) -> StepRecord:
        """Begin to measure a step."""
        generation = YOUNG if step.look is not None and step.look.watch is Watch.GLANCE else ALL
        if self._memory.collect_garbage(LITTERED_STEPS, generation) or step.resident is None:
            step.resident = self._memory.count_before_step(arguments, generation)
        resident = step.resident
        sees_frees = self._memory.sees_frees(resident)
        existing = Existing(resident.size_bytes, resident.stale_bytes, resident.left_bytes, sees_frees)
        record = StepRecord(self._memory.device, existing, self._memory.root)
        self._memory.watch_releases(record, arguments, generation)
        if not record.is_measured and not backward_pass.is_running():
            self._announcements.profiled()
        return record
