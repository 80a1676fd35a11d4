"""A small model of every architecture of transformers and of timm, with batches and losses to train them on.

Nobody adjusts these models by hand: sizes are put into the configuration of an architecture wherever it has such names,
or all its widths are divided by the same number, and the first of these is taken with which plain PyTorch trains it.
"""

from __future__ import annotations

import functools
import inspect
import random as random_numbers
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from .cases import Batch, Case, Entry, integers, random
from .stand_in import torchvision_or_stand_in

LARGEST = 70_000_000  # parameters
LONGEST_S = 5.0  # of a plain step
LENGTH = 48
VOCABULARY = 300
PICTURE = 32  # pixels
BATCH = 8

WIDTHS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "attention_hidden_size"), 48),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "ffn_hidden_size", "n_inner"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "rotary_dim"), 12),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "moe_shared_expert_intermediate_size": 32,
    "embedding_size": 24,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "state_size": 8,
    "time_step_rank": 4,
    "hidden_size_per_layer_input": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
DEPTHS: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    "first_k_dense_replace": 1,
}
LENGTHS: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 128),
    **dict.fromkeys(("attention_window", "sliding_window"), 16),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_size": PICTURE,
    "patch_size": 8,
}
ONE_HEAD_SIZE: dict[str, Any] = dict.fromkeys(
    ("head_dim", "d_kv", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "mamba_d_head"), 12
)
LARGE_HEADS: dict[str, Any] = {  # of 128, as where positions are split into sections of a head
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim"), 256),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), 2),
    "head_dim": 128,
}
SIZES = (
    {**LENGTHS, **DEPTHS, **WIDTHS},
    {**LENGTHS, **DEPTHS, **WIDTHS, **ONE_HEAD_SIZE, "num_key_value_heads": 4},
    {**LENGTHS, **DEPTHS, "hidden_size": 64, "d_model": 64, "intermediate_size": 128},
    {**LENGTHS, **DEPTHS, **WIDTHS, **LARGE_HEADS},
    {**LENGTHS, **DEPTHS},
    DEPTHS,
    {},
)
DIVISORS = (8, 4, 16)
WIDTH_NAMES = re.compile(r"hidden|dim|width|channels|rank|embd|inner|intermediate|ffn|d_model|d_ff|d_kv|_size$|sizes$")
DEPTH_NAMES = re.compile(r"layers$|layer$|depths?$|blocks$|blocks_per_stage$")
OTHER_NAMES = re.compile(
    r"image|patch|kernel|window|vocab|stride|num_channels|in_channels|pool|batch|chunk|codebook_size|context|input_dim"
    r"|temporal|spatial|position|group|mel|bins|num_hidden_layers_|block_size|crop|expand|sampl|feat_extract_|input_feat"
)
MAIN, ALL, TIME_FIRST = "main input", "all inputs", "time first"
INPUTS = (MAIN, ALL, TIME_FIRST)
HEADS = (
    ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
    ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForImageClassification"),
    ("MODEL_FOR_CTC_MAPPING_NAMES", "AutoModelForCTC"),
    ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", "AutoModelForAudioClassification"),
    ("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES", "AutoModelForSemanticSegmentation"),
    ("MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES", "AutoModelForDepthEstimation"),
    ("MODEL_MAPPING_NAMES", "AutoModel"),
)


class UntrainableError(Exception):
    """Plain PyTorch doesn't train an architecture in any of the sizes."""


def entries() -> dict[str, Entry]:
    """List all architectures that are installed, by package and name."""
    return {
        **{f"transformers/{name}": entry_of(f"transformers/{name}") for name in _model_types()},
        **{f"timm/{name}": entry_of(f"timm/{name}") for name in _timm().list_modules()},
    }


def entry_of(name: str) -> Entry:
    """Find an architecture by package and name, as `timm/vision_transformer`."""
    package, _, architecture = name.partition("/")
    return Entry(package, architecture, partial(_build, package, architecture))


def _build(package: str, architecture: str) -> Case:
    return _chosen(package, architecture)()


def _output_loss(output: Any, batch: Batch) -> Tensor:
    """Take the loss that a model computes itself, or pull all numbers of its outputs to zero."""
    loss = output.get("loss") if isinstance(output, dict) else None
    if isinstance(loss, Tensor):
        return loss
    found = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point() and t.requires_grad]
    return torch.stack([t.float().square().mean() for t in found]).sum()


@functools.cache
def _chosen(package: str, architecture: str) -> Callable[[], Case]:
    """Choose sizes, once: which of them is quick enough depends on what else the machine does. Draw no numbers."""
    attempts = {"transformers": _transformers_cases, "timm": _timm_cases}[package](architecture)
    of_python, of_numpy = random_numbers.getstate(), np.random.get_state()  # noqa: NPY002  models may draw from these
    try:
        with torch.random.fork_rng(devices=[]):
            return _first_that_trains(attempts)
    finally:
        random_numbers.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def _first_that_trains(attempts: Iterable[Callable[[], Case]]) -> Callable[[], Case]:
    """Find what builds the first case of which plain PyTorch trains a step: that step leaves hooks and statistics."""
    reasons: dict[str, None] = {}
    for attempt in attempts:
        try:
            case = attempt()
            batch, start = case.make_batch(0), time.perf_counter()
            case.loss_of(case.module(**batch), batch).backward()
            if (seconds := time.perf_counter() - start) > LONGEST_S:
                raise UntrainableError(f"a plain step takes {seconds:.0f} s")
        except Exception as error:  # whatever a configuration says to sizes that it was not made for
            reasons[_first_line(error)] = None
        else:
            return attempt
    raise UntrainableError("; ".join(reasons)[:300])


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:120]


# -------------------------------------------------------------------- transformers


def _model_types() -> list[str]:
    from transformers.models.auto import configuration_auto, modeling_auto

    with_model = set().union(*(getattr(modeling_auto, mapping) for mapping, _ in HEADS))
    return [name for name in configuration_auto.CONFIG_MAPPING_NAMES if name in with_model]


def _transformers_cases(model_type: str) -> Iterator[Callable[[], Case]]:
    given = (partial(_put, sizes=sizes) for sizes in SIZES)
    filled = (partial(_put, sizes=sizes, fill=True) for sizes in SIZES[:2])
    divided = (partial(_divide, by=divisor) for divisor in DIVISORS)
    ways = product((*given, *divided, *filled), INPUTS)
    return (partial(_language_or_vision, model_type, shrink, inputs) for shrink, inputs in ways)


def _language_or_vision(model_type: str, shrink: partial[None], which: str) -> Case:
    _timm()  # some have parts of it
    import transformers
    from transformers.models.auto import modeling_auto

    head = next(head for mapping, head in HEADS if model_type in getattr(modeling_auto, mapping))
    config = transformers.CONFIG_MAPPING[model_type]()
    for each in _nested(config):
        shrink(each)
        if getattr(each, "use_pretrained_backbone", None):
            each.use_pretrained_backbone = False
    is_small = shrink.func is _divide or WIDTHS.items() <= shrink.keywords["sizes"].items()
    _refuse_large(partial(getattr(transformers, head).from_config, config), or_unknown=not is_small)
    module = getattr(transformers, head).from_config(config).train()
    inputs = _inputs(module, config, which)
    has_labels = head in ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")

    def make_batch(index: int) -> Batch:
        batch = {name: _draw(index, *how) for name, how in inputs.items()}
        if has_labels and "input_ids" in batch:
            batch["labels"] = batch["input_ids"].clone()
        return batch

    return Case(module, make_batch, _output_loss)


def _refuse_large(build: Callable[[], nn.Module], or_unknown: bool) -> None:
    """Count parameters on a device without memory, where that is possible."""
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in build().parameters())
    except Exception:  # not all can be built without memory; the limit of the address space is left
        if or_unknown:
            raise
        return
    if size > LARGEST:
        raise UntrainableError(f"{size / 1e6:.0f} million parameters")


def _nested(config: Any, depth: int = 0) -> Iterator[Any]:
    """List a configuration and those in it."""
    yield config
    if depth < 2:
        for value in list(config.__dict__.values()):
            if hasattr(value, "to_dict"):
                yield from _nested(value, depth + 1)


def _put(config: Any, sizes: dict[str, Any], fill: bool = False) -> None:
    """Put sizes into a configuration where it has plain numbers of these names.

    With `fill` where it has None, too, and nothing is kept for a generation.
    """
    for name, value in sizes.items():
        old = config.__dict__.get(name, "")
        if (isinstance(old, int | float) and not isinstance(old, bool)) or (fill and old is None):
            setattr(config, name, value)
    if fill and hasattr(config, "use_cache"):
        config.use_cache = False
    if sizes:
        _fit_layer_types(config)


def _divide(config: Any, by: int) -> None:
    """Divide all widths in a configuration by a number, take two layers wherever there are more, and few words."""
    for name, old in list(config.__dict__.items()):
        if name in ("vocab_size", "vocab_size_per_layer_input") and isinstance(old, int):
            setattr(config, name, min(old, VOCABULARY))
        elif DEPTH_NAMES.search(name):
            setattr(config, name, _each(old, lambda n: min(n, 2)))
        elif WIDTH_NAMES.search(name) and not OTHER_NAMES.search(name):
            setattr(config, name, _each(old, lambda n: n // by if n % by == 0 and n >= 2 * by else n))
    _fit_layer_types(config)


def _each(old: Any, change: Callable[[int], int]) -> Any:
    """Change an integer, or each one in a list; all else stays."""
    if isinstance(old, int) and not isinstance(old, bool):
        return change(old)
    if isinstance(old, list | tuple) and old and all(isinstance(n, int) and not isinstance(n, bool) for n in old):
        return type(old)(change(n) for n in old)
    return old


def _fit_layer_types(config: Any) -> None:
    """Let there be as many types of layers as layers, of each kind one before there are two."""
    layers = config.__dict__.get("layer_types")
    if isinstance(layers, list):
        count, kinds = getattr(config, "num_hidden_layers", len(layers)), list(dict.fromkeys(layers))
        config.layer_types = (kinds * count)[:count]


def _inputs(module: nn.Module, config: Any, which: str) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Say of each input how many integers it is drawn from, 0 for normal numbers, and its shape."""
    text, vision = getattr(config, "text_config", config), getattr(config, "vision_config", config)
    picture = getattr(vision, "image_size", PICTURE)
    size = picture if isinstance(picture, int) else PICTURE
    channels = getattr(vision, "num_channels", 3)
    mels = next((n for c in _nested(config) if isinstance(n := getattr(c, "num_mel_bins", None), int)), 80)
    vocabulary = min(getattr(text, "vocab_size", None) or VOCABULARY, VOCABULARY)
    known: dict[str, tuple[int, tuple[int, ...]]] = {
        "input_ids": (vocabulary, (BATCH, LENGTH)),
        "pixel_values": (0, (BATCH, channels if isinstance(channels, int) else 3, size, size)),
        "input_values": (0, (2, 4000)),
        "input_features": (0, (2, mels, 160)),
        "decoder_input_ids": (vocabulary, (BATCH, LENGTH)),
    }
    main = getattr(module, "main_input_name", "input_ids")
    accepted = inspect.signature(module.forward).parameters
    names = [main if main in known else "input_ids"]
    if which == ALL:
        names = [name for name in known if name in accepted]
    if which == TIME_FIRST:
        if main != "input_features":
            raise UntrainableError("")
        known[main] = (0, (2, 160, mels))
    return {name: known[name] for name in names}


def _draw(index: int, high: int, shape: tuple[int, ...]) -> Tensor:
    return integers(index, high, *shape, low=3) if high else random(index, *shape)


# -------------------------------------------------------------------- timm


def _timm() -> Any:
    with torchvision_or_stand_in():
        import timm

    return timm


def _timm_cases(module_name: str) -> Iterator[Callable[[], Case]]:
    """Go through the two smallest models of one of timm's files."""
    timm, sizes = _timm(), {}
    for name in timm.list_models(module=module_name):
        with torch.device("meta"):
            try:
                sizes[name] = sum(p.numel() for p in timm.create_model(name, num_classes=10).parameters())
            except Exception as error:  # some can't be built on a device without memory
                sizes.setdefault("", _first_line(error))
    names = sorted((n for n in sizes if n), key=lambda n: sizes[n])[:2]
    if not names:
        raise UntrainableError(str(sizes.get("", "no model in this file")))
    return (partial(_pictures, name, size) for name in names for size in (96, 224))


def _pictures(name: str, size: int) -> Case:
    return Case(
        _timm().create_model(name, num_classes=10).train(),
        lambda index: {"x": random(index, BATCH, 3, size, size)},
        lambda output, batch: (
            F.cross_entropy(output, torch.arange(BATCH, device=output.device))
            if isinstance(output, Tensor) and output.dim() == 2
            else _output_loss(output, batch)
        ),
    )
