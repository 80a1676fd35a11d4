"""Train a test model for a few steps and keep everything that must be equal, bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hiremate_lightning.memory.metering import measure_peak
from tests.exact import assert_same
from tests.models import BUILDERS, Model


@dataclass
class Trace:
    """What a training run did."""

    losses: list[Tensor] = field(default_factory=list)  # loss of each step
    gradients: list[list[Tensor | None]] = field(default_factory=list)  # gradients of each step, by parameter
    buffers: list[list[Tensor]] = field(default_factory=list)  # buffers after each step
    random_states: list[Tensor] = field(default_factory=list)  # state of the CPU generator after each step
    parameters: list[Tensor] = field(default_factory=list)  # at the end
    # Measured peak of each step, resident bytes included; only of steps that were asked to be measured
    peaks: dict[int, int] = field(default_factory=dict)


def build(name: str) -> Model:
    """Build a model from a fixed seed."""
    torch.manual_seed(7)
    return BUILDERS[name]()


def train(
    model: Model, steps: int = 5, measured: tuple[int, ...] = (), before: Callable[[int], None] = lambda i: None
) -> Trace:
    """Take some AdamW steps, a new batch each."""
    module = model.module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    trace = Trace()
    torch.manual_seed(11)
    for index in range(steps):
        before(index)
        optimizer.zero_grad()
        batch = model.make_batch(index)
        losses: list[Tensor] = []

        def step(batch: tuple[Tensor, ...] = batch, losses: list[Tensor] = losses) -> None:
            loss = model.loss_of(module(*batch))
            loss.backward()
            losses.append(loss.detach())

        if index in measured:
            gc.collect()  # garbage that dies meanwhile would pass for memory that the step gave back
            resident = resident_bytes(module, optimizer, batch)
            trace.peaks[index] = resident + measure_peak(step)
        else:
            step()
        trace.losses.extend(losses)
        trace.gradients.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])
        trace.random_states.append(torch.get_rng_state())
        optimizer.step()
        trace.buffers.append([b.clone() for b in module.buffers()])
    trace.parameters = [p.detach().clone() for p in module.parameters()]
    return trace


def resident_bytes(module: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> int:
    """Add up what exists before a step, each storage once."""
    tensors = [*module.parameters(), *module.buffers(), *batch]
    tensors += [p.grad for p in module.parameters() if p.grad is not None]
    tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def assert_equal(found: Trace, expected: Trace) -> None:
    """Compare two runs bit for bit."""
    assert [x.item().hex() for x in found.losses] == [x.item().hex() for x in expected.losses]
    for kind in ("gradients", "buffers", "random_states", "parameters"):
        assert_same(getattr(found, kind), getattr(expected, kind), kind)
