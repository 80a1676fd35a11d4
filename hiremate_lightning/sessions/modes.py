"""The modes in which a step, or a captured graph of one, can run.

A mode is chosen as a step begins, or goes on with another call: by `UnplannedSteps._mode` in `unplanned.py`. A step
that does not run eager is captured, and a mode is chosen for each of its graphs as it comes: by `GraphPrograms._mode`
in `graph_programs.py`. Each of these two functions is the list of its rules, in their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ..planning.ladder import Loss
from ..running.program import Program
from ..signatures.plain_steps import Prediction
from ..signatures.recorded_step import RecordedStep
from ..signatures.step_signature import StepSignature
from .offloading import Offloading


@dataclass(frozen=True, slots=True)
class ByProgram:
    """A captured graph runs by a program.

    Attributes:
        program: The program.
        signature: The step signature whose own plan it runs by, None for none. Where the graph has no backward in that,
            the program is not part of the plan.
        is_planned: Whether it runs by a plan, be it of another step; else at the least memory.
        loss: What its step loses by a plan of other sizes, where it was made from traces of other sizes; else None.
    """

    program: Program
    signature: StepSignature | None = None
    is_planned: bool = True
    loss: Loss[RecordedStep] | None = None


@dataclass(frozen=True, slots=True)
class Eager:
    """A step runs as the user wrote it, since it fits the budget so, or since its plan gains nothing.

    Attributes:
        prediction: What it takes then.
        likely: The signature whose code it is expected to run.
        gainless: Its signature, where that has a plan that gains nothing so far; None where it has no plan.
    """

    prediction: Prediction
    likely: StepSignature
    gainless: StepSignature | None = None

    def around(self, arguments: Any) -> AbstractContextManager[None]:
        """Surround a call of the step that is given some arguments."""
        return nullcontext()

    def describe(self) -> str:
        """Describe such steps for the user."""
        return "Steps of other input sizes that fit the budget as they are run without a plan."


@dataclass(frozen=True, slots=True)
class Offloaded(Eager):
    """A step fits where what autograd saves is offloaded until the backward reads it.

    Attributes:
        offloading: Offloads these values.
    """

    offloading: Offloading = field(kw_only=True)

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
