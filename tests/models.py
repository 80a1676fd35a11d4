"""Small real models for tests of numbers: builders that give a module, its batches, and its loss.

Each is sized so that a step takes less than half a second on one slow core, and its activations are tens of megabytes:
enough for a plan to have something to do. Dropout and batch norm are on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.networks import GPT, LogitsOnly, ResNet, UNet
from benchmarks.zoo.stand_in import torchvision_or_stand_in


@dataclass(frozen=True)
class Model:
    """What a test needs to train a module."""

    module: nn.Module  # the module, in training mode, its weights made from the random state at the time it was built
    make_batch: Callable[[int], tuple[Tensor, ...]]  # gives the arguments of a call, the same for the same seed
    loss_of: Callable[[Tensor], Tensor]  # gives the loss of what a call has returned


def cross_entropy_to(make_targets: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Make a loss from fixed targets, so that only the module's output is left to pass."""

    def loss_of(output: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, -2), make_targets(output).flatten())

    return loss_of


def _classes(output: Tensor) -> Tensor:
    count = output.shape[:-1].numel()
    return torch.arange(count, device=output.device) % output.shape[-1]


def _tokens(batch: int, length: int, vocabulary: int) -> Callable[[int], tuple[Tensor, ...]]:
    def make_batch(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randint(vocabulary, (batch, length), generator=generator),)

    return make_batch


def _pictures(batch: int, side: int) -> Callable[[int], tuple[Tensor, ...]]:
    def make_batch(seed: int) -> tuple[Tensor, ...]:
        return (torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(seed)),)

    return make_batch


def build_gpt() -> Model:
    return Model(GPT(), _tokens(batch=8, length=128, vocabulary=256), cross_entropy_to(_classes))


def build_unet() -> Model:
    return Model(UNet(), _pictures(batch=4, side=96), lambda output: output.square().mean())


def build_resnet() -> Model:
    return Model(ResNet(), _pictures(batch=8, side=48), cross_entropy_to(_classes))


def build_torchvision_mobilenet() -> Model:
    models = pytest.importorskip("torchvision.models", exc_type=ImportError)
    return Model(models.mobilenet_v3_small(), _pictures(batch=16, side=96), cross_entropy_to(_classes))


def build_bert(layers: int = 2) -> Model:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=128,
    )
    module = LogitsOnly(transformers.BertForMaskedLM(config)).train()
    return Model(module, _tokens(batch=8, length=128, vocabulary=1000), cross_entropy_to(_classes))


def build_vit(depth: int = 3) -> Model:
    with torchvision_or_stand_in():
        timm = pytest.importorskip("timm")
    module = timm.models.vision_transformer.VisionTransformer(
        img_size=64,
        patch_size=8,
        embed_dim=128,
        depth=depth,
        num_heads=4,
        num_classes=10,
        pos_drop_rate=0.1,
        proj_drop_rate=0.1,
        attn_drop_rate=0.1,
        drop_path_rate=0.1,
    )
    return Model(module, _pictures(batch=8, side=64), cross_entropy_to(_classes))


BUILDERS: dict[str, Callable[[], Model]] = {
    "gpt": build_gpt,
    "unet": build_unet,
    "resnet": build_resnet,
    "torchvision_mobilenet": build_torchvision_mobilenet,
    "bert": build_bert,
    "vit": build_vit,
}
NEEDS_MODELS_EXTRA = ("torchvision_mobilenet", "bert", "vit")
EVERY_MODEL = [
    pytest.param(name, marks=[pytest.mark.models] if name in NEEDS_MODELS_EXTRA else []) for name in BUILDERS
]
