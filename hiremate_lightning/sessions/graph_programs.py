"""Which program a captured graph runs by: that of a plan, one by decisions for other sizes, or that of least memory.

A step without a plan runs by decisions for the same code at other sizes, if any fit, or else at the least memory. A
step of made code (made from traces of other sizes, see `new_sizes`) gets no plan of its own as long as some decisions
fit: nearly every size comes once, so that each step would be planned. The ladder of the code (`planning.ladder`) keeps
decisions for all of its sizes.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

from ..capturing.absent import without_missing
from ..capturing.capture import Captured
from ..housekeeping import Latest, collecting_what_it_leaves, log
from ..measuring.resident import Resident
from ..memory.allocator import alone, free_bytes
from ..planning.headroom import Room, guard_bytes, unless_short
from ..planning.ladder import Ladder, fastest_that_fits
from ..planning.planner import first_solution
from ..planning.solvers.base import UNLIMITED, Problem, SolveOptions
from ..planning.solvers.least_memory import solve_least_memory
from ..records.costs import Profile
from ..records.graph import Graph
from ..records.schedule import Schedule, keep_all, lower
from ..records.step import Decisions, MergedStep, Replays
from ..running.execution import GraphRuntime
from ..running.program import Program
from ..running.program_at_sizes import program_of
from ..signatures.recorded_step import foresee
from ..signatures.step_signature import GraphNumbers, StepSignature
from ..torch_private.runtime import world_size
from .current_step import CurrentStep, Followed, Forward, TakenOver
from .modes import Mode
from .plan_maker import PlanMaker
from .planned_model import PlannedModel

HEADROOM = 0.8  # share of the room that new decisions for all sizes may take: then larger steps fit by them too
LIMIT_S = 5.0  # seconds for solving, while a step waits
TRACING_BYTES = 2**14  # bytes that a trace takes: three states of the random generator

# For the graphs of a step up to some graph: the forward of this graph by decisions for other sizes, None if none fit.
Forwards = Latest[GraphNumbers, Forward | None]


class GraphPrograms:
    """Chooses the program of each captured graph that is about to run."""

    def __init__(self, model: PlannedModel, maker: PlanMaker) -> None:
        self._model, self._maker = model, maker
        self._history, self._runtimes, self._reporter = model.history, model.runtimes, model.reporter
        self._least: weakref.WeakKeyDictionary[GraphRuntime, Program] = weakref.WeakKeyDictionary()
        self._by_others: weakref.WeakKeyDictionary[GraphRuntime, Forwards] = weakref.WeakKeyDictionary()
        # Whether a step of a signature fits whose first graphs ran by these schedules.
        self._fits = dict[tuple[StepSignature, tuple[Schedule, ...]], bool]()
        self._most_bytes = 0  # most resident bytes before any step
        self._replays = Latest[Hashable, Replays](16)
        self._schedules = Latest[Hashable, Schedule](64)  # by decisions, valid at all sizes of the code

    def forget_plans(self) -> None:
        """Forget which decisions were taken over, since there is another plan, or more is resident."""
        self._by_others.clear()
        self._fits.clear()

    def note_resident(self, resident: Resident) -> None:
        """Forget which decisions were taken over if more is resident than ever: they may no longer fit."""
        if resident.size_bytes > self._most_bytes:
            self._most_bytes = resident.size_bytes
            self.forget_plans()

    def forget_least(self, runtime: GraphRuntime) -> None:
        """Forget the programs of a captured graph, which can't run by them any more."""
        self._least.pop(runtime, None)
        self._by_others.pop(runtime, None)

    def decide(self, step: CurrentStep, runtime: GraphRuntime) -> Forward:
        """Choose the program of a captured graph that is about to run in the step under way.

        Decisions for other sizes may be solved here; `step.taken_over` has what the step takes over from then on.

        If the graph has no backward in the plan of its step, its backward comes in a later step, or never. In the
        latter case it runs at the least memory, which takes no time, since nothing is ever computed again.

        Raises:
            InfeasibleBudgetError: If the graph alone fits neither the budget nor the free memory.
        """
        profile, ran = self._runtimes.measure_once(runtime), (*step.graphs, runtime.number)
        signature, program = self._history.choose(ran, step.expected, step.start, partial(self._fits_beside, step))
        if signature is None and not step.may_need_more:
            step.taken_over, forward = self._take_over(step, runtime, ran)
            if forward is not None:
                return forward
        if signature is None or step.may_need_more:
            return Forward(runtime.number, runtime.captured, profile, self._find_least(step, runtime), Mode.LEAST)
        if program is None:
            waits = any(waiting is runtime for waiting, _ in signature.recorded.unfinished)
            program = self._maker.waiting.program(runtime) if waits else self._find_least(step, runtime)
        return Forward(runtime.number, runtime.captured, profile, program, Mode.PLANNED, signature)

    def learn_sizes(self, step: CurrentStep) -> None:
        """Store the sizes of all calls of a captured step, to foresee them from the first call of later steps."""
        signatures = step.taken_over.signatures
        if signatures:
            places = signatures[0].recorded.places
            if all(place < len(step.forwards) for place in places):  # a piece of an iteration may lack some
                signatures[0].of_code.sizes_of_calls.note([step.forwards[place].captured for place in places])

    def learn_margin(self, step: CurrentStep, peak_bytes: int) -> None:
        """Leave a larger margin in steps of sizes never traced, if one took more than predicted for its decisions."""
        at_sizes, resident = step.taken_over.at_sizes, step.resident
        if at_sizes is None or resident is None or not step.is_from_other_sizes:
            return
        whole, forwards = at_sizes.merge(), [step.forwards[place] for place in at_sizes.places]
        decisions = whole.join([forward.program.schedule.decisions(forward.captured.graph) for forward in forwards])
        predicted_bytes = resident.size_bytes + whole.peak_bytes(decisions)
        excess_bytes = peak_bytes - predicted_bytes - guard_bytes(predicted_bytes)  # plans leave the guard free
        if excess_bytes > self._history.margin_bytes:
            self._history.margin_bytes = excess_bytes
            self.forget_plans()

    def _fits_beside(self, step: CurrentStep, signature: StepSignature) -> bool:
        """Whether the step under way fits if it goes on by the plan of a signature."""
        begun = tuple(forward.program.schedule for forward in step.forwards)
        if (signature, begun) not in self._fits:
            recorded, plan = signature.recorded, signature.own_plan
            whole, places = recorded.merge(), [place for place in recorded.places if place < len(begun)]
            before = [begun[place].decisions(step.forwards[place].captured.graph) for place in places]
            decisions = _going_on(whole, before, plan.solution.recompute)
            room = recorded.room(plan.budget, max(plan.budget_bytes, plan.planned_peak_bytes))
            self._fits[signature, begun] = whole.peak_bytes(decisions) <= room.step_bytes
        return self._fits[signature, begun]

    # ---------------------------------------------------------------- the least memory

    def _find_least(self, step: CurrentStep, runtime: GraphRuntime) -> Program:
        """Return the program of least memory of a captured graph.

        If not even the graph alone fits, training stops: at once, or after the step if the device has memory for one
        step. Then the error also counts the other graphs of the step, such as a loss that is a network. With several
        processes the graph runs in any case: a process that stops alone leaves the others waiting in a collective.
        """
        if runtime not in self._least:
            options, is_alone = self._model.options, world_size() == 1
            is_checked = is_alone and not options.budget.is_share and options.on_infeasible == "raise"
            with self._reporter.stage("solving"), collecting_what_it_leaves():
                profile, captured = self._runtimes.measure_once(runtime), runtime.captured
                whole = alone(*_without_doubtful(captured, profile), captured.device)
                outcome = first_solution(
                    whole,
                    self._maker.find_room(whole, step.resident_in(self._model.memory))
                    if is_checked
                    else Room(options.budget, UNLIMITED),
                    options,
                    self._model.name,
                    self._reporter.solving(captured.graph, profile),
                    # The bytes that a first step may take beyond the budget: none if it can get no plan.
                    lambda: 0 if self._model.warn_if_full() else free_bytes(self._model.memory.device),
                    self._model.offloading.reserve(whole, [captured]),
                )
                (program,) = self._model.offloading.build(whole, [captured], unless_short(outcome))
                self._least[runtime] = replace(program, protects=True)  # see `_program_of`
        return self._least[runtime]

    # ---------------------------------------------------------------- plans of other sizes

    def _take_over(
        self, step: CurrentStep, runtime: GraphRuntime, ran: GraphNumbers
    ) -> tuple[TakenOver, Forward | None]:
        """Find decisions for the same code at other sizes, for a graph that is about to run.

        Returns:
            What the step takes over from now on: as before, if an earlier step has shown by which decisions the graph
            runs; and the forward of the graph, None if no decisions fit.
        """
        forwards = self._by_others.setdefault(runtime, Forwards(64))
        if ran in forwards:
            return step.taken_over, forwards[ran]
        with self._reporter.stage("solving"):
            taken_over, decisions = self._find_others(step, runtime)
            if decisions is None:
                forward = None
            else:
                programs = [forward.program for forward in forwards.values() if forward is not None]
                program = self._program_of(runtime.captured, decisions, programs)
                forward = Forward(
                    runtime.number, runtime.captured, self._runtimes.measure_once(runtime), program, Mode.OTHER_SIZES
                )
            forwards[ran] = forward
        return taken_over, forward

    def _find_others(self, step: CurrentStep, runtime: GraphRuntime) -> tuple[TakenOver, Decisions | None]:
        """Return what a step takes over from now on, and the decisions for a graph that is about to run, if any fit."""
        place, begun = len(step.forwards), [*(forward.captured for forward in step.forwards), runtime.captured]
        signatures = tuple(one for one in self._history.planned if one.recorded.begins_as(begun))
        taken_over = replace(step.taken_over, signatures=signatures)
        if not signatures:
            return taken_over, None
        first = signatures[0].recorded
        if place not in first.places or not all(one.recorded.goes_on_as(first, place) for one in signatures):
            return taken_over, None  # signatures differ in what comes next
        call = first.places.index(place)
        followed = taken_over.followed
        if followed is None or not followed.suits(runtime.captured, call):
            taken_over = self._follow(step, taken_over, runtime, call)
        elif call + 1 == len(first.calls):
            taken_over = replace(taken_over, at_sizes=followed.step)
        followed = taken_over.followed
        return taken_over, None if followed is None else followed.decisions[call]

    def _program_of(self, captured: Captured, decisions: Decisions, programs: Sequence[Program]) -> Program:
        """Return the program of a captured graph by decisions: an earlier one if its schedule is the same."""
        key = captured.made_from, captured.overwritten, decisions
        schedule = self._schedules.get(key) or lower(captured.graph, decisions)
        earlier = (program for program in programs if program.schedule == schedule)
        program = next(earlier, None)
        if program is None:  # outside code may still use the values: no step was seen yet
            program = replace(program_of(captured, schedule), protects=True)
        if captured.made_from is not None:
            self._schedules[key] = program.schedule
        return program

    def _follow(self, step: CurrentStep, taken_over: TakenOver, runtime: GraphRuntime, call: int) -> TakenOver:
        """Return `taken_over` with the fastest decisions of its signatures that fit a step; with none if none fit.

        Args:
            step: The step under way.
            taken_over: What it takes over; its signatures run the code of the step so far.
            runtime: The captured graph that is about to run.
            call: The place of the graph among the calls of these signatures.
        """
        signatures, captured = taken_over.signatures, runtime.captured
        recorded, of_code = [signature.recorded for signature in signatures], signatures[0].of_code
        begun = [step.forwards[place] for place in recorded[0].places[:call]]
        resident = step.resident_in(self._model.memory)
        calls = [(forward.captured, forward.profile) for forward in begun]
        calls.append((captured, self._runtimes.measure_once(runtime)))
        to_come = of_code.sizes_of_calls.foresee([captured for captured, _ in calls])
        foreseen = foresee(recorded, [*calls, *to_come], resident)
        if foreseen is None:
            return replace(taken_over, followed=None)
        if len(calls) == len(recorded[0].calls):
            taken_over = replace(taken_over, at_sizes=foreseen)
        whole = foreseen.merge().sharing([call.code for call in foreseen.calls], self._replays)
        is_made = captured.made_from is not None
        room = self._room_for(whole, resident, signatures, is_made)
        before = [forward.program.schedule.decisions(forward.captured.graph) for forward in begun]

        def fastest() -> Decisions | None:
            plans = (signature.own_plan.solution.recompute for signature in signatures)
            candidates = dict.fromkeys([keep_all(whole.graph), *plans, *of_code.ladder.decisions])
            return fastest_that_fits(whole, room, [_going_on(whole, before, d) for d in candidates])

        decisions = fastest()
        if decisions is None and is_made:
            self._find_for_all_sizes(of_code.ladder, whole, room)
            decisions = fastest()
            taken_over = replace(taken_over, fits_nothing=decisions is None)
        followed = None if decisions is None else Followed(foreseen, whole.split(decisions))
        return replace(taken_over, followed=followed)

    def _room_for(
        self, step: MergedStep, resident: Resident, signatures: Sequence[StepSignature], is_made: bool
    ) -> Room:
        """Return the bytes that a step with the code of some signatures may take.

        They leave a margin free, if steps of the signatures took more than was predicted.
        """
        room = self._maker.find_room(step, resident)
        if len(signatures[0].recorded.calls) > 1:  # a later graph is traced during the step
            room = replace(room, resident_bytes=room.resident_bytes + TRACING_BYTES)
        margin_bytes = max(self._history.margin_bytes, *(signature.recorded.margin_bytes for signature in signatures))
        excess = 0.0  # ratio of the excess of a measured peak over the predicted one to the latter
        for plan in (signature.own_plan for signature in signatures if is_made):
            excess_bytes = (plan.measured.peak_bytes or 0) - plan.planned_peak_bytes
            excess = max(excess, excess_bytes / max(1, plan.planned.peak_bytes))
        excess_bytes = int(room.step_bytes * excess / (1 + excess))
        return replace(room, margin_bytes=max(margin_bytes, excess_bytes))

    # ---------------------------------------------------------------- decisions for all sizes of code

    def _find_for_all_sizes(self, ladder: Ladder, step: MergedStep, room: Room) -> None:
        """Solve decisions for a step that no known ones fit, and add them to the ladder of its code.

        They leave some of the room free, so that somewhat larger steps fit too. Nothing is solved if the least memory
        was tried before in as much room.
        """
        share = room.step_bytes / max(1, step.peak_bytes(keep_all(step.graph)))
        if share <= ladder.least_share or fastest_that_fits(step, room, ladder.decisions) is not None:
            return  # some known decisions fit the whole step, but not after the graphs that have run already
        log.debug("searching for the least memory at all sizes")
        with self._reporter.stage("solving"), collecting_what_it_leaves():
            progress = self._reporter.solving(step.graph, step.profile)
            limits = SolveOptions(self._model.options.time_limit_s, progress=progress)
            least = solve_least_memory(Problem(step.graph, step.profile, room.solved_bytes, limits))
            leaving_some = Room(room.budget, int(HEADROOM * room.step_bytes))
            if step.peak_bytes(least.recompute) < leaving_some.step_bytes and self._model.has_place:
                ladder.rungs.append(self._maker.decide(step, leaving_some, LIMIT_S).recompute)
                return
        ladder.least = least.recompute
        if step.peak_bytes(ladder.least) > room.solved_bytes:
            ladder.least_share = share


def _going_on(whole: MergedStep, before: Sequence[Decisions], decisions: Decisions) -> Decisions:
    """Return decisions for a whole step: those that its first calls ran by, then the new ones."""
    return whole.join([*before, *whole.split(decisions)[len(before) :]]) if before else decisions


def _without_doubtful(captured: Captured, profile: Profile) -> tuple[Graph, Profile]:
    """Return the graph and its costs without gradients that may never come.

    If the graph returns a loss, gradients of its other outputs, such as logits, may not come. Nor is it known who holds
    these outputs: a gradient may reuse their memory.
    """
    graph = captured.graph
    doubtful = frozenset(i for i, t in enumerate(graph.tangents) if graph.tensors[t].shape)
    return without_missing(captured, doubtful if len(doubtful) < len(graph.tangents) else frozenset(), profile)
