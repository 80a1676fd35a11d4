"""One training script, written for a plain loop, for Fabric and for Accelerate, with and without a plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.planning.plan import Plan
from tests import exact

WIDTH, ROWS, STEPS = 48, 1024, 6

Prepare = Callable[[nn.Module, torch.optim.Optimizer], tuple[Any, Any]]
BUDGET = "70%"


@dataclass(frozen=True)
class Script:
    framework: str  # "plain", "fabric" or "accelerate"
    precision: str = "no"  # "no" or "bf16"
    accumulate: int = 1  # backwards for each step of the optimizer
    # Where hiremate() is called, "before" or "after" the framework prepares; None for a script without it
    place: str | None = None
    device: str = "cpu"  # where it trains

    def __str__(self) -> str:
        return "-".join(map(str, (self.framework, self.precision, self.accumulate, self.place, self.device)))


@dataclass
class Outcome:
    """What a script left: the loss of each backward, the final weights and buffers, and the plan."""

    losses: list[Tensor]
    state: dict[str, Tensor]
    plan: Plan | None


def make_model() -> nn.Module:
    torch.manual_seed(1)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in "123")
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def make_batch(index: int, rank: int = 0) -> Tensor:
    torch.manual_seed(100 * rank + index)
    return torch.randn(ROWS, WIDTH)


def run(script: Script, rank: int = 0, budget: str = BUDGET, **options: Any) -> Outcome:
    """Run a script in this process, one of several where a process group was begun."""
    return LOOPS[script.framework](script, rank, {"budget": budget, "verbose": False, **options})


def prepared(script: Script, prepare: Prepare, options: dict[str, Any]) -> tuple[nn.Module, nn.Module, Any]:
    """Make and prepare a model, with hiremate() where the script has it; give the model as made, too."""
    made = make_model().to(script.device)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    if script.place == "before":
        hiremate(made, **options)
    model, optimizer = prepare(made, optimizer)
    if script.place == "after":
        assert hiremate(model, **options) is model
    return made, model, optimizer


def run_plain(script: Script, rank: int, options: dict[str, Any]) -> Outcome:
    wrap = DistributedDataParallel if torch.distributed.is_initialized() else lambda model: model
    made, model, optimizer = prepared(script, lambda model, optimizer: (wrap(model), optimizer), options)
    losses = []
    for index in range(STEPS):
        is_last = (index + 1) % script.accumulate == 0
        x = make_batch(index, rank).to(script.device)
        with model.no_sync() if not is_last and model is not made else nullcontext():
            with torch.autocast(script.device, torch.bfloat16, enabled=script.precision == "bf16"):
                loss = model(x).float().square().mean() / script.accumulate
            loss.backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return Outcome(losses, made.state_dict(), get_plan(model))


def run_fabric(script: Script, rank: int, options: dict[str, Any]) -> Outcome:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    fabric = Fabric(
        accelerator=script.device,
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        precision="bf16-mixed" if script.precision == "bf16" else "32-true",
    )
    fabric.launch()
    _, model, optimizer = prepared(script, fabric.setup, options)
    losses = []
    for index in range(STEPS):
        is_last = (index + 1) % script.accumulate == 0
        x = make_batch(index, rank).to(script.device)
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = model(x).float().square().mean() / script.accumulate
            fabric.backward(loss)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return Outcome(losses, model.state_dict(), get_plan(model))


def run_accelerate(script: Script, rank: int, options: dict[str, Any]) -> Outcome:
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        cpu=script.device == "cpu",
        mixed_precision=script.precision,
        gradient_accumulation_steps=script.accumulate,
    )
    _, model, optimizer = prepared(script, accelerator.prepare, options)
    losses = []
    for index in range(STEPS):
        x = make_batch(index, rank).to(script.device)
        with accelerator.accumulate(model):
            loss = model(x).float().square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return Outcome(losses, accelerator.get_state_dict(model), get_plan(accelerator.unwrap_model(model)))


LOOPS = {"plain": run_plain, "fabric": run_fabric, "accelerate": run_accelerate}


def assert_same(found: Outcome, expected: Outcome) -> None:
    exact.assert_same([found.losses, found.state], [expected.losses, expected.state])


def assert_within_budget(plan: Plan | None) -> None:
    """Check that a plan had something to do, and that it kept its promise."""
    assert plan is not None, "nothing was planned"
    assert plan.predicted_overhead > 0
    assert plan.planned_peak_bytes <= plan.budget_bytes < plan.unplanned_peak_bytes
    assert plan.measured.peak_bytes <= plan.budget_bytes, (plan.measured.peak_bytes, plan.planned_peak_bytes)
