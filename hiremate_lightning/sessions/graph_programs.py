"""Which program a captured graph runs by: that of a plan, one taken over from other sizes, or that of least memory.

Steps that have no plan run as was planned for the same code at other sizes, or else at the least memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

from ..capturing.absent import without_missing
from ..capturing.capture import Captured
from ..housekeeping import Latest, collecting_what_it_leaves
from ..measuring.resident import Resident
from ..memory.allocator import alone, free_bytes
from ..planning.headroom import Room, unless_short
from ..planning.ladder import Chosen, Loss, fastest_that_fits
from ..planning.planner import first_solution
from ..planning.solvers.base import Problem, replay
from ..records.costs import Profile, step_time_ms
from ..records.graph import Graph
from ..records.schedule import Schedule, keep_all, lower
from ..records.step import Decisions, Replays, Step
from ..running.execution import Part
from ..running.program import Program
from ..running.template import program_of
from ..signatures.recorded_step import foresee, no_graphs
from ..signatures.step_signature import GraphNumbers, StepSignature
from ..torch_private import runtime
from .current_step import CurrentStep, Followed, Forward
from .modes import ByProgram
from .plan_maker import PlanMaker
from .planned_model import PlannedModel
from .templates import Ladders

TRACING_BYTES = 2**14  # that tracing takes for itself: states of the random generator, three deep

TakenOver = Latest[GraphNumbers, ByProgram | None]  # how a part runs by other steps' plans, by what ran before


class GraphPrograms:
    """Chooses the program of each captured graph that is about to run: of its plan, of other sizes, or of least memory.

    Attributes:
        maker: Knows the budget.
        history: The step signatures, with their plans.
    """

    def __init__(self, model: PlannedModel, maker: PlanMaker) -> None:
        self._model, self.maker = model, maker
        self.history, self._parts, self._reporter = model.history, model.parts, model.reporter
        self._least: weakref.WeakKeyDictionary[Part, Program] = weakref.WeakKeyDictionary()
        self._taken_over: weakref.WeakKeyDictionary[Part, TakenOver] = weakref.WeakKeyDictionary()
        self._fits = dict[tuple[StepSignature, tuple[Schedule, ...]], bool]()  # signatures whose steps began by these
        self._most_bytes = 0  # that were resident
        self._replays, self._ladders = Latest[Hashable, Replays](16), Ladders(model, maker)
        self._schedules = Latest[Hashable, Schedule](64)  # of decisions, for all sizes of code

    def forget_plans(self) -> None:
        """Decide anew what to take over: there is another plan, or more is resident."""
        self._taken_over.clear()
        self._fits.clear()

    def note_resident(self, resident: Resident) -> None:
        """Learn of what exists before a step: where that is more than ever, what was taken over may not fit."""
        if resident.size_bytes > self._most_bytes:
            self._most_bytes = resident.size_bytes
            self.forget_plans()

    def forget_least(self, part: Part) -> None:
        """Learn that a part can't run any more as it did."""
        self._least.pop(part, None)
        self._taken_over.pop(part, None)

    def choose(self, step: CurrentStep, part: Part) -> Forward:
        """Choose the program of a part that is about to run in the step under way, which gets no forward by that.

        Raises:
            InfeasibleBudgetError: If the part alone fits neither the budget nor what is free.
        """
        number, profile = self._parts.prepare(part)
        return Forward(number, part.captured, profile, self._mode(step, part, number, profile))

    def _mode(self, step: CurrentStep, part: Part, number: int, profile: Profile) -> ByProgram:
        """Choose how a captured graph runs: by the first of these rules that applies.

        - The step is likely of a signature without a plan that runs more than the expected one: at the least memory.
        - The step has begun like a planned signature: by its plan. A graph that has no backward there waits for a later
          one, or is dropped. One that is dropped holds the least: that takes no time, and a plan counts what it held as
          it was recorded.
        - Something was decided for the same step at other sizes, and fits: by that.
        - Else at the least memory.
        """
        ran = (*step.graphs, number)
        if step.is_unknown:
            return ByProgram(self._find_least(step, part, profile), is_planned=False)
        signature, program = self.history.choose(ran, step.expected, step.start, partial(self._fits_beside, step))
        if signature is not None:
            if program is None and any(unfinished is part for unfinished, _ in signature.recorded.unfinished):
                program = self.maker.waiting.program(part)
            return ByProgram(program or self._find_least(step, part, profile), signature)
        taken_over = self._take_over(step, part, ran, profile)
        return taken_over or ByProgram(self._find_least(step, part, profile), is_planned=False)

    def step_ended(self, step: CurrentStep) -> None:
        """Learn of a step that ran captured: of the sizes of its calls, and of what it lost by other sizes' plans."""
        if step.comparison.alike:
            places = step.comparison.alike[0].recorded.places
            if all(place < len(step.forwards) for place in places):  # else it ended early, as a piece of an iteration
                self._code(step).sizes_of_calls.note([step.forwards[place].captured for place in places])
        losses = [loss for forward in step.forwards if (loss := forward.mode.loss) is not None]
        if losses and self._ladders.step_ended(losses[-1]):  # it was chosen last, when most was known
            self.forget_plans()

    def _take_over(self, step: CurrentStep, part: Part, ran: GraphNumbers, profile: Profile) -> ByProgram | None:
        """Return how a part runs by a plan for the same step at other sizes; None where none fits."""
        modes = self._taken_over.setdefault(part, TakenOver(64))
        if ran not in modes:
            with self._reporter.stage("solving"):
                before = [mode for mode in modes.values() if mode is not None]
                modes[ran] = self._decide(step, part.captured, profile, before)
        return modes[ran]

    def _fits_beside(self, step: CurrentStep, signature: StepSignature) -> bool:
        """Whether a step of a planned signature fits that has begun as the step under way, and goes on by its plan."""
        begun = tuple(forward.program.schedule for forward in step.forwards)
        if (signature, begun) not in self._fits:
            recorded, plan = signature.recorded, signature.own_plan
            whole, places = recorded.merge(), [place for place in recorded.places if place < len(begun)]
            before = [begun[place].decisions(step.forwards[place].captured.graph) for place in places]
            decisions = _going_on(whole, before, plan.solution.recompute)
            peak_bytes = replay(Problem(whole.graph, whole.profile, 0), decisions).peak_bytes
            room = recorded.room(plan.budget, max(plan.budget_bytes, plan.planned_peak_bytes))
            self._fits[signature, begun] = peak_bytes <= room.step_bytes
        return self._fits[signature, begun]

    def _find_least(self, step: CurrentStep, part: Part, profile: Profile) -> Program:
        """Return the program of least memory of a part.

        Where not even the captured part alone fits, training stops before it runs, or, if there is memory to run it
        once, after: what else the step takes, a second view of a picture or a loss that is a network, is known then.
        Where there are several processes it runs in any case: one that stops alone leaves the others waiting in a
        collective.
        """
        if part not in self._least:
            options, is_alone = self._model.options, runtime.process_group_store() is None
            is_checked = is_alone and options.budget.share is None and options.on_infeasible == "raise"
            with self._reporter.stage("solving"), collecting_what_it_leaves():
                captured, before = part.captured, step.resident_in(self._model.memory)
                whole = alone(*_without_doubtful(captured, profile), captured.device)
                outcome = first_solution(
                    whole,
                    self.maker.room(whole, before) if is_checked else Room.unlimited(options.budget),
                    options,
                    self._model.name,
                    self._reporter.solving(step_time_ms(captured.graph, profile)),
                    self._spare_bytes_or_announce_full,
                    self._model.offloading.host(whole, [captured]),
                )
                least = unless_short(outcome)
                (program,) = self._model.offloading.build(whole, [captured], least)
                self._least[part] = replace(program, protects=True)  # see `_build`
        return self._least[part]

    def _spare_bytes_or_announce_full(self) -> int:
        """Return the bytes that a first step may take beyond the budget; none, announced, where no plan may follow."""
        if self._model.has_place:
            return free_bytes(self._model.memory.device)
        self._model.announce_full()
        return 0

    def _decide(
        self, step: CurrentStep, captured: Captured, profile: Profile, before: Sequence[ByProgram]
    ) -> ByProgram | None:
        """Decide for the next forward of the step under way; its code has run so before, in other steps."""
        place, seen = len(step.forwards), step.comparison
        self._compare(step)
        seen.alike = [signature for signature in seen.alike if signature.recorded.runs_at(place, captured)]
        seen.compared = place + 1
        if not seen.alike:
            return None
        first = seen.alike[0].recorded
        if place not in first.places or not all(
            signature.recorded.goes_on_as(first, place) for signature in seen.alike
        ):
            return None  # nobody knows how the step goes on
        call = first.places.index(place)
        if not self._was_foreseen(step, captured, call, is_last=call + 1 == len(first.calls)):
            seen.followed = self._follow(step, captured, profile, call)
        if seen.followed is None:
            return None
        if call + 1 == len(first.calls):
            seen.foreseen = first, seen.followed.step
        program = self._program_of(captured, seen.followed.decisions[call], before)
        return ByProgram(program, loss=seen.followed.loss)

    def _program_of(self, captured: Captured, decisions: Decisions, before: Sequence[ByProgram]) -> Program:
        """Return the program by decisions for a captured graph; the one that it has run by before, if any has."""
        key = captured.template, captured.overwritten, decisions
        schedule = self._schedules.get(key) or lower(captured.graph, decisions)
        alike = (mode.program for mode in before if mode.program.schedule == schedule)
        program = next(alike, None) or _build(captured, schedule)
        if captured.template is not None:
            self._schedules[key] = program.schedule
        return program

    def _was_foreseen(self, step: CurrentStep, captured: Captured, call: int, is_last: bool) -> bool:
        """Whether a call of the step under way is what was decided for, or smaller where more is still to come."""
        followed = step.comparison.followed
        if followed is None:
            return False
        expected = followed.step.calls[call].captured
        if captured.template is not None and captured.template is expected.template:
            return captured.sizes == expected.sizes
        return not is_last and captured.graph.is_no_larger(expected.graph)  # with the last one all sizes are known

    def _compare(self, step: CurrentStep) -> None:
        """Find the planned steps that are the same code so far."""
        seen = step.comparison
        if not seen.compared:
            seen.alike = list(self.history.planned)
        for place in range(seen.compared, len(step.forwards)):
            captured = step.forwards[place].captured
            seen.alike = [signature for signature in seen.alike if signature.recorded.runs_at(place, captured)]

    def _follow(self, step: CurrentStep, captured: Captured, profile: Profile, call: int) -> Followed | None:
        """Choose, of what was decided for steps of the same code, the fastest that fits; None where none does."""
        alike = [signature.recorded for signature in step.comparison.alike]
        begun = [step.forwards[place] for place in alike[0].places[:call]]
        resident = step.resident_in(self._model.memory)
        calls = [*((forward.captured, forward.profile) for forward in begun), (captured, profile)]
        to_come = self._code(step).sizes_of_calls.foresee([captured for captured, _ in calls])
        foreseen = foresee(alike, [*calls, *to_come], resident)
        if foreseen is None:
            return None
        whole = foreseen.merge().sharing([recorded.code for recorded in foreseen.calls], self._replays)
        traced_bytes = TRACING_BYTES if len(foreseen.calls) > 1 else 0  # graphs are traced while values of others live
        room = self.maker.room(whole, resident)
        room = replace(room, resident_bytes=room.resident_bytes + traced_bytes)
        room = replace(room, margin_bytes=self._margin_bytes(step, room.step_bytes, captured.template is not None))
        before = [forward.program.schedule.decisions(forward.captured.graph) for forward in begun]
        chosen = self._choose_among(step, whole, room, before, captured.template is not None)
        if call + 1 == len(foreseen.calls):
            step.comparison.foreseen = alike[0], foreseen
        if chosen is None:
            return None
        loss = Loss(self._code(step).ladder, replace(foreseen, merged=no_graphs()), room, chosen)
        return Followed(foreseen, whole.split(chosen.decisions), None if captured.template is None else loss)

    def _margin_bytes(self, step: CurrentStep, room_bytes: int, is_made: bool) -> int:
        """Return the bytes of a room to leave free, since steps of the same code took more than was predicted."""
        signatures = step.comparison.alike
        margin_bytes = max(self.history.margin_bytes, *(signature.recorded.margin_bytes for signature in signatures))
        excess = 0.0  # measured beyond what was predicted, over that
        for plan in (signature.own_plan for signature in signatures if is_made):
            excess_bytes = (plan.measured.peak_bytes or 0) - plan.planned_peak_bytes
            excess = max(excess, excess_bytes / max(1, plan.planned.peak_bytes))
        return max(margin_bytes, int(room_bytes * excess / (1 + excess)))

    def _choose_among(
        self, step: CurrentStep, whole: Step, room: Room, before: Sequence[Decisions], is_made: bool
    ) -> Chosen | None:
        """Choose among all decisions for the code of a step, some of whose calls have run already by those in `before`.

        Where nothing fits code that was made from traces of other sizes, decisions are solved for all of these.
        """
        ladder = self._code(step).ladder
        plans = [signature.own_plan.solution.recompute for signature in step.comparison.alike]

        def fastest() -> Chosen | None:
            candidates = dict.fromkeys([keep_all(whole.graph), *plans, *ladder.decisions])
            return fastest_that_fits(whole, room, [_going_on(whole, before, d) for d in candidates])

        chosen = fastest()
        if chosen is None and is_made:
            self._ladders.find(ladder, whole, room)
            chosen = fastest()
            step.comparison.fits_nothing = chosen is None
        return chosen

    def _code(self, step: CurrentStep) -> StepSignature:
        """Return the signature that stands for the code of the step under way, at whatever sizes."""
        signature = step.comparison.alike[0]
        return signature.code or signature


def _going_on(whole: Step, before: Sequence[Decisions], decisions: Decisions) -> Decisions:
    """Return decisions for a step whose first calls have run by others."""
    return whole.join([*before, *whole.split(decisions)[len(before) :]]) if before else decisions


def _without_doubtful(captured: Captured, profile: Profile) -> tuple[Graph, Profile]:
    """Count no gradients that may never come: where a loss is returned, those of other outputs, logits for example.

    Nor is it known who holds these outputs; their memory is taken for free where a gradient may have it.
    """
    graph = captured.graph
    doubtful = frozenset(i for i, t in enumerate(graph.tangents) if graph.tensors[t].shape)
    return without_missing(captured, doubtful if len(doubtful) < len(graph.tangents) else frozenset(), profile)


def _build(captured: Captured, schedule: Schedule) -> Program:
    return replace(program_of(captured, schedule), protects=True)  # what becomes of the values outside was not seen yet
