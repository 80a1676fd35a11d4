"""Max pools that save the index of each maximum within its window, where PyTorch saves it within the whole plane.

The gradient of a max pool goes to the places of the maxima. PyTorch saves the places as 64-bit integers, twice the
bytes of the maxima in single precision, and the input, of which the backward reads only the shape. Here a place is
counted from the first element of its window: one byte is enough for most windows, and the input is not saved. A pool
and its gradient process some pictures at a time with eager PyTorch's kernels, so that 64-bit integers exist for these
pictures only. Each plane is pooled independently of the others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .. import thresholds
from ..torch_private import tensor_state
from . import nodes
from .joint import Joint
from .kernels import memory_format_of, parts_of, waves

aten = torch.ops.aten

_FEW_CHANNELS = 8  # with fewer channels, the channels-last kernel has too little to vectorize

_OPERATORS: dict[int, tuple[Any, Any]] = {  # number of pooled dimensions -> operator, operator of its gradient
    2: (aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward),
    3: (aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward),
}

# Kernel size, stride, padding and dilation by dimension, and whether the output shape is rounded up (ceil_mode).
Windows = tuple[list[int], list[int], list[int], list[int], bool]


def max_pool(
    source: torch.Tensor, windows: Windows, shape: Sequence[int], form: torch.memory_format, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum of each window of pictures or volumes, and its place within the window as `dtype`.

    The results have the given shape (batch, channels, two or three dimensions) and the source's memory format `form`.
    """
    pool, _ = _OPERATORS[source.dim() - 2]
    values = torch.empty(shape, dtype=source.dtype, device=source.device, memory_format=form)
    places = torch.empty(shape, dtype=dtype, device=source.device, memory_format=form)
    first = _first_elements(source.shape[2:], shape[2:], windows, source.device)
    # On the CPU only the channels-last kernel is vectorized, which is worth a copy. It returns the same numbers.
    is_turned = source.is_cpu and form is torch.contiguous_format and source.dim() == 4 and shape[1] >= _FEW_CHANNELS
    for part in parts_of(source.shape[0], source[:1].nbytes):
        read = source[part].contiguous(memory_format=torch.channels_last) if is_turned else source[part]
        made = torch.empty_like(values[part], dtype=torch.int64)
        pool.out(read, *windows, out=values[part], indices=made)
        places[part].copy_(made.sub_(first))
    return values, places


def max_pool_gradient(
    gradient: torch.Tensor, places: torch.Tensor, windows: Windows, shape: Sequence[int], form: torch.memory_format
) -> torch.Tensor:
    """Return the gradient of a max pool with respect to its input, which had this shape and memory format."""
    _, spread = _OPERATORS[gradient.dim() - 2]
    result = torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=form)
    first = _first_elements(shape[2:], places.shape[2:], windows, gradient.device)
    for part in parts_of(shape[0], result[:1].nbytes):
        made, whole = result[part], places[part].to(torch.int64).add_(first)
        # The second argument stands for the pool's input, of which the kernel reads only the shape.
        spread.grad_input(gradient[part], made, *windows, whole, grad_input=made)
    return result


def _first_elements(
    plane: Sequence[int], pooled: Sequence[int], windows: Windows, device: torch.device
) -> torch.Tensor:
    """Return, for each window, the index within the plane of its first element that is not padding."""
    _, stride, padding, *_ = windows
    first = torch.zeros((), dtype=torch.int64, device=device)
    for size, count, step, before in zip(plane, pooled, stride, padding, strict=True):
        starts = torch.arange(-before, count * step - before, step, device=device).clamp_(min=0)
        first = first.unsqueeze(-1) * size + starts
    return first


def join(joint: Joint) -> None:
    """Make max pools save places within windows, if only the gradients of the pools read the places."""
    for dims, (pool, backward) in _OPERATORS.items():
        for node in joint.graph.find_nodes(op="call_function", target=pool.default):
            gradients = _gradients_of(node, backward.default, dims)
            if gradients:
                _replace(node, gradients, _windows_of(node.args[1:], dims))


def _eager_times(pool: fx.Node, position: int) -> int:
    """Return the factor by which the places, the second result, are larger in eager PyTorch."""
    return torch.int64.itemsize // pool.meta["val"][position].itemsize if position == 1 else 1


nodes.register(max_pool, nodes.Operation(eager_times=_eager_times, is_fresh=True))
nodes.register(  # eager PyTorch's gradient also reads the pool's input
    max_pool_gradient,
    nodes.Operation(eager_reads=lambda node: (nodes.source_of(nodes.operation_of(node.all_input_nodes[1])),)),
)


def _replace(pool: fx.Node, gradients: Sequence[fx.Node], windows: Windows) -> None:
    source: Any = pool.args[0]
    values, places = pool.meta["val"]
    form = memory_format_of(source.meta["val"])
    dtype = _dtype_of_places(source.meta["val"].shape[2:], windows)
    with tensor_state.fake_mode_of([places]):
        nodes.show_as(_places_of(pool), places.to(dtype))
    for gradient in gradients:
        args = (gradient.args[0], gradient.args[-1], windows, list(source.meta["val"].shape), form)
        nodes.replace_node(gradient, max_pool_gradient, args)
    nodes.replace_node(pool, max_pool, (source, windows, list(values.shape), form, dtype))


def _places_of(pool: fx.Node) -> Any:
    """Return the places of a max pool, None if nothing reads them."""
    return next((part for part in nodes.values_of(pool) if part.args[1] == 1), None)


def _gradients_of(pool: fx.Node, backward: Any, dims: int) -> list[fx.Node]:
    """List the gradients that read a max pool's places; [] if other nodes read these, or if it can't be replaced."""
    source: Any = pool.args[0]
    shown: torch.Tensor = source.meta["val"]
    places = _places_of(pool)
    if places is None or pool.kwargs or tensor_state.is_symbolic(shown) or shown.dim() != dims + 2:
        return []
    form = memory_format_of(shown)
    made = [*pool.meta["val"], *(n.meta["val"] for n in places.users if n.target is backward)]
    if form is None or not all(t.is_contiguous(memory_format=form) for t in made):
        return []
    if not shown.numel() or places.meta["val"].nbytes < thresholds.current.pooled_bytes * shown.shape[0]:
        return []
    if not _gives_the_same(dims, form, shown.device, shown.dtype):
        return []
    windows = _windows_of(pool.args[1:], dims)
    are_all = all(
        n.target is backward and not n.kwargs and n.args[1] is source and _windows_of(n.args[2:-1], dims) == windows
        for n in places.users
    )
    return list(places.users) if are_all else []


@functools.cache
def _gives_the_same(dims: int, form: torch.memory_format, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether pools here equal PyTorch's on windows with nan, with equal values, and with minus infinity alone.

    For channels-last volumes, PyTorch 2.13 returns places outside of windows that hold only minus infinity.
    """
    pool, backward = _OPERATORS[dims]
    windows: Windows = ([3] * dims, [2] * dims, [1] * dims, [1] * dims, False)
    with tensor_state.real_mode(), torch.no_grad():
        source = _odd_numbers((3, 37, 9, 7, 5)[: dims + 2]).to(device, dtype).contiguous(memory_format=form)
        try:
            expected, whole = pool(source, *windows)
            gradient = _odd_numbers(tuple(expected.shape)).to(device, dtype).nan_to_num_(1, 2, 3)
            arrived = backward(gradient, source, *windows, whole)
            narrow = _dtype_of_places(source.shape[2:], windows)
            values, places = max_pool(source, windows, list(expected.shape), form, narrow)
            spread = max_pool_gradient(gradient, places, windows, list(source.shape), form)
        except (RuntimeError, NotImplementedError):  # PyTorch has no such kernel on this device
            return False
        return torch.equal(values.nan_to_num(), expected.nan_to_num()) and torch.equal(spread, arrived)


def _odd_numbers(shape: tuple[int, ...]) -> torch.Tensor:
    """Make whole numbers with some planes of minus infinity, and some elements nan or infinity."""
    numbers = waves(shape).round_()
    numbers.view(-1)[::41], numbers.view(-1)[5::101] = torch.nan, torch.inf
    numbers[1:, ::4] = -torch.inf
    return numbers


def _windows_of(arguments: Sequence[Any], dims: int) -> Windows:
    """Return the windows of a max pool by dimension; arguments that are left out get their defaults."""
    all_arguments: Any = (*arguments, *([], 0, 1, False)[len(arguments) - 1 :])
    kernel, stride, padding, dilation, is_ceil = all_arguments

    def each(value: Any) -> list[int]:
        values = [value] if isinstance(value, int) else list(value)
        return values * dims if len(values) == 1 else values

    return each(kernel), each(stride) or each(kernel), each(padding), each(dilation), bool(is_ceil)


def _dtype_of_places(plane: Sequence[int], windows: Windows) -> torch.dtype:
    """Return the narrowest integer dtype that can count from the first element of a window to its last."""
    kernel, _, _, dilation, _ = windows
    span = 0
    for size, length, gap in zip(plane, kernel, dilation, strict=True):
        span = span * size + (length - 1) * gap
    return next(d for d in (torch.uint8, torch.int16, torch.int32, torch.int64) if span <= torch.iinfo(d).max)
