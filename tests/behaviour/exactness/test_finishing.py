"""Elementwise operations of the forward compute into what only they read, nowhere else, and no number changes by it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hiremate_lightning.capturing.capture import Captured
from hiremate_lightning.measuring.profiling import CostCache, measure
from hiremate_lightning.records.schedule import keep_all
from tests.behaviour.exactness.test_execution import every_other_kept, exact_by, nothing_kept
from tests.behaviour.exactness.test_overwriting import autocast, captured_of
from tests.exact import added_peaks, network, simple_loop, train_both

ROWS, WIDTH = 64, 32
BACKWARDS = torch.arange(ROWS).flip(0)


def finished(captured: Captured) -> list[str]:
    """List what finishes something, in order, without the views between."""
    steps = [step for finish in captured.finishes.values() for step in finish.steps]
    return [step.target.overloadpacket.__name__ for step in steps if "view" not in step.target.name()]


CHOICES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "one": (lambda f, x: f[1](f[0](x).relu()), ["relu"]),
    "chain": (lambda f, x: f[1](((f[0](x) + x) / 2).relu()), ["add", "div", "relu"]),
    "in place": (lambda f, x: f[1](f[0](x).mul_(2).relu_()), ["mul", "relu"]),
    "the later of two": (lambda f, x: f[2](f[0](x) + f[1](x)), ["add"]),
    "view": (lambda f, x: f[1](f[0](x).view(2, -1, WIDTH).sigmoid()), ["sigmoid"]),
    "product of matrices": (lambda f, x: f[1](torch.matmul(x.view(2, -1, WIDTH), f[0].weight).sigmoid()), ["sigmoid"]),
    "rows": (lambda f, x: f[1]((f[0](x) / 8).softmax(-1)), ["div", "softmax"]),
    "rows of a copy": (lambda f, x: f[1](f[0](x).double().view(4, -1).softmax(1).float().view(x.shape)), ["softmax"]),
    "columns": (lambda f, x: f[1](f[0](x).t().softmax(-1).t().contiguous()), []),
    "read by its gradient": (lambda f, x: f[1](F.gelu(f[0](x))), []),
    "read twice": (lambda f, x: (lambda y: f[1](y.relu()) + y)(f[0](x)), ["add"]),
    "reads itself": (lambda f, x: (lambda y: f[1](y + y))(f[0](x)), []),
    "put into itself": (lambda f, x: (lambda y: f[1](y.index_put((BACKWARDS,), y)))(f[0](x)), []),
    "added to itself": (lambda f, x: (lambda y: f[1](y.index_add(0, BACKWARDS, y)))(f[0](x)), []),
    "returned": (lambda f, x: (lambda y: (y, y.relu()))(f[0](x)), []),
    "returned when finished": (lambda f, x: f[0](x).relu(), ["relu"]),
    "returned as a view": (lambda f, x: f[0](x).view(2, -1, WIDTH).relu(), []),
    "returned behind a view": (lambda f, x: (f[0](x).view(2, -1, WIDTH) + 1) * 2, ["add"]),
    "the batch": (lambda f, x: f[1](x.relu()), []),
    "smaller": (lambda f, x: f[1](f[0](x[:1]) + x), []),
    "another type": (lambda f, x: f[1](f[0](x).to(torch.float64).relu().float()), ["relu"]),
    "part of a block": (lambda f, x: f[1](torch.cat([h.relu() for h in f[0](x).chunk(2, 1)], 1)), []),
    "dropout": (lambda f, x: f[1](F.dropout(f[0](x), 0.5) + x), ["add"]),
}


@pytest.mark.parametrize(("function", "expected"), CHOICES.values(), ids=CHOICES)
def test_only_what_nothing_else_reads_is_finished(function, expected):
    # The graph ends the list of "read twice" with the addition to a linear layer's result.
    assert [name.lstrip("_") for name in finished(captured_of(function))] == expected


def test_what_finishes_belongs_to_one_node_that_allocates_once():
    graph = captured_of(lambda f, x: f[1]((f[0](x) + x).relu())).graph
    (node,) = (i for i in graph.forward if "relu" in graph.nodes[i].key)
    assert graph.nodes[node].op == "aten.addmm.default"
    assert graph.allocates[node] == tuple(graph.tensors[t].storage for t in graph.nodes[node].outputs)
    assert len(graph.allocates[node]) == 1
    assert not [n for n in graph.nodes if n.op in ("aten.relu.default", "aten.add.Tensor")]


def test_small_values_are_finished_in_memory_of_their_own(change_thresholds):
    """So their graph is that of large ones, and no time is spent on looking whether their memory is free."""
    captured = captured_of(lambda f, x: f[1](f[0](x).relu()))
    ((node, finish),) = captured.finishes.items()
    assert [step.target for step in finish.steps] == [torch.ops.aten.relu.default]
    index = captured.fx_nodes.index(node)
    assert measure(captured, CostCache()).workspace_bytes[index] == 0
    change_thresholds(finished_bytes=4 * ROWS * WIDTH + 1)
    assert measure(captured, CostCache()).workspace_bytes[index] == 4 * ROWS * WIDTH


def test_graphs_of_all_batch_sizes_are_alike(change_thresholds):
    """Or what is known of one would say nothing about another: the largest batch is searched by that."""

    def graph_of(rows: int):
        return captured_of(
            lambda f, x: F.cross_entropy(f[1](f[0](x).relu()), x.argmax(1)), torch.randn(rows, WIDTH)
        ).graph

    change_thresholds(finished_bytes=4 * 8 * ROWS * WIDTH, row_bytes=4 * WIDTH)
    small, large = graph_of(ROWS), graph_of(64 * ROWS)
    assert small.difference(large) is None
    assert "hiremate.cross_entropy" in {node.op for node in small.nodes}


# ---------------------------------------------------------------- training


@network(
    lambda: {
        **{name: nn.Conv2d(4, 4, 3, padding=1) for name in ("first", "second")},
        "norm": nn.BatchNorm2d(4),
        "scale": nn.Parameter(torch.ones(4, 1, 1)),
        "dropout": nn.Dropout(0.2),
        "linear": nn.Linear(8, 8),
    }
)
def block(self, x: Tensor) -> Tensor:
    """Whatever can be finished: normalised, dropped, drawn, attended, and what joins a shortcut."""
    y = torch.relu(self.norm(self.first(x)) + x)
    y = self.dropout(self.second(y)) + y
    y = y + torch.rand_like(y) * 0.1 + torch.bernoulli(torch.full_like(y, 0.5)).mul_(0.1)
    weights = F.softmax((y @ y.transpose(-1, -2)) / 3, -1)
    y = F.dropout(weights, 0.1) @ y + x
    return self.linear(y).tanh() * self.scale + x


def blocks() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), block(), block())


@network(lambda: {"layers": nn.ModuleList(nn.Linear(8, 24) for _ in range(2)), "head": nn.Linear(8, 11)})
def attention(self, x: Tensor) -> Tensor:
    """Attention in half precision with softmaxes in single precision, then the loss of a language model."""
    x = x.bfloat16().flatten(1, 2)
    for layer in self.layers:
        queries, keys, values = layer(x).chunk(3, -1)
        weights = F.softmax(queries @ keys.transpose(1, 2), dim=-1, dtype=torch.float32).to(x.dtype)
        x = x + F.dropout(weights, 0.1) @ values
    scores = self.head(x).float().flatten(0, 1)
    return F.cross_entropy(scores, torch.arange(len(scores)) % 11, label_smoothing=0.1)


@network(lambda: {"layer": nn.Linear(8, 8), "shift": torch.zeros(8)})
def moving(self, x: Tensor) -> Tensor:
    """Overwrites a buffer, which is read in its time."""
    y = self.layer(x)
    self.shift += y.detach().mean((0, 1, 2))
    return (self.layer(x) + self.shift).relu()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "blocks": blocks,
    "channels last": lambda: blocks().to(memory_format=torch.channels_last),
    "autocast": lambda: autocast(blocks()),
    "attention": lambda: attention().bfloat16(),
    "a buffer": moving,
}


def pictures(index: int) -> Tensor:
    return torch.randn(4, 3, 8, 8)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("budget", ["100%", "30%"])
def test_training_is_exact(make, budget):
    train_both(make, simple_loop(pictures), budget)


@pytest.mark.parametrize("decide", [keep_all, nothing_kept, every_other_kept])
def test_every_schedule_is_exact(decide):
    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(1)
        return blocks(), pictures(0).requires_grad_()

    exact_by(decide, make)


@network(lambda: {"layer": nn.Linear(WIDTH, WIDTH), "scale": nn.Parameter(torch.ones(16, 1, WIDTH))})
def wide(self, x: Tensor) -> Tensor:
    """What is large has no gradient, and is gone before the rest begins."""
    with torch.no_grad():
        large = ((x * self.scale).mul(3).sub(1)).sigmoid().sum(0)
    return self.layer(large).square().mean()


def test_the_peak_falls_and_is_what_was_planned(change_thresholds):
    x = torch.randn(ROWS, WIDTH)
    one = 4 * 16 * x.numel()
    plainly, planned = added_peaks(wide(), x)
    assert planned <= plainly - 0.9 * one
    change_thresholds(finished_bytes=2**40)
    assert planned <= added_peaks(wide(), x)[1] - 0.9 * one


@pytest.fixture
def _compiled_code_of_another_thread() -> Iterator[None]:
    """Let compiled code run in another thread: TorchDynamo then watches the frames of all threads."""
    runs, is_over = threading.Event(), threading.Event()

    def wait() -> None:
        runs.set()
        is_over.wait()

    thread = threading.Thread(target=torch.compile(wait, backend="eager"))
    thread.start()
    runs.wait()
    yield
    is_over.set()
    thread.join()


@pytest.mark.usefixtures("_compiled_code_of_another_thread")
def test_the_peak_is_as_planned_beside_compiled_code(change_thresholds):
    change_thresholds(finished_bytes=2**40)  # each operation of a chain then has memory of its own
    added_peaks(wide(), torch.randn(ROWS, WIDTH))
