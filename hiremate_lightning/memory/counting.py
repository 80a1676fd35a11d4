"""Count the memory of tensors that have none: live bytes and peaks between marks, by what operations make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch

from ..torch_private.storage_events import StorageEvents
from .allocator import allocated_bytes
from .metering import Interval


class Meter(Protocol):
    """Measures memory between marks, as `MemoryMeter` does."""

    intervals: list[Interval]
    lost_marks: bool

    def start(self) -> None:
        """Begin to measure."""

    def mark(self, label: str) -> None:
        """Begin a new interval."""

    def mark_release(self, label: str) -> None:
        """Begin a new interval as soon as something is released."""

    def stop(self) -> Any:
        """End the measurement."""


class CountingMeter:
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
        self.intervals: list[Interval] = []
        self.lost_marks = False
        self.events = StorageEvents(self._changed, resized)
        self._device = device
        self._live = 0
        self._releases: list[str] = []

    def start(self) -> None:
        """Begin to count; the first mark is called "start"."""
        self.events.__enter__()  # type: ignore[no-untyped-call]
        self.mark("start")

    def mark(self, label: str) -> None:
        """Begin a new interval."""
        self.events.look_at_resized()
        for release in (*self._releases, label):
            self._begin(release)
        self._releases.clear()

    def mark_release(self, label: str) -> None:
        """Begin a new interval as soon as something has been released."""
        self._releases.append(label)

    def stop(self) -> None:
        """End the count."""
        self.events.look_at_resized()
        self.events.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _begin(self, label: str, released_bytes: int = 0) -> None:
        self.intervals.append(Interval(label, self._live, self._live, released_bytes))

    def _changed(self, before_bytes: int, after_bytes: int) -> None:
        before, after = (allocated_bytes(size, self._device) for size in (before_bytes, after_bytes))
        self._live += after - before
        last = self.intervals[-1]
        self.intervals[-1] = replace(last, peak_bytes=max(last.peak_bytes, self._live))
        if self._releases and after < before:
            self._begin(self._releases.pop(0), before - after)
