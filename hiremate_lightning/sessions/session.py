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
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..capturing.capture import Captured
from ..errors import CaptureError, HiRemateWarning
from ..measuring.profiling import TimedRun
from ..measuring.recording import Run, StepRecord
from ..measuring.resident import LITTERED_STEPS, WATCHED_STEPS, Resident, ResidentMemory
from ..memory.free_memory import free_bytes
from ..options import SessionOptions
from ..out_of_memory import InfeasibleBudgetError, explain
from ..planning.plan import Plan, describe_peak
from ..planning.solvers import worker
from ..records.costs import Profile
from ..reporting.report import Reporter, Stages
from ..rewriting.fused_kernel import Kernels
from ..rewriting.joint import updates_under_checkpoint
from ..running.accumulation import Leaves
from ..running.execution import Part
from ..running.program import Program
from ..torch_private import backward_pass, dynamo, runtime, tensor_state
from ..units import Budget, format_bytes
from .backend import planning_backend
from .eager_paths import eager_paths
from .first_steps import Begun, Given
from .kinds import Kind
from .parts import Parts
from .plain_steps import Call, PlainSteps
from .planned import PlannedKinds
from .proving import Proof, Prover
from .releasing import Releases
from .watching import Saw, Watch, WatchPolicy

log = logging.getLogger("hiremate_lightning")

SMALL = 0.02  # of what the budget leaves for a step: code of other sizes each time may take it without a plan
REASONS = 5  # why graphs end that are listed, those first that end most
CAPTURES = 8  # in as many steps, one after the other, are announced: it goes on like that


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
        self.kernels = Kernels(self.say) if options.compile else None
        self.runs = self.updates = 0
        self._runs_of_update = 0  # forwards before the latest update
        self.stages = Stages(Reporter(options.verbose))
        self.parts = Parts(self.stages, options.cache_dir, self.kernels, self.say)
        self._memory = ResidentMemory(root, self.parts.waiting)
        self._watching = WatchPolicy()
        memory, stages = self._memory, self.stages
        self._planned = PlannedKinds(
            options, self._name, memory, self.parts, stages, self._watching, self.say, self._say_over
        )
        self._kinds, self._first_steps = self._planned.kinds, self._planned.first_steps
        self._finished: StepRecord | None = None  # of a kind of step that is not planned yet
        self._plain_steps = PlainSteps()
        self._releases = Releases()
        self._released: Kind | None = None  # that the step under way is of, which runs plain though it has a plan
        self._calls: list[Call] = []  # of the step under way
        self._finished_calls: tuple[Call, ...] = ()
        self._has_said_plain = False
        self._plain_bytes: float | None = None  # what the step under way adds at most where it runs plain
        self._began_with: Resident | None = None  # when the step began, where that was counted
        self._steps = 0
        self._left: weakref.WeakKeyDictionary[object, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._captured = 0  # graphs when the latest step ended
        self._capturing_steps = 0  # one after the other, in each of which something was captured
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
            self._foresee,
            self._resident,
            self._tracing,
            self._ran_as_written,
        )
        self._said: set[str] = set()
        self._breaks = dynamo.graph_breaks()
        self._failed_guards = Counter[str]()  # before the last of so many steps in which something is captured anew

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
        return self._plain_bytes is not None

    @property
    def is_released(self) -> bool:
        """Whether the step under way runs as the user wrote it, though its kind has a plan: that gains nothing."""
        return self._released is not None

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
        self._plain_bytes = self._released = None
        self._calls.clear()
        self._kinds.forget()
        self._watching.forget_step()
        self._releases.forget_step()
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

        given = self.kernels, may_run_captured, prove if self.options.verify else None
        return planning_backend(lambda captured: session().take_in(captured), *given)

    def may_run_captured(self, code: object, size_bytes: int) -> bool:
        """Whether code whose sizes don't repeat may run as captured: where it is small, beside planned code.

        It may from the step after the one in which it asks first, when plans leave room for it.
        That is four times its bytes: sizes may grow, and eager PyTorch hold copies that a graph does not show.

        Args:
            code: What asks.
            size_bytes: Of all its values at the largest size so far.
        """
        if not self._kinds.ran:
            return False
        since, left_bytes = self._left.get(code, (0, 0))
        if 2 * size_bytes <= left_bytes:
            return since < self._steps
        others_bytes = sum(left for _, left in self._left.values()) - left_bytes
        plan, left_bytes = self.plan, 4 * size_bytes
        if plan is not None and others_bytes + left_bytes <= SMALL * (plan.budget_bytes - plan.resident_bytes):
            self._left[code] = self._steps, left_bytes
            self.say(
                f"Small parts of {self._name} have other sizes in each step: from now on they run without a plan, "
                "which would take longer to make than it saves."
            )
        return False

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
        program, planned = self._choose(part, number, profile)
        self._first_steps.begin(Begun(part.captured, profile, program, planned))
        if self._timed is not None:
            program = self._timed.wrap(program)
        run = None if self._record is None else self._record.begin(part, number, program, arguments)
        return program, run

    def forward_done(self, run: Run | None, outputs: Sequence[Any]) -> None:
        """Note the end of a forward."""
        if run is not None and self._record is not None:
            self._record.forward_done(run, outputs)

    def backward_starts(
        self, run: Run | None, tangents: Sequence[Any], leaves: Leaves, is_kept: Callable[[], bool] | None
    ) -> None:
        """Note the start of a backward."""
        self._backward_starts()
        if run is not None and self._record is not None and run in self._record.runs:
            self._record.backward_starts(run, tangents, leaves, is_kept)

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

    def _choose(self, part: Part, number: int, profile: Profile) -> tuple[Program, bool]:
        """Choose the program of a part that begins; say too whether that is by a plan, be it of another step."""
        planned = self._kinds.choose(number) or self._kept(part) or self._taken_over(part, profile)
        return planned or self._least(part, profile), planned is not None

    def _foresee(self, part: Part) -> Program:
        """Find the program that a part would run by now; the step under way does not notice."""
        number, profile = self.parts.prepare(part)
        with self._kinds.trying():
            return self._choose(part, number, profile)[0]

    def _kept(self, part: Part) -> Program | None:
        """Return the program that computes nothing again, for a forward without a backward in its step.

        That is where plain training would fit too, all that such forwards save counted; else None.
        """
        if not self._kinds.is_without_backward or not self._planned.has_room_for_waiting():
            return None
        return self._first_steps.kept(part)

    def _taken_over(self, part: Part, profile: Profile) -> Program | None:
        """Give the program of a part by a plan for other sizes, None where there is none that fits."""
        given = Given(self._resident, self._planned.foreseen, self._planned.budget_bytes)
        return self._first_steps.take_over(part, profile, tuple(self._kinds.ran), given)

    def _least(self, part: Part, profile: Profile) -> Program:
        """Return the program of least memory of a part.

        Where not even the captured part alone fits, training stops before it runs, or, if there is memory to run it
        once, after: what else the step takes, a second view of a picture or a loss that is a network, is known then.
        Where there are several processes it runs in any case: one that stops alone leaves the others waiting in a
        collective.
        """
        options, is_alone = self.options, runtime.process_group_store() is None
        is_checked = is_alone and options.budget.share is None and options.plan.on_infeasible == "raise"
        budget_of = self._planned.budget_bytes if is_checked else None
        return self._first_steps.least(
            part, profile, self._resident, options.budget, budget_of, options.plan, self._name, self._spare_bytes
        )

    def _spare_bytes(self) -> int:
        """Return the bytes that a first step may take beyond the budget: none where no plan may follow."""
        return free_bytes(self._memory.device) if self._planned.may_plan_more() else 0

    def _ran_as_written(self) -> None:
        """Note that captured code ran as the user wrote it, since its proof failed."""
        self.runs += 1
        self.ran_as_written = True

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
            self._calls.append(Call.of(name, tensors))
            self._plain_bytes = self._bound_plain() if self.is_plain else None
        return self.is_plain

    @contextmanager
    def calling_plain(self) -> Iterator[None]:
        """Surround a call that runs as the user wrote it: where that fails, the step is forgotten."""
        try:
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

    def _bound_plain(self) -> float | None:
        """Bound what the step under way adds if it runs plain; None where it is to be captured."""
        likely = self._kinds.likely()
        if self._released is not None:
            is_same = self._released in self._plain_steps.called_like(self._calls, self.plans)
            return self.plans[self._released].unplanned.peak_bytes if is_same else None
        if likely is None or self.kernels is not None:  # fused kernels give other bits than PyTorch's own
            return None
        return self._plain_steps.bound_bytes(self._calls, self._planned.plain_peaks(), likely)

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
        if any(since == self._steps for since, _ in self._left.values()):
            self._planned.leave(sum(left_bytes for _, left_bytes in self._left.values()))
            self._finished = None
        self._steps += 1
        self._has_begun = True
        self._watching.settle()
        self._note_release()
        self._memory.step_begins(arguments)
        size_bytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in arguments)
        self._kinds.begin(size_bytes)
        if self._finished is not None:
            self._memory.collect_garbage()
        if self._watches_resident():
            resident = self._began_with = self._memory.count_before_step(arguments)
            self._first_steps.count(resident)
            self._meet(resident)
        self._calls = list(calls)
        settled = self._settled_kind()
        self._released = settled if settled is not None and self._releases.runs_plain(settled) else None
        self._plain_bytes = self._bound_plain()
        if self._plain_bytes is not None:
            self._begin_plain_step(arguments, self._plain_bytes)
            if self._released is not None:
                self._releases.step_begins(self._released, is_plain=True, is_watched=self._record is not None)
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
            self._releases.step_begins(settled, is_plain=False, is_watched=watch is not Watch.NOTHING)

    def _settled_kind(self) -> Kind | None:
        """Return the kind of the step that begins, where nothing else is called like it and its plan gains nothing."""
        likely, alike = self._kinds.likely(), self._plain_steps.called_like(self._calls, self.plans)
        if likely is None or alike != [likely] or self.kernels is not None:
            return None
        plain_bytes = self._plain_steps.with_margin(self.plans[likely].unplanned.peak_bytes)
        return likely if self._planned.gains_nothing(likely, plain_bytes) else None

    def _note_release(self) -> None:
        """Tell where a kind of step is given back to eager PyTorch from now on."""
        released = self._releases.next_begins()
        if released is not None:
            text = (
                f"A plan of {self._name} recomputes nothing and takes {released[1]:.2f} times as long as the code "
                "without it: such steps run without it from now on."
            )
            log.info(text)
            self.stages.reporter.note(text)

    def _begin_plain_step(self, arguments: list[torch.Tensor], bound_bytes: float) -> None:
        self._kinds.expected = None
        if not self._has_said_plain and self._released is None:
            self._has_said_plain = True
            self.stages.reporter.note("Steps of other input sizes that fit the budget as they are run without a plan.")
        if self._plain_steps.is_to_be_measured(bound_bytes):
            self._record = self._begin_record(arguments)

    def _end_plain_step(self, at_once: bool) -> None:
        record, bound_bytes = self._record, self._plain_bytes
        released, self._released = self._released, None
        self._record, self._plain_bytes = None, None
        self._in_backward, self._began_with = False, None
        self._kinds.end_plain(released)
        self._memory.step_ended(record)
        if record is None or bound_bytes is None:
            return
        record.close(at_once)
        peak_bytes = record.peak_bytes
        self._plain_steps.measured(bound_bytes, None if peak_bytes is None else peak_bytes - record.resident_bytes)
        plan = self.plan
        if released is not None and self.options.budget.share == 1:
            return  # the budget is what plain training takes
        if peak_bytes is not None and plan is not None and peak_bytes > plan.budget_bytes:
            self._releases.keep(released)
            self.say(
                "A step of a new input size ran without recomputation, since it was predicted to fit, and took "
                f"{format_bytes(peak_bytes)}, above the budget of {format_bytes(plan.budget_bytes)}. "
                "From now on such predictions have a margin."
            )

    def _meet(self, resident: Resident) -> None:
        """Plan the step that has ended, and let plans meet what exists now.

        Raises:
            InfeasibleBudgetError: If nothing fits the budget; it says what could not be captured.
        """
        finished, self._finished = self._finished, None
        try:
            self._planned.meet(finished, resident)
        except InfeasibleBudgetError as error:
            if reasons := self._why_over():
                explain(error, f"hiremate:{reasons}")
            raise
        if finished is not None and finished.signature not in self.plans:
            self._watching.missed(finished.signature)
        elif finished is not None:
            code = self._planned.same_code(finished.signature)
            self._plain_steps.learn(finished.signature, self._finished_calls, code)

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
        is_usual = self.parts.count == self._captured
        self._note_captures()
        kind, is_own = self._kinds.end()  # else programs of another kind ran in it, and its plan was not seen
        self._learn_foreseen(kind)
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
                self._finished_calls = tuple(self._calls)
                self._watching.found(kind)
            return Saw.NOTHING
        if resident is None or not record.is_measured:
            return Saw.NOTHING
        if record.peak_bytes is None:
            return Saw.NO_FREES
        self._planned.peak_measured(kind, record.peak_bytes, self._memory.as_seen(resident))
        return Saw.PEAK

    def _learn_foreseen(self, kind: Kind) -> None:
        """Learn what the step that ends would have taken plain, where it ran by the plan of another size."""
        if self._first_steps.foreseen is not None:
            known, added_bytes = self._first_steps.foreseen
            self._plain_steps.learn(kind, self._calls, self._planned.same_code(known), added_bytes)

    def _note_captures(self) -> None:
        """Tell where each step is captured anew: that may take longer than the step itself, and does not end."""
        self._capturing_steps = self._capturing_steps + 1 if self.parts.count > self._captured else 0
        self._captured = self.parts.count
        if self._capturing_steps == CAPTURES - 1:
            self._failed_guards = dynamo.failed_guards()
        if self._capturing_steps == CAPTURES:
            failed = [*(dynamo.failed_guards() - self._failed_guards)]
            found = f" What had been captured is for this alone: {failed[-1]}" if failed else ""
            self.say(
                f"Something was captured anew in each of {CAPTURES} steps, one after the other, which takes time: "
                "input shapes change, numbers that code computes with, or the length of a list that it appends to. Pad "
                "to a few shapes; hand changing numbers over as tensors; append in a function with "
                "@torch.compiler.disable; or name what keeps its shapes with target=, a detector's backbone say.",
                found,
            )

    def why_uncaptured(self) -> str:
        """Say, as a sentence or not at all, what has ended torch.compile's graphs since this session began."""
        reasons = [reason for reason, _ in (dynamo.graph_breaks() - self._breaks).most_common()]
        others = f"; and {len(reasons) - REASONS} more" if len(reasons) > REASONS else ""
        return f" What ends its graphs: {'; '.join(reasons[:REASONS])}{others}." if reasons else ""

    def _why_over(self) -> str:
        """Return, as sentences or "", why code that ends graphs may be what a budget is not met for."""
        reasons = self.why_uncaptured()
        if not reasons:
            return ""
        return (
            " Code between captured graphs has no plan, and what one graph hands to the next is kept. Code that "
            f"torch.compile can capture needs less.{reasons}"
        )

    def _say_over(self, text: str) -> None:
        self.say(text, self._why_over())

    def say(self, text: str, found: str = "") -> None:
        """Warn, once for each text, whatever was found."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text + found, HiRemateWarning, stacklevel=2)


def _tensors_among(values: Any) -> list[torch.Tensor]:
    return [value for value in tensor_state.leaves(values) if isinstance(value, torch.Tensor)]
