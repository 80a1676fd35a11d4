"""Training scripts of Accelerate, Lightning and ZeRO for test_sharding.py, with and without a plan."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from hiremate_lightning import InfeasibleBudgetError, get_plan, hiremate
from hiremate_lightning.callbacks import HiRemateCallback
from hiremate_lightning.integrations.accelerate import prepare_hiremate
from tests.sharding import STEPS, Case, Left, gpt, tokens
from tests.trainers import quiet_trainer

CASE = Case("tools", gpt)
BUDGET: dict[str, Any] = {"budget": "60%", "verbose": False}


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def made() -> nn.Module:
    torch.manual_seed(0)
    return gpt()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def noted(
    rank: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[Tensor], Any],
    state: torch.optim.Optimizer | None = None,
) -> Left:
    """Take steps, and note their losses, and the weights at the end with the bytes of an optimizer's state."""
    left = Left()
    for index in range(STEPS):
        torch.manual_seed(1000 + 10 * index + rank)
        loss = loss_of(model, tokens(rank, index, CASE))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        left.losses.append(loss.detach())
    return left.close(model, state)


def accelerate(rank: int, planned: bool) -> Left:
    """Train with Accelerate and fsdp_version 2; on CPUs its state is set by hand: it would take DDP, without a word."""
    AcceleratorState._reset_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    model = made()
    prepare = partial(prepare_hiremate, accelerator, **BUDGET) if planned else accelerator.prepare
    model, optimizer = prepare(model, adamw(model))
    left = noted(rank, model, optimizer, accelerator.backward)
    left.plans = [get_plan(accelerator.unwrap_model(model))] if planned else []
    AcceleratorState._reset_state()
    return left


class Sharded(pl.LightningModule):
    """A model that Lightning lets shard itself."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.left, self._rank = Left(), rank

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        self.net = made()
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        torch.manual_seed(1000 + 10 * index + self._rank)
        loss = loss_of(self.net, batch)
        self.left.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def lightning(rank: int, planned: bool) -> Left:
    """Train with Lightning's ModelParallelStrategy."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callback, model = HiRemateCallback(**BUDGET), Sharded(rank)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = quiet_trainer(*[callback] * planned, devices=2, strategy=strategy)
    data = torch.cat([tokens(0, index, CASE) for index in range(2 * STEPS)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=CASE.rows))
    return model.left.close(model, None, callback.plan)


def zero(rank: int, planned: bool) -> Left:
    """Train with DistributedDataParallel and an optimizer whose state is sharded (ZeRO-1)."""
    model = DistributedDataParallel(made())
    if planned:
        hiremate(model, **BUDGET)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2)
    left = noted(rank, model, optimizer, Tensor.backward, optimizer.optim)
    left.plans = [get_plan(model)] if planned else []
    return left


TOOLS = {"Accelerate": accelerate, "Lightning": lightning, "ZeRO-1": zero}


def too_small(rank: int, budgets: tuple[str, str]) -> str:
    """Train where the budget of one rank is too small; return the error."""
    model = made()
    for block in model.blocks:
        fully_shard(block)
    hiremate(fully_shard(model), budgets[rank], verbose=False)
    optimizer = adamw(model)
    try:
        for index in range(STEPS):
            loss_of(model, tokens(rank, index, CASE)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except InfeasibleBudgetError as error:
        return str(error)
    return "trained"
