"""The step under way: made when it begins, dropped when it ends or fails. What lasts for one step is kept here."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from ..calls.given import ModuleCall
from ..capturing.capture import Captured
from ..measuring.profiling import TimedRun
from ..measuring.recording import StepRecord
from ..measuring.resident import Resident
from ..measuring.resident_memory import ResidentMemory
from ..planning.ladder import Loss
from ..records.costs import Profile
from ..records.step import Decisions
from ..running.program import Program
from ..signatures.eager_trial import EagerTrial
from ..signatures.recorded_step import RecordedStep
from ..signatures.step_signature import GraphNumbers, Start, StepSignature
from ..signatures.watching import Look
from .modes import ByProgram, Eager


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward of the step.

    Attributes:
        number: Number of the captured graph.
        captured: What runs.
        profile: Its costs.
        mode: How it runs.
    """

    number: int
    captured: Captured
    profile: Profile
    mode: ByProgram

    @property
    def program(self) -> Program:
        """The program that runs it."""
        return self.mode.program

    @property
    def left_bytes(self) -> int:
        """Bytes of its outputs and of what it saves for its backward."""
        graph = self.captured.graph
        saved = self.program.schedule.saved_on_device(graph)
        storages = {graph.tensors[t].storage for t in (*graph.outputs, *saved)} - {None}
        return sum(graph.sizes[s] for s in storages if s is not None and not graph.storages[s].kind.is_resident)


@dataclass(frozen=True, slots=True)
class Followed:
    """What was taken over for the rest of a step.

    Attributes:
        step: The step that it was planned for, at least as large.
        decisions: For each call.
        loss: What it loses by them, where it was made from traces of other sizes; None where it was traced.
    """

    step: RecordedStep
    decisions: tuple[Decisions, ...]
    loss: Loss[RecordedStep] | None = None


@dataclass(eq=False)
class StepComparison:
    """The planned signatures that run the same code as the step under way.

    Attributes:
        alike: These signatures, as far as they were compared.
        compared: How many forwards of the step were compared with theirs.
        followed: What was taken over from one of them; None for nothing.
        foreseen: What the first of them runs, and the step as it is foreseen from it; None before all sizes of the step
            are known.
        fits_nothing: Whether it was made from traces of other sizes, and not even the least memory fits.
    """

    alike: list[StepSignature] = field(default_factory=list)
    compared: int = 0
    followed: Followed | None = None
    foreseen: tuple[RecordedStep, RecordedStep] | None = None
    fits_nothing: bool = False


@dataclass(eq=False)
class CurrentStep:
    """A step from its beginning to its end.

    Attributes:
        size_bytes: Of what its first call was given.
        waiting: How many graphs of earlier steps waited for their backward as it began.
        foreseen: The signatures that it may be of, the likeliest first.
        calls: What each call of a planned module was given.
        has_backward: Whether a backward has begun.
        is_unseen: Whether a part of it was not seen, so that nothing can be learned from it.
        resident: What existed when it began, None where that was not counted.
        eager: How it runs as the user wrote it; None where it runs captured.
        expected: The signature by whose plan it begins, None for none.
        is_unknown: Whether it is likely of a signature without a plan that runs more than the expected one: then all of
            it runs at the least memory.
        look: What is watched in it, None where that was not asked.
        timing: What its whole time is taken for, None where it is not.
        record: What is measured in it, None for nothing.
        timed: Times of its operations, None where they are not taken.
        forwards: Its forwards so far.
        comparison: The planned steps that run the same code.
        is_replanned: Whether plans were made anew since its first forward.
        is_to_be_planned: Whether its signature gets a plan from its record, before the next step.
        has_captured: Whether something was captured in it.
        began_s: When it began, in seconds.
    """

    size_bytes: int = 0
    waiting: int = 0
    foreseen: tuple[StepSignature, ...] = ()
    calls: list[ModuleCall] = field(default_factory=list)
    has_backward: bool = False
    is_unseen: bool = False
    resident: Resident | None = None
    eager: Eager | None = None
    expected: StepSignature | None = None
    is_unknown: bool = False
    look: Look | None = None
    timing: EagerTrial | None = None
    record: StepRecord | None = None
    timed: TimedRun | None = None
    forwards: list[Forward] = field(default_factory=list)
    comparison: StepComparison = field(default_factory=StepComparison)
    is_replanned: bool = False
    is_to_be_planned: bool = False
    has_captured: bool = False
    began_s: float = field(default_factory=time.perf_counter)

    @property
    def is_watched(self) -> bool:
        """Whether anything is done in it beside running it."""
        return self.look is not None and (self.look.is_measured or self.look.is_timed)

    @property
    def start(self) -> Start:
        """How it started."""
        return self.size_bytes, self.waiting

    @property
    def is_over(self) -> bool:
        """Whether the next forward begins another step."""
        return self.has_backward or self.is_unseen

    @property
    def graphs(self) -> GraphNumbers:
        """The captured graphs that have run forward, by number."""
        return tuple(forward.number for forward in self.forwards)

    @property
    def is_from_template(self) -> bool:
        """Whether some of its graphs were made from traces of other sizes."""
        return any(forward.captured.template is not None for forward in self.forwards)

    def resident_in(self, memory: ResidentMemory) -> Resident:
        """Return what existed when it began; where that was not counted, what exists now."""
        return self.resident or memory.count(())

    @property
    def live_bytes(self) -> int:
        """Bytes that its forwards have left: outputs, and what is saved for backwards."""
        return sum(forward.left_bytes for forward in self.forwards)

    def plans_changed(self) -> None:
        """Learn that plans were made anew: what has run, or was taken over, is of those before."""
        self.is_replanned = self.is_replanned or bool(self.forwards)
        self.comparison.followed = None

    def ran_by(self, signatures: Collection[StepSignature]) -> bool:
        """Whether it ran throughout by the plans of these signatures: its own, and those that it is taken for."""
        chosen = {forward.mode.signature for forward in self.forwards}
        return bool(chosen) and chosen <= set(signatures) and not self.is_replanned

    def began_by(self, signature: StepSignature) -> bool:
        """Whether its first forward ran by the plan of a signature."""
        return bool(self.forwards) and self.forwards[0].mode.signature is signature

    @property
    def began_again(self) -> bool:
        """Whether its first graph ran once more, as after a forward without a backward."""
        return bool(self.graphs) and self.graphs[0] in self.graphs[1:]

    @property
    def is_by_plans(self) -> bool:
        """Whether it ran by plans throughout, be they of other signatures."""
        return all(forward.mode.is_planned for forward in self.forwards)

    def drop(self) -> None:
        """End its measurement, of which nothing is learned."""
        if self.record is not None:
            self.record.close()
