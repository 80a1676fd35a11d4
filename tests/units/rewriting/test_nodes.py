"""Where traces say other strides than kernels give is known, so that nothing relies on these."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from hiremate_lightning.rewriting.nodes import may_lie_otherwise, operation_of
from tests.exact import captured_by

aten = torch.ops.aten
N, C, S = 4, 8, 6


def contiguous(*shape: int) -> Tensor:
    return torch.rand(shape)


def transposed(*shape: int) -> Tensor:
    return torch.rand(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def channels_last(*shape: int) -> Tensor:
    return torch.rand(shape).to(memory_format=torch.channels_last)


def batch_second(*shape: int) -> Tensor:
    return torch.rand(shape[1], shape[0], *shape[2:]).transpose(0, 1)


ROWS, PICTURES = (contiguous, transposed), (contiguous, channels_last, batch_second)
EVERY = [True, True, True]
CONVOLUTION = (torch.rand(C, C, 3, 3), [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, EVERY)
GROUPS = (torch.rand(N, 2), torch.rand(N, 2), torch.rand(C), N, C, S * S, 2, EVERY)
Make = Callable[..., tuple[Any, tuple[Any, ...]]]


def two(target: Any, *rest: Any, shape: tuple[int, ...] = (N, C, S, S), first: tuple[Any, ...] = ()) -> Make:
    """Call an operator with a gradient and a value of one shape, and with what comes before and after them."""
    return lambda g, x: (target, (*first, g(*shape), x(*shape), *rest))


def norm(target: Any, *shape: int) -> Make:
    statistics, weight = torch.rand(*shape[:-1], 1), torch.rand(shape[-1])
    return two(target, shape[-1:], statistics, statistics, weight, weight, EVERY, shape=shape)


def batch_norm(*shape: int) -> Make:
    return two(aten.native_batch_norm_backward.default, *[torch.rand(C)] * 5, True, 1e-5, EVERY, shape=shape)


BACKWARDS: dict[str, tuple[tuple[Any, ...], Make]] = {
    "layer norm": (ROWS, norm(aten.native_layer_norm_backward.default, N, S, C)),
    "layer norm of pictures": (PICTURES, norm(aten.native_layer_norm_backward.default, N, C, S, S)),
    "batch norm": (PICTURES, batch_norm(N, C, S, S)),
    "batch norm of rows": (ROWS, batch_norm(N, C, S)),
    "group norm": (PICTURES, two(aten.native_group_norm_backward.default, *GROUPS)),
    "log softmax": (ROWS, two(aten._log_softmax_backward_data.default, -1, torch.float32, shape=(N, S, C))),
    "softmax": (ROWS, two(aten._softmax_backward_data.default, -1, torch.float32, shape=(N, S, C))),
    "gelu": (PICTURES, two(aten.gelu_backward.default)),
    "silu": (PICTURES, two(aten.silu_backward.default)),
    "mish": (PICTURES, two(aten.mish_backward.default)),
    "hardswish": (PICTURES, two(aten.hardswish_backward.default)),
    "sigmoid": (PICTURES, two(aten.sigmoid_backward.default)),
    "tanh": (PICTURES, two(aten.tanh_backward.default)),
    "relu": (PICTURES, two(aten.threshold_backward.default, 0)),
    "leaky relu": (PICTURES, two(aten.leaky_relu_backward.default, 0.1, False)),
    "hardtanh": (PICTURES, two(aten.hardtanh_backward.default, -1.0, 1.0)),
    "softplus": (PICTURES, two(aten.softplus_backward.default, 1.0, 20.0)),
    "elu": (
        PICTURES,
        lambda g, x: (aten.elu_backward.default, (g(N, C, S, S), 1.0, 1.0, 1.0, False, x(N, C, S, S))),
    ),
    "dropout": (
        PICTURES,
        lambda g, x: (aten.native_dropout_backward.default, (g(N, C, S, S), x(N, C, S, S) > 0.5, 2.0)),
    ),
    "glu": (PICTURES, lambda g, x: (aten.glu_backward.default, (g(N, C // 2, S, S), x(N, C, S, S), 1))),
    "convolution": (PICTURES, two(aten.convolution_backward.default, *CONVOLUTION)),
    "mean square": (ROWS, two(aten.mse_loss_backward.default, 1, shape=(N, S, C), first=(torch.tensor(1.0),))),
    "add": (PICTURES, two(aten.add.Tensor)),
    "mul": (PICTURES, two(aten.mul.Tensor)),
    "matrices": (ROWS, two(aten.bmm.default, shape=(N, S, S))),
    "upsampling": (
        PICTURES,
        lambda g, _: (aten.upsample_nearest2d_backward.default, (g(N, C, S, S), [S, S], [N, C, 3, 3])),
    ),
}


def traced(target: Any, arguments: tuple[Any, ...]) -> fx.Node:
    """Make a node that calls an operator, with what a trace knows about it."""
    mode, graph = FakeTensorMode(), fx.Graph()
    faked = tree_map(lambda a: mode.from_tensor(a) if isinstance(a, Tensor) else a, arguments)

    def placeholder(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    node = graph.call_function(target, tree_map(placeholder, faked))
    with mode:
        node.meta["val"] = target(*faked)
    return node


def strides(value: Any) -> list[tuple[int, ...]]:
    return [t.stride() for t in tree_leaves(value) if isinstance(t, Tensor) and t.dim() > 1 and t.numel() > C * C * 9]


@pytest.mark.parametrize(("layouts", "make"), BACKWARDS.values(), ids=BACKWARDS)
def test_strides_are_as_traced_or_not_relied_on(layouts, make):
    for layout in itertools.product(layouts, repeat=2):
        target, arguments = make(*layout)
        node = traced(target, arguments)
        if strides(target(*arguments)) != strides(node.meta["val"]):
            assert may_lie_otherwise(node), layout


@pytest.mark.parametrize("layout", [contiguous, channels_last], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", [name for name, (layouts, _) in BACKWARDS.items() if layouts is PICTURES])
def test_strides_of_tensors_that_lie_alike_are_relied_on(name, layout):
    if layout is channels_last and name in ("glu", "layer norm of pictures"):
        return  # contiguous results
    assert not may_lie_otherwise(traced(*BACKWARDS[name][1](layout, layout)))


class Residuals(torch.nn.Module):
    """Adds linear layers of norms to what they read; transposed in between, as conformers do, or not."""

    def __init__(self, transposes: bool) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(64) for _ in range(3))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.last = torch.nn.Linear(64, 8)
        self.dims = (1, 2) if transposes else (1, 1)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x).transpose(*self.dims)).transpose(*self.dims)
        return self.last(x)


@pytest.mark.parametrize("transposes", [False, True], ids=["alike", "transposed"])
def test_sums_overwrite_where_their_terms_lie_as_traced(transposes):
    captured = captured_by(Residuals(transposes), torch.randn(8, 64, 64))
    terms = [operation_of(term) for node in captured.overwrites for term in node.all_input_nodes]
    assert bool([term for term in terms if "layer_norm_backward" in str(term.target)]) is not transposes
