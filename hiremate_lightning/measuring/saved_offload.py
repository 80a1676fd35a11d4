"""Values that are offloaded while nothing reads them: to temporary files, or from a GPU by `running.copies`.

Files are used again, since to fill fresh pages takes ten times as long as to fill old ones.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from ..running.copies import HostMemory, Leaving, Place
from ..running.execution import CHANGED
from ..torch_private import tensor_state

LEAST_FILE = 2**20  # bytes
GROWTH = 0.25  # share of the bytes of all files that another file has at least
LEAST_OFFLOAD = 2**14  # bytes
_all: weakref.WeakSet[Files] = weakref.WeakSet()


class Files:
    """Temporary files, each of which holds many values one after the other.

    A file is used again from its beginning when none of its values lives any more, but not after the process has
    forked: both processes have its memory then. PyTorch counts the memory of its own files (`torch.from_file`) as
    allocated, so these are none of them.
    """

    def __init__(self) -> None:
        self.size_bytes = 0  # bytes of all files
        self._files = list[_File]()
        _all.add(self)

    def forget(self) -> None:
        """Use no file again: each is deleted when nobody holds its memory."""
        self.size_bytes, self._files = 0, []

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return memory as a storage of its own, which is used again when nobody holds it any more.

        Raises:
            OSError: If the disk has no room for another file.
        """
        file = next((file for file in self._files if file.free_bytes >= size_bytes), None)
        if file is None:
            file = _File(max(size_bytes, LEAST_FILE, int(GROWTH * self.size_bytes)))
            self._files.append(file)
            self.size_bytes += file.size_bytes
        return file.take(size_bytes)


def _forget_all() -> None:
    for files in tuple(_all):
        files.forget()


if hasattr(os, "register_at_fork"):  # not on Windows, where no process forks
    os.register_at_fork(before=_forget_all)


class _File:
    """A temporary file, which is deleted when nobody holds its memory."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        with tempfile.TemporaryFile() as file:
            # Its room is reserved: where a disk is full, a write to a file's memory would end the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            else:
                for _ in range(-(-size_bytes // LEAST_FILE)):
                    file.write(bytes(LEAST_FILE))
                file.flush()
            self._memory = mmap.mmap(file.fileno(), size_bytes)
        self._end = 0  # of the last value
        self._live = list[Callable[[], bool]]()  # of each value

    @property
    def _is_free(self) -> bool:
        return not any(lives() for lives in self._live)

    @property
    def free_bytes(self) -> int:
        """Bytes behind the values that live; all of them where none does."""
        return self.size_bytes - (0 if self._is_free else self._end)

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return the memory of a value that has a place; begin anew where no other value lives."""
        if self._is_free:
            self._end, self._live = 0, []
        value = torch.frombuffer(self._memory, dtype=torch.uint8, count=size_bytes, offset=self._end)
        self._live.append(tensor_state.watch_storage(value))
        self._end += -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return value


class SavedOffload(torch.autograd.graph.saved_tensors_hooks):
    """Offloads the tensors that autograd saves for a backward, each storage once; those given stay.

    Small ones stay too, and so does a value for which memory or disk is full: `on_full` is called then. Without it
    small ones are offloaded, and the error is raised.
    """

    def __init__(
        self,
        given: Collection[int],
        host: HostMemory | None = None,
        on_full: Callable[[OSError | MemoryError], None] | None = None,
        files: Files | None = None,
    ) -> None:
        super().__init__(self._put, lambda get: get())
        self._given, self._on_full = given, on_full
        self._host, self._files = host or HostMemory(), files or Files()
        # By storage, and where the part with a version begins: that version, whether it lives, what returns its copy.
        self._copies: dict[tuple[int, int], tuple[int, Callable[[], bool], Callable[[], torch.UntypedStorage]]] = {}

    def __exit__(self, *raised: object) -> None:
        """Stop offloading, and forget all copies: the hooks refer to themselves, so they die late."""
        super().__exit__(*raised)
        self._copies.clear()

    def _put(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Offload a tensor, where that is worth it; return the function that gets it."""
        (version,) = tensor_state.versions_of([tensor])
        stays = partial(_unchanged, tensor, version)
        is_plain = tensor_state.is_dense(tensor) and not tensor_state.has_parts(tensor)
        if not is_plain or tensor_state.is_transforming() or tensor.is_conj() or tensor.is_neg():
            return stays
        storage = tensor_state.storage_id(tensor)
        least_bytes = 1 if self._on_full is None else LEAST_OFFLOAD
        if storage in self._given or tensor.untyped_storage().nbytes() < least_bytes:
            return stays
        try:
            get, place = self._copy(storage, tensor, version), Place(tensor)
            return lambda: place.on(get())
        except (OSError, MemoryError) as error:
            if self._on_full is None:
                raise
            self._on_full(error)
            return stays

    def _copy(self, storage: int, tensor: torch.Tensor, version: int) -> Callable[[], torch.UntypedStorage]:
        """Copy a storage, unless it was copied as it is; return the function that gets the copy."""
        key = storage, tensor_state.versioned_at(tensor)
        if key in self._copies:
            copied, lives, get = self._copies[key]
            if version == copied and lives():
                return get
        if tensor.device.type == "cpu":
            memory = tensor_state.memory_of(tensor)
            get = self._files.take(memory.nbytes).copy_(memory).untyped_storage
        else:
            leaving = Leaving(tensor, self._host)
            leaving.wait()  # later operations may change the storage in place
            get = leaving.storage
        self._copies[key] = version, tensor_state.watch_storage(tensor), get
        return get


def _unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """Return a tensor, unless it was changed in place: autograd does not look at that where there are hooks."""
    (now,) = tensor_state.versions_of([tensor])
    if now != version:
        name = f"a tensor of shape {tuple(tensor.shape)}"
        raise RuntimeError(CHANGED.format(name=name, found=now, expected=version))
    return tensor


def offloading_saved(function: Callable[..., Any], constants: Sequence[torch.Tensor] = ()) -> Callable[..., Any]:
    """Wrap a function so that tensors which autograd saves in it are offloaded: neither arguments nor constants."""

    def run(*arguments: Any) -> Any:
        with SavedOffload(tensor_state.storages_among((*arguments, *constants))):
            return function(*arguments)

    return run


def in_file(value: torch.Tensor, files: Files) -> torch.Tensor:
    """Copy a value on the host into one of some temporary files, where its size is worth that.

    Raises:
        OSError: If the disk has no room for another file.
    """
    on_host = value.device.type == "cpu" and value.layout is torch.strided
    if not on_host or value.nbytes < LEAST_OFFLOAD:
        return value
    return files.take(value.nbytes).view(value.dtype).view(value.shape).copy_(value)
