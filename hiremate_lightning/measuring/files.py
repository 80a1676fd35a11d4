"""Memory of temporary files, which is used again: to fill fresh pages takes ten times as long as to fill old ones."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable

import torch

from ..torch_private import tensor_state

HAS_FILES = hasattr(os, "posix_fallocate")  # without it a write to a full disk ends the process
LEAST_FILE = 2**20  # bytes
GROWTH = 0.25  # share of the bytes of all files that another file has at least
_all: weakref.WeakSet[Files] = weakref.WeakSet()


class Files:
    """Temporary files, each of which holds many values one after the other.

    A file is used again from its beginning when none of its values lives any more, but not after the process has
    forked: both processes have its memory then. PyTorch counts the memory of its own files (`torch.from_file`) as
    allocated, so these are none of them.

    Attributes:
        size_bytes: Bytes of all files.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
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
        for file in self._files:
            if file.has_room(size_bytes):
                return file.take(size_bytes)
        another = _File(max(size_bytes, LEAST_FILE, int(GROWTH * self.size_bytes)))
        self._files.append(another)
        self.size_bytes += another.size_bytes
        return another.take(size_bytes)


def _forget_all() -> None:
    for files in tuple(_all):
        files.forget()


if HAS_FILES:
    os.register_at_fork(before=_forget_all)


class _File:
    """A temporary file, which is deleted when nobody holds its memory."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        with tempfile.TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            self._memory = mmap.mmap(file.fileno(), size_bytes)
        self._end = 0  # of the last value
        self._live = list[Callable[[], bool]]()  # of each value

    def _is_in_use(self) -> bool:
        return any(lives() for lives in self._live)

    def has_room(self, size_bytes: int) -> bool:
        """Whether a value of so many bytes has a place behind those that live."""
        return (self._end if self._is_in_use() else 0) + size_bytes <= self.size_bytes

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return the memory of a value that has a place."""
        if not self._is_in_use():
            self._end, self._live = 0, []
        value = torch.frombuffer(self._memory, dtype=torch.uint8, count=size_bytes, offset=self._end)
        self._live.append(tensor_state.watch_storage(value))
        self._end += -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return value
