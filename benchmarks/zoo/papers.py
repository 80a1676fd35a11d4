"""Networks of the papers at their own sizes, to be planned without the memory that a step takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cases import Batch, Case, Entry, fields, integers, random, texts, timm
from .stand_in import mend_torchvision

PAPERS: dict[str, Entry] = {}


def paper(package: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Register a builder of a network that a paper reports, under its function's name without `paper_`."""

    def register(build: Callable[[], Case]) -> Callable[[], Case]:
        name = build.__name__.removeprefix("paper_")
        PAPERS[name] = Entry(package, (build.__doc__ or "").rstrip("."), build)
        return build

    return register


class EncoderDecoder(nn.Module):
    """PyTorch's Transformer between an embedding that both sides share and its transpose."""

    def __init__(self, words: int, layers: int, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.transformer = nn.Transformer(width, num_encoder_layers=layers, num_decoder_layers=layers, batch_first=True)
        self.words = nn.Linear(width, words, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Score the words that follow each word of the target."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        mixed = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True)
        scores: Tensor = self.words(mixed)
        return scores


def _torchvision(name: str, batch: int) -> Case:
    mend_torchvision()
    from torchvision import models

    return Case(
        getattr(models, name)(),
        lambda index: {"x": random(index, batch, 3, 224, 224)},
        lambda output, batch: F.cross_entropy(output, torch.arange(len(output)) % 1000),
    )


@paper("transformers")
def paper_gpt2() -> Case:
    """GPT-2 (124 M), 12 layers, 8 x 512 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return texts(GPT2LMHeadModel(GPT2Config(use_cache=False)), batch=8, length=512, vocabulary=50257)


@paper("transformers")
def paper_roberta() -> Case:
    """RoBERTa-base, 12 layers, 16 x 512 tokens, masked language model."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    return texts(RobertaForMaskedLM(config), batch=16, length=512, vocabulary=50265)


@paper("torch")
def paper_transformer() -> Case:
    """Transformer of PyTorch, 4 + 4 layers, 32 x 128 words on each side."""
    words = 10_000

    def make_batch(index: int) -> Batch:
        return {"source": integers(index, words, 32, 128), "target": integers(index + 1, words, 32, 128)}

    return Case(
        EncoderDecoder(words, layers=4),
        make_batch,
        lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch["target"].flatten()),
    )


@paper("torchvision")
def paper_resnet101() -> Case:
    """ResNet-101, 32 pictures of 224 x 224."""
    return _torchvision("resnet101", 32)


@paper("torchvision")
def paper_regnet() -> Case:
    """RegNetX-32GF, 32 pictures of 224 x 224."""
    return _torchvision("regnet_x_32gf", 32)


@paper("torchvision")
def paper_densenet() -> Case:
    """DenseNet-121, 32 pictures of 224 x 224."""
    return _torchvision("densenet121", 32)


@paper("torchvision")
def paper_vgg19() -> Case:
    """VGG-19, 64 pictures of 224 x 224."""
    return _torchvision("vgg19", 64)


@paper("torchvision")
def paper_alexnet() -> Case:
    """AlexNet, 256 pictures of 224 x 224."""
    return _torchvision("alexnet", 256)


@paper("segmentation_models_pytorch")
def paper_unet() -> Case:
    """UNet of segmentation_models_pytorch, encoder of VGG-13 with batch norm, 8 pictures of 256 x 256."""
    mend_torchvision()
    from segmentation_models_pytorch import Unet

    return fields(Unet("vgg13_bn", encoder_weights=None, classes=2), 8, 3, 256, 256)


@paper("timm")
def paper_mixer() -> Case:
    """MLP-Mixer-B/16, 32 pictures of 224 x 224."""
    return timm("mixer_b16_224", 32, 224)


def _without_opt_einsum() -> None:
    """Let neuraloperator multiply by torch.einsum: opt_einsum looks its backend up by code that can't be captured."""
    import neuralop.models  # noqa: F401  chooses opt_einsum
    from tensorly import plugins

    plugins.use_default_einsum()


@paper("neuralop")
def paper_fno() -> Case:
    """Fourier neural operator, 4 layers, 16 fields of 128 x 128."""
    from neuralop.models import FNO

    _without_opt_einsum()
    return fields(FNO(n_modes=(32, 32), in_channels=3, out_channels=1, hidden_channels=64), 16, 3, 128, 128)


@paper("neuralop")
def paper_uno() -> Case:
    """U-shaped neural operator, 5 layers, 16 fields of 128 x 128."""
    from neuralop.models import UNO

    _without_opt_einsum()
    module = UNO(
        in_channels=3,
        out_channels=1,
        hidden_channels=64,
        uno_out_channels=[32, 64, 64, 64, 32],
        channel_mlp_skip="linear",
        uno_n_modes=[[32, 32], [16, 16], [16, 16], [16, 16], [32, 32]],
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [1.0, 1.0], [1.0, 1.0], [2.0, 2.0]],
        n_layers=5,
    )
    return fields(module, 16, 3, 128, 128)
