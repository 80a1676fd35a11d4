"""Watch which storages operations make and release, and what collectives send, on tensors with or without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import tensor_state

_GATHERS = ("c10d::_allgather_base_", "_c10d_functional::all_gather_into_tensor")
_SCATTERS = ("c10d::_reduce_scatter_base_", "_c10d_functional::reduce_scatter_tensor")
_REDUCES = ("_c10d_functional::all_reduce", "_c10d_functional::all_reduce_")


class StorageEvents(TorchDispatchMode):
    """Reports each storage that an operation makes, and its release, while the mode is on.

    What kernels allocate inside is not seen, nor what the graphs do that higher-order operators (`torch.cond`) call.

    Args:
        changed: Called with the bytes before and after: 0 before a storage is made, 0 after its release.
        resized: Tensors that exist, and whose storages others resize: FSDP2 does so with whole parameters.

    Attributes:
        gathered_bytes: Results of all-gathers so far.
        scattered_bytes: Inputs of reduce-scatters so far.
        reduced_bytes: Inputs of all-reduces so far.
    """

    def __init__(self, changed: Callable[[int, int], None], resized: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.supports_higher_order_operators = True
        self.gathered_bytes = self.scattered_bytes = self.reduced_bytes = 0
        self._changed = changed
        storages = {tensor_state.storage_id(tensor): tensor.untyped_storage() for tensor in resized}
        self._resized = [(storage, storage.nbytes()) for storage in storages.values()]
        self._known = set(storages)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch.compile captures code that it has not captured yet."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and see what it has made."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: its own operations on local tensors are seen
        self.look_at_resized()
        result = func(*args, **(kwargs or {}))
        given = _dense_among((args, kwargs))
        existing = {tensor_state.storage_id(tensor) for tensor in given}
        self._count_communication(func.name().partition(".")[0], given, _dense_among(result))
        for tensor in _dense_among(result):
            storage = tensor_state.storage_id(tensor)
            if storage not in existing and storage not in self._known:
                self._begin(storage, tensor)
        return result

    def look_at_resized(self) -> None:
        """Report the storages that were resized since."""
        for position, (storage, before) in enumerate(self._resized):
            after = storage.nbytes()
            if after != before:
                self._resized[position] = (storage, after)
                self._changed(before, after)

    def _begin(self, storage: int, tensor: torch.Tensor) -> None:
        size_bytes = tensor.untyped_storage().nbytes()

        def end() -> None:
            self._known.discard(storage)
            self._changed(size_bytes, 0)

        self._known.add(storage)
        tensor_state.at_release(tensor, end)
        self._changed(0, size_bytes)

    def _count_communication(self, name: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        sizes = [tensor.nbytes for tensor in (*given, *made)]
        self.gathered_bytes += max(sizes) if name in _GATHERS else 0
        self.scattered_bytes += max(sizes) if name in _SCATTERS else 0
        self.reduced_bytes += max(sizes) if name in _REDUCES else 0


def _dense_among(values: Any) -> list[torch.Tensor]:
    return [part for tensor in tensor_state.tensors_among(values) for part in tensor_state.dense_parts(tensor)]
