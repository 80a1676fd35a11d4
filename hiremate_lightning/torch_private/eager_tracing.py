"""Tracing of the very operators that eager PyTorch runs, with the strides that they give.

PyTorch's tables of decompositions are private; `test_torch_private.py` says on which versions this was checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch._dynamo  # before AOTAutograd, which imports it in a circle
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._dispatch.python import no_python_dispatcher
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import runtime_wrappers
from torch._guards import StorageOverlap, TracingContext
from torch._inductor import config as inductor_config
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

from . import folding, hacks, tensor_state
from .hacks import Stage, replaced, replaced_entries


@contextmanager
def traced_as_eager() -> Iterator[None]:
    """Trace what eager PyTorch would run, where torch's tracing departs from it, for a while.

    Departures are in the table of `hacks`. Two are mended by settings: random operations whose result nobody uses are
    dropped, and with them their draws; and the backward is taken to run under the forward's autocast, which training
    ends before it: products in single precision would lose theirs.
    """
    with (
        inductor_config.patch(fallback_random=True),
        functorch_config.patch(backward_pass_autocast="off"),
        hacks.applied(Stage.TRACING),
    ):
        yield


def guarded_overlaps() -> Any:
    """Guard on which inputs of a storage overlap, where some are written to; torch does so only for symbolic sizes."""
    find = runtime_wrappers.compute_overlapping_inputs

    def find_and_guard(config: Any, inputs: list[Any], of_one_storage: list[int]) -> set[int]:
        overlapping: set[int] = find(config, inputs, of_one_storage)
        sources, context = config.aot_autograd_arg_pos_to_source, TracingContext.try_get()
        if sources and context is not None and len(of_one_storage) > 1:
            apart = [sources[i] for i in of_one_storage if i not in overlapping]
            guard = StorageOverlap([sources[i] for i in sorted(overlapping)], apart)
            context.guards_context.aotautograd_guards.append(guard)
        return overlapping

    return replaced((runtime_wrappers, "compute_overlapping_inputs", find_and_guard))


_IMPLICIT = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


@contextmanager
def eager_kernels() -> Iterator[None]:
    """Remove the Python decompositions of some operators from the dispatcher for a while."""
    aten, gru_cell = torch.ops.aten, torch.ops.aten.gru_cell.default
    # The decompositions of these give other numbers: products fold otherwise, resizing rounds.
    packets = [aten.dropout, aten.matmul, aten.hardshrink, aten.softshrink, aten.stft, aten.istft]
    packets += [getattr(aten, name) for name in dir(aten) if name.startswith(("upsample_", "_upsample_"))]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    operators = [*(op for op in overloads if any(key in op.py_kernels for key in _IMPLICIT)), gru_cell]
    kernels_before: dict[OpOverload, dict[Any, Any]] = {op: dict(op.py_kernels) for op in operators}
    for op in operators:
        for key in _IMPLICIT:
            op.py_kernels.pop(key, None)
        op._dispatch_cache.clear()
    for key in _IMPLICIT:
        aten.dropout.default.py_kernels[key] = _eager_dropout
        aten.istft.default.py_kernels[key] = folding.istft
        gru_cell.py_kernels[key] = _eager_gru_cell
    try:
        yield
    finally:
        for op, kernels in kernels_before.items():
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


def _eager_dropout(input: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
    """Draw as eager does: nothing for a probability of 0 or 1."""
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    dropped: torch.Tensor = torch.ops.aten.native_dropout.default(input, p, train)[0]
    return dropped


def _eager_gru_cell(
    input: torch.Tensor,
    hidden: torch.Tensor,
    input_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a GRU's cell as eager does on the CPU: two gates as parts of one tensor, the third as one of its own.

    Eager computes them in place, row by row of a larger tensor. Traced, each would be a tensor of its own, whose
    sigmoid rounds otherwise: a CPU takes many numbers at once, and those that are left at the end of a row one by one.
    """
    aten = torch.ops.aten
    if input.device.type != "cpu":  # a fused kernel
        arguments = (input, hidden, input_weight, hidden_weight, input_bias, hidden_bias)
        cell: torch.Tensor = aten.gru_cell.default._op_dk(DispatchKey.CompositeImplicitAutograd, *arguments)
        return cell
    size = hidden.shape[1]
    of_input = aten.unsafe_split_with_sizes(aten.linear(input, input_weight, input_bias), [2 * size, size], 1)
    of_hidden = aten.unsafe_split_with_sizes(aten.linear(hidden, hidden_weight, hidden_bias), [2 * size, size], 1)
    reset, update = aten.unsafe_chunk(of_hidden[0] + of_input[0], 2, 1)
    new = (of_input[1] + of_hidden[1] * reset.sigmoid()).tanh()
    mixed: torch.Tensor = (hidden - new) * update.sigmoid() + new
    return mixed


@contextmanager
def eager_strides() -> Iterator[None]:
    """Correct the strides, and the types, of results that torch takes for those of an input."""
    aten = torch.ops.aten
    sources = {  # the argument whose memory format the first result has on the CPU; None: contiguous, on all devices
        aten._native_batch_norm_legit_functional.default: 0,
        aten._native_batch_norm_legit.default: 0,
        aten._native_batch_norm_legit.no_stats: 0,
        aten._native_batch_norm_legit_no_training.default: 0,
        aten.native_batch_norm_backward.default: 1,
        aten._log_softmax_backward_data.default: None,
    }
    stand_ins = {op: _with_strides(decomposition_table[op], position) for op, position in sources.items()}
    for op in (aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats):
        stand_ins[op] = _with_precise_statistics(stand_ins[op])
    FakeTensorMode.cache_clear()  # it holds results by arguments, whoever computed them
    try:
        with replaced_entries(decomposition_table, stand_ins):
            yield
    finally:
        FakeTensorMode.cache_clear()


def _with_precise_statistics(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Convert mean and deviation of a batch norm of half precision to the type that the CPU's kernel returns.

    With parameters in single precision, as under autocast, it keeps them in that. What is traced is what is profiled:
    to recompute from statistics of the other type takes other memory.
    """

    @functools.wraps(decomposition)
    def corrected(source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        first, mean, deviation, *others = decomposition(source, *args, **kwargs)
        parameters = (a for a in args[:4] if isinstance(a, torch.Tensor))
        if first.device.type == "cpu" and any(p.dtype != source.dtype for p in parameters):
            mean, deviation = mean.float(), deviation.float()
        return (first, mean, deviation, *others)

    return corrected


@contextmanager
def eager_strides_of_one() -> Iterator[None]:
    """Set the strides of dimensions of size 1 to those that kernels return.

    No element is found by them, but kernels tell by them whether images are channels-last: for a batch of one.
    """
    aten = torch.ops.aten
    operators = aten.view.default, aten._unsafe_view.default
    views = {op: _view_as_kernels_do(op_implementations_dict[op]) for op in operators}
    with_numbers = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
    kernels = {op: op.py_kernels[DispatchKey.Meta] for op in with_numbers}
    for op, kernel in kernels.items():
        op.py_kernels[DispatchKey.Meta] = _with_numbers_as_kernels_do(kernel)
        op._dispatch_cache.clear()
    try:
        with replaced_entries(op_implementations_dict, views):
            yield
    finally:
        for op, kernel in kernels.items():
            op.py_kernels[DispatchKey.Meta] = kernel
            op._dispatch_cache.clear()


def _view_as_kernels_do(implementation: Callable[..., Any]) -> Callable[..., Any]:
    def view(mode: Any, op: OpOverload, tensor: torch.Tensor, *shape: Any) -> Any:
        result = implementation(mode, op, tensor, *shape)
        if 1 not in result.shape or tensor_state.is_symbolic(tensor) or tensor_state.is_symbolic(result):
            return result
        seen = _without_memory(tensor, lambda like: like.view(result.shape))
        return torch.as_strided(tensor, seen.shape, seen.stride(), tensor.storage_offset())

    return view


def _with_numbers_as_kernels_do(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def compute(tensor: Any, number: Any, **options: Any) -> Any:
        result = kernel(tensor, number, **options)
        is_one = isinstance(tensor, torch.Tensor) and 1 in tensor.shape and not tensor_state.is_symbolic(tensor)
        if not is_one or isinstance(number, torch.Tensor):
            return result
        seen = _without_memory(tensor, lambda like: like + like.new_empty(()))  # of another shape, as numbers are
        return torch.as_strided(result, seen.shape, seen.stride())

    return compute


def _without_memory(tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Run a function on a tensor that has nothing but sizes and strides, by the kernels' own rules for these."""
    with tensor_state.real_mode(), no_python_dispatcher():
        return function(torch.empty_strided(tensor.shape, tensor.stride(), device="meta"))


def _with_strides(decomposition: Callable[..., Any], position: int | None) -> Callable[..., Any]:
    """Make a decomposition return its first result in the memory format of an argument; None for contiguous."""

    @functools.wraps(decomposition)  # torch looks at its name and module
    def corrected(*args: Any, **kwargs: Any) -> Any:
        results = decomposition(*args, **kwargs)
        first, *others = results if isinstance(results, tuple) else (results,)
        if first is None or (position is not None and first.device.type != "cpu"):
            return results
        wanted = torch.contiguous_format if position is None else suggest_memory_format(args[position])
        made = torch.empty_like(first, memory_format=wanted)
        return (made, *others) if isinstance(results, tuple) else made

    return corrected


_BYTE_TARGETS = {  # operators, and which argument the classes are
    torch.ops.aten.nll_loss_forward.default: 1,
    torch.ops.aten.nll_loss_backward.default: 2,
}


def byte_targets() -> AbstractContextManager[None]:
    """Trace losses of classes that are given as bytes, for a while, by the shapes that classes of integers have.

    The kernels of `nll_loss` take bytes, torch's tracing of these doesn't.
    """
    stand_ins = {op: _with_integers(decomposition_table[op], position) for op, position in _BYTE_TARGETS.items()}
    return replaced_entries(decomposition_table, stand_ins)


def _with_integers(decomposition: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(decomposition)  # torch looks at its name and module
    def decompose(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position and args[position].dtype == torch.uint8:
            args = (*args[:position], args[position].long(), *args[position + 1 :])
        return decomposition(*args, **kwargs)

    return decompose
