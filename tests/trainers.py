"""Trainers of Lightning that write and show nothing, and a network for them; sentences for transformers' Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


def quiet_trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """Make a trainer for one epoch on the CPU, unless its options are others."""
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(callbacks=[*callbacks], **{"accelerator": "cpu", "max_epochs": 1, **silent, **options})


class Sentences(Dataset):
    """Random words, to be predicted from themselves."""

    def __init__(self, rows: int, length: int, words: int = 64) -> None:
        self.rows = torch.randint(words, (rows, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Squared(pl.LightningModule):
    """A network whose output is to be small, in Lightning's default loop: it frees gradients after the forward."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, x: Tensor, index: int) -> Tensor:
        return self(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())
