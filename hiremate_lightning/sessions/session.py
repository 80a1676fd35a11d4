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
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..capturing.capture import Captured
from ..errors import CaptureError, HiRemateWarning
from ..garbage import collecting_what_it_leaves
from ..measuring.profiling import TimedRun
from ..measuring.recording import Run, StepRecord
from ..measuring.resident import LITTERED_STEPS, WATCHED_STEPS, Resident, ResidentMemory
from ..memory.free_memory import free_bytes
from ..options import SessionOptions
from ..out_of_memory import InfeasibleBudgetError, explain
from ..planning.plan import Plan, describe_peak
from ..planning.planner import make_plan, resolve, unplanned
from ..planning.shared_solving import shared
from ..planning.solvers import worker
from ..planning.solvers.base import Strategy
from ..planning.solvers.curve import Remembering
from ..records.costs import Profile, step_time_ms
from ..records.scaling import are_same
from ..records.schedule import lower
from ..records.step import Step
from ..reporting.report import Reporter, Stages
from ..rewriting.fused_kernel import Kernels
from ..rewriting.joint import may_choose_anew
from ..running.accumulation import Leaves
from ..running.execution import Part
from ..running.program import Program, build
from ..torch_private import backward_pass, dynamo, runtime, tensor_state
from ..units import Budget, format_bytes
from .backend import planning_backend
from .eager_paths import eager_paths
from .first_steps import Begun, FirstSteps, Given, Planned
from .kinds import Kind, Kinds, Known
from .limits import Limits
from .parts import Parts, uses_all_parameters

log = logging.getLogger("hiremate_lightning")

CAPTURES = 8  # in as many steps, one after the other, are announced: it goes on like that
CORRECTIONS = 3  # of a plan whose peak is measured above the budget: where code outside varies, none may be enough


class Session:
    """Plans the steps of one model.

    Attributes:
        root: The module whose parameters and buffers are resident.
        options: What was asked for.
        plans: The plans so far, by kind of step.
        listeners: Called with each plan when it is made, and again when it has been measured.
        runs: Number of forwards of captured graphs so far.
        kernels: Where fused operations are kept, None where nothing is fused.
        stages: Shows the stages of planning, and counts their time.
        parts: The captured graphs.
    """

    def __init__(self, root: nn.Module, options: SessionOptions) -> None:
        self.root = root
        self.options = options
        self.plans: dict[Kind, Plan] = {}
        self.listeners: list[Callable[[Plan], None]] = []
        self.kernels = Kernels(self.say) if options.compile else None
        self.runs = 0
        self.stages = Stages(Reporter(options.verbose))
        self.parts = Parts(self.stages, options.cache_dir, self.kernels)
        self._known: dict[Kind, Known] = {}
        self._first_steps = FirstSteps(self.stages)
        self._awaited = 0  # steps foreseen as of a kind to be measured, since one was
        self._largest_bytes = 0  # of what a step was called with
        self._limits: defaultdict[Kind, Limits] = defaultdict(Limits)
        self._unfit: set[Kind] = set()  # whose plans were made with gradients dying that do not
        self._searching: set[Kind] = set()  # whose next step is the first in which cuDNN chooses algorithms
        self._finished: StepRecord | None = None  # of a kind of step that is not planned yet
        self._auto_bytes: int | None = None
        self._saw_unplanned = False  # whether a kind of step without a plan ran unrecorded
        self._began_with: Resident | None = None  # when the step began, where that was counted
        self._steps = 0
        self._captured = 0  # graphs when the latest step ended
        self._capturing_steps = 0  # one after the other, in each of which something was captured
        self._kinds = Kinds()
        self._memory = ResidentMemory(root)
        self._in_backward = False
        self._is_broken = False  # to be abandoned when the next one begins
        self._record: StepRecord | None = None
        self._timed: TimedRun | None = None
        self._tracing = ExitStack()
        self._said: set[str] = set()

    # ---------------------------------------------------------------- what others ask and tell

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest kind of step, None before there is one."""
        return None if self._kinds.latest is None else self.plans[self._kinds.latest]

    @property
    def captured_count(self) -> int:
        """Number of graphs captured so far."""
        return self.parts.count

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
        before = self.options, dict(self.plans), dict(self._kinds.programs), self._limits
        self.options, self._limits = replace(self.options, budget=budget), defaultdict(Limits)
        try:
            for kind in list(self._known):
                self._make_plan(kind)
        except BaseException:  # Ctrl-C too
            self.options, self.plans, self._kinds.programs, self._limits = before
            self._first_steps.forget_plans()
            raise

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Learn of an optimizer; what follows its step is no longer part of the training step."""
        has_ended = self._memory.stepped(optimizer) and not backward_pass.is_running()
        if has_ended and self._record is not None and self._record.backwards:
            self._record.close()

    def abandon_step(self) -> None:
        """Forget the step under way, after an exception."""
        self._tracing.close()
        if self._record is not None:
            self._record.close()
        self._record, self._finished, self._timed = None, None, None
        self._in_backward, self._began_with, self._memory.batch = False, None, []
        self._kinds.forget()
        self._first_steps.end_step()
        self._is_broken = False

    # ---------------------------------------------------------------- capture

    def backend(self) -> Any:
        """Give the torch.compile backend whose captured graphs this session runs."""
        taking = weakref.WeakMethod(self.take_in)  # torch.compile's caches must not keep a session alive

        def take_in(captured: Captured) -> Part:
            method = taking()
            assert method is not None, "a model is alive while it is called"
            return method(captured)

        return planning_backend(take_in, self.kernels)

    def take_in(self, captured: Captured) -> Part:
        """Make a part of a captured graph."""
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
        elif self._in_backward or self._is_broken:
            self.end_step(at_once=False)
        if not self._kinds.ran and self._record is None:
            self._begin_step([t for t in tensor_state.leaves(arguments) if isinstance(t, torch.Tensor)])
        if not self.parts.count:
            worker.warm_up()
            self._tracing.enter_context(self.stages.stage("capture_s", "tracing"))

        def tell(reason: str) -> None:
            self.say(f"torch.compile could not capture a part of {name}, which runs without a plan: {reason}")

        try:
            with dynamo.capturing_for_plans(tell, sizes_vary=self.parts.count > 0), eager_paths():
                yield
        except dynamo.CompileError as error:
            if not is_inside:
                self.abandon_step()
            raise CaptureError(
                f"torch.compile could not capture {name}: {error}\n"
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
        planned = self._kinds.choose(number) or self._taken_over(part, profile)
        program = planned or self._least(part, profile)
        self._first_steps.begin(Begun(part.captured, profile, program, planned is not None))
        if self._timed is not None:
            program = self._timed.wrap(program)
        run = None if self._record is None else self._record.begin(part, number, program, arguments)
        return program, run

    def forward_done(self, run: Run | None, outputs: Sequence[Any]) -> None:
        """Note the end of a forward."""
        if run is not None and self._record is not None:
            self._record.forward_done(run, outputs)

    def backward_starts(self, run: Run | None, tangents: Sequence[Any], leaves: Leaves) -> None:
        """Note the start of a backward."""
        if not self._in_backward:
            self._in_backward = True
            self._memory.backward_starts(self._steps)
        if run is not None and self._record is not None and run in self._record.runs:
            self._record.backward_starts(run, tangents, leaves)

    def was_overwritten(self, part: Part, storages: Collection[int]) -> None:
        """Learn of values that other code overwrites before the backward: nothing can be computed from them then."""
        part.captured = part.captured.reading_once(storages)
        self._first_steps.forget_least(part)

    def must_return(self, part: Part, positions: Collection[int]) -> None:
        """Learn that gradients were handed to autograd beside those that exist, where a plan may count on adding."""
        for kind, known in self._known.items():
            returning = known.returning(part, positions)
            if returning is not known:
                self._known[kind] = returning
                self._unfit.add(kind)
                self.say(
                    "Gradients can't be added where they appear any more, since a hook sees them, another term of the "
                    "loss has some too, or autograd.grad asks for them: two sets of them are planned for from now on."
                )

    def backward_done(self, run: Run | None) -> None:
        """Note the end of a backward."""
        if run is not None and self._record is not None and run in self._record.runs:
            self._record.backward_done(run)

    def ran_out(self, error: torch.OutOfMemoryError) -> None:
        """Note on an error what was planned and what is allocated."""
        explain(error, f"hiremate: {describe_peak(self._name, self.plan)}{self._memory.describe()}")

    def _taken_over(self, part: Part, profile: Profile) -> Program | None:
        """Give the program of a part by a plan for other sizes, None where there is none that fits."""

        def planned() -> Iterator[Planned]:
            return ((self._known[kind], plan.solution.recompute) for kind, plan in self.plans.items())

        given = Given(self._resident, planned, self._budget_bytes)
        return self._first_steps.take_over(part, profile, tuple(self._kinds.ran), given)

    def _least(self, part: Part, profile: Profile) -> Program:
        """Give the program of least memory of a part.

        Where not even the captured part alone fits, training stops before that. A share of the whole step is not known
        from a part of it: it is checked where a part uses all parameters, else once the step is known.
        """
        is_known = self.options.budget.share is None or uses_all_parameters(part.captured, self.root)
        is_checked = is_known and self.options.plan.on_infeasible == "raise"
        budget, budget_of = self.options.budget, self._budget_bytes if is_checked else None
        return self._first_steps.least(part, profile, self._resident, budget, budget_of, self.options.plan, self._name)

    def _resident(self) -> Resident:
        """Give what existed when the step began; where that was not counted, what exists now."""
        return self._began_with or self._memory.count(())

    # ---------------------------------------------------------------- steps

    def _begin_step(self, arguments: list[torch.Tensor]) -> None:
        self._steps += 1
        self._memory.step_begins(arguments)
        if self._finished is not None:
            self._memory.collect_garbage()
        if self._watches_resident():
            resident = self._began_with = self._memory.count_before_step(arguments)
            self._first_steps.count(resident)
            if self._finished is not None:
                record, self._finished = self._finished, None
                with collecting_what_it_leaves():
                    self._learn(record, resident)
            for kind in self._kinds.all_likely():
                self._adapt(kind, resident)
        likely, all_likely = self._kinds.likely(), self._kinds.all_likely()
        plan = None if likely is None else self.plans[likely]
        self._kinds.expected = max(all_likely, key=lambda kind: self.plans[kind].unplanned_peak_bytes, default=None)
        if plan is not None and plan.measured.peak_bytes is None:
            self._awaited += 1
        size_bytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in arguments)
        is_measured = self._is_to_be_measured(plan, size_bytes)
        self._largest_bytes = max(size_bytes, self._largest_bytes)
        if is_measured:
            self._record = self._begin_record(arguments)
        if self._is_timed(plan):
            self._timed = TimedRun(self._memory.device)

    def _begin_record(self, arguments: list[torch.Tensor]) -> StepRecord:
        """Begin to measure a step."""
        self._memory.collect_garbage(LITTERED_STEPS)
        resident = self._memory.count_before_step(arguments)
        before_bytes, sees_frees = resident.size_bytes + resident.stale_bytes, self._memory.sees_frees(resident)
        record = StepRecord(self._memory.device, before_bytes, sees_frees)
        if not record.is_measured and not backward_pass.is_running():
            self.say("Another profiler is running: peaks and code outside the plan can't be measured meanwhile.")
        return record

    def _is_to_be_measured(self, plan: Plan | None, size_bytes: int) -> bool:
        """Whether to measure the step that begins: it may be of a new kind, or its plan was not measured yet.

        Args:
            plan: Its plan as foreseen; it is awaited less and less often while other kinds come.
            size_bytes: Of what it is called with: what is larger than ever before will not fit into the plans there
                are, and gets one of its own.
        """
        if plan is None or self._saw_unplanned or size_bytes > self._largest_bytes:
            return True
        return plan.measured.peak_bytes is None and (self._awaited < 4 or self._awaited.bit_count() == 1)

    def _is_timed(self, plan: Plan | None) -> bool:
        """Whether to time each operation of the step that begins: for its plan to come, or to see how its plan does."""
        if plan is None:
            return self._memory.device.type == "cpu"  # a GPU's events would count how long it waits for the host
        return self._record is None and plan.measured.peak_bytes is not None and plan.measured.step_ms is None

    def _watches_resident(self) -> bool:
        """Whether to count resident bytes now: they settle within a few steps, and counting takes time."""
        is_due = self._steps < WATCHED_STEPS or self._steps % 64 == 0 or self._memory.has_grown()
        return is_due or self._finished is not None or not self._unfit.isdisjoint(self._kinds.all_likely())

    def end_step(self, at_once: bool = True) -> None:
        """End the step under way, and its measurement; what was learned is used when the next one begins.

        Args:
            at_once: Whether it has ended just now, or some time before the next one.
        """
        if self._is_broken:
            self.abandon_step()
            return
        if at_once:
            self._memory.batch = []
        if not self._kinds.ran and self._record is None:
            return
        self._note_captures()
        kind, is_own = self._kinds.end()  # else programs of another kind ran in it, and its plan was not seen
        if self._first_steps.end_step():
            self._kinds.by_plans.add(kind)
        expected = self._kinds.expected
        if not is_own and expected is not None and kind in self.plans and expected != kind:
            self._confused(expected, kind)
        record, timed = self._record, self._timed
        self._record, self._timed = None, None
        self._in_backward, self._began_with = False, None
        self._memory.step_ended(record)
        if record is not None:
            record.close(at_once)
        if record is not None and record.is_whole:
            if kind in self.plans:
                if record.peak_bytes is not None and is_own:
                    self._measured(kind, record.peak_bytes)
            elif record.backwards:
                record.timed = timed
                self._finished = record if self._gets_a_plan(kind) else None
                self._saw_unplanned = False
        elif record is None and timed is not None and is_own and self.plans[kind].measured.peak_bytes is not None:
            self._update(kind, step_ms=timed.total_ms, recompute_ms=timed.recompute_ms)
        if (record is None or not record.is_whole) and kind not in self.plans:
            self._saw_unplanned = self._gets_a_plan(kind)

    def _note_captures(self) -> None:
        """Tell where each step is captured anew: that may take longer than the step itself, and does not end."""
        self._capturing_steps = self._capturing_steps + 1 if self.parts.count > self._captured else 0
        self._captured = self.parts.count
        if self._capturing_steps == CAPTURES:
            self.say(
                f"Something was captured anew in each of {CAPTURES} steps, one after the other, which takes time: "
                "input shapes change, or numbers that code computes with. Pad to a few shapes; hand changing numbers "
                "over as tensors."
            )

    def _gets_a_plan(self, kind: Kind) -> bool:
        """Whether to plan a kind of step: it has come again, or some of it had to run at the least memory."""
        is_worth_it = self._kinds.sights[kind] > 1 or kind not in self._kinds.by_plans
        return is_worth_it and (self._captured_before(kind) is not None or self._may_plan_more())

    def _captured_before(self, kind: Kind) -> Known | None:
        """Find the same step at the same sizes: Dynamo captures a size anew once it has symbols for it."""
        parts = [part for number in kind if (part := self.parts.find(number)) is not None]
        graphs = [part.captured.graph for part in parts]
        if len(graphs) < len(kind):
            return None
        return next((k for k in self._known.values() if are_same([c.graph for c in k.captured], graphs)), None)

    def _may_plan_more(self) -> bool:
        """Whether there are fewer plans than allowed; if not, that is announced."""
        count = len({id(known.solve) for known in self._known.values()})
        if count < self.options.max_plans:
            return True
        self.say(
            f"There are {count} plans already (max_plans): other steps run as was planned for another input "
            "shape, where that fits, or else at the least memory. Each new shape takes seconds as it first appears: "
            "pad to a few shapes, or raise max_plans."
        )
        return False

    def _learn(self, record: StepRecord, resident: Resident) -> None:
        """Plan a kind of step that was not seen before."""
        kind = record.signature
        twin = self._captured_before(kind)
        calls, order = record.calls(self.parts.profiles)
        runs = [run for run in record.runs if run.index in record.backwards]
        self._known[kind] = Known(
            calls=tuple(calls) if twin is None else twin.calls,
            order=tuple(order),
            parts=tuple(run.part for run in runs),
            captured=tuple(run.part.captured for run in runs),
            places=tuple(run.index for run in runs),
            missing=tuple(run.missing for run in runs),
            added=tuple(run.added for run in runs),
            resident=resident,
            solve=self._new_solver() if twin is None else twin.solve,
        )
        self._make_plan(kind)

    def _new_solver(self) -> Strategy:
        return shared(Remembering(worker.apart(self.options.plan.solver)), runtime.process_group_store())

    def _make_plan(self, kind: Kind) -> None:
        """Plan a known step and let its programs take over."""
        known = self._known[kind]
        step, resident_bytes = known.merge(), known.resident.size_bytes
        budget_bytes = self._limit_bytes(kind, step)
        with self.stages.reporter.stage("solving"):
            plan = make_plan(
                step,
                self.options.budget,
                budget_bytes,
                resident_bytes,
                self.options.plan,
                target=self._name,
                planning=self.stages.take(),
                margin_bytes=known.margin_bytes,
                solve=known.solve,
                progress=self.stages.reporter.solving(step_time_ms(step.graph, step.profile)),
            )
        plan = replace(plan, resident_parts=known.resident.kinds)
        decided = zip(known.captured, known.places, step.split(plan.solution.recompute), strict=True)
        programs = {place: build(captured, lower(captured.graph, decisions)) for captured, place, decisions in decided}
        self.plans[kind] = plan
        self._awaited = min(self._awaited, 3)
        self._first_steps.forget_plans()
        self._kinds.install(kind, programs)
        self.stages.reporter.planned(plan)
        again = {plan.graph.nodes[node].op for node in plan.schedule.recomputed(plan.graph)}
        if may_choose_anew(again, self._memory.device):
            self._searching.add(kind)
            self.say(
                "torch.backends.cudnn.benchmark is on: convolutions that are computed again may take another algorithm "
                "than before, and differ in the last bits. Turn it off for the same numbers bit for bit."
            )
        if plan.planned_peak_bytes > budget_bytes:
            self._limits[kind].nothing_fits(known.resident, plan.planned_peak_bytes)
            peak, budget = format_bytes(plan.planned_peak_bytes), format_bytes(budget_bytes)
            self.say(f"Nothing fits the budget of {budget}: the step runs at the least memory found, {peak}.")
        self._tell(plan)

    def _adapt(self, kind: Kind, resident: Resident) -> None:
        """Meet what exists before this step: the plan stays where it still fits, else the step is planned anew."""
        known, plan = self._known[kind], self.plans[kind]
        if resident == known.resident and kind not in self._unfit:
            return
        limits, is_least = self._limits[kind], plan.planned_peak_bytes > plan.budget_bytes
        if kind in self._unfit:
            self._unfit.discard(kind)
            limits.forget_least()
        self._known[kind] = known = replace(known, resident=resident)
        step = known.merge()
        budget_bytes = self._limit_bytes(kind, step)
        adapted = replace(
            plan,
            graph=step.graph,
            budget_bytes=budget_bytes,
            resident_bytes=resident.size_bytes,
            resident_parts=resident.kinds,
        )
        if (plan.measured.peak_bytes or 0) > budget_bytes:
            adapted = adapted.with_measured(peak_bytes=None)  # it was of more resident bytes: measured again
        if limits.stays(resident, adapted.planned_peak_bytes + known.margin_bytes, is_least):
            self.plans[kind] = adapted
            self._tell(adapted)
        else:
            log.info("%s is planned anew: resident bytes are now %s", self._name, format_bytes(resident.size_bytes))
            self._make_plan(kind)

    def _measured(self, kind: Kind, peak_bytes: int) -> None:
        """Compare a measured peak with the budget; where it is over, plan with less, a few times at most."""
        if kind in self._searching:
            self._searching.remove(kind)
            return  # cuDNN tried its algorithms, with all the memory that these may take: the next step counts
        plan, known = self.plans[kind], self._known[kind]
        self._awaited = 0
        self._update(kind, peak_bytes=peak_bytes)
        excess = peak_bytes - plan.budget_bytes
        if excess <= 0 or plan.planned_peak_bytes > plan.budget_bytes:
            return
        text = f"The measured peak {format_bytes(peak_bytes)} is {format_bytes(excess)} above the budget"
        if known.corrections == CORRECTIONS:
            self.say(
                f"{text}, after planning with a margin: something outside of the planned modules takes the memory."
            )
            return
        margin_bytes = peak_bytes - plan.planned_peak_bytes  # more than the last one, which was left free
        self._known[kind] = replace(known, margin_bytes=margin_bytes, corrections=known.corrections + 1)
        try:
            self._make_plan(kind)
        except InfeasibleBudgetError:
            self.say(f"{text}, and no plan leaves that margin: the plan stays.")
        else:
            log.info("%s: planned again, with that margin", text)

    def _confused(self, expected: Kind, kind: Kind) -> None:
        """Learn that a step turned out another kind than it began as."""
        self._kinds.confuse(expected, kind)
        plan = max((self.plans[expected], self.plans[kind]), key=lambda plan: plan.unplanned_peak_bytes)
        if plan.solution.recompute_ms > 0:
            self.say(
                "A step began by the plan of another kind of step, and went another way: it may have taken more than "
                f"its budget of {format_bytes(plan.budget_bytes)}. From now on such steps begin by the plan of the "
                "kind that needs most."
            )

    def _update(self, kind: Kind, **measured: Any) -> None:
        plan = self.plans[kind] = self.plans[kind].with_measured(**measured)
        if plan.measured.step_ms is not None:
            self.stages.reporter.measured(plan)
        self._tell(plan)

    def _tell(self, plan: Plan) -> None:
        for listener in self.listeners:
            listener(plan)

    def say(self, text: str) -> None:
        """Warn, once for each text."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, HiRemateWarning, stacklevel=2)

    # ---------------------------------------------------------------- bytes

    @property
    def _name(self) -> str:
        return type(self.root).__name__

    def _limit_bytes(self, kind: Kind, step: Step) -> int:
        """Give the budget of a known kind of step with what exists before it now, resident bytes included."""
        resident = self._known[kind].resident
        return self._limits[kind].budget_bytes(resident, self._budget_bytes(step, resident.size_bytes, kind))

    def _budget_bytes(self, step: Step, resident_bytes: int, kind: Kind | None = None) -> int:
        """Give the budget of a step, resident bytes included; a share is of the largest step that is known.

        Args:
            step: The step.
            resident_bytes: Bytes that exist before it.
            kind: Its kind, None where that is not known yet.
        """
        if self._auto_bytes is None:
            self._auto_bytes = resolve(Budget(), resident_bytes, 0, free_bytes(self._memory.device))
        if self.options.budget.is_auto:
            return self._auto_bytes
        others = (plan.unplanned.peak_bytes for planned, plan in self.plans.items() if planned != kind)
        return resolve(self.options.budget, resident_bytes, max(unplanned(step).peak_bytes, *others, 0), 0)
