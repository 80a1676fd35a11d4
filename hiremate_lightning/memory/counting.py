"""Count the memory of tensors that have none: live bytes and peaks between marks, by what operations make."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..torch_private.storage_events import StorageEvents
from .allocator import allocated_bytes
from .metering import LiveBytes, MemoryMeter


class CountingMeter(LiveBytes):
    """A meter of tensors without memory. Workspaces, which kernels take inside, are not counted.

    Args:
        device: Whose allocator would hand out the memory.
        resized: Tensors whose storages others resize, see `StorageEvents`.

    Attributes:
        intervals: One for each mark.
        lost_marks: Never: nothing interrupts it.
        events: What it counts by.
    """

    def __init__(self, device: torch.device, resized: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.lost_marks = False
        self.events = StorageEvents(self._changed, resized)
        self._device = device

    def start(self) -> None:
        """Begin to count; the first mark is called "start"."""
        self.events.__enter__()  # type: ignore[no-untyped-call]
        self.mark("start")

    def mark(self, label: str) -> None:
        """Begin a new interval."""
        self.events.look_at_resized()
        super().mark(label)

    def stop(self) -> None:
        """End the count."""
        self.events.look_at_resized()
        self.events.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _changed(self, before_bytes: int, after_bytes: int) -> None:
        self.add(allocated_bytes(after_bytes, self._device) - allocated_bytes(before_bytes, self._device))


Meter = MemoryMeter | CountingMeter
