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

from benchmarks.stand_in import torchvision_or_stand_in


@dataclass(frozen=True)
class Model:
    """What a test needs to train a module.

    Attributes:
        module: The module, in training mode, its weights made from the random state at the time it was built.
        make_batch: Gives the arguments of a call, the same for the same seed.
        loss_of: Gives the loss of what a call has returned.
    """

    module: nn.Module
    make_batch: Callable[[int], tuple[Tensor, ...]]
    loss_of: Callable[[Tensor], Tensor]


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


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.mix(mixed))
        return x + self.dropout(self.dense(self.norm_2(x)))


class GPT(nn.Module):
    """The model of examples/gpt.py, small, without Lightning."""

    def __init__(self, blocks: int = 4, width: int = 128, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, 0.1) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.bytes(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def convolve(channels_in: int, channels_out: int) -> nn.Sequential:
    """Three convolutions with batch norm, each followed by an in-place ReLU."""
    layers: list[nn.Module] = []
    for channels in (channels_in, channels_out, channels_out):
        layers += [nn.Conv2d(channels, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out)]
        layers += [nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """The model of examples/unet.py, small, without Lightning."""

    def __init__(self, width: int = 12, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.first = convolve(3, width)
        self.down = nn.ModuleList(convolve(widths[i], widths[i + 1]) for i in range(depth))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(widths[i + 1], widths[i], 2, stride=2) for i in range(depth))
        self.up = nn.ModuleList(convolve(2 * widths[i], widths[i]) for i in range(depth))
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, noisy: Tensor) -> Tensor:
        levels = [self.first(noisy)]
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for i in reversed(range(len(self.up))):
            x = self.up[i](torch.cat([levels.pop(), self.grow[i](x)], dim=1))
        return noisy - self.last(x)


class Bottleneck(nn.Module):
    """A residual block that adds in place and applies ReLU in place."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, 4 * channels, 1, bias=False),
            nn.BatchNorm2d(4 * channels),
        )
        fits = stride == 1 and channels_in == 4 * channels
        self.shortcut = None if fits else nn.Conv2d(channels_in, 4 * channels, 1, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """Residual blocks in four stages."""

    def __init__(self, width: int = 8, blocks: tuple[int, ...] = (2, 2, 3, 2)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.body = nn.Sequential()
        channels_in = width
        for stage, count in enumerate(blocks):
            for index in range(count):
                stride = 2 if stage and not index else 1
                self.body.append(Bottleneck(channels_in, width * 2**stage, stride))
                channels_in = 4 * width * 2**stage
        self.head = nn.Linear(channels_in, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean(dim=(2, 3)))


def build_gpt() -> Model:
    return Model(GPT(), _tokens(batch=8, length=128, vocabulary=256), cross_entropy_to(_classes))


def build_unet() -> Model:
    return Model(UNet(), _pictures(batch=4, side=96), lambda output: output.square().mean())


def build_resnet() -> Model:
    return Model(ResNet(), _pictures(batch=8, side=48), cross_entropy_to(_classes))


def build_torchvision_mobilenet() -> Model:
    models = pytest.importorskip("torchvision.models", exc_type=ImportError)
    return Model(models.mobilenet_v3_small(), _pictures(batch=16, side=96), cross_entropy_to(_classes))


class LogitsOnly(nn.Module):
    """A transformers model whose call returns its logits, as a plain tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(input_ids=tokens).logits


def build_bert() -> Model:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=128,
    )
    module = LogitsOnly(transformers.BertForMaskedLM(config)).train()
    return Model(module, _tokens(batch=8, length=128, vocabulary=1000), cross_entropy_to(_classes))


def build_vit() -> Model:
    with torchvision_or_stand_in():
        timm = pytest.importorskip("timm")
    module = timm.models.vision_transformer.VisionTransformer(
        img_size=64,
        patch_size=8,
        embed_dim=128,
        depth=6,
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
