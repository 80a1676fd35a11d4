"""Values that are offloaded while nothing reads them: to temporary files, or from a GPU by `running.copies`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from ..running.copies import HostMemory, Leaving, Place
from ..running.execution import CHANGED
from ..torch_private import tensor_state
from .files import HAS_FILES, Files

LEAST_OFFLOAD = 2**14  # bytes


class _InFile:
    """A storage of the host in a temporary file, and read in the memory of that file."""

    def __init__(self, tensor: torch.Tensor, files: Files) -> None:
        memory = tensor_state.memory_of(tensor)
        self._memory = files.take(memory.nbytes).copy_(memory)

    def storage(self) -> torch.UntypedStorage:
        """Return the storage."""
        return self._memory.untyped_storage()


@dataclass(frozen=True)
class _Offloaded:
    """A tensor that is offloaded: a copy of its storage, and its place there."""

    copy: _InFile | Leaving
    place: Place

    def get(self) -> torch.Tensor:
        """Return the tensor."""
        return self.place.on(self.copy.storage())


@dataclass(frozen=True, slots=True)
class _AsItIs:
    """A tensor that stays where it is, and the number of its changes in place.

    Autograd does not look at these changes where there are hooks.
    """

    tensor: torch.Tensor
    version: int

    def get(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: If it was changed in place, as PyTorch raises it without hooks.
        """
        (version,) = tensor_state.versions_of([self.tensor])
        if version != self.version:
            name = f"a tensor of shape {tuple(self.tensor.shape)}"
            raise RuntimeError(CHANGED.format(name=name, found=version, expected=self.version))
        return self.tensor


class SavedOffload(torch.autograd.graph.saved_tensors_hooks):
    """Offloads the tensors that autograd saves for a backward, each storage once; those given and small ones stay.

    Args:
        given: Storages that existed before, and stay.
        host: Blocks of the host's memory for values of a GPU.
        on_full: Called where memory or disk is full: the value stays then. None to raise the error.
        files: Files for values of the host; None for new ones.
    """

    def __init__(
        self,
        given: Collection[int],
        host: HostMemory | None = None,
        on_full: Callable[[OSError | MemoryError], None] | None = None,
        files: Files | None = None,
    ) -> None:
        super().__init__(self._put, lambda value: value.get())
        self._given, self._on_full = given, on_full
        self._host, self._files = host or HostMemory(), files or Files()
        self._copies: dict[int, tuple[int | None, Callable[[], bool], _InFile | Leaving]] = {}  # by storage

    def __exit__(self, *raised: object) -> None:
        """Stop offloading, and forget all copies: the hooks refer to themselves, so they die late."""
        super().__exit__(*raised)
        self._copies.clear()

    def _put(self, tensor: torch.Tensor) -> _AsItIs | _Offloaded:
        """Offload a tensor, where that is worth it."""
        (version,) = tensor_state.versions_of([tensor])
        stays = _AsItIs(tensor, version)
        is_plain = tensor_state.is_dense(tensor) and not tensor_state.has_parts(tensor)
        if not is_plain or tensor_state.is_transforming() or tensor.is_conj() or tensor.is_neg():
            return stays
        if tensor.device.type == "cpu" and not HAS_FILES:
            return stays
        storage = tensor_state.storage_id(tensor)
        if storage in self._given or tensor.untyped_storage().nbytes() < LEAST_OFFLOAD:
            return stays
        try:
            return _Offloaded(self._copy(storage, tensor, version), Place(tensor))
        except (OSError, MemoryError) as error:
            if self._on_full is None:
                raise
            self._on_full(error)
            return stays

    def _copy(self, storage: int, tensor: torch.Tensor, version: int) -> _InFile | Leaving:
        if storage in self._copies:
            copied, lives, copy = self._copies[storage]
            if version == copied and lives():
                return copy
        if tensor.device.type == "cpu":
            copy = _InFile(tensor, self._files)
        else:
            copy = Leaving(tensor, self._host)
            copy.wait()  # later operations may change the storage in place
        self._copies[storage] = version, tensor_state.watch_storage(tensor), copy
        return copy


def offloading_saved(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that tensors which autograd saves in it are offloaded."""

    def run(*arguments: Any) -> Any:
        with SavedOffload(tensor_state.storages_among(arguments)):
            return function(*arguments)

    return run


def in_file(value: torch.Tensor, files: Files) -> torch.Tensor:
    """Copy a value on the host into one of some temporary files, where its size is worth that.

    Raises:
        OSError: If the disk has no room for another file.
    """
    on_host = value.device.type == "cpu" and value.layout is torch.strided
    if not on_host or value.nbytes < LEAST_OFFLOAD or not HAS_FILES:
        return value
    return files.take(value.nbytes).view(value.dtype).view(value.shape).copy_(value)
