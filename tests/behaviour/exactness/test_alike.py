"""Planned training of networks whose layers are alike, captured once for all: the bits of eager training."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hiremate_lightning import hiremate
from hiremate_lightning.torch_private.regions import repeated_modules
from tests.exact import TORCH, network, simple_loop, train_both
from tests.units.torch_private.test_repeated_modules import (
    WIDTH,
    Block,
    KeepingStack,
    Stack,
    TwiceStack,
    counting,
    in_place,
)

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


@network(lambda _: {"norm": nn.LayerNorm(WIDTH), **{name: nn.Linear(WIDTH, WIDTH) for name in "qkv"}})
def reading_along(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
    """Reads a memory twice and a bias once, which all blocks share, as the decoder of a T5 does."""
    scores = self.q(self.norm(x)) @ self.k(memory).mT + bias
    return x + F.dropout(scores.softmax(-1), 0.1) @ self.v(memory)


class Attended(Stack):
    def __init__(self, kind: Callable[[int], nn.Module], depth: int = 4) -> None:
        super().__init__(kind, depth)
        self.bias = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        memory, bias = torch.tanh(self.first(x)), self.bias.exp()
        for block in self.blocks:
            x = block(x, memory, bias)
        return x


@network(lambda shared: {"norm": nn.LayerNorm(WIDTH), "drop": nn.Dropout(0.2), "shared": shared})
def reading_twice(self, x: Tensor) -> Tensor:
    """Reads a weight twice that all blocks share."""
    hidden = F.gelu(self.norm(x) @ self.shared)
    return x + self.drop(F.gelu(hidden @ self.shared.mT) * hidden.sigmoid())


def sharing() -> Stack:
    shared = nn.Parameter(torch.randn(WIDTH, WIDTH))
    return Stack(lambda _: reading_twice(shared))


def normed(_: int) -> dict[str, nn.Module]:
    return {"norm": nn.LayerNorm(WIDTH), "one": nn.Linear(WIDTH, WIDTH), "other": nn.Linear(WIDTH, WIDTH)}


@network(normed)
def turning(self, x: Tensor) -> Tensor:
    """Returns a view."""
    return self.other(F.gelu(self.one(self.norm(x))) + x.sin() * x.cos()).flip(0).view(2, -1, WIDTH).flatten(0, 1)


@network(lambda _: {**normed(_), "table": nn.Parameter(torch.randn(6, WIDTH))})
def scaled(self, x: Tensor) -> Tensor:
    """Reads a weight more often than its code says: a composite operation does."""
    hidden = F.silu(self.one(x)) + F.rms_norm(self.table, (WIDTH,)) + F.normalize(self.table.abs())
    return x + self.other(hidden.sin() * hidden.cos())


class Frozen(Block):
    """Has a weight without a gradient."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.inner.requires_grad_(False)


@network(normed)
def branching(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gives two results, of which the code around reads the second one seldom."""
    hidden = F.silu(self.one(self.norm(x)))
    return x + self.other(hidden.sin() * hidden.cos()), hidden * 2


class Branched(Stack):
    def forward(self, x: Tensor) -> Tensor:
        total = x = self.first(x)
        for index, block in enumerate(self.blocks):
            x, aside = block(x)
            total = total + (aside if index % 2 else aside.detach())
        return x + total


class Transposing(Stack):
    """Hands gradients of another layout to one of its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return (x.t() @ x).sum()


class Joining(Stack):
    """Joins what some blocks give, as a UNet does: their gradients are parts of larger ones."""

    def forward(self, x: Tensor) -> Tensor:
        x = kept = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            x = torch.cat([x, kept], 1).sin()[:, :WIDTH] if index % 2 else x
        return x


class JoiningBoth(Stack):
    """Joins each of two results with something else."""

    def forward(self, x: Tensor) -> Tensor:
        x = kept = self.first(x)
        for block in self.blocks:
            x, aside = block(x)
            x = (torch.cat([x, kept], 1) * torch.cat([aside, kept], 1))[:, :WIDTH]
        return x


@torch.compiler.disable
def _uncaptured(x: Tensor) -> Tensor:
    return x.sin()


class JoiningComputed(JoiningBoth):
    """Reads what other code has computed several times; its gradient is handed over term by term."""

    def forward(self, x: Tensor) -> Tensor:
        computed = _uncaptured(x * self.first.weight.sum())
        return super().forward(computed) * computed + computed.cos() / 3


class JoiningEachOther(Stack):
    """Joins two results with each other: their gradients lie in one piece of memory."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.cat(block(x), 1).sin()[:, :WIDTH]
        return x


@network(lambda _: {"one": nn.Linear(WIDTH, WIDTH), "other": nn.Linear(WIDTH, WIDTH)})
def passing(self, x: Tensor) -> Tensor:
    """Gives a gradient on as it comes: what a block before it gets then has that layout too."""
    hidden = F.silu(self.one(x.detach())).sin()
    return x + self.other(hidden)


class Passed(Stack):
    """Gives the last of the blocks a gradient that is a part of a larger one."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x), x], 1).sin()


class Changing(Stack):
    """Changes in place what a block gives."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).add_(1).mul_(2)
        return x


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
GIVEN: dict[str, Callable[[], nn.Module]] = {  # by what is special about gradients and memory between the layers
    "memory and bias of all": lambda: Attended(reading_along),
    "a weight of all": sharing,
    "a weight in composites": lambda: Stack(scaled),
    "frozen weights": lambda: Stack(Frozen),
    "results kept": lambda: KeepingStack(Block),
    "called twice": lambda: TwiceStack(Block),
    "another layout": lambda: Transposing(Block),
    "gradients of parts": lambda: Joining(Block),
    "gradients of parts, and of terms": lambda: JoiningComputed(branching),
    "gradients of parts of two results": lambda: JoiningBoth(branching),
    "gradients in one piece of memory": lambda: JoiningEachOther(branching),
    "gradients passed on": lambda: Passed(passing),
    "a gradient missing": lambda: Branched(branching),
    "changed in place outside": lambda: Changing(Block),
    "changes in place": lambda: Stack(in_place),
    "a view returned": lambda: Stack(turning),
}


@pytest.mark.parametrize(("make", "make_batch"), TRAINED.values(), ids=TRAINED)
def test_layers_that_are_alike_train_bit_for_bit(make, make_batch, planning_log):
    train_both(make, simple_loop(make_batch))
    assert planning_log.of("copying") or TORCH < (2, 13)
    assert Bare.forward.__code__ not in repeated_modules._traced_whole


@pytest.mark.parametrize("make", GIVEN.values(), ids=GIVEN)
def test_layers_that_are_alike_get_the_gradients_of_eager(make):
    train_both(make, simple_loop(lambda index: batch(index, 6)), budget="70%")


def test_a_change_of_one_layer_between_steps_trains_bit_for_bit():
    def loop(module: nn.Module) -> list[Tensor | None]:
        log = simple_loop(batch, steps=3)(module)
        module.blocks[3].scale = 0.25
        module.blocks[2].drop.p = 0.5
        log += simple_loop(batch, steps=2)(module)
        module.blocks[4].eval()
        return log + simple_loop(batch, steps=2)(module)

    train_both(lambda: Bare(Block, DEPTH), loop)


@pytest.mark.usefixtures("no_automatic_collection")
def test_nothing_of_the_trace_is_left_as_garbage():
    """It would hold tensors of the step, which then count as there."""
    model = hiremate(Bare(Block, DEPTH), "80%", verbose=False)
    gc.collect()
    model(batch(0)).square().mean().backward()
    assert not [kind for kind in map(type, gc.get_objects()) if kind.__name__ == "TensorVariable"]
