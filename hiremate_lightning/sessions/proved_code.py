"""What the proofs of a session's code ask of it: by which program code is about to run, and in what memory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import torch

from ..memory.allocator import free_bytes
from ..records.costs import Profile
from ..records.step import Step
from ..running.execution import Part
from ..running.program import Program
from .graph_programs import GraphPrograms
from .planned import PlannedSignatures
from .planned_model import PlannedModel
from .steps import Steps


class ProvedCode:
    """The captured code of one session, as `proofs.proving` needs it."""

    def __init__(
        self,
        model: PlannedModel,
        planned: PlannedSignatures,
        graph_programs: GraphPrograms,
        steps: Steps,
        tracing: ExitStack,
    ) -> None:
        self._model, self._planned = model, planned
        self._graph_programs, self._steps = graph_programs, steps
        self.name, self.reporter, self.tracing, self.say = model.name, model.reporter, tracing, model.announcements.say

    @property
    def asked(self) -> int:
        """In how many runs code is proved."""
        return self._model.options.verify

    @property
    def fuses(self) -> bool:
        """Whether operations are fused."""
        return self._model.parts.fuses

    def program_of(self, part: Part) -> Program:
        """Return the program by which a part is about to run."""
        return self._graph_programs.choose(self._steps.under_way, part).program

    def costs_of(self, part: Part) -> Profile:
        """Return the costs of the operations of a part."""
        return self._model.parts.prepare(part)[1]

    def free_bytes(self, step: Step, device: torch.device) -> int:
        """Return the bytes that the budget of a step, and the device, leave beside what is there."""
        resident = self._steps.resident()
        room, plan = self._planned.maker.room(step, resident), self._planned.latest
        budget_bytes = max(room.budget_bytes, 0 if plan is None else plan.budget_bytes)
        live_bytes = resident.size_bytes + self._steps.under_way.live_bytes
        if device.type == "cuda":
            live_bytes = max(live_bytes, torch.cuda.memory_allocated(device))
        room = replace(room, budget_bytes=budget_bytes, resident_bytes=live_bytes)
        return min(room.step_bytes, free_bytes(device))
