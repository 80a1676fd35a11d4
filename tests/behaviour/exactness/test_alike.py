"""Planned training of networks whose layers are alike, traced once for all: the bits of plain training."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hiremate_lightning import hiremate
from hiremate_lightning.torch_private.regions import repeated_modules
from tests.exact import TORCH, simple_loop, train_both

WIDTH, DEPTH = 16, 5


class Block(nn.Module):
    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.outer, self.drop, self.scale = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.2), 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.drop(self.outer(F.gelu(self.inner(self.norm(x)))))


class Normed(Block):
    """Updates buffers."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.norm = nn.BatchNorm1d(WIDTH)


class Deeper(Block):
    """Runs less of itself the deeper it is."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.drop = nn.Dropout(0.1 * (index // 2))


class Attending(nn.Module):
    def __init__(self, _: int = 0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x + self.attention(x, x, x, need_weights=False)[0])


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(index) for index in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Cast(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Tied(Stack):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(kind)
        self.blocks[3].inner.weight = self.blocks[1].inner.weight


class Repeated(Stack):
    """Calls the same block again and again."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(kind)
        self.blocks = nn.ModuleList([self.blocks[0]] * DEPTH)


class Frozen(Stack):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(kind)
        for block in self.blocks[:2]:
            block.requires_grad_(False)


def batch(index: int, length: int = 24) -> Tensor:
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(index))


MAKES = {
    "blocks": lambda: Stack(Block),
    "batch norms": lambda: Stack(Normed),
    "other rates": lambda: Stack(Deeper),
    "autocast": lambda: Cast(Block),
    "tied": lambda: Tied(Block),
    "repeated": lambda: Repeated(Block),
    "frozen": lambda: Frozen(Block),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_layers_that_are_alike_train_bit_for_bit(make, planning_log):
    train_both(make, simple_loop(batch))
    assert planning_log.of("copying") or TORCH < (2, 13)


def test_attention_and_what_follows_it_train_bit_for_bit(planning_log):
    train_both(lambda: Stack(Attending), simple_loop(lambda index: batch(index).view(2, 12, WIDTH)))
    assert planning_log.of("copying") or TORCH < (2, 13)
    assert Stack.forward.__code__ not in repeated_modules._traced_whole


def test_sizes_that_vary_train_bit_for_bit(planning_log):
    train_both(lambda: Stack(Block), simple_loop(lambda index: batch(index, 16 + 8 * index)))
    assert planning_log.of("copying") or TORCH < (2, 13)


def test_a_change_of_one_layer_between_steps_trains_bit_for_bit():
    def loop(module: nn.Module) -> list[Tensor | None]:
        log = simple_loop(batch, steps=3)(module)
        module.blocks[3].scale = 0.25
        module.blocks[2].drop.p = 0.5
        log += simple_loop(batch, steps=2)(module)
        module.blocks[4].eval()
        return log + simple_loop(batch, steps=2)(module)

    train_both(lambda: Stack(Block), loop)


def test_nothing_of_the_trace_is_left_as_garbage():
    """It would hold tensors of the step, which then count as there."""
    model = hiremate(Stack(Block), "80%", verbose=False)
    gc.collect()
    gc.disable()
    try:
        model(batch(0)).square().mean().backward()
        assert not [kind for kind in map(type, gc.get_objects()) if kind.__name__ == "TensorVariable"]
    finally:
        gc.enable()
