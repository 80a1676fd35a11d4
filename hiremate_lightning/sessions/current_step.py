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
from ..records.costs import Profile
from ..records.step import Decisions
from ..running.program import Program
from ..signatures.recorded_step import RecordedStep
from ..signatures.step_signature import GraphNumbers, Start, StepSignature
from ..signatures.watching import Look
from .modes import Eager, Mode


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward of the step: a captured graph that runs by a program."""

    number: int  # number of the captured graph
    captured: Captured  # what runs
    profile: Profile  # its costs
    program: Program  # the program
    mode: Mode  # how it runs
    # The step signature whose own plan it runs by, None for none. Where the graph has no backward in that, the
    # program is not part of the plan.
    signature: StepSignature | None = None

    @property
    def left_bytes(self) -> int:
        """Bytes of its outputs and of what it saves for its backward."""
        graph = self.captured.graph
        saved = self.program.schedule.saved_on_device(graph)
        storages = {graph.tensors[t].storage for t in (*graph.outputs, *saved)} - {None}
        return sum(graph.sizes[s] for s in storages if s is not None and not graph.storages[s].kind.is_resident)


@dataclass(frozen=True, slots=True)
class Followed:
    """What was taken over for the rest of a step."""

    step: RecordedStep  # the step that it was planned for, at least as large
    decisions: tuple[Decisions, ...]  # for each call


@dataclass(eq=False)
class CurrentStep:
    """A step from its beginning to its end."""

    start: Start = (0, 0)  # how it started
    foreseen: tuple[StepSignature, ...] = ()  # the signatures that it may be of, the likeliest first
    calls: list[ModuleCall] = field(default_factory=list)  # what each call of a planned module was given
    has_backward: bool = False  # whether a backward has begun
    is_unseen: bool = False  # whether a part of it was not seen, so that nothing can be learned from it
    resident: Resident | None = None  # what existed when it began, None where that was not counted
    eager: Eager | None = None  # how it runs as the user wrote it; None where it runs captured
    expected: StepSignature | None = None  # the signature by whose plan it begins, None for none
    # Whether it is likely of a signature without a plan that runs more than the expected one: then all of it runs at
    # the least memory.
    is_unknown: bool = False
    look: Look | None = None  # what is watched in it, None where that was not asked
    record: StepRecord | None = None  # what is measured in it, None for nothing
    timed: TimedRun | None = None  # times of its operations, None where they are not taken
    forwards: list[Forward] = field(default_factory=list)  # its forwards so far
    # The planned signatures that run the same code, as far as it has run; listed where it runs by no own plan.
    alike: list[StepSignature] = field(default_factory=list)
    followed: Followed | None = None  # what was taken over from one of them; None for nothing
    # The step as it is foreseen from the first of them; None before all its sizes are known.
    at_sizes: RecordedStep | None = None
    fits_nothing: bool = False  # whether it was made from traces of other sizes, and not even the least memory fits
    is_replanned: bool = False  # whether plans were made anew since its first forward
    is_to_be_planned: bool = False  # whether its signature gets a plan from its record, before the next step
    has_captured: bool = False  # whether something was captured in it
    began_s: float = field(default_factory=time.perf_counter)  # when it began, in seconds

    @property
    def is_watched(self) -> bool:
        """Whether anything is done in it beside running it."""
        return self.look is not None and (self.look.is_measured or self.look.is_timed)

    @property
    def is_over(self) -> bool:
        """Whether the next forward begins another step."""
        return self.has_backward or self.is_unseen

    @property
    def graphs(self) -> GraphNumbers:
        """The captured graphs that have run forward, by number."""
        return tuple(forward.number for forward in self.forwards)

    @property
    def is_from_other_sizes(self) -> bool:
        """Whether some of its graphs were made from traces of other sizes."""
        return any(forward.captured.made_from is not None for forward in self.forwards)

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
        self.followed = None

    def ran_by(self, signatures: Collection[StepSignature]) -> bool:
        """Whether it ran throughout by the plans of these signatures: its own, and those that it is taken for."""
        chosen = {forward.signature for forward in self.forwards}
        return bool(chosen) and chosen <= set(signatures) and not self.is_replanned

    @property
    def is_by_plans(self) -> bool:
        """Whether it ran by plans throughout, be they of other signatures."""
        return all(forward.mode is not Mode.LEAST for forward in self.forwards)

    def drop(self) -> None:
        """End its measurement, of which nothing is learned."""
        if self.record is not None:
            self.record.close()
