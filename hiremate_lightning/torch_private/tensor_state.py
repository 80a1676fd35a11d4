"""What tensors are made of and Python does not tell: versions, storages, tracing modes."""

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

# What is raised where code asks a tensor without memory for its values, or for as many results as these tell.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
HALF_PRECISION = (torch.bfloat16, torch.float16)

_PLAIN = (type(None), bool, int, float, str)


def tensors_among(values: Any) -> list[torch.Tensor]:
    """List the tensors in a tree of containers; of Python's own ones without pytree, which takes ten times as long.

    Of a user's own containers, which pytree can't go through, there are none.
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
    """Whether a value is a tensor that lies in a storage with strides."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def storages_among(values: Iterable[Any]) -> set[int]:
    """Return the identities of the storages of the dense tensors among some values."""
    return {storage_id(value) for value in values if is_dense(value)}


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode:
    """Find the mode in which fake values were made."""
    mode = detect_fake_mode(values)
    return mode if mode is not None else FakeTensorMode()


def fake_mode() -> FakeTensorMode:
    """Make a mode in which tensors have shapes, types and devices, and no memory; it copies real ones that it meets."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def without_log_of_fakes() -> AbstractContextManager[None]:
    """Keep torch from logging a traceback where an operation fails on fake tensors: its error says enough."""
    return replaced((logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor that was made in a fake mode."""
    return isinstance(value, FakeTensor)


def unviewed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor that is no view of another one, as autograd sees it."""
    return torch.ops.aten._unsafe_view(tensor, tensor.shape)  # type: ignore[no-any-return]


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same class on the same memory, of which autograd knows nothing; a parameter's is plain."""
    kind, memory = type(tensor), plain(tensor)
    is_other = type(memory) is torch.Tensor and kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    with torch._C.DisableTorchFunctionSubclass():
        return memory.as_subclass(kind) if is_other and not issubclass(kind, torch.nn.Parameter) else memory


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory without what autograd knows of it, and without a class that only carries metadata."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def has_own_code(kind: type[torch.Tensor]) -> bool:
    """Whether a class of tensors runs Python code of its own with each operation."""
    function = getattr(kind.__torch_function__, "__func__", None)
    return function not in (None, getattr(torch.Tensor.__torch_function__, "__func__", None))


def has_parts(value: Any) -> bool:
    """Whether a value is a tensor made of several tensors, as a sharded one is."""
    return isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__")


def versions_of(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Count the in-place changes of each tensor; -1 for None, and for one of inference mode, which has no count."""
    try:
        return [tensor._version for tensor in tensors]  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # that is rare, and to ask each tensor first takes as long again
        return [-1 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


def versioned_at(tensor: torch.Tensor) -> int:
    """Return the first element of the part of a storage whose in-place changes a tensor counts.

    A view counts those of its base. Each of the parts that `unsafe_chunk` returns counts its own.
    """
    return int((tensor if tensor._base is None else tensor._base).storage_offset())


def are_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are dense, and of one shape and device."""
    same = (tensor.shape, tensor.device) == (other.shape, other.device)
    return same and tensor.layout is torch.strided is other.layout


def is_batched(value: Any) -> bool:
    """Whether a tensor stands for the many that `torch.autograd.grad` got with is_grads_batched."""
    return isinstance(value, torch.Tensor) and bool(torch._C._functorch.is_legacy_batchedtensor(value))


def is_transforming() -> bool:
    """Whether a transform of torch.func (grad, vmap) or forward-mode differentiation is under way."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def watching_modes() -> list[str]:
    """Name the modes around this call that see each operator (`FlopCounterMode`): Dynamo captures nothing in them."""
    modes = (mode for mode in _get_current_dispatch_mode_stack() if not isinstance(mode, FakeTensorMode))
    return [type(m).__name__.lstrip("_") for m in modes if not (m.is_infra_mode() or m.ignore_compile_internals())]


def kernel_settings() -> tuple[Any, ...]:
    """Describe what decides which kernels PyTorch runs: backends, precision."""
    kernels = torch._C._get_flash_sdp_enabled(), torch._C._get_mem_efficient_sdp_enabled()
    others = torch._C._get_math_sdp_enabled(), torch._C._get_cudnn_sdp_enabled(), *torch._C._get_sdp_priority_order()
    cudnn, find_precision = torch.backends.cudnn, torch._C._get_fp32_precision_getter
    backends = torch.backends.mkldnn.enabled, cudnn.enabled, cudnn.benchmark, cudnn.deterministic
    precision = [find_precision(*of) for of in product(("cuda", "mkldnn"), ("matmul", "conv", "rnn"))]
    return (*kernels, *others, *backends, *precision, torch.get_deterministic_debug_mode())


def changes_uncounted(tensors: Sequence[torch.Tensor]) -> Any:
    """Keep autograd from counting changes of tensors made within a block."""
    return _unsafe_preserve_version_counter(tuple(tensors))


def with_strides(source: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with these strides, whose memory has its very numbers: itself where that is so, else a copy."""
    source = source.resolve_conj().resolve_neg()
    return source if source.stride() == strides else laid_out_like(source, strides).copy_(source)


def layout_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]:
    """Return the shape, the strides, the type and the device of a tensor of definite sizes."""
    return tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), tensor.dtype, tensor.device


def laid_out_like(tensor: torch.Tensor, strides: Sequence[int] | None = None) -> torch.Tensor:
    """Return new memory of a tensor's shape, type, device and strides, or of other strides."""
    layout = tensor.stride() if strides is None else strides
    return torch.empty_strided(tensor.shape, layout, dtype=tensor.dtype, device=tensor.device)


def is_symbolic(value: Any) -> bool:
    """Whether a traced tensor has a size that is not a number yet."""
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def storage_id(tensor: torch.Tensor) -> int:
    """Identify a storage, fake ones included, as long as a tensor on it lives."""
    return int(tensor.untyped_storage()._cdata)


def storages_of(tensors: Iterable[torch.Tensor | None]) -> list[torch.UntypedStorage | None]:
    """Return the storage of each tensor, the very object as long as one is kept; None where it is not a plain one."""
    return [tensor.untyped_storage() if tensor is not None and _has_storage(tensor) else None for tensor in tensors]


def _has_storage(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    is_plain = kind is torch.nn.Parameter or kind is torch.Tensor or not has_own_code(kind)
    return is_plain and tensor.layout is torch.strided and not has_parts(tensor)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """View all memory that a tensor lies on as bytes."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def detach_views(values: list[Any], positions: Iterable[int]) -> None:
    """Detach those of some values that are views; tokens that order effects come as None."""
    for position in positions:
        value = values[position]
        if isinstance(value, torch.Tensor) and value._is_view():
            values[position] = value.detach()


def is_alone_on_storage(tensor: torch.Tensor) -> bool:
    """Whether nobody else holds a tensor's storage, by itself or by a tensor, but for the one that it is a view of."""
    storage = tensor.untyped_storage()  # the Python object that others have too, where they have one
    count: int = torch._C._storage_Use_Count(storage._cdata)
    is_only = count == 2 + tensor._is_view()  # its own, this Python object's, and that of the tensor it is a view of
    return is_only and sys.getrefcount(storage) == _OWN_REFERENCES


def _count_own_references() -> int:
    tensor = torch.empty(0)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_OWN_REFERENCES = _count_own_references()  # to the Python object of a storage that only a function and a tensor have


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that a tensor is made of: itself, or the indices and values of a sparse one.

    Of a DTensor that is what this process has: its own storage has the size of the whole, and no memory.
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


def storage_sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of all storages of some tensors, each once, by their identities."""
    parts = (part for tensor in tensors for part in dense_parts(tensor))
    return {storage_id(part): part.untyped_storage().nbytes() for part in parts}


def watch_storage(tensor: torch.Tensor) -> Callable[[], bool]:
    """Return a function that tells whether a tensor's storage still lives, without keeping it alive."""
    reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: not reference.expired()


def refer_weakly(storage: torch.UntypedStorage) -> Callable[[], torch.UntypedStorage | None]:
    """Return a function that returns a storage as long as it lives, without keeping it alive."""
    reference = StorageWeakRef(storage)
    return lambda: torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def at_release(tensor: torch.Tensor, function: Callable[[], None]) -> Callable[[], Any]:
    """Call a function when a tensor's storage is about to be released, whoever holds it; what is returned ends that."""
    release = weakref.finalize(tensor.untyped_storage(), function)
    release.atexit = False
    return release.detach


def plain_tensors_of_python() -> list[torch.Tensor]:
    """List dense tensors that are Python objects, without subclasses and what transforms put in their place."""
    kinds = torch.Tensor, torch.nn.Parameter  # each object refers to its class
    tensors = [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]
    own = [t for t in tensors if not (torch._C._functorch.is_functorch_wrapped_tensor(t) or is_batched(t))]
    return [tensor for tensor in own if tensor.layout is torch.strided]


def int_hint(value: Any) -> int:
    """Read a size that may be symbolic, without guarding on it."""
    if isinstance(value, torch.SymInt):
        hint = value.node.hint
        return int(hint) if hint is not None else 0
    return int(value)


def takes_other_gradients(tensor: torch.Tensor) -> bool:
    """Whether a leaf takes gradients of other types than its own, as FSDP2's do under mixed precision since 2.15."""
    return tensor.is_leaf and bool(getattr(tensor, "grad_dtype", tensor.dtype) != tensor.dtype)
