"""How the result of a batch norm comes back, bit for bit, from the statistics that its first run leaves.

A batch norm in training reads its input for the mean, for the variance and to normalise it. The backward reads mean and
inverse deviation in any case, two numbers a channel. From these, the last reading alone gives the result again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from ..torch_private import tensor_state
from .kernels import memory_format_of

aten = torch.ops.aten

_IN_TRAINING: dict[Any, int] = {  # and which argument tells that they train
    aten._native_batch_norm_legit_functional.default: 5,
    aten._native_batch_norm_legit.no_stats: 3,
}


def normalize(
    source: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
) -> torch.Tensor:
    """Normalise as a batch norm in training does once it has its statistics.

    Args:
        source: What the batch norm reads, channels in dimension 1.
        weight: By channel, None for ones.
        bias: By channel, None for zeros.
        mean: By channel.
        inverse_deviation: By channel.

    Returns:
        The batch norm's result.
    """
    if source.is_cuda:
        return torch.batch_norm_elemt(source, weight, bias, mean, inverse_deviation, 0.0)
    precise = torch.promote_types(source.dtype, torch.float32)  # in which kernels compute
    scale, shift = inverse_deviation.to(precise), None if bias is None else bias.to(precise)
    if weight is not None:
        scale = scale * weight.to(precise)
    # The kernel of inference scales by weight / sqrt(variance + epsilon), that of training by the product above.
    ones = torch.ones_like(scale)
    return torch.native_batch_norm(source, scale, shift, mean.to(precise), ones, False, 0.0, 0.0)[0]


def can_normalize(node: fx.Node) -> bool:
    """Whether a captured node is a batch norm whose result `normalize` gives again; the same for all batch sizes."""
    arguments: Any = node.args
    position = _IN_TRAINING.get(node.target)
    if position is None or not arguments[position]:
        return False
    source: torch.Tensor = arguments[0].meta["val"]
    layout = memory_format_of(source)
    if layout is None:
        return False
    dtypes = (None if a is None else a.meta["val"].dtype for a in arguments[1:3])
    return _gives_the_same(node.target, source.device, source.dim(), layout, source.dtype, *dtypes)


@functools.cache
def _gives_the_same(
    target: Any,
    device: torch.device,
    dims: int,
    layout: torch.memory_format,
    dtype: torch.dtype,
    *parameters: torch.dtype | None,
) -> bool:
    """Compare both kernels of this build of torch on numbers of this kind: how they round is nobody's promise."""
    channels = 37
    with tensor_state.real_mode(), torch.no_grad():
        source = _numbers((3, channels, 5, 7, 3)[:dims], device, dtype).contiguous(memory_format=layout)
        weight, bias = (None if p is None else _numbers((channels,), device, p) for p in parameters)
        counted = torch.zeros(channels, device=device, dtype=parameters[0] or torch.promote_types(dtype, torch.float32))
        running = () if target is aten._native_batch_norm_legit.no_stats else (counted, counted + 1)
        try:
            expected, mean, inverse, *_ = target(source, weight, bias, *running, True, 0.1, 1e-5)
            found = normalize(source, weight, bias, mean, inverse)
        except (RuntimeError, NotImplementedError):  # no kernel for it here
            return False
        return torch.equal(found, expected) and found.stride() == expected.stride() and found.dtype == expected.dtype


def _numbers(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Make numbers of all magnitudes around one, without a generator."""
    count = torch.Size(shape).numel()
    return (
        torch.arange(1, count + 1, dtype=torch.float64).mul_(1.7).sin_().mul_(3).add_(0.3).view(shape).to(device, dtype)
    )
