"""Networks that are written here, of any size, and what gives a network its loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# -------------------------------------------------------------------- around a network


class WithLoss(nn.Module):
    """A module and a loss on its output."""

    def __init__(self, net: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, inputs: Any, *targets: Tensor) -> Tensor:
        """Return the scalar loss of a batch."""
        return self.loss(self.net(inputs), *targets)


class LanguageModel(nn.Module):
    """A transformers model with its own loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the model's own loss."""
        return self.net(input_ids=tokens, labels=tokens).loss


class LogitsOnly(nn.Module):
    """A transformers model whose call returns its logits, as a plain tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of all words."""
        return self.inner(input_ids=tokens).logits


class Denoiser(nn.Module):
    """A diffusers model with the loss of Ho et al. 2020: the noise in a noisy image."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, noisy: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        """Return the mean squared error of the noise found."""
        return F.mse_loss(self.net(noisy, time).sample, noise)


# -------------------------------------------------------------------- transformers, convolutions


class Block(nn.Module):
    """Pre-norm transformer block, dropout on."""

    def __init__(self, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to tokens."""
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
        self.blocks = nn.ModuleList(Block(width, heads, 0.1) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next bytes."""
        x = self.dropout(self.bytes(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def convolve(channels_in: int, channels_out: int, count: int = 3) -> nn.Sequential:
    """Chain convolutions with batch norm, each followed by an in-place ReLU."""
    layers: list[nn.Module] = []
    for channels in (channels_in, *[channels_out] * (count - 1)):
        layers += [nn.Conv2d(channels, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out)]
        layers += [nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """UNet with batch norm and long skips (Ronneberger et al. 2015).

    Args:
        width: Channels of the first level; each further one has twice as many.
        depth: Number of levels below the first.
        convolutions: Number of them in a block.
        is_residual: Whether it gives what is to be taken off the image, as examples/unet.py does.
    """

    def __init__(self, width: int = 12, depth: int = 3, convolutions: int = 3, is_residual: bool = True) -> None:
        super().__init__()
        self.is_residual = is_residual
        block = partial(convolve, count=convolutions)
        widths = [width * 2**level for level in range(depth + 1)]
        self.first = block(3, width)
        self.down = nn.ModuleList(block(widths[i], widths[i + 1]) for i in range(depth))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(widths[i + 1], widths[i], 2, stride=2) for i in range(depth))
        self.up = nn.ModuleList(block(2 * widths[i], widths[i]) for i in range(depth))
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, noisy: Tensor) -> Tensor:
        """Map an image to an image."""
        levels = [self.first(noisy)]
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for i in reversed(range(len(self.up))):
            x = self.up[i](torch.cat([levels.pop(), self.grow[i](x)], dim=1))
        return noisy - self.last(x) if self.is_residual else self.last(x)


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
        """Map features to features."""
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
        """Return the scores of ten classes."""
        return self.head(self.body(self.stem(x)).mean(dim=(2, 3)))


# -------------------------------------------------------------------- Fourier neural operators


class SpectralConv(nn.Module):
    """Spectral convolution of a Fourier neural operator (Li et al., arXiv 2010.08895)."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, width, width, modes, modes, 2) / width)

    def forward(self, signal: Tensor) -> Tensor:
        """Filter the lowest modes."""
        spectrum = torch.fft.rfft2(signal)
        low = spectrum[..., : self.modes, : self.modes]
        high = spectrum[..., -self.modes :, : self.modes]
        first, second = torch.view_as_complex(self.weight)
        out = torch.zeros_like(spectrum)
        out[..., : self.modes, : self.modes] = torch.einsum("bixy,ioxy->boxy", low, first)
        out[..., -self.modes :, : self.modes] = torch.einsum("bixy,ioxy->boxy", high, second)
        return torch.fft.irfft2(out, s=signal.shape[-2:])


class FNOLayer(nn.Module):
    """Spectral convolution beside a pointwise one."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.spectral = SpectralConv(width, modes)
        self.local = nn.Conv2d(width, width, 1)

    def forward(self, field: Tensor) -> Tensor:
        """Map a field to a field."""
        return F.gelu(self.spectral(field) + self.local(field))


class FNO(nn.Module):
    """Fourier neural operator, 2-D."""

    def __init__(self, width: int = 24, modes: int = 12, layers: int = 4) -> None:
        super().__init__()
        self.lift = nn.Conv2d(3, width, 1)
        self.layers = nn.Sequential(*(FNOLayer(width, modes) for _ in range(layers)))
        self.project = nn.Sequential(nn.Conv2d(width, 64, 1), nn.GELU(), nn.Conv2d(64, 3, 1))

    def forward(self, field: Tensor) -> Tensor:
        """Map a field to a field."""
        return self.project(self.layers(self.lift(field)))
