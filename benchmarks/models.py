"""Models of the benchmarks: those of the HiRemate paper and those that people train today, random init.

Each builder returns a module that maps its batch to a scalar loss, and the batch. Sizes are chosen so that a training
step takes about a second on one core while activations, not weights, fill the memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from stand_in import mend_torchvision, torchvision_or_stand_in
from torch import Tensor, nn
from torch.nn import functional as F

mend_torchvision()

Built = tuple[nn.Module, tuple[Any, ...]]
MODELS: dict[str, Callable[[], Built]] = {}


def model(builder: Callable[[], Built]) -> Callable[[], Built]:
    """Register a builder under its function's name."""
    MODELS[builder.__name__] = builder
    return builder


class WithLoss(nn.Module):
    """A module and a loss on its output."""

    def __init__(self, net: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, inputs: Any, *targets: Tensor) -> Tensor:
        """Give the scalar loss of a batch."""
        return self.loss(self.net(inputs), *targets)


class LanguageModel(nn.Module):
    """A transformers model with its own loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the model's own loss."""
        return self.net(input_ids=tokens, labels=tokens).loss


def _images(batch: int, size: int, classes: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(batch, 3, size, size, generator=generator),
        torch.randint(0, classes, (batch,), generator=generator),
    )


def _tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))


def gpt2_of(layers: int, batch: int = 4, width: int = 256) -> Built:
    """Build a GPT-2 of any depth and width, with its batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=width, n_head=8, vocab_size=1024, n_positions=256, use_cache=False)
    return LanguageModel(GPT2LMHeadModel(config)), (_tokens(batch, 128, 1024),)


@model
def gpt2_12() -> Built:
    """GPT-2, 12 layers."""
    return gpt2_of(12)


@model
def gpt2_48() -> Built:
    """GPT-2, 48 layers."""
    return gpt2_of(48, batch=2)


class Block(nn.Module):
    """Pre-norm transformer block, dropout on."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to tokens."""
        heads = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.mix(mixed))
        return x + self.dense(self.norm_2(x))


@model
def gpt() -> Built:
    """Byte-level GPT, 10 blocks, as in the demo."""
    net = nn.Sequential(nn.Embedding(256, 256), *(Block(256, 8) for _ in range(10)), nn.Linear(256, 256))
    tokens = _tokens(8, 257, 256)
    return WithLoss(net, lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten())), (
        tokens[:, :-1],
        tokens[:, 1:],
    )


@model
def bert() -> Built:
    """BERT, 8 layers, masked-language loss."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=256, num_hidden_layers=8, num_attention_heads=8, intermediate_size=1024, vocab_size=1024
    )
    return LanguageModel(BertForMaskedLM(config)), (_tokens(8, 128, 1024),)


@model
def t5() -> Built:
    """T5 encoder-decoder, 6 + 6 layers."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=6,
        num_heads=8,
        vocab_size=1024,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return LanguageModel(T5ForConditionalGeneration(config)), (_tokens(4, 128, 1024),)


def _llama(vocabulary: int) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=vocabulary,
        use_cache=False,
    )
    return LanguageModel(LlamaForCausalLM(config)), (_tokens(4, 128, vocabulary),)


@model
def llama() -> Built:
    """Llama-like decoder, 8 layers."""
    return _llama(1024)


@model
def llama_words() -> Built:
    """Llama-like decoder, 8 layers, 32,000 words, in bfloat16: its loss needs more than its layers."""
    net, inputs = _llama(32_000)
    return net.bfloat16(), inputs


def _timm(name: str, batch: int, size: int, **options: Any) -> Built:
    with torchvision_or_stand_in():
        import timm

    net = timm.create_model(name, pretrained=False, num_classes=10, **options)
    return WithLoss(net, F.cross_entropy), _images(batch, size)


@model
def vit() -> Built:
    """ViT-tiny, 12 blocks, stochastic depth and dropout on."""
    return _timm("vit_tiny_patch16_224", 8, 224, drop_rate=0.1, proj_drop_rate=0.1, drop_path_rate=0.1)


@model
def mixer() -> Built:
    """MLP-Mixer-S/32."""
    return _timm("mixer_s32_224", 8, 224)


@model
def regnet() -> Built:
    """RegNetX-400MF."""
    return _timm("regnetx_004", 8, 128)


@model
def convnext() -> Built:
    """ConvNeXt-atto."""
    return _timm("convnext_atto", 8, 160)


@model
def resnet50() -> Built:
    """ResNet-50."""
    return _timm("resnet50", 8, 128)


@model
def resnet101() -> Built:
    """ResNet-101."""
    return _timm("resnet101", 8, 128)


class UNet(nn.Module):
    """UNet with batch norm and long skips (Ronneberger et al. 2015)."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.first = self._block(3, widths[0])
        self.down = nn.ModuleList(self._block(a, b) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths))
        self.merge = nn.ModuleList(self._block(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for width in (inputs, outputs):
            layers += [
                nn.Conv2d(width, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            ]
        return nn.Sequential(*layers)

    def forward(self, image: Tensor) -> Tensor:
        """Map an image to an image."""
        skips = [self.first(image)]
        for block in self.down:
            skips.append(block(F.max_pool2d(skips[-1], 2)))
        current = skips.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            current = merge(torch.cat((skips.pop(), up(current)), 1))
        return self.last(current)


@model
def unet() -> Built:
    """UNet with long skips, batch norm."""
    images, _ = _images(4, 128)
    return WithLoss(UNet(), F.mse_loss), (images, images)


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


@model
def fno() -> Built:
    """Fourier neural operator, 4 layers."""
    images, _ = _images(4, 96)
    return WithLoss(FNO(), F.mse_loss), (images, images)


class Denoiser(nn.Module):
    """A diffusers model with the loss of Ho et al. 2020: the noise in a noisy image."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, noisy: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        """Give the mean squared error of the noise found."""
        return F.mse_loss(self.net(noisy, time).sample, noise)


@model
def diffusion() -> Built:
    """Denoising diffusion UNet with attention, dropout on."""
    from diffusers import UNet2DModel

    net = UNet2DModel(
        sample_size=32,
        block_out_channels=(48, 96, 96),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=16,
        norm_num_groups=8,
        dropout=0.1,
    )
    images, _ = _images(8, 32)
    times = torch.randint(0, 1000, (8,), generator=torch.Generator().manual_seed(0))
    return Denoiser(net), (images, times, images.roll(1, 0))
