"""Read and set tensor state that Python does not expose: versions, storages, layouts, fake tensors, tracing modes."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import product
from typing import Any, TypeGuard

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _disable_current_modes as real_mode
from torch.utils._pytree import tree_leaves as leaves
from torch.utils._pytree import tree_map as map_leaves

from ..objects import attempt, is_of
from .hacks import replaced

__all__ = ["TorchDispatchMode", "leaves", "map_leaves", "real_mode"]

# Raised if code reads the values of a fake tensor, or if a result's shape depends on them.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
HALF_PRECISION = (torch.bfloat16, torch.float16)

_PLAIN = (type(None), bool, int, float, str)


def tensors_among(values: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree of containers; pytree would take ten times as long for Python's own ones.

    A user's own container that pytree can't walk has none.
    """
    kind = type(values)
    if kind is tuple or kind is list:
        return [tensor for value in values for tensor in tensors_among(value)]
    if kind is dict:
        return tensors_among(list(values.values()))
    if issubclass(kind, torch.Tensor):
        return [values]
    if kind in _PLAIN:
        return []
    values_inside: list[Any] = attempt(lambda: leaves(values), [], f"the values in {kind.__name__}")
    return [value for value in values_inside if is_of(value, torch.Tensor)]


def is_dense(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor with strides, on a storage."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def storages_among(values: Iterable[Any]) -> set[int]:
    """Return the ids of the storages of the strided tensors among some values."""
    return {storage_id(value) for value in values if is_dense(value)}


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode:
    """Return the fake mode of some values, or a new one."""
    mode = detect_fake_mode(values)
    return mode if mode is not None else FakeTensorMode()


def fake_mode() -> FakeTensorMode:
    """Return a fake mode, whose tensors have no memory; it converts real tensors that it meets."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def without_log_of_fakes() -> AbstractContextManager[None]:
    """Keep torch from logging a traceback if an operation fails on fake tensors: the error says enough."""
    return replaced((logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))


def is_fake(value: Any) -> bool:
    """Whether a value is a fake tensor."""
    return isinstance(value, FakeTensor)


def unviewed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory that autograd takes for no view."""
    return torch.ops.aten._unsafe_view(tensor, tensor.shape)  # type: ignore[no-any-return]


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached tensor of the same class on the same memory; for a parameter a plain tensor."""
    kind, memory = type(tensor), plain(tensor)
    is_other = type(memory) is torch.Tensor and kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    with torch._C.DisableTorchFunctionSubclass():
        return memory.as_subclass(kind) if is_other and not issubclass(kind, torch.nn.Parameter) else memory


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached tensor on the same memory, without a subclass that only carries metadata."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def has_own_code(kind: type[torch.Tensor]) -> bool:
    """Whether a tensor class runs Python code of its own (`__torch_function__`) with each operation."""
    function = getattr(kind.__torch_function__, "__func__", None)
    return function not in (None, getattr(torch.Tensor.__torch_function__, "__func__", None))


def has_parts(value: Any) -> bool:
    """Whether a value is a tensor subclass made of inner tensors, for example a DTensor."""
    return isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__")


def versions_of(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Return each tensor's count of changes in place; -1 for None and inference tensors, which have no count."""
    try:
        return [tensor._version for tensor in tensors]  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # rare; to check each tensor first doubles the time
        return [-1 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


def versioned_at(tensor: torch.Tensor) -> int:
    """Return the storage offset of the tensor whose version counter a tensor uses.

    A view uses that of its base. Each of the parts that `unsafe_chunk` returns has its own.
    """
    return int((tensor if tensor._base is None else tensor._base).storage_offset())


def are_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are strided, and of one shape and device."""
    same = (tensor.shape, tensor.device) == (other.shape, other.device)
    return same and tensor.layout is torch.strided is other.layout


def is_batched(value: Any) -> bool:
    """Whether a tensor is a batch that `torch.autograd.grad` made with is_grads_batched."""
    return isinstance(value, torch.Tensor) and bool(torch._C._functorch.is_legacy_batchedtensor(value))


def is_transforming() -> bool:
    """Whether a transform of torch.func (grad, vmap) or forward-mode differentiation is active."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def watching_modes() -> list[str]:
    """Return the names of active modes that see each operator (`FlopCounterMode`): Dynamo captures nothing in them."""
    modes = (mode for mode in _get_current_dispatch_mode_stack() if not isinstance(mode, FakeTensorMode))
    return [type(m).__name__.lstrip("_") for m in modes if not (m.is_infra_mode() or m.ignore_compile_internals())]


def kernel_settings() -> tuple[Any, ...]:
    """Return the settings that decide which kernels PyTorch runs: backends, precision, determinism."""
    kernels = torch._C._get_flash_sdp_enabled(), torch._C._get_mem_efficient_sdp_enabled()
    rest = torch._C._get_math_sdp_enabled(), torch._C._get_cudnn_sdp_enabled(), *torch._C._get_sdp_priority_order()
    cudnn, find_precision = torch.backends.cudnn, torch._C._get_fp32_precision_getter
    backends = torch.backends.mkldnn.enabled, cudnn.enabled, cudnn.benchmark, cudnn.deterministic
    precision = [find_precision(*of) for of in product(("cuda", "mkldnn"), ("matmul", "conv", "rnn"))]
    return (*kernels, *rest, *backends, *precision, torch.get_deterministic_debug_mode())


def changes_uncounted(tensors: Sequence[torch.Tensor]) -> Any:
    """Return a context in which autograd does not count changes of tensors."""
    return _unsafe_preserve_version_counter(tuple(tensors))


def with_strides(source: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with the same values and these strides: the source itself if it has them, else a copy."""
    source = source.resolve_conj().resolve_neg()
    return source if source.stride() == strides else laid_out_like(source, strides).copy_(source)


def layout_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]:
    """Return the shape, the strides, the dtype and the device of a tensor without symbolic sizes."""
    return tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), tensor.dtype, tensor.device


def laid_out_like(tensor: torch.Tensor, strides: Sequence[int] | None = None) -> torch.Tensor:
    """Return an uninitialised tensor of a tensor's shape, dtype, device and strides, or of other strides."""
    layout = tensor.stride() if strides is None else strides
    return torch.empty_strided(tensor.shape, layout, dtype=tensor.dtype, device=tensor.device)


def is_symbolic(value: Any) -> bool:
    """Whether a value is a tensor with a symbolic size."""
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def storage_id(tensor: torch.Tensor) -> int:
    """Return the id of a tensor's storage, fake or real; it is valid while a tensor on the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def storages_of(tensors: Iterable[torch.Tensor | None]) -> list[torch.UntypedStorage | None]:
    """Return each tensor's storage, the same Python object while one is kept; None without a plain storage."""
    return [tensor.untyped_storage() if tensor is not None and _has_storage(tensor) else None for tensor in tensors]


def _has_storage(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    is_plain = kind is torch.nn.Parameter or kind is torch.Tensor or not has_own_code(kind)
    return is_plain and tensor.layout is torch.strided and not has_parts(tensor)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of bytes over a tensor's whole storage."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def detach_views(values: list[Any], positions: Iterable[int]) -> None:
    """Replace the views at `positions` of a list by detached tensors; None for a token that orders effects stays."""
    for position in positions:
        value = values[position]
        if isinstance(value, torch.Tensor) and value._is_view():
            values[position] = value.detach()


def is_alone_on_storage(tensor: torch.Tensor) -> bool:
    """Whether only this tensor, and the tensor that it is a view of, hold its storage."""
    storage = tensor.untyped_storage()  # the one Python object of this storage
    count: int = torch._C._storage_Use_Count(storage._cdata)
    is_only = count == 2 + tensor._is_view()  # of this tensor, of the Python object, and of the tensor it views
    return is_only and sys.getrefcount(storage) == _OWN_REFERENCES


def _count_own_references() -> int:
    tensor = torch.empty(0)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_OWN_REFERENCES = _count_own_references()  # to a storage's Python object that only a function and a tensor hold


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the strided tensors that make up a tensor: itself, or the indices and values of a sparse one.

    For a DTensor, return this process's local part: the DTensor's own storage has the size of the whole, and no memory.
    """
    local = getattr(tensor, "_local_tensor", None)
    if local is not None:
        return dense_parts(getattr(local, "elem", local))  # an AsyncCollectiveTensor has what it waits for in `elem`
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


def viewed_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a conjugated, or negated, view if another one is such a view."""
    tensor = tensor.conj() if like.is_conj() else tensor
    return torch._neg_view(tensor) if like.is_neg() else tensor


def storage_sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage of some tensors, by storage id."""
    parts = (part for tensor in tensors for part in dense_parts(tensor))
    return {storage_id(part): part.untyped_storage().nbytes() for part in parts}


def watch_storage(tensor: torch.Tensor) -> Callable[[], bool]:
    """Return a function that tells whether a tensor's storage is alive, without keeping it alive."""
    reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: not reference.expired()


def refer_weakly(storage: torch.UntypedStorage) -> Callable[[], torch.UntypedStorage | None]:
    """Return a function that returns a storage, or None once it is freed, without keeping it alive."""
    reference = StorageWeakRef(storage)
    return lambda: torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def at_release(tensor: torch.Tensor, function: Callable[[], None]) -> Callable[[], Any]:
    """Call a function when a tensor's storage is about to be freed; calling the result cancels that."""
    release = weakref.finalize(tensor.untyped_storage(), function)
    release.atexit = False
    return release.detach


def plain_tensors_of_python() -> list[torch.Tensor]:
    """Return the strided tensors that are Python objects, without subclasses and wrappers of torch.func."""
    kinds = torch.Tensor, torch.nn.Parameter  # each object refers to its class
    tensors = [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]
    unwrapped = [t for t in tensors if not (torch._C._functorch.is_functorch_wrapped_tensor(t) or is_batched(t))]
    return [tensor for tensor in unwrapped if tensor.layout is torch.strided]


def int_hint(value: Any) -> int:
    """Return a size that may be symbolic as a number, without a guard on it; 0 without a hint."""
    if isinstance(value, torch.SymInt):
        hint = value.node.hint
        return int(hint) if hint is not None else 0
    return int(value)


def takes_other_gradients(tensor: torch.Tensor) -> bool:
    """Whether a leaf takes gradients of another dtype, as FSDP2's do under mixed precision since 2.15."""
    return tensor.is_leaf and bool(getattr(tensor, "grad_dtype", tensor.dtype) != tensor.dtype)
