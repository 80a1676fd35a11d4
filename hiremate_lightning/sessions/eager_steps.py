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
from .modes import Eager, GivenBack, Offloaded
from .planned import PlannedSignatures
from .planned_model import PlannedModel
from .templates import Templates

SIMILAR = 2.0  # of the bytes of a step whose plan saves none: up to so many more, steps of its code save none either


class EagerSteps:
    """Decides which steps run as the user wrote them, and learns from those that do."""

    def __init__(self, model: PlannedModel, planned: PlannedSignatures, templates: Templates) -> None:
        self._model, self._planned, self._templates = model, planned, templates
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
        gainless = None if likely is None else self._gainless_signature(step, likely)
        step.eager = self._mode(step, likely, gainless)
        if step.eager is None:
            return
        if not isinstance(step.eager, GivenBack):
            self._sizes_vary = True
            self._extra_ms[tuple(step.calls)] += step.eager.prediction.extra_ms
        self._tell(step.eager.describe())

    def called(self, step: CurrentStep, call: ModuleCall) -> None:
        """Learn of a further call of the step under way: if it does not fit as it is, it is captured."""
        step.calls.append(call)
        if step.eager is not None:
            gainless = step.eager.likely if isinstance(step.eager, GivenBack) else None
            step.eager = self._mode(step, step.eager.likely, gainless, step.eager)

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

    def _is_to_be_captured(self, step: CurrentStep, likely: StepSignature) -> bool:
        """Whether saving memory has taken more time, in steps called like this one or in all, than plans would have."""
        plan = self._planned.latest
        planning_ms = 0.0 if plan is None else 1000 * plan.planning.all_s
        if self._extra_ms.get(tuple(step.calls), 0.0) > thresholds.current.worth_a_plan * planning_ms:
            return True
        is_worth_it = sum(self._extra_ms.values()) >= thresholds.current.worth_templates * planning_ms
        return is_worth_it and self._templates.may_serve(likely.step)

    def _gainless_signature(self, step: CurrentStep, likely: StepSignature) -> StepSignature | None:
        """Return the likely signature of this step where nothing else is called like it and its plan gains nothing.

        At sizes that no signature has been called with, it is returned where nothing fits and its plan saves no memory.
        """
        alike = self._predictions.called_like(step.calls)
        if alike and alike != [likely]:
            return None
        eager_bytes = self._predictions.with_margin(likely.own_plan.unplanned.peak_bytes)
        free = partial(free_bytes, self._model.memory.device)
        is_gainless = likely.gains_nothing(eager_bytes, free) if alike else likely.saves_nothing(eager_bytes, free)
        return likely if is_gainless else None

    def _mode(
        self,
        step: CurrentStep,
        likely: StepSignature | None,
        gainless: StepSignature | None,
        begun: Eager | None = None,
    ) -> Eager | None:
        """Choose how a step runs, by the first of these rules that applies; None where it runs captured.

        - Its plan gains nothing: eager; captured where a further call turns out another signature's.
        - Nobody knows which signature it has: captured.
        - A signature that is called so has a plan, which recomputes, or sizes did not vary yet: captured.
        - It fits as it is: eager.
        - It fits only with less memory, and capturing has become worth its time: captured.
        - It fits with what autograd saves offloaded: eager, so.
        - Else captured.

        Args:
            step: The step.
            likely: The signature that it is expected to have; None where nobody knows.
            gainless: The same, where nothing else is called like it and its plan gains nothing; else None.
            begun: How it has begun without a plan, for a further call.
        """
        if gainless is not None:
            return self._given_back(step, gainless)
        if likely is None:
            return None
        alike = self._predictions.called_like(step.calls)
        if alike and not (self._sizes_vary and all(signature.own_plan.solution.is_plain for signature in alike)):
            return None
        saves_memory = False if alike else None if begun is None else begun.prediction.saves_memory
        prediction = self._predictions.predict(step.calls, likely, self._room_bytes(), saves_memory)
        if prediction is None:
            return None
        if not prediction.saves_memory:
            return Eager(prediction, likely)
        if begun is None and self._is_to_be_captured(step, likely):
            self._offloading.files.forget()
            return None
        has_room = begun is not None or self._offloading.has_room(prediction.offloaded_bytes)
        return Offloaded(prediction, likely, offloading=self._offloading) if has_room else None

    def _given_back(self, step: CurrentStep, signature: StepSignature) -> GivenBack | None:
        """Return how a step runs whose plan gains nothing; None where its calls are another signature's."""
        alike = self._predictions.called_like(step.calls)
        if alike and signature not in alike:
            return None
        is_known = not alike and signature.is_given_back
        prediction = self._predictions.predict(step.calls, signature, sys.maxsize, saves_memory=False)
        if prediction is None:
            return None
        is_similar = prediction.captured_bytes <= SIMILAR * signature.own_plan.unplanned.peak_bytes
        is_open = alike or is_known or is_similar
        return GivenBack(prediction, signature, is_at_its_sizes=bool(alike)) if is_open else None
