"""Models of the sizes that people train on a GPU: random weights, built on the device, with a batch and a loss.

Llama and the diffusion UNet are written here, the others come from transformers and timm. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cases import integers, random, timm_model
from .models import Built
from .networks import Block, LanguageModel, UNet, WithLoss


@contextmanager
def built_on(device: str, dtype: torch.dtype = torch.float32) -> Any:
    """Build modules on a device in a dtype: billions of weights would take minutes on the CPU."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    """Draw random tokens on the CPU, the same on each device."""
    return integers(0, vocabulary, batch, length, low=4)


def mean_square(found: Tensor, target: Tensor) -> Tensor:
    """Compute the mean squared difference, in steps that the simulated GPU has too."""
    return (found - target).square().mean()


# -------------------------------------------------------------------- Llama


@dataclass(frozen=True)
class LlamaSize:
    """Shapes of a Llama; the defaults are those of Llama 3 8B."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    vocabulary: int = 128256
    length: int = 4096


TOY_LLAMA = LlamaSize(layers=2, width=64, heads=4, kv_heads=2, hidden=160, vocabulary=256, length=128)


class Attention(nn.Module):
    """Causal attention with rotated positions; several heads share keys and values."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.each = size.width // size.heads
        self.wq = nn.Linear(size.width, size.width, bias=False)
        self.wk = nn.Linear(size.width, size.kv_heads * self.each, bias=False)
        self.wv = nn.Linear(size.width, size.kv_heads * self.each, bias=False)
        self.wo = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Map tokens to tokens."""
        q, k, v = (w(x).unflatten(-1, (-1, self.each)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = (rotate(t, cosines, sines) for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate pairs of channels by an angle that grows with the position."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


class LlamaBlock(nn.Module):
    """Attention and a gated feed-forward network, each behind a norm."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.attention = Attention(size)
        self.w1, self.w3 = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(size.hidden, size.width, bias=False)
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(size.width, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Map tokens to tokens."""
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        normed = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


class Llama(nn.Module):
    """A decoder of the shapes of Llama 3."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(LlamaBlock(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=1e-5)
        self.output = nn.Linear(size.width, size.vocabulary, bias=False)
        each = size.width // size.heads
        speeds = 500_000.0 ** (-torch.arange(0, each, 2, dtype=torch.float32) / each)
        angles = torch.outer(torch.arange(size.length, dtype=torch.float32), torch.cat((speeds, speeds)))
        self.register_buffer("cosines", angles.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sines", angles.sin().to(torch.get_default_dtype()), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map tokens to the logits of the next ones."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.cosines[: ids.shape[1]], self.sines[: ids.shape[1]])
        return self.output(self.norm(x))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross-entropy in float32, as large models are trained."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def llama(size: LlamaSize, device: str, batch: int = 1) -> Built:
    """Build a Llama in bfloat16, and a batch of full length."""
    with built_on(device, torch.bfloat16):
        net = Llama(size)
    ids = tokens(batch, size.length + 1, size.vocabulary).to(device)
    return WithLoss(net, next_token_loss), (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


# -------------------------------------------------------------------- a diffusion UNet


@dataclass(frozen=True)
class UNetSize:
    """Shapes of a diffusion UNet; the defaults are those of Stable Diffusion 1."""

    widths: tuple[int, ...] = (320, 640, 1280, 1280)
    side: int = 64
    heads: int = 8
    context: tuple[int, int] = (77, 768)
    groups: int = 32
    blocks: int = 2


TOY_UNET = UNetSize(widths=(16, 32), side=16, heads=2, context=(4, 16), groups=8, blocks=1)


class ResidualBlock(nn.Module):
    """Two convolutions behind group norms, shifted by the embedding of the time."""

    def __init__(self, inputs: int, outputs: int, time_width: int, groups: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(groups, inputs), nn.GroupNorm(groups, outputs)
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time_width, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Map a picture to a picture."""
        hidden = self.conv_1(F.silu(self.norm_1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv_2(F.silu(self.norm_2(hidden)))


class PictureAttention(nn.Module):
    """Attention among the pixels, attention to a text, and a gated feed-forward network."""

    def __init__(self, width: int, size: UNetSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm = nn.GroupNorm(size.groups, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.queries = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.keys_values = nn.ModuleList(nn.Linear(w, 2 * width, bias=False) for w in (width, size.context[1]))
        self.mixes = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.gated, self.out = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def _attend(self, which: int, x: Tensor, source: Tensor) -> Tensor:
        q, k, v = self.queries[which](x), *self.keys_values[which](source).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return self.mixes[which](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """Map a picture to a picture."""
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        normed = self.norms[0](pixels)
        pixels = pixels + self._attend(0, normed, normed)
        pixels = pixels + self._attend(1, self.norms[1](pixels), text)
        value, gate = self.gated(self.norms[2](pixels)).chunk(2, dim=-1)
        pixels = pixels + self.out(value * F.gelu(gate))
        return x + pixels.transpose(1, 2).unflatten(2, x.shape[2:])


class UNetBlock(nn.Module):
    """A residual block and, but for the deepest level, an attention."""

    def __init__(self, inputs: int, outputs: int, time_width: int, size: UNetSize, attends: bool) -> None:
        super().__init__()
        self.residual = ResidualBlock(inputs, outputs, time_width, size.groups)
        self.attention = PictureAttention(outputs, size) if attends else None

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        """Map a picture to a picture."""
        x = self.residual(x, time)
        return x if self.attention is None else self.attention(x, text)


class DiffusionUNet(nn.Module):
    """A UNet of Stable Diffusion's widths, with the loss that it is trained by."""

    def __init__(self, size: UNetSize) -> None:
        super().__init__()
        widths, time_width, last = size.widths, 4 * size.widths[0], len(size.widths) - 1
        self.time = nn.Sequential(nn.Linear(widths[0], time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.first = nn.Conv2d(4, widths[0], 3, padding=1)

        def level(index: int, first: int, other: int) -> nn.ModuleList:
            inputs = [first, *[other] * (size.blocks - 1)]
            return nn.ModuleList(UNetBlock(i, widths[index], time_width, size, index < last) for i in inputs)

        below = [widths[0], *widths]
        self.down = nn.ModuleList(level(i, below[i], width) for i, width in enumerate(widths))
        self.middle = UNetBlock(widths[-1], widths[-1], time_width, size, attends=True)
        above = [*widths, widths[-1]]
        self.up = nn.ModuleList(
            level(i, above[i + 1] + width, 2 * width) for i, width in reversed(list(enumerate(widths)))
        )
        self.last = nn.Sequential(
            nn.GroupNorm(size.groups, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], 4, 3, padding=1)
        )

    def forward(self, picture: Tensor, time: Tensor, text: Tensor, target: Tensor) -> Tensor:
        """Compute the mean squared error of the noise found in a picture, at a time, for a text."""
        time, x = self.time(time), self.first(picture)
        kept = []
        for index, level in enumerate(self.down):
            x = F.avg_pool2d(x, 2) if index else x
            for block in level:
                x = block(x, time, text)
                kept.append(x)
        x = self.middle(x, time, text)
        for index, level in enumerate(self.up):
            x = F.interpolate(x, scale_factor=2.0) if index else x
            for block in level:
                x = block(torch.cat((x, kept.pop()), dim=1), time, text)
        return mean_square(self.last(x).float(), target.float())


# -------------------------------------------------------------------- all but Llama, by name

HALF, TOY_SIDE = torch.bfloat16, 64
Builder = Callable[[str, bool], Built]
OTHERS: dict[str, Builder] = {}


def other(builder: Builder) -> Builder:
    """Register a builder under its function's name; it takes the device, and whether to be small."""
    OTHERS[builder.__name__] = builder
    return builder


@other
def gpt2_medium(device: str, is_toy: bool) -> Built:
    """GPT-2 medium, 24 layers, 1024 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads, vocabulary, length = (2, 64, 4, 128, 64) if is_toy else (24, 1024, 16, 50257, 1024)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": length, "vocab_size": vocabulary}
    with built_on(device, HALF):
        net = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))
    return LanguageModel(net), (tokens(4, length, vocabulary),)


@other
def bert_large(device: str, is_toy: bool) -> Built:
    """BERT-large, 24 layers, 512 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    layers, width, heads, vocabulary, length = (2, 64, 4, 128, 64) if is_toy else (24, 1024, 16, 30522, 512)
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    with built_on(device, HALF):
        net = BertForMaskedLM(BertConfig(**sizes, intermediate_size=4 * width, vocab_size=vocabulary))
    return LanguageModel(net), (tokens(8, length, vocabulary),)


@other
def vit_large(device: str, is_toy: bool) -> Built:
    """ViT-L/16 at 224 pixels."""
    sizes = {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": TOY_SIDE} if is_toy else {}
    return _pictures("vit_large_patch16_224", device, 32, is_toy, **sizes)


@other
def resnet50_224(device: str, is_toy: bool) -> Built:
    """ResNet-50 at 224 pixels."""
    return _pictures("resnet10t" if is_toy else "resnet50", device, 64, is_toy)


def _pictures(name: str, device: str, batch: int, is_toy: bool, **options: Any) -> Built:
    with built_on(device, HALF):
        net = timm_model(name, 1000, **options)
    batch, side = (8, TOY_SIDE) if is_toy else (batch, 224)
    return WithLoss(net, F.cross_entropy), (random(0, batch, 3, side, side).to(HALF), torch.arange(batch) % 1000)


@other
def stable_diffusion_unet(device: str, is_toy: bool) -> Built:
    """A UNet of Stable Diffusion's widths, 64 by 64 latent pixels."""
    size, batch = (TOY_UNET, 2) if is_toy else (UNetSize(), 4)
    with built_on(device, HALF):
        net = DiffusionUNet(size)
    shapes = ((4, size.side, size.side), (size.widths[0],), size.context, (4, size.side, size.side))
    return net, tuple(random(0, batch, *shape).to(HALF) for shape in shapes)


@other
def t5_large(device: str, is_toy: bool) -> Built:
    """T5-large, 24 layers on each side, 512 tokens."""
    from transformers import T5Config, T5ForConditionalGeneration

    layers, width, heads, vocabulary, length = (1, 64, 4, 128, 32) if is_toy else (24, 1024, 16, 32128, 512)
    sizes = {"d_model": width, "d_kv": width // heads, "d_ff": 4 * width, "num_layers": layers, "num_heads": heads}
    config = T5Config(**sizes, vocab_size=vocabulary, use_cache=False, decoder_start_token_id=0)
    with built_on(device, HALF):
        net = T5ForConditionalGeneration(config)
    return LanguageModel(net), (tokens(4, length, vocabulary),)


def toy_gpt() -> Built:
    """Build a small GPT with dropout, on the CPU, for rehearsals."""
    net = nn.Sequential(nn.Embedding(256, 64), *(Block(64, 4) for _ in range(2)), nn.Linear(64, 256))
    return WithLoss(net, next_token_loss), (tokens(4, 64, 256), tokens(4, 64, 256))


def toy_unet() -> Built:
    """Build a small UNet with batch norm, on the CPU, for rehearsals."""
    pictures = random(0, 2, 3, 32, 32)
    return WithLoss(UNet(width=8, depth=1), mean_square), (pictures, pictures)


TOYS = {"gpt": toy_gpt, "unet": toy_unet}


def build_other(name: str, device: str, is_toy: bool) -> Callable[[], Built]:
    """Make the builder of a model, without arguments."""
    return partial(OTHERS[name], device, is_toy)
