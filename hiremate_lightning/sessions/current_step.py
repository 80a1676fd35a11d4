"""The record of the training step under way: made when the step begins, dropped when it ends or fails."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from ..calls.module_call import ModuleCall
from ..capturing.capture import Captured
from ..measuring.profiling import TimedRun
from ..measuring.recording import StepMeasurement
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
    """One forward of a captured graph in the step, with its program."""

    number: int  # number of the captured graph
    captured: Captured  # the captured graph
    profile: Profile  # time and bytes of its operations
    program: Program  # the program that runs it
    mode: Mode  # why this program was chosen
    # The step signature whose plan the forward follows; None if it follows none. If the graph has no backward in the
    # steps of that signature, the plan has no program for it, and `program` comes from elsewhere.
    signature: StepSignature | None = None

    @property
    def left_bytes(self) -> int:
        """Bytes of its outputs and saved tensors on the device, weights and buffers left out."""
        graph = self.captured.graph
        saved = self.program.schedule.saved_on_device(graph)
        storages = {graph.tensors[t].storage for t in (*graph.outputs, *saved)} - {None}
        return sum(graph.sizes[s] for s in storages if s is not None and not graph.storages[s].kind.is_resident)


@dataclass(frozen=True, slots=True)
class Followed:
    """Decisions, made for the same code at other sizes, that the rest of a step follows."""

    step: RecordedStep  # the step for which they were found to fit; the step under way is no larger
    decisions: tuple[Decisions, ...]  # the nodes that each call recomputes

    def suits(self, captured: Captured, call: int) -> bool:
        """Whether they were made for a call of these sizes, or, if it is not the last call, for a larger one."""
        expected = self.step.calls[call].captured
        if captured.made_from is not None and captured.made_from is expected.made_from:
            return captured.sizes == expected.sizes
        is_last = call + 1 == len(self.step.calls)  # at the last call all sizes are known
        return not is_last and captured.graph.is_no_larger(expected.graph)


@dataclass(frozen=True, slots=True)
class TakenOver:
    """What a step takes over from plans of the same code at other sizes, as its graphs without a plan begin.

    A graph changes nothing here if the same graphs ran in an earlier step: `GraphPrograms` keeps its program, and has
    learned from the sizes and the memory of the earlier step.
    """

    signatures: tuple[StepSignature, ...] = ()  # planned signatures whose code is that of all forwards until then
    followed: Followed | None = None  # decisions taken over from these signatures; None if none fit
    # The step as foreseen from these signatures, with the sizes of all its calls; None before all sizes are known.
    at_sizes: RecordedStep | None = None
    fits_nothing: bool = False  # whether it runs made code (of a size never traced), and not even the least memory fits


@dataclass(eq=False)
class CurrentStep:
    """A step from its beginning to its end."""

    start: Start = (0, 0)  # bytes of its arguments, and number of graphs that waited for a backward as it began
    foreseen: tuple[StepSignature, ...] = ()  # the signatures that it may turn out to have, the likeliest first
    calls: list[ModuleCall] = field(default_factory=list)  # types and shapes of the tensors that each call was given
    has_backward: bool = False  # whether a backward has begun
    is_unseen: bool = False  # whether a part of it ran unobserved: its measurement is dropped
    resident: Resident | None = None  # memory that existed when it began; None if not counted
    eager: Eager | None = None  # why it runs eager, and its prediction; None if it runs captured
    expected: StepSignature | None = None  # the signature by whose plan it begins; None if there is no plan
    # Whether it is likely to have a signature without a plan that runs more than the expected one: then all of its
    # graphs run at the least memory.
    may_need_more: bool = False
    look: Look | None = None  # whether its memory is measured or its operations timed; None before that is decided
    measurement: StepMeasurement | None = None  # the measurement of its memory; None if not measured
    timed: TimedRun | None = None  # times of its operations; None if not timed
    forwards: list[Forward] = field(default_factory=list)  # its forwards so far
    taken_over: TakenOver = TakenOver()  # from plans of the same code at other sizes
    is_replanned: bool = False  # whether plans were made again since its first forward
    is_to_be_planned: bool = False  # whether its signature gets a plan from its record, before the next step
    has_captured: bool = False  # whether a graph was captured in it
    began_s: float = field(default_factory=time.perf_counter)  # seconds, by the clock `time.perf_counter`

    @property
    def is_watched(self) -> bool:
        """Whether its memory is measured or its operations are timed."""
        return self.look is not None and (self.look.is_measured or self.look.is_timed)

    @property
    def is_over(self) -> bool:
        """Whether the next forward begins another step."""
        return self.has_backward or self.is_unseen

    def was_trial_of(self, call: ModuleCall) -> bool:
        """Whether it was one call of the same module, without a backward, as pipelines make one before training."""
        was_one_call = len(self.forwards) == 1 and [before.name for before in self.calls] == [call.name]
        return was_one_call and self.measurement is not None and self.measurement.left_nothing

    @property
    def graphs(self) -> GraphNumbers:
        """The numbers of the captured graphs that have run forward, in order."""
        return tuple(forward.number for forward in self.forwards)

    @property
    def is_from_other_sizes(self) -> bool:
        """Whether any of its graphs was made from traces of other sizes."""
        return any(forward.captured.made_from is not None for forward in self.forwards)

    def resident_in(self, memory: ResidentMemory) -> Resident:
        """Return the memory that existed when it began; if that was not counted, the memory that exists now."""
        return self.resident or memory.count(())

    @property
    def live_bytes(self) -> int:
        """Bytes of the outputs and saved tensors of its forwards so far."""
        return sum(forward.left_bytes for forward in self.forwards)

    def plans_changed(self) -> None:
        """Set `is_replanned` if a forward has run, since plans were made again; drop decisions taken over."""
        self.is_replanned = self.is_replanned or bool(self.forwards)
        self.taken_over = replace(self.taken_over, followed=None)

    def ran_by(self, signatures: Collection[StepSignature]) -> bool:
        """Whether each of its forwards followed the plan of one of these signatures."""
        chosen = {forward.signature for forward in self.forwards}
        return bool(chosen) and chosen <= set(signatures) and not self.is_replanned

    @property
    def is_by_plans(self) -> bool:
        """Whether no forward ran at the least memory: each followed a plan, or decisions for other sizes."""
        return all(forward.mode is not Mode.LEAST for forward in self.forwards)

    def drop(self) -> None:
        """Stop its measurement and discard the result."""
        if self.measurement is not None:
            self.measurement.close()
