"""What a case of the zoo is, and the batches and losses that several cases share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .stand_in import torchvision_or_stand_in

Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model with what it is trained on.

    Attributes:
        module: The model, in training mode.
        make_batch: Keyword arguments of the model's forward, for a step number.
        loss_of: Scalar loss of an output and its batch.
    """

    module: nn.Module
    make_batch: Callable[[int], Batch]
    loss_of: Callable[[Any, Batch], Tensor]


@dataclass(frozen=True)
class Entry:
    """A builder and where its model comes from."""

    package: str
    about: str
    build: Callable[[], Case]


# -------------------------------------------------------------------- batches and losses


def random(index: int, *shape: int) -> Tensor:
    """Draw normal numbers, the same for the same step."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(index))


def integers(index: int, high: int, *shape: int, low: int = 0) -> Tensor:
    """Draw random integers from low to high - 1, the same for the same step."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(index))


def own_loss(output: Any, batch: Batch) -> Tensor:
    """Take the loss that a transformers model computes itself."""
    loss: Tensor = output.loss
    return loss


def mean_square(output: Any, batch: Batch) -> Tensor:
    """Pull all numbers of the outputs to zero."""
    if hasattr(output, "sample"):
        output = output.sample
    outputs = [t for t in (output if isinstance(output, (tuple, list)) else [output]) if isinstance(t, Tensor)]
    return torch.stack([t.abs().square().mean() for t in outputs]).sum()


def texts(module: nn.Module, batch: int = 4, length: int = 64, vocabulary: int = 512) -> Case:
    """Train on random tokens with the model's own loss."""

    def make_batch(index: int) -> Batch:
        tokens = integers(index, vocabulary, batch, length, low=4)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return Case(module, make_batch, own_loss)


def labelled_images(module: nn.Module, batch: int, size: int) -> Case:
    """Train a transformers model on random pictures of ten classes, with its own loss."""

    def make_batch(index: int) -> Batch:
        return {"pixel_values": random(index, batch, 3, size, size), "labels": integers(index, 10, batch)}

    return Case(module, make_batch, own_loss)


def fields(module: nn.Module, *shape: int, name: str = "x") -> Case:
    """Train a map of fields on random ones."""
    return Case(module, lambda index: {name: random(index, *shape)}, mean_square)


def timm_model(name: str, classes: int = 10, **options: Any) -> nn.Module:
    """Build a timm model that tells classes apart."""
    with torchvision_or_stand_in():
        from timm import create_model

    module: nn.Module = create_model(name, pretrained=False, num_classes=classes, **options)
    return module


def timm(name: str, batch: int, size: int, **options: Any) -> Case:
    """Train a timm model on random pictures of ten classes."""
    return Case(
        timm_model(name, **options),
        lambda index: {"x": random(index, batch, 3, size, size)},
        lambda output, batch: F.cross_entropy(output, torch.arange(len(output), device=output.device) % 10),
    )
