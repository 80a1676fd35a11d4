"""The ways in which a step can run, and the rules by which one of them is chosen.

A way is chosen as a step begins, or goes on with another call. Where that is `BY_GRAPHS`, the step runs captured, and a
way is chosen for each captured graph as it comes. `choose_way` holds the order of the rules. What each rule looks at
stands with the objects that know it: `unplanned` for steps, `graph_programs` for graphs.

- A step: eager, where its plan gains nothing or that is being measured; by a plan of its own; without a plan as it is,
  or with saved values offloaded, the faster of these that fits (`plain_steps`); else `BY_GRAPHS`.
- A graph: by the plan of its step; by a plan of other sizes; at the least memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..planning.ladder import Loss
from ..running.program import Program
from ..signatures.plain_steps import Prediction
from ..signatures.recorded_step import RecordedStep
from ..signatures.step_signature import StepSignature
from .offload_room import OffloadRoom


@dataclass(frozen=True, slots=True)
class Way:
    """How a step, or a captured graph of one, runs."""


# -------------------------------------------------------------------- captured


@dataclass(frozen=True, slots=True)
class ByGraphs(Way):
    """The step runs captured: each of its graphs has its way."""


BY_GRAPHS = ByGraphs()


@dataclass(frozen=True, slots=True)
class ByProgram(Way):
    """A captured graph runs by a program.

    Attributes:
        program: The program.
        is_planned: Whether it comes from a plan, be it of another step.
    """

    program: Program
    is_planned: ClassVar[bool] = True

    @property
    def signature(self) -> StepSignature | None:
        """The step signature whose own plan the program is part of, None for none."""
        return None


@dataclass(frozen=True, slots=True)
class OwnPlan(ByProgram):
    """A captured graph runs by the plan of the signature that its step has begun like.

    Attributes:
        of_signature: The signature. Where the graph has no backward in it, the program is not part of the plan.
    """

    of_signature: StepSignature

    @property
    def signature(self) -> StepSignature | None:
        """The step signature whose own plan the program is part of."""
        return self.of_signature


@dataclass(frozen=True, slots=True)
class PlanOfOtherSizes(ByProgram):
    """A captured graph runs by what was decided for the same code at other sizes.

    Attributes:
        loss: What its step loses by that, where it was made from traces of other sizes; None where it was traced.
    """

    loss: Loss[RecordedStep] | None = None


@dataclass(frozen=True, slots=True)
class LeastMemory(ByProgram):
    """A captured graph runs at the least memory: nothing was planned for it, or nothing planned fits."""

    is_planned: ClassVar[bool] = False


# -------------------------------------------------------------------- as the user wrote it


@dataclass(frozen=True, slots=True)
class Eager(Way):
    """The step runs as the user wrote it, since it fits the budget so, or since its plan gains nothing.

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

    def describe(self, name: str) -> str:
        """Describe such steps of the named model for the user."""
        return "Steps of other input sizes that fit the budget as they are run without a plan."


@dataclass(frozen=True, slots=True)
class Offloaded(Eager):
    """The step fits where what autograd saves is offloaded until the backward reads it.

    Attributes:
        room: Where that is put.
    """

    room: OffloadRoom = field(kw_only=True)

    @contextmanager
    def around(self, arguments: Any) -> Iterator[None]:
        """Offload what autograd saves in a call."""
        with self.room.saving(arguments):
            yield

    def describe(self, name: str) -> str:
        """Describe such steps of the named model for the user."""
        return (
            "Steps of new input sizes that fit the budget only with less memory run without a plan at first: what the "
            "backward reads is offloaded to temporary files or, from a GPU, to the host's memory. They get plans once "
            "that has cost more time than planning."
        )


# -------------------------------------------------------------------- the choice


class WayChoices:
    """What there is to choose from for a step, or for a captured graph: each rule returns a way, or None."""

    def given_back(self) -> Way | None:
        """As the user wrote it: its plan gains nothing and is slower than plain PyTorch, or that is being measured."""

    def own_plan(self) -> Way | None:
        """By the plan of its own signature."""

    def without_plan(self) -> Way | None:
        """As the user wrote it, as it is or with what is saved offloaded: the faster that fits."""

    def plan_of_other_sizes(self) -> Way | None:
        """Captured, by a plan for the same code at other sizes, where that fits."""

    def least_memory(self) -> Way:
        """What is left: for a step, that its graphs choose; for a graph, the least memory."""
        return BY_GRAPHS


def choose_way(choices: WayChoices) -> Way:
    """Choose how a step runs, or a captured graph of one: by the first of these rules that has a way."""
    rules = (
        choices.given_back,
        choices.own_plan,
        choices.without_plan,
        choices.plan_of_other_sizes,
    )
    return next((way for rule in rules if (way := rule()) is not None), None) or choices.least_memory()
