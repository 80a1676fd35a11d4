"""The session: all state of one planned model, and the life of its plans.

Its first training step runs at the least memory, or as was planned for another input shape, while torch.compile
captures every graph of the step and the code outside of them is measured. At the start of the next step all of it is
planned as one problem, and the plan takes over without capturing anything again. The step after that is measured: its
peak against the prediction, and in one more step its time.

What makes a step: a forward after a backward begins a new one. Programs are chosen by the captured graphs that have run
so far in the step, so several kinds of steps (a GAN's two, another input shape) have their own plans side by side.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..capturing.capture import Captured
from ..errors import CaptureError
from ..measuring.profiling import TimedRun
from ..measuring.recording import Run, StepRecord
from ..measuring.resident import LITTERED_STEPS, WATCHED_STEPS, Resident, ResidentMemory
from ..memory.free_memory import free_bytes
from ..options import SessionOptions
from ..out_of_memory import InfeasibleBudgetError, explain
from ..planning.plan import Plan, describe_peak
from ..planning.solvers import worker
from ..reporting.report import Reporter, Stages
from ..rewriting.fused_kernel import Kernels
from ..rewriting.joint import updates_under_checkpoint
from ..running.accumulation import Leaves
from ..running.execution import Part
from ..running.program import Program
from ..torch_private import backward_pass, dynamo, tensor_state
from ..units import Budget
from .announcements import Announcements
from .backend import planning_backend
from .choosing import ProgramChoice
from .eager_paths import eager_paths
from .first_steps import Begun
from .kinds import Kind
from .parts import Parts
from .plain_steps import Call
from .planned import PlannedKinds
from .proving import Proof, Prover
from .small_parts import SmallParts
from .unplanned import UnplannedSteps
from .watching import Saw, Watch, WatchPolicy

log = logging.getLogger("hiremate_lightning")


class Session:
    """Plans the steps of one model.

    Attributes:
        root: The module whose parameters and buffers are resident.
        runs: Number of forwards of captured graphs so far.
        ran_as_written: Whether some captured code ran as the user wrote it, since its proof failed.
        updates: Number of updates of the weights so far; optimizers that step after the same forwards make one.
        kernels: Where fused operations are kept, None where nothing is fused.
        stages: Shows the stages of planning, and counts their time.
        parts: The captured graphs.
        prover: Proves them as they first run.
    """

    def __init__(self, root: nn.Module, options: SessionOptions) -> None:
        self.root = root
        self._announcements = Announcements()
        self.say, self.why_uncaptured = self._announcements.say, self._announcements.why_uncaptured
        self.kernels = Kernels(self.say) if options.compile else None
        self.runs = self.updates = 0
        self._runs_of_update = 0  # forwards before the latest update
        self.stages = Stages(Reporter(options.verbose))
        self.parts = Parts(self.stages, options.cache_dir, self.kernels, self.say)
        self._memory = ResidentMemory(root, self.parts.waiting, self.parts.retained)
        self._watching = WatchPolicy()
        memory, stages = self._memory, self.stages
        self._planned = PlannedKinds(
            options, self._name, memory, self.parts, stages, self._watching, self.say, self._announcements.say_over
        )
        self._kinds, self._first_steps = self._planned.kinds, self._planned.first_steps
        self._choice = ProgramChoice(self._name, self._planned, self.parts, self._resident, self._spare_bytes)
        self._finished: StepRecord | None = None  # of a kind of step that is not planned yet
        self._unplanned = UnplannedSteps(
            root, self._planned, stages.reporter, self.say, is_allowed=self.kernels is None
        )
        self._began_with: Resident | None = None  # when the step began, where that was counted
        self._steps = 0
        self._small_parts = SmallParts()
        self._in_backward = False
        self._has_begun = False
        self._is_passed_by = False  # by steps that ran since the latest one
        self._is_broken = False  # to be abandoned when the next one begins
        self._record: StepRecord | None = None
        self._timed: TimedRun | None = None
        self._tracing = ExitStack()
        self.ran_as_written = False
        self.prover = Prover(
            self._planned,
            self.parts,
            self.stages,
            self.say,
            self._choice.foresee,
            self._resident,
            self._tracing,
            self._ran_as_written,
        )

    # ---------------------------------------------------------------- what others ask and tell

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest kind of step, None before there is one."""
        return self._planned.latest

    @property
    def plans(self) -> Mapping[Kind, Plan]:
        """The plans so far, by kind of step."""
        return self._planned.plans

    @property
    def options(self) -> SessionOptions:
        """What was asked for."""
        return self._planned.options

    @property
    def listeners(self) -> list[Callable[[Plan], None]]:
        """Called with each plan when it is made, and again when it has been measured."""
        return self._planned.listeners

    @property
    def _name(self) -> str:
        return type(self.root).__name__

    @property
    def captured_count(self) -> int:
        """Number of graphs captured so far."""
        return self.parts.count

    @property
    def is_plain(self) -> bool:
        """Whether the step under way runs as the user wrote it, since that fits the budget at its sizes."""
        return self._unplanned.bound_bytes is not None

    @property
    def is_released(self) -> bool:
        """Whether the step under way runs as the user wrote it, though its kind has a plan: that gains nothing."""
        return self._unplanned.released is not None

    @property
    def parameters_of_step(self) -> frozenset[int] | None:
        """Identities of the parameters that captured graphs have got in the step under way; None where not recorded."""
        return None if self._record is None else frozenset(self._record.parameters)

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an optimizer's state as resident."""
        self._memory.watch(optimizer)

    def expect_batch(self, batch: Any) -> None:
        """Count a batch in the next step, with what of it the planned modules do not receive."""
        self._memory.batch = [t for t in tensor_state.leaves(batch) if isinstance(t, torch.Tensor)]

    def set_budget(self, budget: Budget) -> None:
        """Change the budget; steps already seen are planned anew, nothing is captured again.

        Raises:
            InfeasibleBudgetError: If nothing fits it; then all is as it was.
        """
        self._planned.set_budget(budget)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Learn of an optimizer; what follows its step is no longer part of the training step."""
        is_own = self._memory.stepped(optimizer)
        if is_own and self.runs > self._runs_of_update:
            self.updates, self._runs_of_update = self.updates + 1, self.runs
        if is_own and not backward_pass.is_running() and self._record is not None and self._record.backwards:
            self._record.close()

    def was_passed_by(self) -> None:
        """Learn that a step ran without its plan: its gradients were made unseen, so are not seen freed in the next."""
        self._is_passed_by = True

    def abandon_step(self) -> None:
        """Forget the step under way, after an exception."""
        self._tracing.close()
        if self._record is not None:
            self._record.close()
        self._record, self._finished, self._timed = None, None, None
        self._in_backward, self._began_with, self._memory.batch = False, None, []
        self._unplanned.forget_step()
        self._kinds.forget()
        self._watching.forget_step()
        self._first_steps.end_step()
        self._has_begun = self._is_broken = False

    # ---------------------------------------------------------------- capture

    def backend(self) -> Any:
        """Give the torch.compile backend whose captured graphs this session runs."""
        reference = weakref.ref(self)  # torch.compile's caches must not keep a session alive

        def session() -> Session:
            found = reference()
            assert found is not None, "a model is alive while it is called"
            return found

        def may_run_captured(code: object, size_bytes: int) -> bool:
            return session().may_run_captured(code, size_bytes)

        def prove(proof: Proof, arguments: Sequence[Any]) -> None:
            session().prover.prove(proof, arguments)

        def say(text: str) -> None:
            session().say(text)

        given = self.kernels, may_run_captured, prove if self.options.verify else None, say
        return planning_backend(lambda captured: session().take_in(captured), *given)

    def may_run_captured(self, code: object, size_bytes: int) -> bool:
        """Whether code whose sizes don't repeat may run as captured: where it is small, beside planned code.

        Args:
            code: What asks.
            size_bytes: Of all its values at the largest size so far.
        """
        if not self._kinds.ran:
            return False
        if self._small_parts.let_in(code, size_bytes, self._steps, self.plan):
            self.say(
                f"Small parts of {self._name} have other sizes in each step: from now on they run without a plan, "
                "which would take longer to make than it saves."
            )
        return self._small_parts.may_run(code, size_bytes, self._steps)

    def take_in(self, captured: Captured) -> Part:
        """Make a part of a captured graph."""
        if updates_under_checkpoint(captured.joint):
            self.say(
                f"{self._name} calls torch.utils.checkpoint around code that updates buffers, as batch norms do. Plain "
                "PyTorch runs such code twice in a step, and updates them twice; here it updates them once. Call it "
                "without checkpoint: what is computed again is for the plan to decide."
            )
        return self.parts.add(captured, self)

    @contextmanager
    def calling(self, name: str, arguments: Sequence[Any]) -> Iterator[None]:
        """Surround an outermost call of a planned module.

        A call after a backward begins a new step. The first call is traced, and errors of torch.compile become ours.
        """
        is_inside = backward_pass.is_running()
        if is_inside:  # what is measured can't be ended there: autograd would restore the profiler
            self._is_broken = True
            self.say(
                f"{name} was called inside of a backward, as torch.utils.checkpoint around it does: such calls get no "
                "plan. Call it without checkpoint: what is computed again is for the plan to decide."
            )
        else:
            self.begin_step(arguments)
        if not self.parts.count:
            worker.warm_up()
            self._tracing.enter_context(self.stages.stage("capture_s", "tracing"))

        def tell(reason: str) -> None:
            self.say(f"torch.compile could not capture a part of {name}, which runs without a plan: {reason}")

        try:
            with dynamo.capturing_for_plans(tell, sizes_vary=self.parts.count > 0), eager_paths():
                yield
            if self.ran_as_written and not self._kinds.ran and not is_inside:
                self.abandon_step()  # none of its backwards would end it
        except dynamo.CompileError as error:
            if not is_inside:
                self.abandon_step()
            raise CaptureError(
                f"torch.compile could not capture {name}: {dynamo.reason_of(error)}\n"
                "Where plain PyTorch fails too, on a wrong shape for example, mend that. Else name submodules that can "
                "be captured with target=, or train without a plan."
            ) from error
        except BaseException:  # Ctrl-C too: the next step must not go on with half of this one
            if not is_inside:
                self.abandon_step()
            raise
        finally:
            self._tracing.close()

    # ---------------------------------------------------------------- conductor of the parts

    def start(self, part: Part, arguments: Sequence[Any]) -> tuple[Program, Run | None]:
        """Choose the program of a forward."""
        self.runs += 1
        self._tracing.close()
        number, profile = self.parts.prepare(part)
        program, planned = self._choice.choose(part, number, profile)
        self._first_steps.begin(Begun(part.captured, profile, program, planned))
        if self._timed is not None:
            program = self._timed.wrap(program)
        run = None if self._record is None else self._record.begin(part, number, program, arguments)
        return program, run

    def forward_done(self, run: Run | None, outputs: Sequence[Any]) -> None:
        """Note the end of a forward."""
        if run is not None and self._record is not None:
            self._record.forward_done(run, outputs)

    def backward_starts(self, run: Run | None, tangents: Sequence[Any], leaves: Leaves, retains: bool) -> None:
        """Note the start of a backward."""
        self._backward_starts()
        if run is not None and self._record is not None and run in self._record.runs:
            self._record.backward_starts(run, tangents, leaves, retains)

    def _backward_starts(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._memory.backward_starts(self._steps)

    def was_overwritten(self, part: Part, storages: Collection[int]) -> None:
        """Learn of values that other code overwrites before the backward: nothing can be computed from them then."""
        part.captured = part.captured.reading_once(storages)
        self._first_steps.forget_least(part)

    def must_return(self, part: Part, positions: Collection[int]) -> None:
        """Learn that gradients were handed to autograd beside those that exist, where a plan may count on adding."""
        self._planned.must_return(part, positions)

    def backward_done(self, run: Run | None) -> None:
        """Note the end of a backward."""
        if run is not None and self._record is not None and run in self._record.runs:
            self._record.backward_done(run)

    def ran_out(self, error: torch.OutOfMemoryError) -> None:
        """Note on an error what was planned and what is allocated."""
        explain(error, f"hiremate: {describe_peak(self._name, self.plan)}{self._memory.describe()}")

    def _ran_as_written(self) -> None:
        """Note that captured code ran as the user wrote it, since its proof failed."""
        self.runs += 1
        self.ran_as_written = True

    def _spare_bytes(self) -> int:
        """Return the bytes that a first step may take beyond the budget: none where no plan may follow."""
        return free_bytes(self._memory.device) if self._planned.may_plan_more() else 0

    def _resident(self) -> Resident:
        """Give what existed when the step began; where that was not counted, what exists now."""
        return self._began_with or self._memory.count(())

    # ---------------------------------------------------------------- steps

    def begin_call(self, name: str, arguments: Any) -> bool:
        """Begin a call of a planned module; return whether it is to run as the user wrote it.

        Inside of a backward, where a call is made again, it runs as it ran before.
        """
        if backward_pass.is_running():
            return self.is_plain
        tensors = _tensors_among(arguments)
        self._end_what_is_over()
        if not self._has_begun:
            self._begin_step(tensors, Call.of(name, tensors))
        else:
            self._unplanned.called(Call.of(name, tensors))
        return self.is_plain

    @contextmanager
    def calling_plain(self) -> Iterator[None]:
        """Surround a call that runs as the user wrote it: where that fails, the step is forgotten."""
        try:
            with self._unplanned.calling():
                yield
        except BaseException:  # Ctrl-C too: the next step must not go on with half of this one
            if not backward_pass.is_running():
                self.abandon_step()
            raise

    def ran_plain(self, result: Any) -> Any:
        """Note what a call returned that ran as the user wrote it, and see when its backward begins."""
        self.runs += 1
        reference = weakref.ref(self)  # autograd's graph must not keep a session alive

        def begins(_: Any) -> None:
            session = reference()
            if session is not None:
                session.plain_backward_starts()

        nodes = {tensor.grad_fn for tensor in _tensors_among(result) if tensor.grad_fn is not None}
        for node in nodes:
            node.register_prehook(begins)
        self._is_broken = self._is_broken or not nodes  # nothing shows where the step ends
        return result

    def plain_backward_starts(self) -> None:
        """Note the start of a backward of a step that runs plain."""
        self._backward_starts()
        if self._record is not None:
            self._record.plain_backward_starts()

    def begin_step(self, arguments: Any) -> None:
        """Begin a step where a backward has ended the one before, or none is under way."""
        self._end_what_is_over()
        if not self._has_begun:
            self._begin_step(_tensors_among(arguments))

    def _end_what_is_over(self) -> None:
        if self._in_backward or self._is_broken:
            self.end_step(at_once=False)

    def _begin_step(self, arguments: list[torch.Tensor], *calls: Call) -> None:
        if self._is_passed_by:
            self._memory.step_ended(None)
            self._is_passed_by = False
        if self._small_parts.came_in(self._steps):
            self._planned.leave(self._small_parts.size_bytes)
            self._finished = None
        self._steps += 1
        self._has_begun = True
        self._watching.settle()
        self._memory.step_begins(arguments)
        size_bytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in arguments)
        self._kinds.begin(size_bytes)
        if self._finished is not None:
            self._memory.collect_garbage()
        if self._watches_resident():
            resident = self._began_with = self._memory.count_before_step(arguments)
            self._first_steps.count(resident)
            self._meet(resident)
        settled, releases = self._unplanned.step_begins(*calls), self._unplanned.releases
        if self.is_plain:
            self._kinds.expected = None
            if self._unplanned.is_to_be_measured:
                self._record = self._begin_record(arguments)
            if settled is not None:
                releases.step_begins(settled, is_plain=True, is_watched=self._record is not None)
            return
        all_likely = self._kinds.all_likely()
        self._kinds.expected = max(all_likely, key=lambda kind: self.plans[kind].unplanned_peak_bytes, default=None)
        watch = self._watching.step_begins(self._planned.expect(size_bytes))
        if watch is Watch.MEASURE:
            self._record = self._begin_record(arguments)
        has_profile = self._kinds.likely() is not None
        if watch is Watch.TIME or (watch is Watch.MEASURE and not has_profile and self._memory.device.type == "cpu"):
            self._timed = TimedRun(self._memory.device)  # a GPU's events would count how long it waits for the host
        if settled is not None:
            releases.step_begins(settled, is_plain=False, is_watched=watch is not Watch.NOTHING)

    def _end_plain_step(self, at_once: bool) -> None:
        record, released = self._record, self._unplanned.released
        self._record, self._in_backward, self._began_with = None, False, None
        self._kinds.end_plain(released)
        self._memory.step_ended(record)
        if record is not None:
            record.close(at_once)
        self._unplanned.step_ended(record)

    def _meet(self, resident: Resident) -> None:
        """Plan the step that has ended, and let plans meet what exists now.

        Raises:
            InfeasibleBudgetError: If nothing fits the budget; it says what could not be captured.
        """
        finished, self._finished = self._finished, None
        try:
            self._planned.meet(finished, resident)
        except InfeasibleBudgetError as error:
            if reasons := self._announcements.why_over():
                explain(error, f"hiremate:{reasons}")
            raise
        if finished is not None and finished.signature not in self.plans:
            self._watching.missed(finished.signature)
        elif finished is not None:
            self._unplanned.was_planned(finished.signature)

    def _begin_record(self, arguments: list[torch.Tensor]) -> StepRecord:
        """Begin to measure a step."""
        self._memory.collect_garbage(LITTERED_STEPS)
        resident = self._began_with = self._memory.count_before_step(arguments)
        sees_frees = self._memory.sees_frees(resident)
        sizes = (resident.size_bytes, resident.stale_bytes, resident.left_bytes)
        record = StepRecord(self._memory.device, *sizes, sees_frees, self.root)
        self._memory.watch_releases(record, arguments)
        if not record.is_measured and not backward_pass.is_running():
            self.say("Another profiler is running: peaks and code outside the plan can't be measured meanwhile.")
        return record

    def _watches_resident(self) -> bool:
        """Whether to count resident bytes now: they settle within a few steps, and counting takes time."""
        is_due = self._steps < WATCHED_STEPS or self._steps % 64 == 0 or self._memory.has_grown()
        is_held = self._planned.shortage.is_held
        return is_due or is_held or self._finished is not None or self._planned.any_is_unfit()

    def end_step(self, at_once: bool = True) -> None:
        """End the step under way, and its measurement; what was learned is used when the next one begins.

        Args:
            at_once: Whether it has ended just now, or some time before the next one.
        """
        if self._is_broken:
            self.abandon_step()
            return
        self._has_begun = False
        if at_once:
            self._memory.batch = []
        if self.is_plain:
            self._end_plain_step(at_once)
            return
        if not self._kinds.ran and self._record is None:
            return
        is_usual = self._announcements.step_ended(self.parts.count)
        kind, is_own = self._kinds.end()  # else programs of another kind ran in it, and its plan was not seen
        self._unplanned.was_foreseen(kind, self._first_steps)
        if self._first_steps.end_step():
            self._kinds.by_plans.add(kind)
        expected = self._kinds.expected
        if not is_own and expected is not None and kind in self.plans and expected != kind:
            self._planned.confused(expected, kind)
        record, timed, resident = self._record, self._timed, self._began_with
        self._record, self._timed = None, None
        self._in_backward, self._began_with = False, None
        self._memory.step_ended(record)
        saw = Saw.NOTHING
        if record is not None:
            record.close(at_once)
            saw = self._learn_from(record, timed, kind, resident if is_own else None)
        elif timed is not None and is_own and self.plans[kind].measured.peak_bytes is not None:
            self._planned.update(kind, step_ms=timed.total_ms, recompute_ms=timed.recompute_ms)
        self._watching.step_ended(kind, saw, is_usual)
        is_missed = kind not in self.plans and (record is None or not record.is_whole)
        if is_missed and self._planned.gets_a_plan(kind):
            self._watching.missed(kind)

    def _learn_from(self, record: StepRecord, timed: TimedRun | None, kind: Kind, resident: Resident | None) -> Saw:
        """Keep the record of a step that has ended to plan its kind, or compare its peak with that of its plan.

        Args:
            record: Of the step.
            timed: Times of its operations, None where they were not taken.
            kind: Its kind.
            resident: What existed before it, None where it did not run by its plan.
        """
        if not record.is_whole:
            return Saw.NOTHING
        if kind not in self.plans:
            if record.backwards:
                record.timed = timed
                self._finished = record if self._planned.gets_a_plan(kind) else None
                self._unplanned.finished()
                self._watching.found(kind)
            return Saw.NOTHING
        if resident is None or not record.is_measured:
            return Saw.NOTHING
        if record.peak_bytes is None:
            return Saw.NO_FREES
        self._planned.peak_measured(kind, record.peak_bytes, self._memory.as_seen(resident))
        return Saw.PEAK


def _tensors_among(values: Any) -> list[torch.Tensor]:
    return [value for value in tensor_state.leaves(values) if isinstance(value, torch.Tensor)]
