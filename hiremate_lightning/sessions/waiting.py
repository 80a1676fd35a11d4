"""Graphs that wait for a backward in a later step: their programs, and the bytes that they hold meanwhile.

If the backward of a forward comes after that of a later forward (pipelines, first-order MAML, the loop of the DCGAN
tutorial), an iteration is planned in pieces, each from a forward to the backward that follows. A forward whose backward
comes in a later piece saves everything, if all known pieces fit the budget then, with all waiting graphs beside them.
Else all such forwards save the least.

Pieces of a pipeline may begin alike, though some run the backward of their own forward and some do not. All of them
run by these programs, since they can't be told apart as they begin.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from ..capturing.capture import Captured
from ..measuring.resident import WAITING, Resident
from ..memory.allocator import alone, in_blocks
from ..options import SessionOptions
from ..planning.headroom import Room
from ..planning.solvers.base import UNLIMITED, Problem, SolveOptions
from ..planning.solvers.least_memory import solve_least_memory
from ..records.costs import Profile
from ..records.graph import StorageKind, bytes_of
from ..records.schedule import Schedule, keep_all, lower
from ..records.simulation import simulate
from ..records.step import Decisions
from ..running.execution import GraphRuntime
from ..running.program import Program
from ..running.program_at_sizes import program_of
from ..signatures.recorded_step import RecordedStep
from ..signatures.step_signature import StepSignature
from .graph_runtimes import GraphRuntimes


class Holds(Enum):
    """How much a graph saves while it waits for its backward."""

    EVERYTHING = "all that the backward reads"
    LEAST = "what takes the least memory"


@dataclass(frozen=True)
class _Waiting:
    """A waiting graph, and the nodes that it recomputes."""

    captured: Captured
    profile: Profile
    decisions: Decisions

    @cached_property
    def schedule(self) -> Schedule:
        return lower(self.captured.graph, self.decisions)

    @cached_property
    def program(self) -> Program:
        return program_of(self.captured, self.schedule)

    def more_bytes(self, schedule: Schedule) -> int:
        """Return the bytes that it saves beyond what another schedule saves, inputs left out."""
        return 0 if schedule == self.schedule else self._saved_bytes(self.schedule) - self._saved_bytes(schedule)

    def _saved_bytes(self, schedule: Schedule) -> int:
        graph = self.captured.graph
        return bytes_of(graph, set(schedule.saved_on_device(graph)).difference(graph.inputs))

    @cached_property
    def backward_bytes(self) -> dict[bool, int]:
        """Peak bytes of its backward beyond its saved tensors, by whether gradients of parameters are accumulated."""
        return {is_added: self._backward_bytes(is_added) for is_added in (False, True)}

    def _backward_bytes(self, is_added: bool) -> int:
        graph, outputs, values = self.captured.graph, self.captured.backward_outputs, self.captured.tensor_of
        weights = {s for s, storage in enumerate(graph.storages) if storage.kind is StorageKind.PARAMETER}
        are_weights = [graph.tensors[t].storage in weights for t in graph.inputs]
        trained = [p for p in self.captured.trained if is_added and are_weights[p] and outputs[p] in values]
        added = {values[outputs[position]] for position in trained}
        stay = tuple(t for t in graph.gradients if t not in added)
        graph = in_blocks(replace(graph, gradients=stay), self.captured.device)
        simulation = simulate(graph, self.profile, lower(graph, self.decisions))
        return max(moment.peak_bytes for moment in simulation.timeline[simulation.turn :]) - simulation.saved_bytes


class WaitingGraphs:
    """The programs of waiting graphs.

    Attributes:
        holds: How much a forward saves that runs now.
    """

    def __init__(self, options: SessionOptions, runtimes: GraphRuntimes) -> None:
        self._options, self._runtimes = options, runtimes
        self._graphs: weakref.WeakKeyDictionary[GraphRuntime, dict[Holds, _Waiting]] = weakref.WeakKeyDictionary()
        self.holds = Holds.EVERYTHING

    def concerns(self, signature: StepSignature, step: RecordedStep) -> bool:
        """Whether graphs wait before or after a step of a signature, or some of its steps have other backwards."""
        return step.waits or signature.backwards_vary

    def fits(self, signature: StepSignature, recorded: RecordedStep, room: Room) -> bool:
        """Whether a step, as decided or at its least memory, fits beside waiting graphs that hold everything."""
        recorded = self.at(signature, recorded, Holds.EVERYTHING)
        step = recorded.merge()
        decided = recorded.decided or tuple(self._of(call.runtime, Holds.LEAST).decisions for call in recorded.calls)
        room = replace(room, resident_bytes=recorded.resident.size_bytes)
        return step.peak_bytes(step.join(decided)) <= room.solved_bytes

    def at(self, signature: StepSignature, step: RecordedStep, holds: Holds | None = None) -> RecordedStep:
        """Return the step of a signature with the bytes that waiting graphs hold, by default at the present `holds`."""
        if not self.concerns(signature, step):
            return step
        holds = holds or self.holds
        resident = self.resident_at(step.resident, holds)
        waiting = [self._of(runtime, holds) for runtime, _ in resident.waiting]
        of_pieces = step.calls if signature.backwards_vary else ()
        return replace(
            step,
            resident=resident,
            unfinished_bytes=sum(
                self._of(runtime, holds).more_bytes(schedule) for runtime, schedule in step.unfinished
            ),
            others_bytes=max((graph.backward_bytes[bool(resident.kept)] for graph in waiting), default=0),
            decided=tuple(self._of(call.runtime, holds).decisions for call in of_pieces),
        )

    def resident_at(self, resident: Resident, holds: Holds | None = None) -> Resident:
        """Return the memory before a step with the bytes that waiting graphs hold, by default at this `holds`."""
        if not resident.waiting:
            return resident
        holds = holds or self.holds
        more_bytes = sum(self._of(runtime, holds).more_bytes(schedule) for runtime, schedule in resident.waiting)
        return replace(
            resident.with_more(WAITING, more_bytes),
            waiting=tuple((runtime, self._of(runtime, holds).schedule) for runtime, _ in resident.waiting),
        )

    def program(self, runtime: GraphRuntime) -> Program:
        """Return the program of a forward whose backward comes in a later step."""
        return self._of(runtime, self.holds).program

    def _of(self, runtime: GraphRuntime, holds: Holds) -> _Waiting:
        """Return a captured graph as one that waits; the first call decides which nodes it recomputes."""
        graphs = self._graphs.setdefault(runtime, {})
        waiting = graphs.get(holds)
        if waiting is None or waiting.captured.graph is not runtime.captured.graph:
            profile, captured = self._runtimes.measure_once(runtime), runtime.captured
            decisions = keep_all(captured.graph)
            if holds is Holds.LEAST:  # as a step of its own
                step = alone(captured.graph, profile, captured.device)
                options = SolveOptions(time_limit_s=self._options.time_limit_s)
                least = solve_least_memory(Problem(step.graph, step.profile, UNLIMITED, options))
                (decisions,) = step.split(least.recompute)
            waiting = graphs[holds] = _Waiting(captured, profile, decisions)
        return waiting
