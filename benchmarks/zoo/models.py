"""Models of the benchmarks: those of the HiRemate paper and those that people train today, random init.

Each builder returns a module that maps its batch to a scalar loss, and the batch. Sizes are chosen so that a training
step takes about a second on one core while activations, not weights, fill the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cases import integers, timm_model
from .networks import FNO, Block, Denoiser, LanguageModel, UNet, WithLoss
from .stand_in import mend_torchvision

mend_torchvision()

Built = tuple[nn.Module, tuple[Any, ...]]
MODELS: dict[str, Callable[[], Built]] = {}


def model(builder: Callable[[], Built]) -> Callable[[], Built]:
    """Register a builder under its function's name."""
    MODELS[builder.__name__] = builder
    return builder


def _images(batch: int, size: int, classes: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(batch, 3, size, size, generator=generator),
        torch.randint(0, classes, (batch,), generator=generator),
    )


def _tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    return integers(0, vocabulary, batch, length)


def gpt2_of(layers: int, batch: int = 4, width: int = 256, length: int = 128) -> Built:
    """Build a GPT-2 of any depth and width, with its batch of texts of some length."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=width, n_head=8, vocab_size=1024, n_positions=256, use_cache=False)
    return LanguageModel(GPT2LMHeadModel(config)), (_tokens(batch, length, 1024),)


@model
def gpt2_12() -> Built:
    """GPT-2, 12 layers."""
    return gpt2_of(12)


@model
def gpt2_48() -> Built:
    """GPT-2, 48 layers."""
    return gpt2_of(48, batch=2)


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


def t5_of(layers: int, batch: int = 4, width: int = 256, length: int = 128) -> Built:
    """Build a T5 of so many layers in its encoder, and as many in its decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=width,
        d_kv=width // 8,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=8,
        vocab_size=1024,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return LanguageModel(T5ForConditionalGeneration(config)), (_tokens(batch, length, 1024),)


@model
def t5() -> Built:
    """T5 encoder-decoder, 6 + 6 layers."""
    return t5_of(6)


def llama_of(layers: int, vocabulary: int = 1024, batch: int = 4, width: int = 256, length: int = 128) -> Built:
    """Build a Llama of any depth, width and vocabulary, with its batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=vocabulary,
        use_cache=False,
    )
    return LanguageModel(LlamaForCausalLM(config)), (_tokens(batch, length, vocabulary),)


@model
def llama() -> Built:
    """Llama-like decoder, 8 layers."""
    return llama_of(8)


@model
def llama_words() -> Built:
    """Llama-like decoder, 8 layers, 32,000 words, in bfloat16: its loss needs more than its layers."""
    net, inputs = llama_of(8, 32_000)
    return net.bfloat16(), inputs


def _timm(name: str, batch: int, size: int, **options: Any) -> Built:
    return WithLoss(timm_model(name, **options), F.cross_entropy), _images(batch, size)


def vit_of(layers: int, batch: int = 8, width: int = 192, size: int = 224) -> Built:
    """Build a ViT-tiny of any depth and width, stochastic depth and dropout on, with its batch."""
    rates = {"drop_rate": 0.1, "proj_drop_rate": 0.1, "drop_path_rate": 0.1}
    sizes = {"depth": layers, "embed_dim": width, "num_heads": width // 64, "img_size": size}
    return _timm("vit_tiny_patch16_224", batch, size, **sizes, **rates)


@model
def vit() -> Built:
    """ViT-tiny, 12 blocks, stochastic depth and dropout on."""
    return vit_of(12)


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


@model
def unet() -> Built:
    """UNet with long skips, batch norm."""
    images, _ = _images(4, 128)
    return WithLoss(UNet(16, 4, convolutions=2, is_residual=False), F.mse_loss), (images, images)


@model
def fno() -> Built:
    """Fourier neural operator, 4 layers."""
    images, _ = _images(4, 96)
    return WithLoss(FNO(), F.mse_loss), (images, images)


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
