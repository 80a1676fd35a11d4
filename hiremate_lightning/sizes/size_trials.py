"""Real steps at chosen sizes: each in a session of its own, recorded, and planned only where that is to be proven."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError
from ..measuring.describing import describe
from ..memory.allocator import allocated_bytes, free_bytes, storage_bytes
from ..memory.metering import measure_peak
from ..options import SessionOptions
from ..planning.plan import Plan
from ..planning.planner import resolve
from ..records.sized_numbers import Line
from ..records.step import Call, Step, merge
from ..sessions.session import Session
from ..targets.modules import Targets
from ..targets.training_step import StepTarget
from ..torch_private import hooks
from ..units import Budget
from .training_state import TrainingState


class TrialSession(Session):
    """A session of one size: its first step is recorded, and planned only if asked for.

    Attributes:
        plans_first: Whether to plan the first step at its end.
        calls: What the first step ran, and the order of its backwards; None before.
        batch_bytes: Bytes of the batch on the model's device.
        resident: What existed after the step, the batch included.
        peaks: Measured peaks of planned steps.
    """

    may_exceed = False  # refuses to run a size that may not fit: a smaller one comes next

    def __init__(self, root: nn.Module, options: SessionOptions) -> None:
        super().__init__(root, options)
        self.plans_first = False
        self.calls: tuple[tuple[Call, ...], tuple[int, ...]] | None = None
        self.batch_bytes = 0
        self.resident = self._memory.count(())
        self.peaks: list[int] = []
        self.listeners.append(self._hear)

    def _hear(self, plan: Plan) -> None:
        if plan.measured.peak_bytes is not None:
            self.peaks.append(plan.measured.peak_bytes)

    def finish(self, batch: Any) -> None:
        """End the step, while its batch is still there.

        Raises:
            ConfigurationError: If it was no single forward and backward, or was not measured.
        """
        self.end_step()
        record = self.steps.take_record()
        self.expect_batch(batch)
        device = self._memory.device
        self.batch_bytes = storage_bytes((t for t in self._memory.batch if t.device == device), device)
        self.resident = self._memory.count(())
        if self.calls is not None:
            return
        if record is None or self.plans:
            raise ConfigurationError(
                f"A step must run one forward and one backward of the model, found {'more' if self.plans else 'none'}. "
                "Where it accumulates gradients, run one part of it; check that the model is in training mode."
            )
        if not record.is_measured:
            raise ConfigurationError("Another profiler is running, so memory can't be measured: stop it first.")
        calls, order = describe(record, self.parts.profiles)
        self.calls = tuple(calls), tuple(order)
        if self.plans_first:
            self.planned.learn(record, self.resident)

    def peak_of(self, function: Callable[[], Any], batch: Any) -> int:
        """Run a function, and give its peak with all that exists beside it, gradients included."""
        self.expect_batch(batch)
        resident = self._memory.count(())
        with torch.no_grad():
            added = measure_peak(function, self._memory.device)
        return resident.size_bytes + resident.stale_bytes + added


@dataclass(frozen=True, slots=True)
class RealStep:
    """What a real step at a size has shown.

    Attributes:
        calls: What it ran.
        order: The order of its backwards.
        batch_bytes: Bytes of its batch on the model's device.
        validation_bytes: Peak of a validation step of that size, all that exists included; 0 where there is none.
    """

    calls: tuple[Call, ...]
    order: tuple[int, ...]
    batch_bytes: int
    validation_bytes: int


@dataclass(frozen=True, slots=True)
class SizeTask:
    """What is to be run at each size.

    Attributes:
        root: The module whose steps run.
        run: Runs a step of a size; tells the session of the batch before it (`expect_batch`) and after it (`finish`).
        make_targets: Takes over the calls of the module for a session.
        validate: Runs one step of validation of a size, and gives its peak; None where there is none.
    """

    root: nn.Module
    run: Callable[[int, TrialSession], None]
    make_targets: Callable[[Session], Targets | StepTarget]
    validate: Callable[[int, TrialSession], int] | None = None


class SizeRunner:
    """Runs steps, and remembers what they have shown.

    Attributes:
        seen: What has run, by size.
        steps: Number of real steps so far.
        fixed_bytes: Bytes that exist beside a step whatever its size, as of the latest step.
        optimizer_ms: Time of the optimizers in the latest step.
    """

    def __init__(self, task: SizeTask, options: SessionOptions, state: TrainingState) -> None:
        self._task = task
        self._options = options
        self._state = state
        self._stale_bytes = 0
        self.seen: dict[int, RealStep] = {}
        self.steps = 0
        self.fixed_bytes = 0
        self.optimizer_ms = 0.0

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return next(self._task.root.parameters()).device

    @property
    def block_bytes(self) -> int:
        """The granularity of the device's allocator."""
        return allocated_bytes(1, self.device)

    def free_bytes(self) -> int:
        """Return the bytes that "auto" stands for: what is there, and most of what is free."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        resident = TrialSession(self._task.root, self._options).resident
        return resolve(Budget(), resident.size_bytes, 0, free_bytes(self.device))

    @contextmanager
    def session(self, budget_bytes: int, on_infeasible: str) -> Iterator[TrialSession]:
        """Plan the module's calls by a new session, as long as the context lasts."""
        budget = Budget(size_bytes=budget_bytes)
        options = replace(self._options, budget=budget, on_infeasible=on_infeasible, verbose=False)
        session = TrialSession(self._task.root, options)
        for optimizer in self._state.optimizers:
            session.watch_optimizer(optimizer)
        targets = self._task.make_targets(session)
        targets.attach()
        try:
            yield session
        finally:
            targets.detach()
            self._clear()

    def _clear(self) -> None:
        """Drop the gradients, and all that died with the session."""
        for parameter in self._task.root.parameters():
            parameter.grad = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def step(self, size: int, session: TrialSession) -> None:
        """Run a step; the first one of a session is remembered, and validation is run after it."""
        self.optimizer_ms = 0.0
        is_first = session.calls is None
        with self._watching():
            self._task.run(size, session)
        self.steps += 1
        if is_first:
            assert session.calls is not None, "finish() records it or raises"
            calls, order = session.calls
            self.fixed_bytes = session.resident.size_bytes - session.batch_bytes
            self._stale_bytes = session.resident.stale_bytes
            validation = self._task.validate(size, session) if self._task.validate is not None else 0
            self.seen[size] = RealStep(calls, order, session.batch_bytes, validation)

    def sample(self, size: int) -> Step:
        """Return the step at a size that has run, as one graph."""
        seen = self.seen[size]
        return merge(seen.calls, seen.order, self._stale_bytes)

    def resident_line(self, sizes: Sequence[int]) -> Line:
        """Return what exists before a step, by size."""
        return Line(sizes, [self.fixed_bytes + self.seen[size].batch_bytes for size in sizes])

    def validation_line(self, sizes: Sequence[int]) -> Line | None:
        """Return the peak of validation, by size; None where there is none."""
        if self._task.validate is None:
            return None
        return Line(sizes, [self.seen[size].validation_bytes for size in sizes])

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Keep each optimizer's state before its first step, and take the time of its steps."""
        began: dict[torch.optim.Optimizer, float] = {}

        def before(optimizer: torch.optim.Optimizer) -> None:
            self._state.watch(optimizer)
            began[optimizer] = self._now_ms()

        def after(optimizer: torch.optim.Optimizer) -> None:
            if optimizer in began:
                self.optimizer_ms += self._now_ms() - began.pop(optimizer)

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
