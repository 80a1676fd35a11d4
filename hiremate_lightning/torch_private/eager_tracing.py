"""Replace decompositions and meta kernels while AOTAutograd traces, to get eager PyTorch's operators and strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch._dynamo  # before AOTAutograd, which imports it in a circle
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._dispatch.python import no_python_dispatcher
from torch._functorch import config as functorch_config
from torch._guards import StorageOverlap, TracingContext
from torch._inductor import config as inductor_config
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

from . import hacks, tensor_state
from .hacks import Stage, StandIn, around, instead_of, replaced, replaced_entries


@contextmanager
def traced_as_eager() -> Iterator[None]:
    """Trace the operators that eager PyTorch runs, in a `with` block, where torch's tracing departs from them.

    The table of `hacks` lists the departures. Settings correct two: random operations with unused results are dropped,
    and with them their draws; and the backward is traced under the forward's autocast, which training leaves before the
    backward: float32 products would lose precision.
    """
    with (
        inductor_config.patch(fallback_random=True),
        functorch_config.patch(backward_pass_autocast="off"),
        hacks.applied(Stage.TRACING),
    ):
        yield


@instead_of("torch._functorch._aot_autograd.runtime_wrappers.compute_overlapping_inputs")
def guarded_overlaps(find: Callable[..., Any], config: Any, inputs: list[Any], of_one_storage: list[int]) -> set[int]:
    """Guard which inputs of one storage overlap if some are written to; else they count as overlapping in each call."""
    overlapping: set[int] = find(config, inputs, of_one_storage)
    sources, context = config.aot_autograd_arg_pos_to_source, TracingContext.try_get()
    if sources and context is not None and len(of_one_storage) > 1:
        apart = [sources[i] for i in of_one_storage if i not in overlapping]
        guard = StorageOverlap([sources[i] for i in sorted(overlapping)], apart)
        context.guards_context.aotautograd_guards.append(guard)
    return overlapping


aten = torch.ops.aten
_IMPLICIT = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


def eager_kernels() -> AbstractContextManager[None]:
    """Remove Python decompositions in a `with` block if their numbers differ from eager's: code would run eager."""
    # These decompositions compute other numbers: products fold differently, resizing rounds.
    packets = [aten.dropout, aten.matmul, aten.hardshrink, aten.softshrink, aten.stft, aten.istft]
    packets += [getattr(aten, name) for name in dir(aten) if name.startswith(("upsample_", "_upsample_"))]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    operators = [op for op in overloads if any(key in op.py_kernels for key in _IMPLICIT)]
    kernels: dict[OpOverload, Callable[..., Any]] = {aten.dropout.default: _eager_dropout, aten.istft.default: istft}
    kernels[aten.gru_cell.default] = _eager_gru_cell
    return _with_kernels({op: {key: kernels.get(op) for key in _IMPLICIT} for op in (*operators, *kernels)})


def _with_kernels(
    kernels: Mapping[OpOverload, Mapping[DispatchKey, Callable[..., Any] | None]],
) -> AbstractContextManager[None]:
    """Replace Python kernels of operators in a `with` block; None removes a kernel."""
    stand_ins: list[StandIn] = []
    for op, replacements in kernels.items():
        merged = {**op.py_kernels, **replacements}
        stand_ins.append((op, "py_kernels", {key: kernel for key, kernel in merged.items() if kernel is not None}))
        stand_ins.append((op, "_dispatch_cache", {}))
    return replaced(*stand_ins)


def _eager_dropout(input: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
    """Apply dropout as eager does, which draws nothing for a probability of 0 or 1."""
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    dropped: torch.Tensor = aten.native_dropout.default(input, p, train)[0]
    return dropped


def _eager_gru_cell(
    input: torch.Tensor,
    hidden: torch.Tensor,
    input_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a GRU cell as eager does on the CPU: two gates as parts of one tensor, the third in its own tensor.

    Eager computes the gates in place, in rows of a larger tensor. If each gate were a tensor of its own, its sigmoid
    would round differently: a CPU computes many numbers at once, and those left at the end of a row one by one.
    """
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
    """Correct strides and dtypes of norms' results in a `with` block; else the proof fails, and code runs eager."""
    sources = {  # position of the argument whose memory format the first result has on CPU; None: contiguous everywhere
        aten._native_batch_norm_legit_functional.default: 0,
        aten._native_batch_norm_legit.default: 0,
        aten._native_batch_norm_legit.no_stats: 0,
        aten._native_batch_norm_legit_no_training.default: 0,
        aten.native_batch_norm_backward.default: 1,
        aten._log_softmax_backward_data.default: None,
    }
    stand_ins = {op: around(decomposition_table[op], partial(_strided, at)) for op, at in sources.items()}
    FakeTensorMode.cache_clear()  # it caches results by arguments, for any decomposition
    try:
        with replaced_entries(decomposition_table, stand_ins):
            yield
    finally:
        FakeTensorMode.cache_clear()


@contextmanager
def eager_strides_of_one() -> Iterator[None]:
    """Set strides of size-1 dimensions as kernels do, which tell by these if a batch of one is channels-last."""
    operators = aten.view.default, aten._unsafe_view.default
    views = {op: around(op_implementations_dict[op], _view_as_kernels_do) for op in operators}
    with_numbers = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
    key = DispatchKey.Meta
    kernels = {op: {key: around(op.py_kernels[key], _with_numbers_as_kernels_do)} for op in with_numbers}
    with replaced_entries(op_implementations_dict, views), _with_kernels(kernels):
        yield


def _view_as_kernels_do(view: Callable[..., Any], mode: Any, op: OpOverload, tensor: torch.Tensor, *shape: Any) -> Any:
    result = view(mode, op, tensor, *shape)
    if 1 not in result.shape or tensor_state.is_symbolic(tensor) or tensor_state.is_symbolic(result):
        return result
    seen = _without_memory(tensor, lambda like: like.view(result.shape))
    return torch.as_strided(tensor, seen.shape, seen.stride(), tensor.storage_offset())


def _with_numbers_as_kernels_do(kernel: Callable[..., Any], tensor: Any, number: Any, **options: Any) -> Any:
    result = kernel(tensor, number, **options)
    is_one = isinstance(tensor, torch.Tensor) and 1 in tensor.shape and not tensor_state.is_symbolic(tensor)
    if not is_one or isinstance(number, torch.Tensor):
        return result
    seen = _without_memory(tensor, lambda like: like + like.new_empty(()))  # 0-dimensional, like a number
    return torch.as_strided(result, seen.shape, seen.stride())


def _without_memory(tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Run a function on a meta tensor of the same sizes and strides, so that kernels set the strides of the result."""
    with tensor_state.real_mode(), no_python_dispatcher():
        return function(torch.empty_strided(tensor.shape, tensor.stride(), device="meta"))


def _strided(position: int | None, decomposition: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a decomposition; return its first result in the memory format of an argument, or contiguous for None."""
    results = decomposition(*args, **kwargs)
    first, *rest = results if isinstance(results, tuple) else (results,)
    if first is None or (position is not None and first.device.type != "cpu"):
        return results
    wanted = torch.contiguous_format if position is None else suggest_memory_format(args[position])
    made = torch.empty_like(first, memory_format=wanted)
    return (made, *rest) if isinstance(results, tuple) else made


def byte_targets() -> AbstractContextManager[None]:
    """Trace losses with uint8 targets like those with integers, in a `with` block; else such code runs uncaptured."""
    classes_at = {aten.nll_loss_forward.default: 1, aten.nll_loss_backward.default: 2}
    stand_ins = {op: around(decomposition_table[op], partial(_with_integers, at)) for op, at in classes_at.items()}
    return replaced_entries(decomposition_table, stand_ins)


def _with_integers(position: int, decomposition: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if len(args) > position and args[position].dtype == torch.uint8:
        args = (*args[:position], args[position].long(), *args[position + 1 :])
    return decomposition(*args, **kwargs)


class _CheckedInTheGraph(tensor_state.TorchDispatchMode):
    """Checks in the graph whether windows leave gaps; C++ reads the answer, which no trace knows."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is aten.equal.default:
            has_gaps = args[0]
            text = "istft: the windows leave gaps, their squares' sum is 0 somewhere"
            torch._assert_async(has_gaps.logical_not(), text)
            return False
        return function(*args, **(kwargs or {}))


def istft(*arguments: Any, **options: Any) -> torch.Tensor:
    """Compute PyTorch's C++ `istft`, with its check of the windows in the graph."""
    with no_python_dispatcher(), _CheckedInTheGraph():  # type: ignore[no-untyped-call]
        result: torch.Tensor = torch._C._VariableFunctions.istft(*arguments, **options)
    return result
