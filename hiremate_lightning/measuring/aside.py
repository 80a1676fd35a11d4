"""Values put aside while nothing reads them: in temporary files, or in the host's memory where they lie on a GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..torch_private import tensor_state

LEAST_IN_FILE = 2**14  # bytes


@dataclass(frozen=True)
class _Aside:
    """A tensor that is put aside.

    Attributes:
        memory: The bytes of its storage.
        like: Its shape, type, device and place in the storage.
    """

    memory: torch.Tensor
    like: tuple[torch.dtype, torch.device, int, Sequence[int], Sequence[int]]

    def get(self) -> torch.Tensor:
        """Return the tensor: on a GPU in new memory, else on the memory of the file."""
        dtype, device, offset, shape, strides = self.like
        memory = self.memory.to(device).untyped_storage()
        return torch.empty(0, dtype=dtype, device=device).set_(memory, offset, shape, strides)


class SavedAside(torch.autograd.graph.saved_tensors_hooks):
    """Puts aside what autograd saves for a backward: each storage once, and none that was there before.

    Args:
        given: Storages that were there before.
    """

    def __init__(self, given: Collection[int]) -> None:
        super().__init__(self._put, lambda value: value.get() if isinstance(value, _Aside) else value)
        self._given = given
        self._copies: dict[int, tuple[int | None, Callable[[], bool], torch.Tensor]] = {}  # by storage: of a version

    def __exit__(self, *raised: object) -> None:
        """Save nothing aside any more, and forget what was: the hooks refer to themselves, so they die late."""
        super().__exit__(*raised)
        self._copies.clear()

    def _put(self, tensor: torch.Tensor) -> torch.Tensor | _Aside:
        is_plain = tensor_state.is_dense(tensor) and not tensor_state.has_parts(tensor)
        if not is_plain or tensor.is_conj() or tensor.is_neg():
            return tensor
        storage = tensor_state.storage_id(tensor)
        if storage in self._given:
            return tensor
        (version,) = tensor_state.versions_of([tensor])
        copied, lives, memory = self._copies.get(storage, (None, bool, tensor))
        if version != copied or not lives():
            memory = in_file(tensor_state.memory_of(tensor)).cpu()
            self._copies[storage] = version, tensor_state.watch_storage(tensor), memory
        offset = int(tensor.storage_offset())
        return _Aside(memory, (tensor.dtype, tensor.device, offset, tensor.shape, tensor.stride()))


def saving_aside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function put aside what autograd saves in it."""

    def run(*arguments: Any) -> Any:
        with SavedAside(tensor_state.storages_among(arguments)):
            return function(*arguments)

    return run


def in_file(value: torch.Tensor) -> torch.Tensor:
    """Copy a value on the host into a temporary file, which goes with the tensor that is returned.

    Raises:
        OSError: If there is no room for the file.
    """
    on_host = value.device.type == "cpu" and value.layout is torch.strided
    if not on_host or value.nbytes < LEAST_IN_FILE or not hasattr(os, "posix_fallocate"):
        return value
    with tempfile.NamedTemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, value.nbytes)  # without it a write to a full disk ends the process
        memory = torch.from_file(file.name, shared=True, size=value.nbytes, dtype=torch.uint8)
    return memory.view(value.dtype).view(value.shape).copy_(value)
