"""Train a test model for a few steps and keep everything that must be equal, bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hiremate_lightning.memory.metering import measure_peak
from tests.exact import Log, leave_behind
from tests.models import BUILDERS, Model


def build(name: str) -> Model:
    torch.manual_seed(7)
    return BUILDERS[name]()


def train(
    model: Model, steps: int = 5, measured: tuple[int, ...] = (), before: Callable[[int], None] = lambda i: None
) -> tuple[Log, dict[int, int]]:
    """Take some AdamW steps, a new batch each.

    Returns:
        Losses and all that each step leaves behind, and the measured peaks of some steps, resident bytes included.
    """
    module = model.module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    log, peaks = Log(), dict[int, int]()
    torch.manual_seed(11)
    for index in range(steps):
        before(index)
        optimizer.zero_grad()
        batch = model.make_batch(index)

        def step(batch: tuple[Tensor, ...] = batch) -> None:
            loss = model.loss_of(module(*batch))
            loss.backward()
            log.append(loss.detach())

        if index in measured:
            gc.collect()  # garbage that dies meanwhile would pass for memory that the step gave back
            peaks[index] = resident_bytes(module, optimizer, batch) + measure_peak(step)
        else:
            step()
        optimizer.step()
        log.extend(leave_behind(module))
    return log, peaks


def resident_bytes(module: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> int:
    """Add up what exists before a step, each storage once."""
    tensors = [*module.parameters(), *module.buffers(), *batch]
    tensors += [p.grad for p in module.parameters() if p.grad is not None]
    tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
