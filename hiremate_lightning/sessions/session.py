"""The session of one planned model: the interface for its calls, its captured graphs and its users.

In the first training step torch.compile captures all graphs of the step, and memory of the code outside of them is
measured; the step runs at the least memory, or as was planned for another input shape. When the next step begins, the
whole step is planned as one problem, and runs by the plan without another capture. The peak of a step by the plan is
compared with the prediction, and the time of one more step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..calls.module_call import ModuleCall, tensors_inside
from ..calls.replaced import ReplacedCheckpointing
from ..capturing.backend import capture_opaque, planning_backend
from ..capturing.capture import Captured
from ..capturing.same_captures import SameCaptures
from ..errors import CaptureError
from ..housekeeping import weakly
from ..measuring.resident import Resident
from ..options import SessionOptions
from ..planning.headroom import Short
from ..planning.plan import Plan
from ..planning.solvers import worker
from ..proofs.proof import Proof
from ..proofs.proving import Prover
from ..rewriting.nodes import updates_under_checkpoint
from ..running.execution import GraphRuntime
from ..signatures.step_signature import GraphNumbers
from ..torch_private import backward_pass, compiled_by_torch, dynamo, tensor_state
from ..torch_private.tensor_state import tensors_among
from ..units import Budget
from .calls_without_gradients import CallsWithoutGradients
from .eager_steps import EagerSteps
from .first_wait import modules_without_parts
from .graph_programs import GraphPrograms
from .largest import Arguments, VaryingSizes
from .messages import Listener, transforms_in
from .modes import GivenBack
from .new_sizes import NewSizes
from .plan_maker import PlanMaker
from .planned import PlannedSignatures
from .planned_model import PlannedModel
from .steps import Steps


class Session:
    """Plans the steps of one model.

    Attributes:
        model: What the objects of the session share.
        root: The module whose parameters and buffers are resident.
        updates: Number of updates of the weights so far; optimizers that step after the same forwards count once.
        reporter: Shows the stages of planning, and counts their time.
        planned: The plans, by step signature.
        listeners: Called with each plan when it is made, and again when it has been measured.
        steps: The step under way, and the one before it.
        closing: What `close` calls last: whoever takes over calls for the session gives them back there.
    """

    def __init__(self, root: nn.Module, options: SessionOptions) -> None:
        self.model = model = PlannedModel(root, options)
        self.root, self.reporter = root, model.reporter
        self.warn, self.why_uncaptured = model.warn, model.messages.why_uncaptured
        self.has_warned_of_transforms = model.messages.has_warned_of_transforms
        self.updates = 0
        self._runs_of_update = 0  # number of forwards before the latest update
        self._varying = VaryingSizes(lambda: (tuple(weight.shape) for weight in root.parameters()))
        maker = PlanMaker(model)
        graph_programs = GraphPrograms(model, maker)
        self.listeners: list[Listener] = [self._report_replaced]
        self.planned = PlannedSignatures(model, maker, graph_programs, self.listeners)
        self._new_sizes = NewSizes(model)
        eager_steps = EagerSteps(model, self._new_sizes)
        self.steps = Steps(model, self.planned, eager_steps, graph_programs)
        self._without_gradients = CallsWithoutGradients(model)
        self._checkpointing = ReplacedCheckpointing(root)
        self.closing = ExitStack()
        self._compiled = ExitStack()  # restores on closing the code that ran by torch.compile before
        self._prover = Prover(model, self.steps.choose_program, self.steps.free_bytes)

    # ---------------------------------------------------------------- the interface

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest step signature, with the present state of the proofs; None before there is one."""
        latest = self.model.history.latest_plan
        return None if latest is None else self.planned.maker.with_proofs(latest)

    @property
    def plans(self) -> Mapping[GraphNumbers, Plan]:
        """The plans so far, with the present state of the proofs, by the captured graphs of their steps."""
        with_proofs, planned = self.planned.maker.with_proofs, self.model.history.planned
        return {signature.graphs: with_proofs(signature.own_plan) for signature in planned}

    @property
    def options(self) -> SessionOptions:
        """The options, with the present budget."""
        return self.model.options

    @property
    def runs(self) -> int:
        """Number of forwards so far, captured or eager."""
        return self.steps.runs + self.model.proofs.runs_eager

    @property
    def captured_count(self) -> int:
        """Number of graphs captured so far."""
        return self.model.runtimes.traced_count

    @property
    def holds_graphs(self) -> bool:
        """Whether graphs wait for their backward, or are retained for another."""
        return bool(self.model.runtimes.waiting() or self.model.runtimes.retained())

    @property
    def is_eager(self) -> bool:
        """Whether the step under way runs eager."""
        return self.steps.eager is not None

    @property
    def is_given_back(self) -> bool:
        """Whether the step under way runs eager because its plan gains nothing."""
        return isinstance(self.steps.eager, GivenBack)

    @property
    def parameters_of_step(self) -> frozenset[int] | None:
        """The `id` of each parameter given to captured graphs in the step under way; None if it is not measured."""
        return None if self.steps.measurement is None else frozenset(self.steps.measurement.parameters)

    def expect_wait(self, modules: int, operations: int = 0) -> None:
        """Estimate the seconds of the first plan from the number of leaf modules, or of operations."""
        if not self.reporter.is_silent:
            self.reporter.expect(self.model.name, self.model.first_wait.expected_s(modules, operations))

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an optimizer's state as resident."""
        self.model.memory.optimizers.add(optimizer)

    def inherit(self, before: Session) -> None:
        """Continue a session that plans no more: with its optimizers, listeners, reports and replaced compiled code."""
        for optimizer in before.model.memory.optimizers:
            self.watch_optimizer(optimizer)
        self.listeners.extend(before.listeners[1:])  # the first listener is `_report_replaced` of that session
        self._compiled.enter_context(before._compiled.pop_all())
        self.reporter.show_like(before.reporter)

    def expect_batch(self, batch: Any) -> None:
        """Count all tensors of a batch in the next step: the planned modules may receive only some of them."""
        self.model.memory.batch = tensors_among(batch)

    def replace_compiling(self, aside: Sequence[Callable[[], None]] = ()) -> None:
        """Run a model that a script gave to torch.compile without it, and report that.

        `aside` are functions that restore compiled code inside of the model, which was replaced already.
        """
        given_back = [*aside, *map(compiled_by_torch.run_eager, compiled_by_torch.compiled_around(self.root))]
        for give_back in given_back:
            self._compiled.callback(give_back)
        if given_back:
            self.reporter.report(
                f"HiRemate plan of {self.model.name}, in place of torch.compile: numbers are those of uncompiled code, "
                "and steps may take longer; compile='inductor' plans with fused kernels. Put back when the plan goes"
            )

    def set_budget(self, budget: Budget) -> None:
        """Change the budget and plan all recorded steps again; nothing is captured again.

        Raises:
            InfeasibleBudgetError: If nothing fits it; budget and plans stay as they were.
        """
        self.planned.set_budget(budget)
        if self.steps.current is not None:
            self.steps.current.plans_changed()

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an update of the weights, and end the measurement of the training step.

        If graphs wait for their backward, the measurement goes on, since more of the iteration follows.
        """
        is_own = self.model.memory.stepped(optimizer)
        if is_own:
            self._without_gradients.drop()
        if is_own and self.runs > self._runs_of_update:
            self.updates, self._runs_of_update = self.updates + 1, self.runs
        measurement = self.steps.measurement
        goes_on = backward_pass.is_running() or bool(self.model.runtimes.waiting())
        if is_own and measurement is not None and measurement.backwards and not goes_on:
            measurement.close()

    def was_passed_by(self) -> None:
        """Mark that an optimizer stepped after a step that ran without its plan."""
        self.steps.was_passed_by()

    def abandon_step(self) -> None:
        """Drop the step under way, after an exception."""
        self.model.tracing.close()
        self.steps.fail()

    def close(self) -> None:
        """Plan no more: drop the step under way, and restore calls, checkpointing and compiled code."""
        self._checkpointing.put_back()
        self._compiled.close()
        self._without_gradients.drop()
        self.abandon_step()
        self.closing.close()

    # ---------------------------------------------------------------- capture

    def backend(self, makes_sizes: bool = True) -> Any:
        """Return the torch.compile backend whose captured graphs this session runs.

        It keeps no session alive. Without `makes_sizes` each size is traced, none is made from traces of others.
        """
        proof = partial(Proof, prove=weakly(self._prover.prove)) if self.options.verify else None
        return planning_backend(
            weakly(self.take_in),
            self.model.kernels,
            proof,
            weakly(self.warn),
            weakly(self.model.largest.trace_ahead),
            weakref.proxy(self._new_sizes) if makes_sizes else None,
            SameCaptures(weakly(self.model.runtimes.captured_again)),
        )

    def take_in(self, captured: Captured) -> GraphRuntime:
        """Make the runtime of a captured graph; warn if it updates buffers under `torch.utils.checkpoint`."""
        if updates_under_checkpoint(captured.joint):
            self.warn(
                f"{self.model.name} calls torch.utils.checkpoint around code that updates buffers, as batch norms do. "
                "Plain PyTorch runs such code twice in a step, and updates them twice; here it updates them once. Call "
                "it without checkpoint: what is computed again is for the plan to decide."
            )
        runtime = self.model.runtimes.add(captured, self.steps)
        self.model.largest.took(runtime)
        return runtime

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Return the context of an outermost call of a planned module, after `begin_call`.

        It times the capture of the first call, and turns errors of torch.compile into a `CaptureError`.
        """
        is_inside = backward_pass.is_running()
        if is_inside:
            self.steps.called_inside_backward()
            self.model.messages.called_inside_backward(name)
        if not self.model.runtimes.count:
            worker.warm_up()
            self.expect_wait(modules_without_parts(self.root))
            self.model.tracing.enter_context(self.reporter.stage("tracing"))

        def warn(reason: str) -> None:
            is_inside_transform = "Tensor(lvl=" in reason  # as torch.func writes tensors with their level
            self.warn(
                f"torch.compile could not capture a part of {name}, which runs without a plan: {reason}",
                topic=transforms_in(name) if is_inside_transform else "",
            )

        try:
            sizes_vary = bool(self.model.largest.becomes) or self.model.runtimes.count > 0
            vary = chain(self.model.largest.becomes, self._varying)
            capture_opaque()
            with dynamo.capturing_for_plans(warn, sizes_vary, vary):
                yield
            step = self.steps.current
            if self.model.proofs.runs_eager and not is_inside and (step is None or not step.forwards):
                self.abandon_step()  # all of its code was refused: no captured backward would end it
        except BaseException as error:  # Ctrl-C too: the next step must not go on with half of this one
            if not is_inside:
                self.abandon_step()
            if isinstance(error, dynamo.CompileError):
                raise CaptureError(
                    f"torch.compile could not capture {name}: {dynamo.reason_of(error)}\n"
                    "Where plain PyTorch fails too, on a wrong shape for example, mend that. Else name submodules that "
                    "can be captured with target=, or train without a plan."
                ) from error
            raise
        finally:
            self.model.tracing.close()

    def _report_replaced(self, plan: Plan) -> None:
        """Report, once, the activation checkpointing that plans replace."""
        text = self._checkpointing.describe(plan)
        if text is not None:
            self.reporter.report(text)

    # ---------------------------------------------------------------- steps

    def begin_call(self, name: str, arguments: Arguments, function: Callable[..., Any]) -> bool:
        """Begin a call of a planned module, and a step if none is under way; return whether the call runs eager."""
        if not backward_pass.is_running():
            self._checkpointing.replace()
            tensors = tensors_inside(arguments)
            self.model.largest.called(function, arguments, tensors)
            call = ModuleCall.of(name, tensors)
            self._varying.called(name, call.shapes)
            self._called(arguments, call)
        return self.is_eager

    def leaves_out(self, name: str, arguments: Arguments, is_part: bool = False) -> bool:
        """Return whether a call runs eager and unobserved, with a warning.

        It does inside of a dispatch or function mode that sees each operator, where nothing can be captured. It also
        does inside of a backward, as in a GradCache loss, unless it repeats a call of the step or is a part (`is_part`)
        of a planned module: there checkpointing recomputes it.
        """
        if backward_pass.is_running():
            step = self.steps.current
            repeats = step is not None and ModuleCall.of(name, tensors_inside(arguments)) in step.calls
            if is_part or repeats:
                return False
            self.model.messages.called_inside_backward(name or self.model.name)
        elif modes := " and ".join(tensor_state.watching_modes()):
            self.warn(
                f"A call of {self.model.name} ran without its plan, in the memory of plain PyTorch: {modes} is around "
                "it and sees each operator, so that torch.compile captures nothing. Calls without it are planned: "
                "leave it out, or use it in a few steps only."
            )
        else:
            return False
        self.steps.ran_unseen()
        return True

    def begin_step(self, arguments: Any) -> None:
        """Begin a step if none is under way or a backward has ended the last one; do nothing inside of a backward."""
        if not backward_pass.is_running():
            self._called(arguments)

    def begin_graph(self, arguments: Sequence[Any]) -> None:
        """Begin a call of a graph that belongs to no module, and a step as `begin_step` does."""
        self.model.largest.called(None, (arguments, {}), tensors_among(arguments))
        self.begin_step(arguments)

    def _called(self, arguments: Any, call: ModuleCall | None = None) -> None:
        """Begin a call with gradients, or code around such calls: end a run of calls without gradients."""
        self._without_gradients.end()
        self.steps.called(arguments, call)
        self._without_gradients.compare(self.model.history.latest_plan)

    def begin_without_gradients(self, name: str, arguments: Arguments) -> None:
        """Begin a call without gradients in training mode; between steps its memory is measured."""
        step = self.steps.current
        is_between = not backward_pass.is_running() and (step is None or step.is_over)
        if is_between and self.model.history.latest_plan is not None:
            self._without_gradients.begins(name, tensors_inside(arguments))

    def end_step(self) -> None:
        """End the step under way now; what was learned is used when the next one begins."""
        self.steps.end_at_once()

    def plan_ended(self, resident: Resident) -> Short | None:
        """Plan the step that has ended now, instead of when the next one begins.

        Returns:
            What the step needs beside the memory that exists before it, if nothing fits the budget.
        """
        ended = self.steps.take_ended()
        assert ended is not None, "a step has ended that is to be planned"
        assert ended.measurement is not None, "such a step was measured"
        return self.planned.learn(ended.measurement, resident)

    def run_eager(self, arguments: Arguments, call: Callable[[], Any]) -> Any:
        """Run a call eager, and note when its backward begins; if the call fails, drop the step."""
        eager = self.steps.eager  # None for an unobserved call
        try:
            with nullcontext() if eager is None else eager.around(arguments):
                result = call()
        except BaseException:  # Ctrl-C too: the next step must not go on with half of this one
            if not backward_pass.is_running():
                self.abandon_step()
            raise
        self.steps.runs += 1
        begins = weakly(self.steps.eager_backward_starts)  # autograd's graph must not keep a session alive
        nodes = {tensor.grad_fn for tensor in tensors_inside(result) if tensor.grad_fn is not None}
        for node in nodes:
            node.register_prehook(lambda _: begins())
        if not nodes and self.steps.current is not None:
            self.steps.current.is_unseen = True  # without a backward nothing shows where the step ends
        return result
