"""What is traced is what eager PyTorch runs, where torch's own tracing departs from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hiremate_lightning.torch_private.eager_tracing import traced_as_eager
from tests.exact import TORCH, network, simple_loop, train_both


@network(lambda: {"mix": nn.Linear(8, 8), "norm": nn.GroupNorm(4, 8), "convolution": nn.Conv2d(8, 8, 3, padding=1)})
def image(self, x: torch.Tensor) -> torch.Tensor:
    """Attention over an image, as the autoencoders of diffusion models have it, then a group norm."""
    mixed = self.mix(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)
    return self.convolution(self.norm((mixed + x) / 2))


def test_a_batch_of_one_trains():
    """A group norm copies its input or doesn't, by the stride of a dimension that has one element."""
    train_both(image, simple_loop(lambda step: torch.randn(1, 8, 6, 6)), "1 MiB")


@pytest.mark.skipif(TORCH >= (2, 14), reason="torch 2.14 was mended")
def test_torch_still_traces_it_otherwise():
    """Once no torch does that is supported, our strides for dimensions of size one can go."""
    with pytest.raises(RuntimeError, match="is_contiguous"):
        torch.compile(image(), backend="aot_eager")(torch.randn(1, 8, 6, 6))


VIEWS = {
    "image": ((1, 36, 8), (288, 8, 1), lambda x: x.transpose(1, 2).view(1, 8, 6, 6)),
    "kept": ((4, 36, 8), (288, 8, 1), lambda x: x.transpose(1, 2).view(4, 8, 6, 6)),
    "expanded": ((1, 8), (0, 1), lambda x: x.view(1, 1, 8)),
    "odd": ((1, 8, 6, 6), (5, 1, 48, 8), lambda x: x.view(1, 8, 6, 1, 6)),
}
NUMBERS = {
    name: ((1, 8, 6, 6), (stride, 1, 48, 8), function)
    for stride in (1, 5, 8, 288, 400)
    for name, function in (
        (f"divided {stride}", lambda x: x / 2),
        (f"scaled {stride}", lambda x: x * 2),
        (f"raised {stride}", lambda x: x + 2),
        (f"lowered {stride}", lambda x: x - 2),
        (f"added {stride}", lambda x: x + x),
        (f"beside {stride}", lambda x: x + torch.ones(1, 8, 6, 6)),
    )
}


@pytest.mark.parametrize(("shape", "strides", "function"), (VIEWS | NUMBERS).values(), ids=VIEWS | NUMBERS)
def test_strides_of_dimensions_of_size_one_are_those_of_kernels(shape, strides, function):
    expected = function(torch.empty_strided(shape, strides).zero_())
    with traced_as_eager(), enable_python_dispatcher(), FakeTensorMode():
        found = function(torch.empty_strided(shape, strides))
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("strides", [(6, 1), (1, 4)], ids=str)
def test_gradients_of_log_softmax_are_traced_as_kernels_do(device, strides):
    """They are contiguous, whatever they are made of; torch's own trace takes over the strides of what it reads."""
    with traced_as_eager(), FakeTensorMode():
        gradient = torch.empty_strided((4, 6), strides, device=device)
        found = torch.ops.aten._log_softmax_backward_data(gradient, gradient, 1, torch.float32)
    assert found.is_contiguous()


@network(
    lambda has_bias=True, dtype=torch.float32: {
        "cell": nn.GRUCell(32, 100, bias=has_bias),
        "out": nn.Linear(100, 8),
        "dtype": dtype,
    }
)
def cells(self, x: torch.Tensor) -> torch.Tensor:
    """A loop of GRU cells; rows of 100 numbers are no multiple of what a CPU takes at once."""
    hidden = None
    with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype.itemsize < 4):
        for step in x.unbind(1):
            hidden = self.cell(step, hidden)
        return self.out(hidden)


@pytest.mark.parametrize("options", [{}, {"has_bias": False}, {"dtype": torch.bfloat16}], ids=str)
def test_a_loop_of_gru_cells_trains(options):
    """Eager computes their gates in place, in parts of larger tensors."""
    train_both(lambda: cells(**options), simple_loop(lambda step: torch.randn(16, 6, 32)), "80%")


class Operators(TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **kwargs or {})


def test_a_gru_cell_on_another_device_is_that_of_pytorch():
    """On a GPU it is one kernel."""
    shapes = (4, 8), (4, 8), (24, 8), (24, 8), (24,), (24,)
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    with traced_as_eager(), enable_python_dispatcher(), Operators() as operators:
        torch.ops.aten.gru_cell(*tensors)
    assert torch.ops.aten.sigmoid_.default in operators.seen
