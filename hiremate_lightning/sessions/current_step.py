"""The step under way: made when it begins, dropped when it ends or fails. What lasts for one step is kept here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from ..capturing.capture import Captured
from ..measuring.profiling import TimedRun
from ..measuring.recording import StepRecord
from ..measuring.resident import Resident
from ..records.costs import Profile
from ..records.step import Decisions
from ..running.program import Program
from .kinds import Kind, Start
from .known import Known
from .plain_steps import ModuleCall, Prediction
from .releasing import Timing
from .watching import Look

Planned = tuple[Known, Decisions]  # a step, and what was decided for it


class State(Enum):
    """How far a step has come."""

    FORWARD = "its forwards run"
    BACKWARD = "a backward has begun, so the next forward begins another step"
    ENDED = "it has ended, and the next step may learn from it"
    FAILED = "it was dropped, since an exception was raised or not all of it was seen"


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward of the step.

    Attributes:
        number: Number of the captured graph.
        captured: What runs.
        profile: Its costs.
        program: The program that runs it.
        kind: The kind of step whose own plan the program is part of, or would be if the forward had a backward; None
            where the step began like no planned kind.
        is_planned: Whether the program comes from a plan, be it of another step.
    """

    number: int
    captured: Captured
    profile: Profile
    program: Program
    kind: Kind | None
    is_planned: bool

    @property
    def left_bytes(self) -> int:
        """Bytes of its outputs and of what it saves for its backward."""
        graph = self.captured.graph
        storages = {graph.tensors[t].storage for t in (*graph.outputs, *self.program.schedule.saved)} - {None}
        return sum(graph.sizes[s] for s in storages if s is not None and not graph.storages[s].kind.is_resident)


@dataclass(frozen=True, slots=True)
class Followed:
    """What was taken over for the rest of a step.

    Attributes:
        known: The step that it was planned for, at least as large.
        decisions: For each call.
    """

    known: Known
    decisions: tuple[Decisions, ...]


@dataclass(eq=False)
class Comparison:
    """The planned steps that run the same code as the step under way.

    Attributes:
        alike: These steps, as far as they were compared.
        compared: How many forwards of the step were compared with theirs.
        followed: What was taken over from one of them; None for nothing.
        foreseen: The first of them, and the step as it is foreseen from it; None before all sizes of the step are
            known.
    """

    alike: list[Planned] = field(default_factory=list)
    compared: int = 0
    followed: Followed | None = None
    foreseen: tuple[Known, Known] | None = None


@dataclass(frozen=True, slots=True)
class PlainRun:
    """How a step runs as the user wrote it.

    Attributes:
        prediction: Which of its modules it calls twice, and what it takes then.
        likely: The kind whose code it is expected to run.
        released: Its kind, where that has a plan which gains nothing; else None.
    """

    prediction: Prediction
    likely: Kind
    released: Kind | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """What happened in a step that ran captured code.

    Attributes:
        kind: Its kind.
        is_own: Whether it ran by the plan of its kind throughout, or of a kind that it is taken for.
        is_by_plans: Whether it ran by plans throughout, be they of other kinds.
        expected: The kind by whose plan it began, None for none.
        resident: What existed when it began, None where that was not counted.
        record: What was measured, None for nothing.
        timed: Times of its operations, None where they were not taken.
    """

    kind: Kind
    is_own: bool
    is_by_plans: bool
    expected: Kind | None
    resident: Resident | None
    record: StepRecord | None
    timed: TimedRun | None


@dataclass(eq=False)
class CurrentStep:
    """A step from its beginning to its end.

    Attributes:
        size_bytes: Of what its first call was given.
        waiting: How many graphs of earlier steps waited for their backward as it began.
        foreseen: The kinds that it may be of, the likeliest first.
        calls: What each call of a planned module was given.
        state: How far it has come.
        is_unseen: Whether a part of it was not seen, so that nothing can be learned from it.
        resident: What existed when it began, None where that was not counted.
        plain: How it runs as the user wrote it; None where it runs captured.
        expected: The kind by whose plan it begins, None for none.
        look: What is watched in it, None where that was not asked.
        timing: How its whole time is taken, None where it is not.
        record: What is measured in it, None for nothing.
        timed: Times of its operations, None where they are not taken.
        forwards: Its forwards so far.
        comparison: The planned steps that run the same code.
        is_replanned: Whether plans were made anew since its first forward.
        is_to_be_planned: Whether its kind gets a plan from its record, before the next step.
    """

    size_bytes: int = 0
    waiting: int = 0
    foreseen: tuple[Kind, ...] = ()
    calls: list[ModuleCall] = field(default_factory=list)
    state: State = State.FORWARD
    is_unseen: bool = False
    resident: Resident | None = None
    plain: PlainRun | None = None
    expected: Kind | None = None
    look: Look | None = None
    timing: Timing | None = None
    record: StepRecord | None = None
    timed: TimedRun | None = None
    forwards: list[Forward] = field(default_factory=list)
    comparison: Comparison = field(default_factory=Comparison)
    is_replanned: bool = False
    is_to_be_planned: bool = False

    @property
    def start(self) -> Start:
        """How it started."""
        return self.size_bytes, self.waiting

    @property
    def is_over(self) -> bool:
        """Whether the next forward begins another step."""
        return self.state is not State.FORWARD or self.is_unseen

    @property
    def kind(self) -> Kind:
        """The numbers of the captured graphs that have run forward."""
        return tuple(forward.number for forward in self.forwards)

    @property
    def live_bytes(self) -> int:
        """Bytes that its forwards have left: outputs, and what is saved for backwards."""
        return sum(forward.left_bytes for forward in self.forwards)

    def plans_changed(self) -> None:
        """Learn that plans were made anew: what has run, or was taken over, is of those before."""
        self.is_replanned = self.is_replanned or bool(self.forwards)
        self.comparison.followed = None

    def end(self, own: Collection[Kind]) -> Ended:
        """End it.

        Args:
            own: Its kind, and those that it is taken for.

        Returns:
            What happened in it.
        """
        self.state = State.ENDED
        chosen = {forward.kind for forward in self.forwards}
        is_own = bool(chosen) and chosen <= set(own) and not self.is_replanned
        is_by_plans = all(forward.is_planned for forward in self.forwards)
        given = self.expected, self.resident, self.record, self.timed
        return Ended(self.kind, is_own, is_by_plans, *given)

    def fail(self) -> None:
        """Drop it."""
        self.state = State.FAILED
        if self.record is not None:
            self.record.close()
