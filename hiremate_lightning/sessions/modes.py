"""The modes of steps and of captured graphs, and the rules that choose the mode of a step: `step_mode`, in order.

`ModeFacts` finds what the rules ask of a step. A step that runs eager has a record of its mode, which says what to
measure in the step and what to do with the result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar

from ..calls.module_call import ModuleCall
from ..measuring.recording import StepMeasurement
from ..signatures.eager_predictions import EagerPredictions, Prediction, SavedTensors
from ..signatures.step_signature import StepSignature
from ..units import format_bytes
from .offloading import Offloading
from .planned_model import PlannedModel

# If the plan of a step saves no memory, steps of other sizes run eager too, up to so many times its bytes.
MUCH_MORE = 2.0


class Mode(Enum):
    """How a step, or one of its captured graphs, runs."""

    GIVEN_BACK = "eager, its plan given back"
    EAGER = "eager"
    OFFLOADED = "eager, saved values offloaded"
    PLANNED = "by a plan"
    OTHER_SIZES = "by what was decided for the same code at other sizes"
    LEAST = "at the least memory"


def step_mode(facts: ModeFacts) -> Eager | None:
    """Return the record of the mode in which a step runs eager; None if it is captured. The first rule decides."""
    if facts.needs_plan:
        return None
    prediction = facts.prediction
    if prediction is None:  # it may not fit eager
        return None
    if facts.gains_nothing:
        given_back = GivenBack(prediction, facts.likely, is_at_its_sizes=bool(facts.called_alike))
        # A later call may show that the step has another signature.
        return given_back if facts.is_similar(prediction) else None
    if prediction.saved is SavedTensors.IN_MEMORY:
        return Eager(prediction, facts.likely)
    if facts.begun is None and facts.is_worth_capturing():
        return None
    return Offloaded(prediction, facts.likely, facts.offloading) if facts.may_offload(prediction) else None


@dataclass(frozen=True)
class ModeFacts:
    """What the rules ask of a step that begins, or of an eager step at its next call; each fact is found when asked.

    A step without a likely signature is captured without asking (`EagerSteps.choose_mode`).
    """

    calls: Sequence[ModuleCall]  # types and shapes that each call so far is given
    likely: StepSignature  # the planned signature that the step likely has
    begun: Eager | None  # the eager mode in which it has begun; None if it begins now
    predictions: EagerPredictions  # predicts the memory of eager steps
    offloading: Offloading  # offloads saved tensors
    sizes_vary: bool  # whether any step ran eager because its sizes had no plan
    room_bytes: Callable[[], int]  # returns the bytes that it may add to the resident bytes
    free_bytes: Callable[[], int]  # returns the bytes that the device could still allocate
    # Returns whether offloading has taken more time than plans would.
    is_worth_capturing: Callable[[], bool]

    @cached_property
    def called_alike(self) -> list[StepSignature]:
        """The planned signatures whose first calls were given the same types and shapes."""
        return self.predictions.called_like(self.calls)

    @cached_property
    def prediction(self) -> Prediction | None:
        """The bytes that it takes when it runs eager; None if that may not fit."""
        saved = None if self.begun is None else self.begun.prediction.saved
        if self.called_alike or self.gains_nothing:
            saved = SavedTensors.IN_MEMORY
        room_bytes = sys.maxsize if self.gains_nothing else self.room_bytes()
        return self.predictions.predict(self.calls, self.likely, room_bytes, saved)

    @cached_property
    def gains_nothing(self) -> bool:
        """Whether the plan of the likely signature gains nothing, and no other planned signature is called so.

        At sizes without a plan, only a plan counts that saves no memory, under a budget that nothing fits.
        """
        if self.begun is not None:
            return isinstance(self.begun, GivenBack)
        if self.called_alike and self.called_alike != [self.likely]:
            return False
        eager_bytes = self.predictions.with_margin(self.likely.own_plan.unplanned.peak_bytes)
        decide = self.likely.gains_nothing if self.called_alike else self.likely.saves_nothing
        return decide(eager_bytes, self.free_bytes)

    @property
    def needs_plan(self) -> bool:
        """Whether a plan for these very shapes is to run: it recomputes something, or all sizes so far had plans."""
        keep_all = all(signature.own_plan.solution.keeps_all for signature in self.called_alike)
        return bool(self.called_alike) and not self.gains_nothing and not (self.sizes_vary and keep_all)

    def is_similar(self, prediction: Prediction) -> bool:
        """Whether it may run eager: called like the signature, shown to take no more, or not `MUCH_MORE` as large."""
        if self.called_alike:
            return self.likely in self.called_alike
        is_much_more = prediction.captured_bytes > MUCH_MORE * self.likely.own_plan.unplanned.peak_bytes
        return bool(self.likely.eager_is_no_worse) or not is_much_more

    def may_offload(self, prediction: Prediction) -> bool:
        """Whether there is memory for its offloaded tensors; a step that has begun so goes on."""
        return self.begun is not None or self.offloading.has_room(prediction.offloaded_bytes)


# ---------------------------------------------------------------- steps that run eager


@dataclass(frozen=True, slots=True)
class Eager:
    """A step runs eager, since it fits the budget so."""

    mode: ClassVar[Mode] = Mode.EAGER
    prediction: Prediction  # the bytes that it takes
    likely: StepSignature  # the signature whose code it is expected to run

    def around(self, arguments: Any) -> AbstractContextManager[None]:
        """Return the context in which a call of the step runs."""
        return nullcontext()

    def describe(self) -> str:
        """Describe such steps for the user."""
        return "Steps of other input sizes that fit the budget as they are run without a plan."

    def is_to_be_measured(self, predictions: EagerPredictions, room_bytes: int) -> bool:
        """Whether to measure the step, which may add `room_bytes` to the resident bytes."""
        return predictions.is_to_be_measured(self.prediction, room_bytes)

    def ended(self, model: PlannedModel, measurement: StepMeasurement, budget_bytes: int | None) -> None:
        """Warn if the measured peak of the step is above the budget; `budget_bytes` is None if there is no plan."""
        if measurement.peak_bytes is not None and budget_bytes is not None and measurement.peak_bytes > budget_bytes:
            took, budget = format_bytes(measurement.peak_bytes), format_bytes(budget_bytes)
            self._exceeded(model, f" It took {took}; the budget is {budget}.")

    def _exceeded(self, model: PlannedModel, took: str) -> None:
        """Warn that the step took more than the budget."""
        missing = "a plan" if self.prediction.saved is SavedTensors.OFFLOADED else "recomputation"
        model.messages.warn(
            f"A step of a new input size ran without {missing}, since it was predicted to fit, and took more than the "
            "budget. From now on such predictions have a margin.",
            took,
        )


@dataclass(frozen=True, slots=True)
class Offloaded(Eager):
    """A step runs eager, and fits since its saved tensors are offloaded until the backward reads them."""

    mode: ClassVar[Mode] = Mode.OFFLOADED
    offloading: Offloading  # offloads the saved tensors

    @contextmanager
    def around(self, arguments: Any) -> Iterator[None]:
        """Offload the saved tensors of a call."""
        with self.offloading.saving(arguments):
            yield

    def describe(self) -> str:
        """Describe such steps for the user."""
        return (
            "Steps of new input sizes that fit the budget only with less memory run without a plan at first: what the "
            "backward reads is offloaded to temporary files or, from a GPU, to the host's memory. They get plans once "
            "that has cost more time than planning."
        )


@dataclass(frozen=True, slots=True)
class GivenBack(Eager):
    """A step runs eager, since the plan of its likely signature gains nothing: the plan is kept, and not used."""

    mode: ClassVar[Mode] = Mode.GIVEN_BACK
    is_at_its_sizes: bool  # whether its calls have the types and shapes of the planned step

    def describe(self) -> str:
        """Describe such steps for the user."""
        return "Steps whose plan recomputes nothing, or saves no memory, run without it where they can."

    def is_to_be_measured(self, predictions: EagerPredictions, room_bytes: int) -> bool:
        """Whether to measure it: if its plan saves no memory, until a step has shown whether it takes more."""
        if self.likely.own_plan.saves_nothing:
            return self.likely.eager_is_no_worse is None
        return Eager.is_to_be_measured(self, predictions, room_bytes)

    def ended(self, model: PlannedModel, measurement: StepMeasurement, budget_bytes: int | None) -> None:
        """Decide whether a plan that saves no memory stays: it does if the step took more than with the plan."""
        plan, peak_bytes = self.likely.own_plan, measurement.peak_bytes
        if not plan.saves_nothing:
            Eager.ended(self, model, measurement, budget_bytes)
            return
        plan_bytes = measurement.resident.existing_bytes + self.prediction.captured_bytes
        if self.is_at_its_sizes:
            plan_bytes = plan.measured.peak_bytes or plan.planned_peak_bytes
        self.likely.ran_without_plan(peak_bytes, plan_bytes)
        if self.likely.eager_is_no_worse is None:
            return
        text = f"A plan of {model.name} saves no memory: such steps run without it from now on."
        if not self.likely.eager_is_no_worse:
            found = "was not seen" if peak_bytes is None else f"is {format_bytes(peak_bytes)}"
            text = f"The plan of {model.name} saves little memory. It stays, since the peak without it {found}."
        model.report(text)

    def _exceeded(self, model: PlannedModel, took: str) -> None:
        """Run steps of this signature by their plan again, and warn."""
        self.likely.keep_plan()
        text = "A step without its plan took more than the budget: such steps run by their plan again."
        model.messages.warn(text, took)
