"""Steps that run as the user wrote them, though their model is planned: where that fits.

There are three cases. Steps of sizes that were never seen, which to capture would take seconds
(`signatures.eager_predictions`). Those of them that fit only where what autograd saves is offloaded, until plans for
them are worth their time (`offloading`). And steps whose plan gains nothing (`StepSignature.gains_nothing`).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from functools import cache, partial

from .. import thresholds
from ..calls.given import ModuleCall
from ..memory.allocator import free_bytes
from ..signatures.eager_predictions import CapturedStep, EagerPredictions
from ..signatures.step_signature import StepSignature
from .current_step import CurrentStep
from .modes import RECORDS, Eager, GivenBack, Mode, StepFacts, mode_of
from .new_sizes import NewSizes
from .planned import PlannedSignatures
from .planned_model import PlannedModel


class EagerSteps:
    """Finds out what `mode_of` asks of a step that begins, and learns from steps that run as the user wrote them."""

    def __init__(self, model: PlannedModel, planned: PlannedSignatures, new_sizes: NewSizes) -> None:
        self._model, self._planned, self._new_sizes = model, planned, new_sizes
        self._history = model.history
        self._may_run_eager = not model.parts.fuses  # fused kernels give other bits than PyTorch's own
        self._tell = cache(model.tell)  # each text once
        self._predictions, self._offloading = EagerPredictions(), model.offloading
        self._sizes_vary = False  # whether any step ran eager since its sizes were not known
        self._extra_ms = defaultdict[tuple[ModuleCall, ...], float](float)  # spent on saving memory so far, by calls

    def step_begins(self, step: CurrentStep) -> None:
        """Choose how a step runs that begins with some calls."""
        for signature in self._history.planned if self._may_run_eager else ():
            if signature.calls is not None:
                self._predictions.learn(signature)
        likely = self._history.likely(step.foreseen) if self._may_run_eager and step.calls else None
        if likely is None:
            return
        step.eager = self._choose(step, likely)
        if step.eager is None:
            if self._offloading.files.size_bytes and self._is_worth_capturing(step.calls, likely):
                self._offloading.files.forget()
            return
        if not isinstance(step.eager, GivenBack):
            self._sizes_vary = True
            self._extra_ms[tuple(step.calls)] += step.eager.prediction.extra_ms
        self._tell(step.eager.describe())

    def called(self, step: CurrentStep, call: ModuleCall) -> None:
        """Learn of a further call of the step under way: if it does not fit as it is, it is captured."""
        step.calls.append(call)
        if step.eager is not None:
            step.eager = self._choose(step, step.eager.likely)

    def is_to_be_measured(self, eager: Eager) -> bool:
        """Whether to measure a step that runs eager."""
        return eager.is_to_be_measured(self._predictions, self._room_bytes())

    def ended(self, step: CurrentStep, eager: Eager) -> None:
        """Learn from a step that ran eager."""
        if step.record is None:
            return
        peak_bytes, plan = step.record.peak_bytes, self._planned.latest
        added_bytes = None if peak_bytes is None else peak_bytes - step.record.resident.existing_bytes
        self._predictions.measured(step.calls, eager.likely, eager.prediction, added_bytes)
        if not self._model.options.budget.is_whole:  # else it is what plain training takes
            eager.ended(self._model, step.record, None if plan is None else plan.budget_bytes)

    def graph_stays(self) -> None:
        """Learn that a backward retained the graph of code that ran as the user wrote it: later steps are captured.

        What such a graph holds in the steps that follow, nobody sees.
        """
        self._may_run_eager = False
        self._tell("Steps that retain a graph run by plans from now on, which count what it holds.")

    def learn_from_taken_over(self, step: CurrentStep, signature: StepSignature) -> None:
        """Learn of the step that ends, where it ran by the plan of another size and has none of its own."""
        at_sizes = step.at_sizes
        if at_sizes is not None and signature.plan is None and self._may_run_eager:
            code = self._history.same_code(at_sizes)
            self._predictions.learn_foreseen(CapturedStep(tuple(step.calls), code, at_sizes))

    def _room_bytes(self) -> int:
        """Return what a step may add to the resident bytes; any, where the budget is what plain training takes."""
        if self._model.options.budget.is_whole:
            return sys.maxsize
        rooms = [signature.own_plan.room for signature in self._history.planned]
        if self._model.options.budget.share is None:
            most_resident_bytes = max(room.resident_bytes for room in rooms)
            rooms = [replace(room, resident_bytes=most_resident_bytes) for room in rooms]
        return max(room.step_bytes for room in rooms)

    def _is_worth_capturing(self, calls: list[ModuleCall], likely: StepSignature) -> bool:
        """Whether saving memory has taken more time, in steps called like this one or in all, than plans would have."""
        plan = self._planned.latest
        planning_ms = 0.0 if plan is None else 1000 * plan.planning.all_s
        if self._extra_ms.get(tuple(calls), 0.0) > thresholds.current.worth_a_plan * planning_ms:
            return True
        is_worth_it = sum(self._extra_ms.values()) >= thresholds.current.worth_made_code * planning_ms
        return is_worth_it and self._new_sizes.may_serve(likely.step)

    def _choose(self, step: CurrentStep, likely: StepSignature) -> Eager | None:
        """Choose how a step runs that is likely of a signature; None where it is captured."""
        facts = StepFacts(
            step.calls,
            likely,
            step.eager,
            self._predictions,
            self._offloading,
            self._sizes_vary,
            self._room_bytes,
            partial(free_bytes, self._model.memory.device),
            partial(self._is_worth_capturing, step.calls, likely),
        )
        mode = mode_of(facts)
        if mode is Mode.CAPTURED or facts.prediction is None:
            return None
        return RECORDS[mode].of(facts, facts.prediction)
