"""Runs real steps at chosen sizes and restores all state: the steps are recorded, and planned if a plan is to run."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..calls.kept_state import KeptState
from ..errors import ConfigurationError
from ..measuring.recorded_calls import calls_of
from ..measuring.resident import Resident
from ..measuring.resident_memory import ResidentMemory
from ..memory.allocator import free_bytes
from ..memory.metering import measure_peak
from ..options import SessionOptions
from ..planning.headroom import resolve, unless_short
from ..planning.plan import Plan
from ..records.step import MergedStep, merge
from ..sessions.session import Session
from ..targets.modules import Targets
from ..targets.training_step import TrainingStepTarget
from ..units import Budget

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


class TrainingState(KeptState):
    """A copy of the state that training changes, to restore: weights, buffers, gradients, optimizers, random numbers.

    Copies are in host memory, and take no device memory. `others` are further objects with a `state_dict`.
    """

    def __init__(
        self, module: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = (), others: Iterable[Stateful] = ()
    ) -> None:
        super().__init__(module)
        self._gradients = {parameter: parameter.grad for parameter in module.parameters()}
        for tensor in (*self._gradients, *module.buffers(), *self._gradients.values()):
            self._kept(tensor)
        self._modes = {m: m.training for m in module.modules()}
        self._others = [(other, copy.deepcopy(other.state_dict())) for other in others]
        # The optimizers whose state is kept, with a copy of their state and of their groups.
        self.optimizers: dict[torch.optim.Optimizer, tuple[dict[Any, Any], list[dict[str, Any]]]] = {}
        for optimizer in optimizers:
            self.watch(optimizer)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the state of an optimizer before its first step, unless it was copied before."""
        if optimizer not in self.optimizers:
            state = {p: {n: self._kept(v) for n, v in values.items()} for p, values in optimizer.state.items()}
            groups = [{n: v if n == "params" else self._kept(v) for n, v in g.items()} for g in optimizer.param_groups]
            self.optimizers[optimizer] = state, groups

    def _kept(self, value: Any) -> Any:
        """Return a copy of a value; of a tensor, copy the numbers to the host and return the tensor itself."""
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        self._numbers.append((value, value.detach().to("cpu", copy=True)))
        return value

    def restore(self) -> None:
        """Restore all state."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        for optimizer, (states, groups) in self.optimizers.items():
            optimizer.state.clear()
            optimizer.state.update({parameter: dict(values) for parameter, values in states.items()})
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(settings)
        for other, state_dict in self._others:
            other.load_state_dict(state_dict)
        for module, mode in self._modes.items():
            module.training = mode
        self.put_back()


class TrialSteps:
    """The steps of one size, in a session of their own."""

    step: MergedStep | None = None  # the first step; None before it has ended
    resident: Resident  # the memory that existed after the first step, its batch included

    def __init__(self, session: Session) -> None:
        self.plans: list[Plan] = []  # each plan of the session when it is made, and again when it was measured
        self._session, self._steps = session, session.steps
        session.listeners.append(self.plans.append)

    def step_begins(self, batch: Any) -> None:
        """Count all tensors of the batch of the step: planned modules may receive only some of them."""
        self._session.expect_batch(batch)

    def step_ends(self, batch: Any) -> None:
        """End the step, while its batch still exists; after the first step set `step` and `resident`.

        Raises:
            ConfigurationError: If the first step did not run one forward and one backward, or was not measured.
        """
        self._session.end_step()
        if self.step is not None:
            return
        self._session.expect_batch(batch)
        self.resident = self._steps.resident()
        ended = self._steps.ended
        measurement = None if ended is None else ended.measurement
        if measurement is None or not (measurement.backwards and measurement.is_whole) or self._steps.count > 1:
            raise ConfigurationError(
                "A step must run one forward and one backward of the model, found "
                f"{'more' if self._steps.count > 1 else 'none'}. Where it accumulates gradients, run one part of it; "
                "check that the model is in training mode."
            )
        if not measurement.is_measured:
            raise ConfigurationError("Another profiler is running, so memory can't be measured: stop it first.")
        self.step = merge(*calls_of(measurement), self.resident.stale_bytes)

    def plan(self) -> Plan:
        """Plan the first step now, instead of when the second one begins."""
        unless_short(self._session.plan_ended(self.resident))
        return self.plans[-1]

    def peak_of(self, function: Callable[[], Any], device: torch.device) -> int:
        """Run a function between steps; return its peak in bytes, with resident bytes and gradients."""
        self._session.expect_batch(())
        resident = self._steps.resident()
        with torch.no_grad():
            return resident.size_bytes + resident.stale_bytes + measure_peak(function, device)


@dataclass(frozen=True, slots=True)
class RealStep:
    """The measurement of a real step at a size."""

    step: MergedStep
    batch_bytes: int  # bytes of its batch on the model's device
    validation_bytes: int  # peak of a validation step of that size, resident bytes included; 0 without validation


@dataclass(eq=False)
class SizeRunner:
    """Runs steps of chosen sizes, and keeps their measurements."""

    root: nn.Module  # the module whose steps run
    options: SessionOptions  # options and budget of plans
    state: TrainingState  # the state to restore
    train: Callable[[int, TrialSteps], None]  # runs a step of a size; gives the trial its batch before and after it
    make_targets: Callable[[Session], Targets | TrainingStepTarget]  # takes over the calls of the module for a session
    validate: Callable[[int], Any] | None = None  # runs one step of validation of a size
    seen: dict[int, RealStep] = field(default_factory=dict)  # measured steps by size, the latest one last
    steps: int = 0  # number of real steps so far
    fixed_bytes: int = 0  # bytes that exist before a step at any size, without its batch, as of the latest step
    optimizer_ms: float = 0.0  # time of the optimizers in the latest step

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return next(self.root.parameters()).device

    def free_bytes(self) -> int:
        """Return the bytes that the budget "auto" stands for: resident bytes and most of the free ones."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        resident = ResidentMemory(self.root).count(())
        return resolve(Budget(), resident.size_bytes, 0, free_bytes(self.device))

    @contextmanager
    def trial(self, size: int, budget_bytes: int, on_infeasible: str, max_plans: int) -> Iterator[TrialSteps]:
        """Plan the module's calls by a new session while the context lasts; with `max_plans=0`, only record steps.

        The first step runs before the context is entered, then validation; `seen` gets their measurements.
        """
        options = replace(
            self.options,
            budget=Budget(size_bytes=budget_bytes),
            on_infeasible=on_infeasible,
            max_plans=max_plans,
            verbose=False,
        )
        session = Session(self.root, options)
        for optimizer in self.state.optimizers:
            session.watch_optimizer(optimizer)
        self.make_targets(session).attach()
        try:
            trial = TrialSteps(session)
            self.run(size, trial)
            assert trial.step is not None, "step_ends() sets it or raises"
            resident, validate = trial.resident, self.validate
            self.fixed_bytes = resident.size_bytes - resident.batch_bytes
            validation = 0 if validate is None else trial.peak_of(partial(validate, size), self.device)
            self.seen[size] = RealStep(trial.step, resident.batch_bytes, validation)
            yield trial
        finally:
            session.close()
            for parameter in self.root.parameters():
                parameter.grad = None
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def run(self, size: int, trial: TrialSteps) -> None:
        """Run a step of a trial: copy each optimizer's state before its first step, and set `optimizer_ms`."""
        self.optimizer_ms = 0.0
        began_ms: dict[torch.optim.Optimizer, float] = {}

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self.state.watch(optimizer)
            began_ms[optimizer] = self._now_ms()

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self.optimizer_ms += self._now_ms() - began_ms[optimizer]

        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(before).remove)
            stack.callback(register_optimizer_step_post_hook(after).remove)
            self.train(size, trial)
        self.steps += 1

    def _now_ms(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1000 * time.perf_counter()
