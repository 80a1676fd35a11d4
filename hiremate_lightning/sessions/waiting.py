"""Graphs that wait for a later backward: by which programs they run, and what they hold meanwhile.

Where the backward of a forward comes after that of a later forward (pipelines, first-order MAML, the loop of the DCGAN
tutorial), an iteration is planned in pieces, each from a forward to the backward that follows. Forwards whose backward
comes in a later piece run at one level: at level 0 they keep everything, at the last one they hold the least. The level
is the first one at which all known pieces fit the budget, with all that waits beside them.

Pieces that look alike when they begin, of which some have the backward of their own forward and some don't, as in the
middle and at the end of a pipeline's iteration, run at that level too: nobody knows which of them begins.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..kinds.recorded_step import RecordedStep
from ..kinds.step_kind import StepKind
from ..measuring.resident import WAITING, Resident
from ..memory.allocator import in_blocks
from ..options import SessionOptions
from ..planning.planner import guard_bytes
from ..planning.solvers import UNLIMITED, Solution, smallest_budget, worker
from ..planning.solvers.base import Problem, SolveOptions, replay
from ..planning.solvers.curve import Remembering
from ..records.graph import Graph, StorageKind, bytes_of
from ..records.schedule import Schedule, keep_all, lower
from ..records.simulation import simulate
from ..records.step import Call, Decisions, Step, merge
from ..reporting.report import Stages
from ..running.execution import Part
from ..running.program import Program
from ..running.template import program_of
from .parts import Parts

LAST = 7  # level, at which forwards that wait hold the least


@dataclass(frozen=True)
class _Alone:
    """A graph as a step of its own, and what was decided for it, by level."""

    graph: Graph
    step: Step
    problem: Problem
    solve: Remembering
    decided: dict[int, Decisions] = field(default_factory=dict)
    schedules: dict[int, Schedule] = field(default_factory=dict)
    work_bytes: dict[tuple[int, bool], int] = field(default_factory=dict)  # and by whether gradients are added
    programs: dict[int, Program] = field(default_factory=dict)

    @cached_property
    def least(self) -> Solution:
        """The decisions with which it takes the least memory."""
        return smallest_budget(self.problem)

    def decide(self, level: int) -> Decisions:
        """Decide for it with a part of the memory between the least and that of plain training."""
        everything = keep_all(self.graph)
        if not level:
            return everything
        if level < LAST:
            most_bytes = replay(self.problem, self.step.join([everything])).peak_bytes
            size_bytes = most_bytes - (most_bytes - self.least.peak_bytes) * level // LAST
            found = self.solve(replace(self.problem, budget_bytes=size_bytes))
            if found.is_feasible and replay(self.problem, found.recompute).peak_bytes <= size_bytes:
                return self.step.split(found.recompute)[0]
        return self.step.split(self.least.recompute)[0]


class WaitingGraphs:
    """The programs of the graphs that wait, by level.

    Args:
        options: What was asked for.
        parts: The captured graphs.
        stages: Shows solving, and adds up its seconds.

    Attributes:
        level: That of the forwards that run now.
    """

    def __init__(self, options: SessionOptions, parts: Parts, stages: Stages) -> None:
        self._options, self._parts, self._stages = options.plan, parts, stages
        self._alone: weakref.WeakKeyDictionary[Part, _Alone] = weakref.WeakKeyDictionary()
        self._most_bytes = 0  # that were resident beside what waits
        self._is_due = False  # since pieces look alike, or more waits beside a kind than ever
        self._has_grown = False
        self.level = LAST

    def note_before(self, resident: Resident, kinds: Iterable[StepKind]) -> None:
        """Note what exists before a step, and whether that is more than ever.

        Args:
            resident: What exists.
            kinds: That the step may be of.
        """
        for kind in kinds:
            self._see(kind, resident)
        size_bytes = resident.size_bytes - resident.waiting_bytes
        self._has_grown, self._most_bytes = size_bytes > self._most_bytes, max(size_bytes, self._most_bytes)

    @property
    def is_due(self) -> bool:
        """Whether to choose the level now: pieces are known to look alike, or more exists than ever."""
        return self._is_due or self._has_grown

    def _see(self, kind: StepKind, resident: Resident) -> None:
        """Learn what existed before a step of a kind, and remember the most."""
        most = kind.most_before
        is_more = most is not None and _plain_bytes(resident) > _plain_bytes(most)
        if most is None or is_more:
            kind.most_before = resident
        self._is_due = self._is_due or (is_more and bool(resident.waiting))

    def with_most(self, kind: StepKind, state_bytes: int) -> RecordedStep:
        """Return the step of a kind where most waits beside it, and optimizers keep so many bytes, or more."""
        step = kind.recorded
        most = max(kind.most_before or step.resident, step.resident, key=_plain_bytes)
        return replace(step, resident=most.with_state(state_bytes))

    def concerns(self, kind: StepKind, step: RecordedStep) -> bool:
        """Whether graphs wait beside a step of a kind, or what it runs has to fit such steps too."""
        return step.waits or kind.backwards_vary

    def found_alike(self, kind: StepKind) -> None:
        """Learn that steps of a kind have other backwards than others of the same kind."""
        self._is_due = self._is_due or not kind.backwards_vary
        kind.backwards_vary = True

    def choose_level(self, steps: Iterable[tuple[StepKind, RecordedStep, int]]) -> bool:
        """Choose the level; return whether anything has changed.

        Args:
            steps: Each kind of step beside which graphs wait, with what it runs then and its budget.
        """
        was_due, before, steps = self._is_due, self.level, tuple(steps)
        self._is_due = False
        if not steps:
            return False
        with self._stages.stage("solve_s", "solving"):
            self.level = bisect_left(range(LAST), True, key=lambda level: self._all_fit(steps, level))
        return was_due or self.level != before

    def _all_fit(self, steps: Iterable[tuple[StepKind, RecordedStep, int]], level: int) -> bool:
        return all(self._fits(self.at(kind, step, level), budget_bytes) for kind, step, budget_bytes in steps)

    def _fits(self, recorded: RecordedStep, budget_bytes: int) -> bool:
        """Whether a step fits with what waits beside it, its own calls at the least memory unless they are decided."""
        step = recorded.merge()
        decided = recorded.decided or tuple(self.decisions(call.part, LAST) for call in recorded.calls)
        size_bytes = budget_bytes - recorded.resident.size_bytes - recorded.margin_bytes
        peak_bytes = replay(Problem(step.graph, step.profile, size_bytes), step.join(decided)).peak_bytes
        return peak_bytes + guard_bytes(max(0, size_bytes)) <= size_bytes

    def at(self, kind: StepKind, step: RecordedStep, level: int | None = None) -> RecordedStep:
        """Return the step of a kind as it is with all that waits at a level, by default the one of now."""
        if not self.concerns(kind, step):
            return step
        level = self.level if level is None else level
        resident = self.resident_at(step.resident, level)
        return replace(
            step,
            resident=resident,
            unfinished_bytes=sum(self._more_bytes(part, schedule, level) for part, schedule in step.unfinished),
            others_bytes=max(
                (self._work_bytes(part, level, bool(resident.kept)) for part, _ in resident.waiting), default=0
            ),
            decided=tuple(self.decisions(call.part, level) for call in step.calls) if kind.backwards_vary else (),
        )

    def resident_at(self, resident: Resident, level: int | None = None) -> Resident:
        """Return what exists before a step if all that waits ran at a level, by default the one of now."""
        if not resident.waiting:
            return resident
        level = self.level if level is None else level
        more_bytes = sum(self._more_bytes(part, schedule, level) for part, schedule in resident.waiting)
        return replace(
            resident.with_more(WAITING, more_bytes),
            waiting_bytes=resident.waiting_bytes + more_bytes,
            waiting=tuple((part, self._schedule(part, level)) for part, _ in resident.waiting),
        )

    def program(self, part: Part) -> Program:
        """Return the program of a forward that will wait for its backward."""
        programs = self._of(part).programs
        if self.level not in programs:
            programs[self.level] = program_of(part.captured, self._schedule(part, self.level))
        return programs[self.level]

    def decisions(self, part: Part, level: int) -> Decisions:
        """Decide what a graph that waits computes again at a level."""
        alone = self._of(part)
        if level not in alone.decided:
            alone.decided[level] = alone.decide(level)
        return alone.decided[level]

    def _of(self, part: Part) -> _Alone:
        alone = self._alone.get(part)
        if alone is None or alone.graph is not part.captured.graph:
            graph, (_, profile) = part.captured.graph, self._parts.prepare(part)
            step = merge([Call(in_blocks(graph, part.captured.device), profile)], [0])
            options = SolveOptions(time_limit_s=self._options.time_limit_s)
            problem = Problem(step.graph, step.profile, UNLIMITED, options)
            solve = Remembering(worker.apart(self._options.solver))
            alone = self._alone[part] = _Alone(graph, step, problem, solve)
        return alone

    def _schedule(self, part: Part, level: int) -> Schedule:
        schedules = self._of(part).schedules
        if level not in schedules:
            schedules[level] = lower(part.captured.graph, self.decisions(part, level))
        return schedules[level]

    def _more_bytes(self, part: Part, schedule: Schedule, level: int) -> int:
        """Count the bytes by which a graph saves more at a level than by a schedule."""
        own = self._schedule(part, level)
        return 0 if own == schedule else saved_bytes(part, own) - saved_bytes(part, schedule)

    def _work_bytes(self, part: Part, level: int, is_added: bool) -> int:
        """Count what the backward of a graph takes beyond what the graph holds.

        Args:
            part: Runs the graph.
            level: By which it runs.
            is_added: Whether gradients of parameters are added to those that exist.
        """
        counted = self._of(part).work_bytes
        if (level, is_added) in counted:
            return counted[level, is_added]
        graph, trained = part.captured.graph, part.captured.trained
        values = {node: t for t, node in enumerate(part.captured.fx_values)}
        added = {
            values[part.captured.backward_outputs[position]]
            for position in (trained if is_added else ())
            if _is_parameter(graph, position) and part.captured.backward_outputs[position] in values
        }
        (_, profile), stay = self._parts.prepare(part), tuple(t for t in graph.gradients if t not in added)
        graph = in_blocks(replace(graph, gradients=stay), part.captured.device)
        found = simulate(graph, profile, lower(graph, self.decisions(part, level)))
        peak_bytes = max(moment.peak_bytes for moment in found.timeline[found.turn :])
        counted[level, is_added] = peak_bytes - found.saved_bytes
        return counted[level, is_added]


def _plain_bytes(resident: Resident) -> int:
    """Count what exists before a step in plain training, without optimizers' state."""
    return resident.size_bytes - resident.waiting_bytes + resident.plain_waiting_bytes - resident.state_bytes


def saved_bytes(part: Part, schedule: Schedule) -> int:
    """Count the bytes of what a part saves for its backward by a schedule, without its inputs."""
    graph = part.captured.graph
    return bytes_of(graph, set(schedule.saved_on_device(graph)).difference(graph.inputs))


def _is_parameter(graph: Graph, position: int) -> bool:
    storage = graph.tensors[graph.inputs[position]].storage
    return storage is not None and graph.storages[storage].kind is StorageKind.PARAMETER
