"""Real steps at chosen sizes: each in a session of its own, recorded, and planned only where that is to be proven."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError
from ..measuring.describing import describe
from ..measuring.resident import Resident
from ..measuring.resident_memory import ResidentMemory
from ..memory.allocator import free_bytes
from ..memory.metering import measure_peak
from ..options import SessionOptions
from ..planning.headroom import resolve, unless_short
from ..planning.plan import Plan
from ..records.step import Call, Step, merge
from ..sessions.session import Session
from ..targets.modules import Targets
from ..targets.training_step import StepTarget
from ..torch_private import hooks
from ..units import Budget
from .training_state import TrainingState


class TrialSteps:
    """The steps of one size, in a session of their own.

    Attributes:
        calls: What the first step ran, and the order of its backwards; None before it has ended.
        resident: What existed after the latest step, its batch included.
        plans: The plans of the session as they are made, and again as they are measured.
    """

    calls: tuple[Sequence[Call], Sequence[int]] | None = None
    resident: Resident

    def __init__(self, session: Session) -> None:
        self.plans: list[Plan] = []
        self._session, self._steps = session, session.steps
        session.listeners.append(self.plans.append)

    def step_begins(self, batch: Any) -> None:
        """Count the whole batch of the step: the planned modules may receive only a part of it."""
        self._session.expect_batch(batch)

    def step_ends(self, batch: Any) -> None:
        """End the step, while its batch is still there.

        Raises:
            ConfigurationError: If the first step was no single forward and backward, or was not measured.
        """
        self._session.end_step()
        self._session.expect_batch(batch)
        self.resident = self._steps.resident()
        if self.calls is not None:
            return
        ended = self._steps.ended
        record = None if ended is None else ended.record
        if record is None or not (record.backwards and record.is_whole) or self._steps.count > 1:
            raise ConfigurationError(
                "A step must run one forward and one backward of the model, found "
                f"{'more' if self._steps.count > 1 else 'none'}. Where it accumulates gradients, run one part of it; "
                "check that the model is in training mode."
            )
        if not record.is_measured:
            raise ConfigurationError("Another profiler is running, so memory can't be measured: stop it first.")
        self.calls = describe(record, self._session.parts.profiles)

    def plan(self) -> Plan:
        """Plan the first step now, instead of when the second one begins."""
        record = self._steps.take_record()
        assert record is not None, "the first step has ended, and no other one has begun"
        unless_short(self._session.planned.learn(record, self.resident))
        return self.plans[-1]

    def peak_of(self, function: Callable[[], Any], device: torch.device) -> int:
        """Run a function between steps; return its peak with all that exists beside it, gradients included."""
        self._session.expect_batch(())
        resident = self._steps.resident()
        with torch.no_grad():
            return resident.size_bytes + resident.stale_bytes + measure_peak(function, device)


@dataclass(frozen=True, slots=True)
class SizeTask:
    """What is to be run at each size.

    Attributes:
        root: The module whose steps run.
        train: Runs a step of a size; tells the trial of the batch before it and after it.
        make_targets: Takes over the calls of the module for a session.
        validate: Runs one step of validation of a size; None where there is none.
    """

    root: nn.Module
    train: Callable[[int, TrialSteps], None]
    make_targets: Callable[[Session], Targets | StepTarget]
    validate: Callable[[int], Any] | None = None


@dataclass(frozen=True, slots=True)
class RealStep:
    """What a real step at a size has shown.

    Attributes:
        step: What it ran, as one graph.
        batch_bytes: Bytes of its batch on the model's device.
        validation_bytes: Peak of a validation step of that size, all that exists included; 0 where there is none.
    """

    step: Step
    batch_bytes: int
    validation_bytes: int


class SizeRunner:
    """Runs steps, and remembers what they have shown.

    Attributes:
        seen: What has run, by size; the latest one last.
        steps: Number of real steps so far.
        fixed_bytes: Bytes that exist beside a step whatever its size, as of the latest step.
        optimizer_ms: Time of the optimizers in the latest step.
    """

    def __init__(self, task: SizeTask, options: SessionOptions, state: TrainingState) -> None:
        self._task, self._options, self._state = task, options, state
        self.seen: dict[int, RealStep] = {}
        self.steps = self.fixed_bytes = 0
        self.optimizer_ms = 0.0

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return next(self._task.root.parameters()).device

    def free_bytes(self) -> int:
        """Return the bytes that "auto" stands for: what is there, and most of what is free."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        resident = ResidentMemory(self._task.root).count(())
        return resolve(Budget(), resident.size_bytes, 0, free_bytes(self.device))

    def alike(self) -> dict[int, RealStep]:
        """Return what has run the same graph as the latest step, by size, ascending."""
        latest = list(self.seen.values())[-1].step.graph
        return {n: real for n, real in sorted(self.seen.items()) if real.step.graph.difference(latest) is None}

    @contextmanager
    def trial(self, budget_bytes: int, on_infeasible: str, max_plans: int) -> Iterator[TrialSteps]:
        """Plan the module's calls by a new session, as long as the context lasts.

        Args:
            budget_bytes: The budget of its steps.
            on_infeasible: "raise" to refuse to run what may not fit, or "warn" to run it at the least memory.
            max_plans: 0 for a trial that only records its step.
        """
        options = replace(
            self._options,
            budget=Budget(size_bytes=budget_bytes),
            on_infeasible=on_infeasible,
            max_plans=max_plans,
            verbose=False,
        )
        session = Session(self._task.root, options)
        for optimizer in self._state.optimizers:
            session.watch_optimizer(optimizer)
        targets = self._task.make_targets(session)
        targets.attach()
        try:
            yield TrialSteps(session)
        finally:
            targets.detach()
            for parameter in self._task.root.parameters():
                parameter.grad = None
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def run(self, size: int, trial: TrialSteps) -> None:
        """Run a step; the first one of a trial is remembered, and validation is run after it."""
        is_first = trial.calls is None
        with self._watching_optimizers():
            self._task.train(size, trial)
        self.steps += 1
        if is_first:
            assert trial.calls is not None, "step_ends() describes it or raises"
            resident, validate = trial.resident, self._task.validate
            self.fixed_bytes = resident.size_bytes - resident.batch_bytes
            step = merge(*trial.calls, resident.stale_bytes)
            validation = 0 if validate is None else trial.peak_of(partial(validate, size), self.device)
            self.seen[size] = RealStep(step, resident.batch_bytes, validation)

    @contextmanager
    def _watching_optimizers(self) -> Iterator[None]:
        """Keep each optimizer's state before its first step, and take the time of its steps."""
        self.optimizer_ms = 0.0
        began_ms: dict[torch.optim.Optimizer, float] = {}

        def before(optimizer: torch.optim.Optimizer) -> None:
            self._state.watch(optimizer)
            began_ms[optimizer] = self._now_ms()

        def after(optimizer: torch.optim.Optimizer) -> None:
            if optimizer in began_ms:
                self.optimizer_ms += self._now_ms() - began_ms.pop(optimizer)

        handles = (hooks.before_optimizer_step(before), hooks.on_optimizer_step(after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _now_ms(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1000 * time.perf_counter()
