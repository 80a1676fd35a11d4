"""Blocks that are alike are traced once, with the joint graph of a trace of each; others as they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from hiremate_lightning.capturing import backend
from hiremate_lightning.torch_private import tensor_state
from hiremate_lightning.torch_private.regions import alike_blocks, block_templates
from tests.exact import TORCH, captured_by, network, quiet, simple_loop, train_both
from tests.units.torch_private.test_repeated_modules import (
    WIDTH,
    Block,
    KeepingStack,
    PairedStack,
    Stack,
    TwiceStack,
    counting,
    in_place,
    paired,
)

pytestmark = pytest.mark.skipif(TORCH < (2, 13), reason="all is traced before PyTorch 2.13")


@network(lambda _: {"norm": nn.LayerNorm(WIDTH), **{name: nn.Linear(WIDTH, WIDTH) for name in "qkv"}})
def attending(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
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
def tied(self, x: Tensor) -> Tensor:
    """Reads a weight twice that all blocks share."""
    hidden = F.gelu(self.norm(x) @ self.shared)
    return x + self.drop(F.gelu(hidden @ self.shared.mT) * hidden.sigmoid())


def sharing() -> Stack:
    shared = nn.Parameter(torch.randn(WIDTH, WIDTH))
    return Stack(lambda _: tied(shared))


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


class Casting(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def describe(joint: fx.GraphModule) -> list[Any]:
    """List what passes read of a joint graph, with numbers for its nodes and for the storages of its values."""
    indices = {node: index for index, node in enumerate(joint.graph.nodes)}
    storages = dict[int, int]()

    def shown(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = storages.setdefault(tensor_state.storage_id(value), len(storages))
        layout = tuple(value.shape), value.stride(), value.storage_offset(), value.dtype
        return *layout, storage, value.untyped_storage().nbytes()

    def row(node: fx.Node) -> tuple[Any, ...]:
        read = fx.node.map_arg((node.args, node.kwargs), lambda value: f"%{indices[value]}")
        stacks = [[*(node.meta.get(f"{of}nn_module_stack") or {}).values()] for of in ("", "fwd_")]
        marks = [node.meta.get(key) for key in ("is_gradient_acc", "partitioner_tag")]
        target = None if node.op == "placeholder" else node.target
        return node.op, target, read, [shown(v) for v in tensor_state.leaves(node.meta.get("val"))], stacks, marks

    return [row(node) for node in joint.graph.nodes]


def trace(make: Callable[[], nn.Module], *, folds: bool, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Capture a module, each block or each kind of block once; give its joint graphs and the number of blocks.

    Each joint graph comes twice: before it is rewritten, and after.
    And whether any joint graph has come of folded blocks.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    graphs, blocks, is_written = [], itertools.count(), []

    def fold(code: fx.GraphModule) -> alike_blocks.Folded:
        folded = plain_fold(code) if folds else alike_blocks.Folded(code)
        for _ in folded.calls:
            next(blocks)
        return folded

    def write_out(joint: fx.GraphModule) -> None:
        stand_ins = joint.graph.find_nodes(op="call_function", target=torch.ops.hiremate_lightning.block.default)
        plain_write_out(joint)
        is_written.append(bool(stand_ins))
        graphs.append(describe(joint))

    def capture(joint: fx.GraphModule, *given: Any) -> Any:
        graphs.append(describe(joint))
        return plain_capture(joint, *given)

    plain_fold, plain_write_out, plain_capture = alike_blocks.fold, block_templates.write_out, backend.capture
    with monkeypatch.context() as patch:
        patch.setattr(alike_blocks, "fold", fold)
        patch.setattr(backend.block_templates, "write_out", write_out)
        patch.setattr(backend, "capture", capture)
        with quiet():
            captured_by(make(), torch.randn(6, WIDTH), verify="off")
    return SimpleNamespace(graphs=graphs, blocks=next(blocks), is_written=any(is_written))


FOLDED = {
    "blocks": (lambda: Stack(Block), 4),
    "several arguments": (lambda: PairedStack(paired), 4),
    "memory and bias of all": (lambda: Attended(attending), 3),
    "a weight of all": (sharing, 4),
    "a weight in composites": (lambda: Stack(scaled), 4),
    "frozen weights": (lambda: Stack(Frozen), 4),
    "results kept": (lambda: KeepingStack(Block), 4),
    "called twice": (lambda: TwiceStack(Block), 8),
    "another layout": (lambda: Transposing(Block), 4),
    "gradients of parts": (lambda: Joining(Block), 3),
    "gradients of parts, and of terms": (lambda: JoiningComputed(branching), 3),
    "gradients of parts of two results": (lambda: JoiningBoth(branching), 3),
    "gradients passed on": (lambda: Joining(passing), 3),
    "changed in place outside": (lambda: Changing(Block), 4),
}
TRACED = {
    "buffers": lambda: Stack(counting),
    "changes in place": lambda: Stack(in_place),
    "a view returned": lambda: Stack(turning),
    "autocast around": lambda: Casting(Block),
    "two blocks": lambda: Stack(Block, 2),
}


def expect_same(expected: list[Any], graphs: list[Any]) -> None:
    assert [len(rows) for rows in graphs] == [len(rows) for rows in expected]
    for rows, rows_expected in zip(graphs, expected, strict=True):
        assert [(a, b) for a, b in zip(rows, rows_expected, strict=True) if a != b] == []


@pytest.mark.parametrize("name", FOLDED)
def test_joint_graph_is_that_of_a_trace_of_each_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, count = FOLDED[name]
    expected, folded = (trace(make, folds=folds, monkeypatch=monkeypatch) for folds in (False, True))
    assert folded.blocks == count
    assert folded.is_written
    expect_same(expected.graphs, folded.graphs)


@pytest.mark.parametrize("name", TRACED)
def test_blocks_that_change_or_share_memory_are_traced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, folded = (trace(TRACED[name], folds=folds, monkeypatch=monkeypatch) for folds in (False, True))
    assert folded.blocks == 0
    expect_same(expected.graphs, folded.graphs)


ENDED = {
    "a gradient missing": lambda: Branched(branching),
    "gradients in one piece of memory": lambda: JoiningEachOther(branching),
    "gradients passed on too often": lambda: Passed(passing, 6),
}


@pytest.mark.parametrize("name", ENDED)
def test_all_is_traced_where_gradients_do_not_fit_a_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, folded = (trace(ENDED[name], folds=folds, monkeypatch=monkeypatch) for folds in (False, True))
    assert folded.blocks > 0
    assert not folded.is_written
    expect_same(expected.graphs, folded.graphs)


@pytest.mark.parametrize("name", [*FOLDED, *TRACED, *ENDED])
def test_folded_blocks_train_bit_for_bit(name: str) -> None:
    make = FOLDED[name][0] if name in FOLDED else (TRACED | ENDED)[name]
    loop = simple_loop(lambda step: torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step)))
    train_both(make, loop, budget="70%")
