"""The modes in which a step can run without being captured: `EagerSteps._mode` chooses one of them, or none.

A step that does not run eager is captured, and `GraphPrograms.choose` chooses the program of each of its graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ..measuring.recording import StepRecord
from ..signatures.eager_predictions import EagerPredictions, Prediction
from ..signatures.step_signature import StepSignature
from ..units import format_bytes
from .offloading import Offloading
from .planned_model import PlannedModel


@dataclass(frozen=True, slots=True)
class Eager:
    """A step runs as the user wrote it, since it fits the budget so."""

    prediction: Prediction  # what it takes then
    likely: StepSignature  # the signature whose code it is expected to run

    def around(self, arguments: Any) -> AbstractContextManager[None]:
        """Surround a call of the step that is given some arguments."""
        return nullcontext()

    def describe(self) -> str:
        """Describe such steps for the user."""
        return "Steps of other input sizes that fit the budget as they are run without a plan."

    def is_to_be_measured(self, predictions: EagerPredictions, room_bytes: int) -> bool:
        """Whether to measure such a step, which may add so many bytes to the resident ones."""
        return predictions.is_to_be_measured(self.prediction, room_bytes)

    def ended(self, model: PlannedModel, record: StepRecord, budget_bytes: int | None) -> None:
        """Learn what a measured step took; None for a budget where there is no plan."""
        if record.peak_bytes is not None and budget_bytes is not None and record.peak_bytes > budget_bytes:
            took, budget = format_bytes(record.peak_bytes), format_bytes(budget_bytes)
            self._exceeded(model, f" It took {took}; the budget is {budget}.")

    def _exceeded(self, model: PlannedModel, took: str) -> None:
        """Warn, once for each text, of a step that took more than the budget."""
        way = "a plan" if self.prediction.saves_memory else "recomputation"
        model.announcements.say(
            f"A step of a new input size ran without {way}, since it was predicted to fit, and took more than the "
            "budget. From now on such predictions have a margin.",
            took,
        )


@dataclass(frozen=True, slots=True)
class Offloaded(Eager):
    """A step fits where what autograd saves is offloaded until the backward reads it."""

    offloading: Offloading = field(kw_only=True)  # offloads these values

    @contextmanager
    def around(self, arguments: Any) -> Iterator[None]:
        """Offload what autograd saves in a call."""
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
    """A step runs as the user wrote it, since the plan of its signature, the likely one, gains nothing."""

    is_at_its_sizes: bool = field(kw_only=True)  # whether its calls are given what those of the planned step were

    def describe(self) -> str:
        """Describe such steps for the user."""
        return "Steps whose plan recomputes nothing, or saves no memory, run without it where they can."

    def is_to_be_measured(self, predictions: EagerPredictions, room_bytes: int) -> bool:
        """Whether to measure it: where its plan saves no memory, until a step has shown that it takes no more."""
        if self.likely.own_plan.saves_nothing:
            return self.likely.is_given_back is None
        return Eager.is_to_be_measured(self, predictions, room_bytes)

    def ended(self, model: PlannedModel, record: StepRecord, budget_bytes: int | None) -> None:
        """Learn whether the plan stays: one that saves no memory does where the step took more than by the plan."""
        plan, peak_bytes = self.likely.own_plan, record.peak_bytes
        if not plan.saves_nothing:
            Eager.ended(self, model, record, budget_bytes)
            return
        plan_bytes = record.resident.existing_bytes + self.prediction.captured_bytes
        if self.is_at_its_sizes:
            plan_bytes = plan.measured.peak_bytes or plan.planned_peak_bytes
        self.likely.ran_without_plan(peak_bytes, plan_bytes)
        if self.likely.is_given_back is None:
            return
        text = f"A plan of {model.name} saves no memory: such steps run without it from now on."
        if not self.likely.is_given_back:
            found = "was not seen" if peak_bytes is None else f"is {format_bytes(peak_bytes)}"
            text = f"The plan of {model.name} saves little memory. It stays, since the peak without it {found}."
        model.tell(text)

    def _exceeded(self, model: PlannedModel, took: str) -> None:
        """Let such steps run by their plan again, and warn."""
        self.likely.is_given_back = False
        text = "A step without its plan took more than the budget: such steps run by their plan again."
        model.announcements.say(text, took)
