"""Replay nodes: recompute results of random operations, dropouts and batch norms bit for bit, without a second run.

A random operation can't run again as it is: a replay draws again from the saved generator state, and then restores the
generator, so that later numbers are those of eager training. The output of a dropout is recomputed as input times mask.
The mask, one byte per element, need not be saved, since it can be drawn again. A state takes 5 kB on the CPU and no
device memory on CUDA.
A batch norm in training mode reads its input three times: for the mean, the variance, and the normalised result. Its
backward needs mean and inverse deviation anyway, two numbers per channel. A replay reads the input once and normalises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from ..torch_private import tensor_state
from .kernels import apply_dropout_mask, as_eager, draw_mask, eager_scale, memory_format_of, waves
from .kernels import dropout as dropout_on_host
from .nodes import is_of_torch

aten = torch.ops.aten

APPLY_MASK = "hiremate.apply_dropout_mask"  # reads the dropout's input and mask; returns its output
DRAW_MASK = "hiremate.draw_dropout_mask"  # reads a generator state; returns the dropout's mask
DRAW_AGAIN = "hiremate.draw_again"  # reads the operation's inputs and a generator state; returns all its outputs
NORMALIZE = "hiremate.normalize"  # reads the batch norm's inputs, mean and inverse deviation; returns its output

OperatorCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def call_of(op: str, drawn: fx.Node, inputs: Sequence[fx.Node]) -> OperatorCall:
    """Return the function that a replay node runs, and its arguments, in which FX nodes stand for values.

    `inputs` may end with further inputs of the operations that finish `drawn`, a random operation or batch norm.
    """
    if op in (APPLY_MASK, DRAW_MASK):
        source, probability = cast("tuple[fx.Node, float]", drawn.args[:2])
        if op == APPLY_MASK:
            return apply_dropout_mask, (*inputs[:2], eager_scale(source, probability)), {}
        shown: torch.Tensor = source.meta["val"]
        size = tuple(map(tensor_state.int_hint, shown.shape))
        return draw_mask_again, (inputs[-1], size, shown.dtype, shown.device, probability), {}
    if op == NORMALIZE:
        read = drawn.args[:3]
        first = len({a for a in read if isinstance(a, fx.Node)})
        return normalize, (*read, *inputs[first : first + 2]), {}
    target, args = as_eager(drawn)
    return again(target), (inputs[-1], _device(drawn), *args), dict(drawn.kwargs)


def generator_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's default generator, a tensor in host memory."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def mask_state(device: torch.device, source: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the generator's state before a dropout, and the strides of the dropout's input.

    A mask is drawn in the input's order in memory, and the input may have other strides than traced.
    """
    return generator_state(device), source.stride()


@functools.cache
def again(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that draws from a given state: it takes the state, the device, and the arguments of `draw`."""

    def draw_again(state: torch.Tensor, device: torch.device, /, *args: Any, **kwargs: Any) -> Any:
        before, on_device = generator_state(device), functools.partial(torch.cuda.set_rng_state, device=device)
        put = on_device if device.type == "cuda" else torch.set_rng_state
        put(state)
        try:
            return draw(*args, **kwargs)
        finally:
            put(before)

    name = str(getattr(draw, "__name__", draw)).replace(".", "_")
    draw_again.__name__ = draw_again.__qualname__ = f"{name}_again"
    return draw_again


def add_state(joint: fx.Graph, drawn: fx.Node) -> fx.Node:
    """Insert and return the node whose value is the generator's state before a random operation.

    For a dropout, the node lacks the second argument, so that it keeps no value alive; `state_arguments` adds it.
    """
    is_dropout = drawn.target is aten.native_dropout.default
    with joint.inserting_before(drawn):
        state = joint.call_function(mask_state if is_dropout else generator_state, (_device(drawn),))
    with tensor_state.fake_mode_of([drawn.meta["val"]]):
        state.meta["val"] = torch.empty(generator_state(torch.device("cpu")).shape, dtype=torch.uint8)
    return state


def is_state(node: fx.Node) -> bool:
    """Whether a node was inserted by `add_state`."""
    return node.target in (generator_state, mask_state)


def state_arguments(state: fx.Node, drawn: fx.Node, value_of: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return all arguments of a state's node; `value_of` maps the input of a dropout to its value."""
    return (*state.args, value_of(drawn.args[0])) if state.target is mask_state else state.args


def _device(drawn: fx.Node) -> torch.device:
    return tensor_state.tensors_among(drawn.meta["val"])[0].device


def can_draw_again(node: fx.Node) -> bool:
    """Whether a random operation that mutates nothing draws only from the default generator of its device."""
    target: Any = node.target
    if not is_of_torch(target) or "rnn" in str(target) or _device(node).type not in ("cpu", "cuda"):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags and node.kwargs.get("generator") is None


def draw_mask_of(
    size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, probability: float
) -> torch.Tensor:
    """Draw the mask of a dropout with such an input; on CUDA, run a dropout, whose kernel draws and applies at once."""
    if device.type == "cuda":
        source = torch.empty_strided(size, strides, dtype=dtype, device=device)
        return torch.native_dropout(source, probability, train=True)[1]
    return draw_mask(torch.empty_strided(size, strides, device="meta"), probability, device)


def draw_mask_again(
    before: tuple[torch.Tensor, tuple[int, ...]],
    size: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    probability: float,
) -> torch.Tensor:
    """Draw the mask of a dropout again; `before` is the result of `mask_state` before the dropout."""
    state, strides = before
    mask: torch.Tensor = again(draw_mask_of)(state, device, size, strides, dtype, device, probability)
    return mask


def can_draw_mask(dropout: fx.Node, is_allocated: bool) -> bool:
    """Whether `draw_mask_of` draws the same mask as a captured dropout, whose input the step itself may allocate.

    CUDA's kernel draws by the alignment of its input, known only if the input begins a block that the step allocates.
    """
    source, probability = dropout.args[:2]
    if not isinstance(source, fx.Node) or not isinstance(probability, float):
        return False
    if as_eager(dropout)[0] is dropout_on_host:
        return True
    begins_block = is_allocated and tensor_state.int_hint(source.meta["val"].storage_offset()) == 0
    return _device(dropout).type == "cuda" and begins_block


# ---------------------------------------------------------------- a batch norm from its statistics

_IN_TRAINING: dict[Any, int] = {  # batch norm -> position of the argument that is True in training mode
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
    """Return the output of a batch norm in training mode from its statistics; channels are in dimension 1."""
    if source.is_cuda:
        return torch.batch_norm_elemt(source, weight, bias, mean, inverse_deviation, 0.0)
    precise = torch.promote_types(source.dtype, torch.float32)  # dtype in which the kernels compute
    scale, shift = inverse_deviation.to(precise), None if bias is None else bias.to(precise)
    if weight is not None:
        scale = scale * weight.to(precise)
    # The inference kernel scales by weight / sqrt(variance + epsilon). Variance 1 and epsilon 0 make that `scale`.
    ones = torch.ones_like(scale)
    return torch.native_batch_norm(source, scale, shift, mean.to(precise), ones, False, 0.0, 0.0)[0]


def can_normalize(node: fx.Node) -> bool:
    """Whether a node is a batch norm whose result `normalize` reproduces; equal for all batch sizes."""
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
    """Whether `normalize` equals the batch norm of this build of torch on test numbers; PyTorch doesn't promise it."""
    channels = 37
    with tensor_state.real_mode(), torch.no_grad():
        numbers = waves((3, channels, 5, 7, 3)[:dims]).add_(0.3)
        source = numbers.to(device, dtype).contiguous(memory_format=layout)
        of_channels = waves((channels,)).add_(0.3)
        weight, bias = (None if p is None else of_channels.to(device, p) for p in parameters)
        counted = torch.zeros(channels, device=device, dtype=parameters[0] or torch.promote_types(dtype, torch.float32))
        running = () if target is aten._native_batch_norm_legit.no_stats else (counted, counted + 1)
        try:
            expected, mean, inverse, *_ = target(source, weight, bias, *running, True, 0.1, 1e-5)
            result = normalize(source, weight, bias, mean, inverse)
        except (RuntimeError, NotImplementedError):  # PyTorch has no such kernel on this device
            return False
        return torch.equal(result, expected) and result.stride() == expected.stride() and result.dtype == expected.dtype
