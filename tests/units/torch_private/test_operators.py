"""Operators are called by the fastest function that does the same, and by no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from hiremate_lightning.torch_private.operators import schema_call, shortest

aten = torch.ops.aten


def node_of(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Make a node that calls an operator; tensors stand for values of the graph."""
    graph = fx.Graph()

    def value(argument: Any) -> Any:
        if isinstance(argument, list):
            return [value(a) for a in argument]
        if not isinstance(argument, torch.Tensor):
            return argument
        placeholder = graph.placeholder("x")
        placeholder.meta["val"] = argument
        return placeholder

    return graph.call_function(target, tuple(value(a) for a in args), {k: value(a) for k, a in kwargs.items()})


X, CUBE = torch.randn(4, 4), torch.randn(2, 3, 4)
FAST = {
    "add": (aten.add.Tensor, (X, X), {}),
    "add, scaled": (aten.add.Tensor, (X, X), {"alpha": 2}),
    "add a number": (aten.add.Tensor, (X, 1.5), {}),
    "addmm": (aten.addmm.default, (X, X, X), {}),
    "bmm": (aten.bmm.default, (CUBE, CUBE.mT.contiguous()), {}),
    "cat": (aten.cat.default, ([X, X], 1), {}),
    "clone": (aten.clone.default, (X,), {"memory_format": torch.contiguous_format}),
    "convolution": (aten.convolution.default, (CUBE, CUBE, None, [1], [0], [1], False, [0], 1), {}),
    "embedding": (aten.embedding.default, (X, torch.zeros(3, dtype=torch.int64)), {}),
    "expand": (aten.expand.default, (X, [2, 4, 4]), {}),
    "gelu": (aten.gelu.default, (X,), {"approximate": "tanh"}),
    "mean": (aten.mean.dim, (X, [1], True), {}),
    "mm": (aten.mm.default, (X, X), {}),
    "norm": (aten.native_layer_norm.default, (X, [4], None, None, 1e-5), {}),
    "permute": (aten.permute.default, (CUBE, [2, 0, 1]), {}),
    "reshape": (aten.reshape.default, (X, [16]), {}),
    "reshape, by a copy": (aten.reshape.default, (X.t(), [16]), {}),
    "power": (aten.pow.Tensor_Scalar, (X, 2), {}),
    "select": (aten.select.int, (X, 0, 1), {}),
    "sum": (aten.sum.dim_IntList, (X, [0], True), {}),
    "transpose": (aten.transpose.int, (X, 0, 1), {}),
    "view": (aten.view.default, (X, [16]), {}),
}
OTHERS = {
    "a number that is no tensor": (aten.mul.Scalar, (X, 2.0), {}),
    "no function": (aten.slice.Tensor, (X, 0, 1, 3), {}),
    "a tensor of no dimensions": (aten.pow.Scalar, (2.0, X), {}),
    "a tensor from nothing": (aten.full.default, ([3], 2.0), {}),
    "a backward": (aten.gelu_backward.default, (X, X), {}),
}


@pytest.mark.parametrize(("target", "args", "kwargs"), FAST.values(), ids=FAST)
def test_common_calls_have_a_faster_function(target, args, kwargs):
    function = shortest(node_of(target, *args, **kwargs))
    assert function is not schema_call(target)
    assert function.__name__ == target.overloadpacket.__name__
    assert "torch._ops" not in repr(function)


@pytest.mark.parametrize(("target", "args", "kwargs"), (FAST | OTHERS).values(), ids=FAST | OTHERS)
def test_a_faster_function_gives_the_same_result(target, args, kwargs):
    expected = target(*args, **kwargs)
    found = shortest(node_of(target, *args, **kwargs))(*args, **kwargs)
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


def test_operators_without_an_equal_function_are_called_as_such():
    """`torch.mul` with a number calls `mul.Tensor`, which is not what was captured; other forms are looked at anew."""
    assert shortest(node_of(aten.mul.Tensor, X, X)) is torch.mul
    for number in (2.0, 3):
        assert shortest(node_of(aten.mul.Scalar, X, number)) is schema_call(aten.mul.Scalar)
    assert shortest(node_of(torch.sin, X)) is torch.sin
    node = node_of(aten.add.Tensor, X, X)
    node.args[0].meta.clear()
    assert shortest(node) is schema_call(aten.add.Tensor)


def test_a_default_device_changes_nothing():
    made = shortest(node_of(aten.full.default, [3], 2.0))
    with torch.device("meta"):
        assert torch.full([3], 2.0).device.type == "meta"
        assert made([3], 2.0).device.type == "cpu"


def test_operators_of_others_are_called_as_they_are():
    @torch.library.custom_op("hiremate_tests::add", mutates_args=())
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Not what `torch.add` does."""
        return x - y

    target = torch.ops.hiremate_tests.add.default
    assert torch.equal(shortest(node_of(target, X, X))(X, X), torch.zeros(4, 4))
