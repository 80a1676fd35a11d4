"""Offload saved tensors while nothing reads them: from a CPU to temporary files, from a GPU by `running.copies`.

Files are reused, because filling new pages takes ten times as long as filling old ones.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Collection
from functools import partial

import torch

from ..running.copies import HostMemory, Leaving, place_of
from ..running.execution import CHANGED
from ..torch_private import tensor_state

LEAST_FILE = 2**20  # bytes of the smallest file
GROWTH = 0.25  # least size of a new file, as a share of the bytes of all files
LEAST_OFFLOAD = 2**14  # bytes of the smallest value that is worth offloading
_all: weakref.WeakSet[Files] = weakref.WeakSet()


class Files:
    """Temporary files, each of which holds many values one after the other.

    A file is reused from its beginning when none of its values lives any more, but not after a fork: then both
    processes have its memory. They are not files of `torch.from_file`, whose memory PyTorch counts as allocated.
    """

    def __init__(self) -> None:
        self.size_bytes = 0  # bytes of all files
        self._files = list[_File]()
        _all.add(self)

    def forget(self) -> None:
        """Reuse no file from now on; each is deleted when nothing holds its memory."""
        self.size_bytes, self._files = 0, []

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return memory as a storage of its own, which is reused when nothing holds it any more.

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
    """A temporary file, which is deleted when nothing holds its memory."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        with tempfile.TemporaryFile() as file:
            # Disk space is taken now: on a full disk, a later write to the file's memory would end the process.
            for _ in range(-(-size_bytes // LEAST_FILE)):
                file.write(bytes(LEAST_FILE))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), size_bytes)
        self._end = 0  # end of the last value
        self._live = list[Callable[[], bool]]()  # for each value, whether it lives

    @property
    def free_bytes(self) -> int:
        """Bytes behind the last value; all bytes if no value lives."""
        return self.size_bytes - (self._end if any(lives() for lives in self._live) else 0)

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return memory for a value that fits, behind the last value or, if none lives, at the beginning."""
        start = self.size_bytes - self.free_bytes
        if not start:
            self._live.clear()
        value = torch.frombuffer(self._memory, dtype=torch.uint8, count=size_bytes, offset=start)
        self._live.append(tensor_state.watch_storage(value))
        self._end = start + -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return value


class SavedOffload(torch.autograd.graph.saved_tensors_hooks):
    """Offloads the tensors that autograd saves for a backward, each storage once.

    Storages in `given` stay, and so do small tensors. If memory or disk is full, the tensor stays and `on_full` is
    called. Without `on_full`, small tensors are offloaded too and the error is raised.
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
        # By storage and `versioned_at`: the copied version, whether the storage lives, and what returns the copy.
        self._copies: dict[tuple[int, int], tuple[int, Callable[[], bool], Callable[[], torch.UntypedStorage]]] = {}

    def __exit__(self, *raised: object) -> None:
        """Stop offloading, and drop all copies: the hooks are in a reference cycle, so they are freed late."""
        super().__exit__(*raised)
        self._copies.clear()

    def _put(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Offload a tensor if possible and worth it; return the function that returns the tensor."""
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
            get, place = self._copy(storage, tensor, version), place_of(tensor)
            return lambda: place(get())
        except (OSError, MemoryError) as error:
            if self._on_full is None:
                raise
            self._on_full(error)
            return stays

    def _copy(self, storage: int, tensor: torch.Tensor, version: int) -> Callable[[], torch.UntypedStorage]:
        """Copy a storage, unless this version of it was copied; return the function that returns the copy."""
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
    """Return a tensor, unless it was changed in place: with hooks, autograd does not check this."""
    (now,) = tensor_state.versions_of([tensor])
    if now != version:
        name = f"a tensor of shape {tuple(tensor.shape)}"
        raise RuntimeError(CHANGED.format(name=name, found=now, expected=version))
    return tensor


def in_file(value: torch.Tensor, files: Files) -> torch.Tensor:
    """Copy a value of at least `LEAST_OFFLOAD` bytes on the host into a temporary file; return others as they are.

    Raises:
        OSError: If the disk has no room for another file.
    """
    on_host = value.device.type == "cpu" and value.layout is torch.strided
    if not on_host or value.nbytes < LEAST_OFFLOAD:
        return value
    return files.take(value.nbytes).view(value.dtype).view(value.shape).copy_(value)
