"""Planned training of networks whose layers are alike, traced once for all: the bits of plain training."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from hiremate_lightning import hiremate
from hiremate_lightning.torch_private.regions import repeated_modules
from tests.exact import TORCH, network, simple_loop, train_both
from tests.units.torch_private.test_repeated_modules import WIDTH, Block, Stack, counting

DEPTH = 5


class Deeper(Block):
    """Runs less of itself the deeper it is."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.drop = nn.Dropout(0.1 * (index // 2))


@network(lambda _: {"attention": nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True), "block": Block(0)})
def attending(self, x: Tensor) -> Tensor:
    return self.block(x + self.attention(x, x, x, need_weights=False)[0])


class Bare(Stack):
    """Begins with its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Cast(Bare):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def tied() -> nn.Module:
    model = Bare(Block, DEPTH)
    model.blocks[3].inner.weight = model.blocks[1].inner.weight
    return model


def frozen() -> nn.Module:
    model = Bare(Block, DEPTH)
    model.blocks[:2].requires_grad_(False)
    return model


def repeated() -> nn.Module:
    """The same block again and again."""
    return nn.Sequential(*[Block(0)] * DEPTH)


def batch(index: int, length: int = 24) -> Tensor:
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(index))


TRAINED = {
    "blocks": (lambda: Bare(Block, DEPTH), batch),
    "batch norms": (lambda: Bare(counting, DEPTH), batch),
    "other rates": (lambda: Bare(Deeper, DEPTH), batch),
    "autocast": (lambda: Cast(Block, DEPTH), batch),
    "tied": (tied, batch),
    "repeated": (repeated, batch),
    "frozen": (frozen, batch),
    "attention and what follows it": (
        lambda: Bare(attending, DEPTH),
        lambda index: batch(index).view(2, 12, WIDTH),
    ),
    "sizes that vary": (lambda: Bare(Block, DEPTH), lambda index: batch(index, 16 + 8 * index)),
}


@pytest.mark.parametrize(("make", "make_batch"), TRAINED.values(), ids=TRAINED)
def test_layers_that_are_alike_train_bit_for_bit(make, make_batch, planning_log):
    train_both(make, simple_loop(make_batch))
    assert planning_log.of("copying") or TORCH < (2, 13)
    assert Bare.forward.__code__ not in repeated_modules._traced_whole


def test_a_change_of_one_layer_between_steps_trains_bit_for_bit():
    def loop(module: nn.Module) -> list[Tensor | None]:
        log = simple_loop(batch, steps=3)(module)
        module.blocks[3].scale = 0.25
        module.blocks[2].drop.p = 0.5
        log += simple_loop(batch, steps=2)(module)
        module.blocks[4].eval()
        return log + simple_loop(batch, steps=2)(module)

    train_both(lambda: Bare(Block, DEPTH), loop)


def test_nothing_of_the_trace_is_left_as_garbage():
    """It would hold tensors of the step, which then count as there."""
    model = hiremate(Bare(Block, DEPTH), "80%", verbose=False)
    gc.collect()
    gc.disable()
    try:
        model(batch(0)).square().mean().backward()
        assert not [kind for kind in map(type, gc.get_objects()) if kind.__name__ == "TensorVariable"]
    finally:
        gc.enable()
