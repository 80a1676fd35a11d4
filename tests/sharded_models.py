"""Training scripts of models of transformers and timm under FSDP2 for test_sharding.py, with and without a plan."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from benchmarks.zoo.stand_in import torchvision_or_stand_in
from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.integrations.transformers_trainer import HiRemateTrainerCallback
from hiremate_lightning.memory.metering import measure_peak
from tests.exact import recorded
from tests.sharding import STEPS, Left, local
from tests.shared_memory import SharedMemory, communicate_through
from tests.trainers import Sentences

BUDGET = "70%"
WORDS, ROWS, LENGTH = 64, 8, 32


class Sharding(Trainer):
    """A Trainer that shards on CPUs too, where Accelerate takes DistributedDataParallel without a word."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        state = self.accelerator.state
        if state.mixed_precision != "no":
            plugin.set_mixed_precision(state.mixed_precision)
        state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        self.is_fsdp_enabled = True
        self.losses = list[Tensor]()

    def training_step(self, *arguments: Any, **others: Any) -> Tensor:
        loss = super().training_step(*arguments, **others)
        self.losses.append(loss.clone())
        return loss


class Notes(TrainerCallback):
    """Notes local gradients; lets what is sharded communicate through shared memory."""

    def __init__(self, memory: SharedMemory) -> None:
        self.gradients, self._memory = list[dict[str, Tensor]](), memory

    def on_train_begin(self, *arguments: Any, model: nn.Module, **others: Any) -> None:
        communicate_through(self._memory, model)

    def on_pre_optimizer_step(self, *arguments: Any, model: nn.Module, **others: Any) -> None:
        self.gradients.append({name: local(p.grad) for name, p in model.named_parameters()})


def train_with_trainer(rank: int, memory: SharedMemory, planned: bool) -> Left:
    """Train with transformers' Trainer: tied weights, bfloat16, two batches in each step, clipped gradients."""
    set_seed(0)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, bos_token_id=0, eos_token_id=0, **sizes))
    notes, plan = Notes(memory), HiRemateTrainerCallback(BUDGET, verbose=False)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=2,
            bf16=True,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            fsdp=True,
            fsdp_config={"version": 2},
        )
        callbacks = [notes, plan] if planned else [notes]
        trainer = Sharding(model, arguments, train_dataset=Sentences(128, LENGTH, WORDS), callbacks=callbacks)
        trainer.train()
    return Left(trainer.losses, notes.gradients).close(trainer.model, None, plan.plan)


def t5() -> nn.Module:
    """Make an encoder and a decoder, whose embeddings and head are one weight."""
    sizes = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, use_cache=False, **sizes))


def vit() -> nn.Module:
    """Make a vision transformer, of which whole blocks are left out at random."""
    with torchvision_or_stand_in():
        from timm.models.vision_transformer import VisionTransformer
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": WORDS}
    return VisionTransformer(drop_path_rate=0.1, **sizes)


def train_units(
    make: Callable[[], nn.Module],
    kind: str,
    batch: Callable[[torch.Generator], Tensor],
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    rank: int,
    memory: SharedMemory,
    planned: bool,
) -> Left:
    """Train a model of which the modules of a class are units."""
    torch.manual_seed(0)
    model, left = make(), Left()
    for module in [m for m in model.modules() if type(m).__name__ == kind] + [model]:
        fully_shard(module)
    communicate_through(memory, model)
    with recorded() as left.warned:
        if planned:
            hiremate(model, BUDGET, verbose=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for index in range(STEPS):
            torch.manual_seed(1000 + 10 * index + rank)

            def step(x: Tensor) -> None:
                loss = loss_of(model, x)
                loss.backward()
                left.losses.append(loss.detach())

            run = partial(step, batch(torch.Generator().manual_seed(10 * index + rank)))
            left.peak_bytes = measure_peak(run) if index + 1 == STEPS else run() or 0
            left.gradients.append({name: local(p.grad) for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    return left.close(model, None, get_plan(model) if planned else None)


MODELS = {
    "Trainer": train_with_trainer,
    "T5": partial(
        train_units,
        t5,
        "T5Block",
        lambda generator: torch.randint(WORDS, (ROWS, LENGTH), generator=generator),
        lambda model, words: model(input_ids=words, labels=words).loss,
    ),
    "ViT": partial(
        train_units,
        vit,
        "Block",
        lambda generator: torch.randn(ROWS, 3, 32, 32, generator=generator),
        lambda model, images: model(images).logsumexp(1).mean(),
    ),
}
