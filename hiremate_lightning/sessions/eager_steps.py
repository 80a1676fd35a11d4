"""Steps of a planned model that run eager, since they fit the budget so.

There are three cases. Steps of sizes that were never captured: a capture would take seconds
(`signatures.eager_predictions`). Such steps that fit only with their saved tensors offloaded, until the time spent on
that exceeds the time of planning (`offloading`). And steps whose plan gains nothing (`StepSignature.gains_nothing`).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial

from .. import thresholds
from ..calls.module_call import ModuleCall
from ..housekeeping import Once
from ..memory.allocator import free_bytes
from ..signatures.eager_predictions import EagerPredictions, LearnedStep
from ..signatures.step_signature import StepSignature
from .current_step import CurrentStep
from .modes import Eager, GivenBack, ModeFacts, step_mode
from .new_sizes import NewSizes
from .planned_model import PlannedModel


class EagerSteps:
    """Collects the facts by which `step_mode` chooses the mode of a step, and corrects predictions by eager steps."""

    def __init__(self, model: PlannedModel, new_sizes: NewSizes) -> None:
        self._model, self._new_sizes = model, new_sizes
        self._history = model.history
        self._may_run_eager = not model.runtimes.fuses  # eager kernels differ from fused kernels in the last bits
        self._report_once = Once(model.report)
        self._predictions, self._offloading = EagerPredictions(), model.offloading
        self._sizes_vary = False  # whether any step ran eager because its sizes had no plan
        self._extra_ms = defaultdict[tuple[ModuleCall, ...], float](float)  # time spent on offloading so far, by calls

    def choose_mode(self, step: CurrentStep) -> None:
        """Choose whether a step that begins runs eager, and log its mode; set `step.eager`."""
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
        self._report_once(step.eager.describe())

    def called(self, step: CurrentStep, call: ModuleCall) -> None:
        """Add a call to the step under way; if the step runs eager, choose its mode again."""
        step.calls.append(call)
        if step.eager is not None:
            step.eager = self._choose(step, step.eager.likely)

    def is_to_be_measured(self, eager: Eager) -> bool:
        """Whether to measure the memory of a step that runs eager."""
        return eager.is_to_be_measured(self._predictions, self._room_bytes())

    def ended(self, step: CurrentStep, eager: Eager) -> None:
        """Correct predictions by the measured peak of a step that ran eager, and compare the peak with the budget."""
        if step.measurement is None:
            return
        peak_bytes, plan = step.measurement.peak_bytes, self._history.latest_plan
        added_bytes = None if peak_bytes is None else peak_bytes - step.measurement.resident.existing_bytes
        self._predictions.measured(step.calls, eager.likely, eager.prediction, added_bytes)
        if not self._model.options.budget.is_whole:  # a budget of 100% is what eager training takes
            eager.ended(self._model, step.measurement, None if plan is None else plan.budget_bytes)

    def graph_stays(self) -> None:
        """Capture all later steps, since a backward of an eager step retained its autograd graph.

        The memory that such a graph holds in later steps can't be measured.
        """
        self._may_run_eager = False
        self._report_once("Steps that retain a graph run by plans from now on, which count what it holds.")

    def learn_from_taken_over(self, step: CurrentStep, signature: StepSignature) -> None:
        """Predict eager steps also from the step that ends, if its sizes are foreseen and it has no plan of its own."""
        at_sizes = step.taken_over.at_sizes
        if at_sizes is not None and signature.plan is None and self._may_run_eager:
            code = self._history.same_code(at_sizes)
            self._predictions.learn_foreseen(LearnedStep(tuple(step.calls), code, at_sizes))

    def _room_bytes(self) -> int:
        """Return the bytes that a step may add to the resident bytes; no limit if the budget is 100%."""
        if self._model.options.budget.is_whole:
            return sys.maxsize
        rooms = [signature.own_plan.room for signature in self._history.planned]
        if not self._model.options.budget.is_share:
            most_resident_bytes = max(room.resident_bytes for room in rooms)
            rooms = [replace(room, resident_bytes=most_resident_bytes) for room in rooms]
        return max(room.step_bytes for room in rooms)

    def _is_worth_capturing(self, calls: list[ModuleCall], likely: StepSignature) -> bool:
        """Whether offloading, in steps called like this one or in all steps, has taken more time than plans would."""
        plan = self._history.latest_plan
        planning_ms = 0.0 if plan is None else 1000 * plan.planning.all_s
        if self._extra_ms.get(tuple(calls), 0.0) > thresholds.current.worth_a_plan * planning_ms:
            return True
        is_worth_it = sum(self._extra_ms.values()) >= thresholds.current.worth_made_code * planning_ms
        return is_worth_it and self._new_sizes.may_serve(likely.step)

    def _choose(self, step: CurrentStep, likely: StepSignature) -> Eager | None:
        """Return the record of the eager mode of a step that likely has a signature; None if it is captured."""
        return step_mode(
            ModeFacts(
                calls=step.calls,
                likely=likely,
                begun=step.eager,
                predictions=self._predictions,
                offloading=self._offloading,
                sizes_vary=self._sizes_vary,
                room_bytes=self._room_bytes,
                free_bytes=partial(free_bytes, self._model.memory.device),
                is_worth_capturing=partial(self._is_worth_capturing, step.calls, likely),
            )
        )
