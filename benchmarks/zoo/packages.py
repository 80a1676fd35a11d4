"""Models of other packages, small and with random weights, with batches and losses to train them on.

A builder returns a model as its package gives it; what is on by default in training (dropout, stochastic depth, batch
norm) stays on. Sizes are such that a step takes well below a second on one core, and that activations fill the memory
rather than gradients: of a batch of one tiny picture nothing could be saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .cases import Batch, Case, Entry, fields, integers, labelled_images, mean_square, own_loss, random, texts, timm

CASES: dict[str, Entry] = {}


def case(package: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Register a builder under its function's name; its docstring says what it builds."""

    def register(build: Callable[[], Case]) -> Callable[[], Case]:
        CASES[build.__name__] = Entry(package, (build.__doc__ or "").rstrip("."), build)
        return build

    return register


# -------------------------------------------------------------------- transformers: language

WIDTH: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512}
DECODER: dict[str, Any] = {**WIDTH, "intermediate_size": 256, "num_key_value_heads": 2, "use_cache": False}
ENCODER: dict[str, Any] = {**WIDTH, "intermediate_size": 256}


@case("transformers")
def gpt2() -> Case:
    """GPT-2, 4 layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return texts(GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=96, n_head=4, vocab_size=512, use_cache=False)), batch=8)


@case("transformers")
def bert() -> Case:
    """BERT, 4 layers, masked language model."""
    from transformers import BertConfig, BertForMaskedLM

    return texts(BertForMaskedLM(BertConfig(**ENCODER)), batch=8)


@case("transformers")
def roberta() -> Case:
    """RoBERTa, 4 layers, masked language model."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    return texts(RobertaForMaskedLM(RobertaConfig(**ENCODER)), batch=8)


@case("transformers")
def distilbert() -> Case:
    """DistilBERT, 4 layers, masked language model."""
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    config = DistilBertConfig(dim=96, n_layers=4, n_heads=4, hidden_dim=256, vocab_size=512)
    return texts(DistilBertForMaskedLM(config), batch=8)


@case("transformers")
def albert() -> Case:
    """ALBERT, 4 layers that share their weights."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(**ENCODER, embedding_size=64, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    return texts(AlbertForMaskedLM(config), batch=8)


@case("transformers")
def deberta() -> Case:
    """DeBERTa-v2, 4 layers, relative positions."""
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    config = DebertaV2Config(**ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"])
    return texts(DebertaV2ForMaskedLM(config), batch=8)


@case("transformers")
def modernbert() -> Case:
    """ModernBERT, 4 layers, local and global attention."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    config = ModernBertConfig(**ENCODER, pad_token_id=0, attention_dropout=0.1, mlp_dropout=0.1)
    return texts(ModernBertForMaskedLM(config), batch=8)


@case("transformers")
def t5() -> Case:
    """T5, encoder and decoder, 3 + 3 layers."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=96,
        d_kv=24,
        d_ff=256,
        num_layers=3,
        num_heads=4,
        vocab_size=512,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return texts(T5ForConditionalGeneration(config), batch=8)


@case("transformers")
def bart() -> Case:
    """BART, encoder and decoder, 3 + 3 layers, layer dropout."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        d_model=96,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        vocab_size=512,
        use_cache=False,
    )
    return texts(BartForConditionalGeneration(config), batch=8)


@case("transformers")
def opt() -> Case:
    """OPT, 4 layers."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(**WIDTH, ffn_dim=256, word_embed_proj_dim=96, use_cache=False)
    return texts(OPTForCausalLM(config), batch=8)


@case("transformers")
def llama() -> Case:
    """Llama, 4 layers, grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return texts(LlamaForCausalLM(LlamaConfig(**DECODER)), batch=8)


@case("transformers")
def mistral() -> Case:
    """Mistral, 4 layers, sliding window."""
    from transformers import MistralConfig, MistralForCausalLM

    return texts(MistralForCausalLM(MistralConfig(**DECODER, sliding_window=32)), batch=8)


@case("transformers")
def mixtral() -> Case:
    """Mixtral, 4 layers, mixture of 4 experts with router loss."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**{**DECODER, "intermediate_size": 96}, num_local_experts=4, output_router_logits=True)
    return texts(MixtralForCausalLM(config), batch=8)


@case("transformers")
def qwen3() -> Case:
    """Qwen3, 4 layers, normalized queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return texts(Qwen3ForCausalLM(Qwen3Config(**DECODER, head_dim=24)), batch=8)


@case("transformers")
def gemma2() -> Case:
    """Gemma 2, 4 layers, soft-capped logits."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return texts(Gemma2ForCausalLM(Gemma2Config(**DECODER, head_dim=24)), batch=8)


@case("transformers")
def phi3() -> Case:
    """Phi-3, 4 layers, fused projections."""
    from transformers import Phi3Config, Phi3ForCausalLM

    return texts(Phi3ForCausalLM(Phi3Config(**DECODER, pad_token_id=0, resid_pdrop=0.1)), batch=8)


@case("transformers")
def mamba() -> Case:
    """Mamba, 2 layers, the sequential scan of plain PyTorch."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2, state_size=8, use_cache=False)
    return texts(MambaForCausalLM(config), batch=4, length=32)


# -------------------------------------------------------------------- transformers: pictures and sound


@case("transformers")
def vit() -> Case:
    """ViT, 4 layers."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        image_size=64,
        patch_size=8,
        num_labels=10,
        hidden_dropout_prob=0.1,
    )
    return labelled_images(ViTForImageClassification(config), 8, 64)


@case("transformers")
def swin() -> Case:
    """Swin, 2 + 2 layers, shifted windows, stochastic depth."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=64, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=10
    )
    return labelled_images(SwinForImageClassification(config), 8, 64)


@case("transformers")
def segformer() -> Case:
    """SegFormer, segmentation, batch norm in its head."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 64, 96], decoder_hidden_size=64, num_labels=10, drop_path_rate=0.1
    )

    def make_batch(index: int) -> Batch:
        return {"pixel_values": random(index, 4, 3, 64, 64), "labels": integers(index, 10, 4, 64, 64)}

    return Case(SegformerForSemanticSegmentation(config), make_batch, own_loss)


@case("transformers")
def clip() -> Case:
    """CLIP, texts against pictures, 3 + 3 layers."""
    from transformers import CLIPConfig, CLIPModel

    layers = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = CLIPConfig(
        text_config={**layers, "vocab_size": 512, "eos_token_id": 2, "max_position_embeddings": 32},
        vision_config={**layers, "image_size": 64, "patch_size": 8},
        projection_dim=64,
    )

    def make_batch(index: int) -> Batch:
        tokens, pictures = integers(index, 512, 8, 32, low=4), random(index, 8, 3, 64, 64)
        return {"input_ids": tokens, "pixel_values": pictures, "return_loss": True}

    return Case(CLIPModel(config), make_batch, own_loss)


@case("transformers")
def detr() -> Case:
    """DETR, boxes by matching, convolutions and 2 + 2 layers."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 64, 96],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_queries=20,
        num_labels=10,
    )

    def make_batch(index: int) -> Batch:
        labels = [
            {"class_labels": integers(index + n, 10, 3), "boxes": 0.25 + 0.2 * random(index + n, 3, 4).sigmoid()}
            for n in range(8)
        ]
        return {"pixel_values": random(index, 8, 3, 128, 128), "labels": labels}

    return Case(DetrForObjectDetection(config), make_batch, own_loss)


@case("transformers")
def whisper() -> Case:
    """Whisper, sound to text, 3 + 3 layers."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=96,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        vocab_size=512,
        num_mel_bins=40,
        max_source_positions=128,
        max_target_positions=64,
        dropout=0.1,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )

    def make_batch(index: int) -> Batch:
        return {"input_features": random(index, 4, 40, 256), "labels": integers(index, 512, 4, 32, low=4)}

    return Case(WhisperForConditionalGeneration(config), make_batch, own_loss)


@case("transformers")
def wav2vec2() -> Case:
    """Wav2Vec2, sound to characters by CTC, spans masked by NumPy's generator."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        conv_dim=(32, 32, 32),
        conv_stride=(5, 4, 2),
        conv_kernel=(10, 4, 2),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        vocab_size=32,
    )

    def make_batch(index: int) -> Batch:
        return {"input_values": random(index, 2, 8000), "labels": integers(index, 32, 2, 12, low=4)}

    return Case(Wav2Vec2ForCTC(config), make_batch, own_loss)


# -------------------------------------------------------------------- timm


@case("timm")
def resnet50() -> Case:
    """ResNet-50."""
    return timm("resnet50", 16, 96)


@case("timm")
def efficientnet() -> Case:
    """EfficientNet-B0, squeeze and excitation, stochastic depth and dropout."""
    return timm("efficientnet_b0", 8, 96, drop_rate=0.2, drop_path_rate=0.2)


@case("timm")
def mobilenet() -> Case:
    """MobileNetV3-small."""
    return timm("mobilenetv3_small_100", 8, 96, drop_rate=0.2)


@case("timm")
def convnext() -> Case:
    """ConvNeXt-atto, stochastic depth."""
    return timm("convnext_atto", 8, 96, drop_path_rate=0.1)


@case("timm")
def mixer() -> Case:
    """MLP-Mixer-S/32, 8 blocks."""
    return timm("mixer_s32_224", 8, 128, img_size=128)


@case("timm")
def vit_tiny() -> Case:
    """ViT-tiny, 4 blocks, dropout and stochastic depth."""
    options = {"depth": 4, "embed_dim": 96, "drop_rate": 0.1, "proj_drop_rate": 0.1, "drop_path_rate": 0.1}
    return timm("vit_tiny_patch16_224", 8, 128, img_size=128, **options)


@case("timm")
def swin_timm() -> Case:
    """Swin of timm, 2 + 2 blocks."""
    options = {"embed_dim": 48, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "drop_path_rate": 0.1}
    return timm("swin_tiny_patch4_window7_224", 8, 64, img_size=64, **options)


@case("timm")
def maxvit() -> Case:
    """MaxViT, pico, windows and grids."""
    return timm("maxvit_rmlp_pico_rw_256", 4, 128, img_size=128)


@case("timm")
def densenet() -> Case:
    """DenseNet-121."""
    return timm("densenet121", 8, 96)


@case("timm")
def inception() -> Case:
    """Inception v3."""
    return timm("inception_v3", 8, 128)


@case("timm")
def regnet() -> Case:
    """RegNetY-400MF."""
    return timm("regnety_004", 8, 96)


@case("timm")
def nfnet() -> Case:
    """NFNet, standardized weights, no batch norm."""
    return timm("nfnet_l0", 8, 128)


# -------------------------------------------------------------------- diffusers


@case("diffusers")
def unet_condition() -> Case:
    """UNet of Stable Diffusion, cross attention."""
    from diffusers import UNet2DConditionModel

    module = UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=32,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )

    def make_batch(index: int) -> Batch:
        return {
            "sample": random(index, 4, 4, 32, 32),
            "timestep": integers(index, 1000, 4),
            "encoder_hidden_states": random(index, 4, 16, 32),
        }

    return Case(module, make_batch, mean_square)


@case("diffusers")
def autoencoder() -> Case:
    """Autoencoder of Stable Diffusion."""
    from diffusers import AutoencoderKL

    module = AutoencoderKL(
        block_out_channels=(16, 32),
        norm_num_groups=8,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
    )
    return Case(module, lambda i: {"sample": random(i, 2, 3, 64, 64), "sample_posterior": True}, mean_square)


@case("diffusers")
def dit() -> Case:
    """DiT, diffusion transformer, 4 layers."""
    from diffusers import DiTTransformer2DModel

    module = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=100,
        dropout=0.1,
    )

    def make_batch(index: int) -> Batch:
        return {
            "hidden_states": random(index, 8, 4, 16, 16),
            "timestep": integers(index, 100, 8),
            "class_labels": integers(index, 10, 8),
        }

    return Case(module, make_batch, mean_square)


@case("diffusers")
def flux() -> Case:
    """Flux, two streams and one, 2 + 2 layers."""
    from diffusers import FluxTransformer2DModel

    module = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )

    def make_batch(index: int) -> Batch:
        return {
            "hidden_states": random(index, 4, 64, 16),
            "encoder_hidden_states": random(index + 1, 4, 32, 32),
            "pooled_projections": random(index + 2, 4, 32),
            "timestep": torch.rand(4, generator=torch.Generator().manual_seed(index)),
            "img_ids": torch.zeros(64, 3),
            "txt_ids": torch.zeros(32, 3),
        }

    return Case(module, make_batch, mean_square)


# -------------------------------------------------------------------- monai


@case("monai")
def unet_monai() -> Case:
    """UNet of MONAI, volumes, residual units."""
    from monai.networks.nets import UNet

    module = UNet(3, 1, 2, channels=(16, 32, 64), strides=(2, 2), num_res_units=2, dropout=0.1, norm="batch")
    return fields(module, 2, 1, 32, 32, 32)


@case("monai")
def dynunet() -> Case:
    """DynUNet, the network of nnU-Net, deep supervision."""
    from monai.networks.nets import DynUNet

    module = DynUNet(
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        kernel_size=[3, 3, 3, 3],
        strides=[1, 2, 2, 2],
        upsample_kernel_size=[2, 2, 2],
        filters=[16, 32, 48, 64],
        deep_supervision=True,
        deep_supr_num=2,
        dropout=0.1,
    )
    return fields(module, 4, 1, 96, 96)


@case("monai")
def unetr() -> Case:
    """UNETR, a transformer encodes volumes."""
    from monai.networks.nets import UNETR

    module = UNETR(
        1, 2, img_size=(32, 32, 32), feature_size=8, hidden_size=48, mlp_dim=96, num_heads=4, dropout_rate=0.1
    )
    return fields(module, 2, 1, 32, 32, 32, name="x_in")


@case("monai")
def swin_unetr() -> Case:
    """Swin UNETR, shifted windows in pictures."""
    from monai.networks.nets import SwinUNETR

    module = SwinUNETR(1, 2, feature_size=12, depths=(1, 1, 1, 1), spatial_dims=2, window_size=4, drop_rate=0.1)
    return fields(module, 4, 1, 64, 64, name="x_in")


@case("monai")
def segresnet() -> Case:
    """SegResNet, group norm, dropout."""
    from monai.networks.nets import SegResNet

    module = SegResNet(
        2, init_filters=16, in_channels=1, out_channels=2, dropout_prob=0.1, blocks_down=(1, 2, 2), blocks_up=(1, 1)
    )
    return fields(module, 4, 1, 96, 96)


# -------------------------------------------------------------------- neuraloperator


@case("neuralop")
def fno() -> Case:
    """Fourier neural operator, complex weights."""
    from neuralop.models import FNO

    return fields(FNO(n_modes=(8, 8), in_channels=3, out_channels=1, hidden_channels=24), 4, 3, 64, 64)


@case("neuralop")
def tfno() -> Case:
    """Tensorized Fourier neural operator, factorized complex weights."""
    from neuralop.models import TFNO

    module = TFNO(n_modes=(8, 8), in_channels=3, out_channels=1, hidden_channels=24, factorization="Tucker", rank=0.2)
    return fields(module, 4, 3, 64, 64)


@case("neuralop")
def uno() -> Case:
    """U-shaped neural operator."""
    from neuralop.models import UNO

    module = UNO(
        in_channels=3,
        out_channels=1,
        hidden_channels=16,
        uno_out_channels=[16, 16, 16],
        channel_mlp_skip="linear",
        uno_n_modes=[[8, 8], [8, 8], [8, 8]],
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]],
        n_layers=3,
    )
    return fields(module, 4, 3, 64, 64)


# -------------------------------------------------------------------- torch_geometric


def graphs(module: nn.Module, nodes: int = 600, edges: int = 3000, width: int = 32) -> Case:
    """Train on one random graph, with new features at each step."""

    def make_batch(index: int) -> Batch:
        return {"x": random(index, nodes, width), "edge_index": integers(0, nodes, 2, edges)}

    return Case(module, make_batch, mean_square)


@case("torch_geometric")
def gcn() -> Case:
    """Graph convolutions, 6 layers, batch norm; edges are normalized in each layer."""
    from torch_geometric.nn import GCN

    return graphs(GCN(32, 64, 6, 16, dropout=0.1, norm="batch_norm"))


@case("torch_geometric")
def sage() -> Case:
    """GraphSAGE, 4 layers, batch norm."""
    from torch_geometric.nn import GraphSAGE

    return graphs(GraphSAGE(32, 64, 4, 16, dropout=0.1, norm="batch_norm"))


@case("torch_geometric")
def gat() -> Case:
    """Graph attention, 4 layers."""
    from torch_geometric.nn import GAT

    return graphs(GAT(32, 64, 4, 16, dropout=0.1, heads=4, v2=True))


@case("torch_geometric")
def gin() -> Case:
    """Graph isomorphism network, 4 layers."""
    from torch_geometric.nn import GIN

    return graphs(GIN(32, 64, 4, 16, dropout=0.1))


# -------------------------------------------------------------------- x-transformers, peft


@case("x_transformers")
def x_decoder() -> Case:
    """Decoder of x-transformers: rotary, gated, normalized queries and keys."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=96, depth=4, heads=4, rotary_pos_emb=True, ff_glu=True, attn_qk_norm=True, ff_dropout=0.1, attn_dropout=0.1
    )
    module = TransformerWrapper(num_tokens=256, max_seq_len=64, attn_layers=layers)
    return Case(module, lambda index: {"x": integers(index, 256, 8, 64)}, mean_square)


@case("x_transformers")
def x_vit() -> Case:
    """Picture transformer of x-transformers."""
    from x_transformers import Encoder, ViTransformerWrapper

    module = ViTransformerWrapper(
        image_size=64, patch_size=8, num_classes=10, attn_layers=Encoder(dim=96, depth=4, heads=4, attn_flash=True)
    )
    return Case(module, lambda index: {"img": random(index, 8, 3, 64, 64)}, mean_square)


@case("peft")
def lora() -> Case:
    """LoRA on Llama: adapters train, the rest is frozen."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return texts(get_peft_model(LlamaForCausalLM(LlamaConfig(**DECODER)), config), batch=8)
