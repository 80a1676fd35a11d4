"""Makes the plans of step signatures within the budget. It installs no plan and warns of nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..housekeeping import log
from ..measuring.recorded_calls import calls_of
from ..measuring.recording import StepMeasurement
from ..measuring.resident import Resident
from ..memory.allocator import free_bytes
from ..planning.headroom import GUARD_BYTES, Need, Room, Short, least_need, resolve, unless_short
from ..planning.plan import Plan
from ..planning.planner import make_plan
from ..planning.shared_solving import announce, shared
from ..planning.solutions import Solutions, remembering
from ..planning.solvers import worker
from ..planning.solvers.base import Problem, Solution, SolveOptions, Strategy
from ..records.expressions import SizesDifferError
from ..records.offload import Host
from ..records.step import MergedStep
from ..running.program import Program
from ..signatures.limits import Limits
from ..signatures.recorded_step import RecordedCall, RecordedStep
from ..signatures.shortage import ALL_ADVICE, Shortage
from ..signatures.step_signature import StepSignature
from ..torch_private import runtime
from ..units import Budget
from .planned_model import PlannedModel
from .waiting import Holds, WaitingGraphs


@dataclass(frozen=True, slots=True)
class Fits:
    """A plan within the budget, or of the least memory if training goes on with that."""

    plan: Plan  # the plan
    programs: Mapping[int, Program]  # the program of each forward with a backward, by its place in the step


class PlanMaker:
    """Makes the plans of one model.

    Attributes:
        waiting: The programs of forwards whose backward comes in a later step.
        state_bytes: Most bytes of optimizer state seen so far.
    """

    def __init__(self, model: PlannedModel) -> None:
        self._model = model
        self._history, self._reporter = model.history, model.reporter
        self.waiting = WaitingGraphs(model.options, model.runtimes)
        self.state_bytes = 0
        # Bytes that the budget "auto" stands for. They are found once, before the first plan: free memory changes
        # all the time, and each change would be another budget.
        self._auto_bytes: int | None = None

    def note_state(self, resident: Resident) -> bool:
        """Store the bytes of optimizer state in the memory before a step; return whether they are more than ever."""
        has_grown = resident.state_bytes > self.state_bytes
        self.state_bytes = max(self.state_bytes, resident.state_bytes)
        return has_grown

    def find_room(self, step: MergedStep, resident: Resident, signature: StepSignature | None = None) -> Room:
        """Find the bytes that a step may take, within the largest budget of all step signatures.

        The first call fixes the bytes of the budget "auto" for all later ones.
        A budget that is a share is a share of the bytes that the largest step adds in eager training, with graphs that
        wait for their backward. `signature` is that of the step, None if not known yet.
        """
        budget_bytes = max(self._own_budget_bytes(step, resident, signature), self._others_budget_bytes(signature))
        return Room(self._model.options.budget, budget_bytes, resident.size_bytes)

    def _others_budget_bytes(self, signature: StepSignature | None) -> int:
        """Return the largest budget of the other planned step signatures; 0 if the budget is not a share."""
        if not self._model.options.budget.is_share:
            return 0
        other_signatures = (other for other in self._history.planned if other is not signature)
        return max((other.recorded.limits.own_bytes for other in other_signatures), default=0)

    def _own_budget_bytes(self, step: MergedStep, resident: Resident, signature: StepSignature | None) -> int:
        if self._auto_bytes is None:
            self._auto_bytes = resolve(Budget(), resident.size_bytes, 0, free_bytes(self._model.memory.device))
        if self._model.options.budget.is_auto:
            return self._auto_bytes
        if not self._model.options.budget.is_share:
            return resolve(self._model.options.budget, 0, 0, 0)
        of_others = (self._eager_bytes(other) for other in self._history.planned if other is not signature)
        added_bytes = max(step.eager_bytes + resident.eager_waiting_bytes, *of_others, 0)
        return resolve(self._model.options.budget, resident.size_bytes - resident.waiting_bytes, added_bytes, 0)

    def _eager_bytes(self, signature: StepSignature) -> int:
        """Return the bytes that a planned step adds in eager training, with graphs that wait for their backward."""
        step = signature.recorded
        if not step.waits:
            return signature.own_plan.unplanned.peak_bytes
        piece = self.waiting.at(signature, step, Holds.EVERYTHING).merge()
        return piece.eager_bytes + step.resident.eager_waiting_bytes

    def limits(self, signature: StepSignature, step: RecordedStep) -> Limits:
        """Return the limits of a step signature, with the budget of one of its steps added."""
        plain = self.waiting.at(signature, step, Holds.EVERYTHING)
        own_bytes = self._own_budget_bytes(plain.merge(), plain.resident, signature)
        limits = replace(step.limits, of_others=self._others_budget_bytes(signature))
        return limits.meeting(step.resident, own_bytes)

    def choose_waiting(self, may_hold_more: bool) -> list[StepSignature]:
        """Choose whether graphs that wait hold everything or the least; return the signatures to plan again for that.

        With `may_hold_more`, as after a change of the budget, they may go back from the least to everything.
        """
        recorded, waiting = self._history.recorded, self.waiting
        concerned = [signature for signature in recorded if waiting.concerns(signature, signature.recorded)]
        if not concerned or (waiting.holds is Holds.LEAST and not may_hold_more):
            return []

        def fits(signature: StepSignature) -> bool:
            """Whether it fits beside waiting graphs that hold everything, with the optimizer state of now."""
            step = signature.recorded
            step = replace(step, resident=step.resident.with_state(self.state_bytes))
            room = step.room(self._model.options.budget, self.limits(signature, step).budget_bytes)
            return waiting.fits(signature, step, room)

        with self._reporter.stage("solving"):
            holds = Holds.EVERYTHING if all(map(fits, concerned)) else Holds.LEAST
        if waiting.holds is holds:
            return []
        waiting.holds = holds
        for signature in concerned:
            self._history.record(signature, waiting.at(signature, signature.recorded))
        return concerned

    def announce(self) -> None:
        """Publish the key of this process's model to the other processes."""
        announce(runtime.process_group_store(), self._model_key)

    @cached_property
    def _model_key(self) -> str:
        """A key of the model, made before its first step: after it FSDP2 may hold whole parameters of another type."""
        return self._model.memory.model_key()

    def larger_step(
        self, signature: StepSignature, measurement: StepMeasurement, resident: Resident
    ) -> RecordedStep | None:
        """Return a later step of a planned signature, if it takes more than the planned one.

        Returns:
            The later step; None if it has neither more gradients nor more bytes outside of its calls.
        """
        later, step = self.waiting.at(signature, self.recorded_step(measurement, resident)), signature.recorded
        if later.places != step.places:
            return None
        pairs = zip(later.calls, step.calls, strict=True)
        has_more = later.outside_bytes > step.outside_bytes + GUARD_BYTES
        return later if has_more or any(now.missing < before.missing for now, before in pairs) else None

    def recorded_step(self, measurement: StepMeasurement, resident: Resident) -> RecordedStep:
        """Return the recorded step of a measurement; `resident` is the memory that exists before such a step."""
        calls, order = calls_of(measurement)
        return RecordedStep(
            calls=tuple(
                RecordedCall(call, run.runtime, run.runtime.captured, run.index, run.missing, run.added)
                for call, run in zip(calls, measurement.planned, strict=True)
            ),
            order=tuple(order),
            resident=resident,
            solve=self._new_solve(),
            limits=Limits(self._model.options.budget.is_share),
            unfinished=tuple((run.runtime, run.program.schedule) for run in measurement.unfinished),
            is_provisional=measurement.has_dropped_by_plan,
        )

    def anew(self, step: RecordedStep) -> RecordedStep:
        """Return a copy of a foreseen step that was not planned yet: without corrections and limits."""
        untried = replace(step, corrections=0, keeps_on_device=False, counts_on_freed_gradients=False, decided=())
        return replace(untried, solve=self._new_solve(), limits=Limits(self._model.options.budget.is_share))

    def _new_solve(self) -> Strategy:
        name = self._model.options.solver
        return shared(remembering(worker.apart(name), name), runtime.process_group_store(), self._model_key)

    def make(self, signature: StepSignature) -> Fits | Short | None:
        """Plan a recorded step signature within its limits, and build its programs.

        Returns:
            The plan with its programs; what the step needs, if nothing fits the budget; None if its code was made from
            traces of other sizes that do not determine its programs: then the caller drops the signature.
        """
        recorded, options = signature.recorded, self._model.options
        step = recorded.merge()
        with self._reporter.stage("solving"):
            plan = make_plan(
                step,
                recorded.room(options.budget, recorded.limits.budget_bytes),
                replace(options, on_infeasible="warn") if recorded.is_provisional else options,
                target=self._model.name,
                solve=recorded.solve,
                progress=self._reporter.solving(step.graph, step.profile),
                decided=step.join(recorded.decided) if recorded.decided else None,
                host=self._reserve_host(recorded),
            )
        if isinstance(plan, Short):
            return plan
        self._model.first_wait.took(self._reporter.total)
        plan = self.with_proofs(replace(plan, resident_parts=recorded.resident.kinds, planning=self._reporter.total))
        captured = [call.captured for call in recorded.calls]
        try:
            programs = [*self._model.offloading.build(step, captured, plan.solution)]
        except SizesDifferError as error:
            log.info("A step signature of %s gets no plan of its own: %s", self._model.name, error)
            return None
        return Fits(plan, dict(zip(recorded.places, programs, strict=True)))

    def adapted(self, signature: StepSignature, resident: Resident) -> tuple[RecordedStep, Plan]:
        """Return the recorded step and the plan of a signature with the memory that exists before such a step now."""
        plan, step = signature.own_plan, signature.recorded
        has_more_state = resident.state_bytes > step.resident.state_bytes
        limits = step.limits.without_least() if step.counts_on_freed_gradients else step.limits
        step = replace(step, resident=resident, limits=limits, counts_on_freed_gradients=False)
        step = self.waiting.at(signature, step)
        step = replace(step, limits=self.limits(signature, step))
        highest_bytes = max(plan.measured.peak_bytes or 0, plan.measured.predicted_bytes or 0)
        if has_more_state or highest_bytes > step.limits.budget_bytes:
            plan = plan.with_measured(peak_bytes=None, predicted_bytes=None)  # measured beside other resident bytes
        merged = step.merge()
        adapted = replace(
            plan,
            graph=merged.graph,
            profile=merged.profile,
            budget_bytes=step.limits.budget_bytes,
            resident_bytes=step.resident.size_bytes,
            resident_parts=step.resident.kinds,
        )
        return step, adapted

    def short_of_all(self, shortage: Shortage) -> Short | None:
        """Return the needs of all steps seen, with the most optimizer state and batch; None if all fit the budget."""
        needs, rooms = list[Need](), dict[int, Room]()
        for signature in self._history.recorded:
            step = self.waiting.at(signature, signature.recorded, Holds.LEAST)
            states = [replace(step, resident=shortage.with_all(seen)) for seen in signature.before.values()]
            of_signature = [self._need(state, shortage.less_bytes) for state in states]
            of_states = (self.find_room(state.merge(), state.resident, signature) for state in states)
            room = max(of_states, key=lambda room: room.budget_bytes, default=Room(self._model.options.budget, 0))
            rooms.update((need.peak_bytes, room) for need in of_signature if need.peak_bytes > room.budget_bytes)
            needs += of_signature
        return Short(tuple(needs), rooms[max(rooms)], self._model.name, shortage.words, ALL_ADVICE) if rooms else None

    def _need(self, recorded: RecordedStep, less_bytes: int) -> Need:
        step, resident, options = recorded.merge(), recorded.resident, self._model.options
        limits = SolveOptions(options.time_limit_s)
        problem = Problem(step.graph, step.profile, 0, limits, self._reserve_host(recorded))
        decided = step.join(recorded.decided) if recorded.decided else None
        need = least_need(problem, resident.size_bytes, decided, Solutions(options.cache_dir))
        waiting_bytes = resident.waiting_bytes, resident.eager_waiting_bytes
        return replace(need, waiting_bytes=waiting_bytes, is_guarded=True, less_bytes=less_bytes)

    def decide(self, step: MergedStep, room: Room, limit_s: float) -> Solution:
        """Solve a step that gets no plan of its own, within `limit_s`; find its least memory if nothing fits."""
        options = self._model.options
        options = replace(options, on_infeasible="warn", time_limit_s=min(limit_s, options.time_limit_s))
        progress = self._reporter.solving(step.graph, step.profile)
        plan = make_plan(step, room, options, self._model.name, progress=progress)
        return unless_short(plan).solution

    def with_proofs(self, plan: Plan) -> Plan:
        """Return a plan with the present state of the proofs; the plan itself if it has that."""
        proved, rounded = self._model.proofs.words(), self._model.proofs.rounded()
        is_new = (plan.proved, plan.rounded) != (proved, rounded)
        return replace(plan, proved=proved, rounded=rounded) if is_new else plan

    def _reserve_host(self, recorded: RecordedStep) -> Host:
        """Reserve and return the host memory to which a recorded step may offload values."""
        if recorded.keeps_on_device:
            return Host(0)
        captured = [call.captured for call in recorded.calls]
        waits = recorded.waits or bool(recorded.decided)
        return self._model.offloading.reserve(recorded.merge(), captured, waits)
