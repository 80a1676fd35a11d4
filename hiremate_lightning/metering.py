"""Measure memory: live bytes and peaks between marks, by the allocator's own events.

On the CPU a profiler records each allocation; a dispatch mode would miss what kernels allocate inside. On CUDA the caching
allocator's statistics are read and reset at each mark.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.profiler import record_function

from . import torch_private


@dataclass(frozen=True, slots=True)
class Interval:
    """Memory between two marks, in bytes relative to the start of the measurement.

    Attributes:
        label: The mark at its start.
        start_bytes: Live at the mark.
        peak_bytes: Most that lived until the next mark.
    """

    label: str
    start_bytes: int
    peak_bytes: int


class MemoryMeter:
    """Measures from `start` to `stop`.

    Only one meter runs at a time: to start another ends the first, which then has the intervals up to there.

    Attributes:
        intervals: One for each mark, complete when the measurement has ended.
        is_running: Whether marks are still taken.
    """

    _running: weakref.ref[MemoryMeter] | None = None

    def __init__(self, device: torch.device) -> None:
        self.intervals: list[Interval] = []
        self.is_running = False
        self._means: _HostEvents | _DeviceStatistics = (
            _DeviceStatistics(device) if device.type == "cuda" else _HostEvents()
        )

    @classmethod
    def is_available(cls, device: torch.device) -> bool:
        """Whether someone else's profiler leaves the means of measurement free."""
        current = cls._running() if cls._running is not None else None
        ours = current is not None and current.is_running
        return device.type == "cuda" or ours or not torch_private.profiler_is_running()

    def __enter__(self) -> MemoryMeter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to measure; the first mark is called "start"."""
        current = MemoryMeter._running() if MemoryMeter._running is not None else None
        if current is not None:
            current.stop()
        MemoryMeter._running = weakref.ref(self)
        self.is_running = True
        self._means.start()
        # A meter that is dropped must not leave a profiler running.
        self._dropped = weakref.finalize(self, self._means.stop)
        self.mark("start")

    def mark(self, label: str) -> None:
        """Begin a new interval."""
        if self.is_running:
            self._means.mark(label)

    def stop(self) -> None:
        """End the measurement; once is enough."""
        if self.is_running:
            self.is_running = False
            self._dropped.detach()
            self.intervals = self._means.stop()


class _HostEvents:
    """The host allocator's events, with marks as named ranges among them."""

    _MARK = "hiremate_mark:"

    def start(self) -> None:
        torch_private.start_host_events()

    def mark(self, label: str) -> None:
        with record_function(self._MARK + label):
            pass

    def stop(self) -> list[Interval]:
        intervals: list[Interval] = []
        live = 0
        for name, size in torch_private.stop_host_events():
            if name.startswith(self._MARK):
                intervals.append(Interval(name.removeprefix(self._MARK), live, live))
            elif size and intervals:
                live += size
                intervals[-1] = replace(intervals[-1], peak_bytes=max(intervals[-1].peak_bytes, live))
        return intervals


class _DeviceStatistics:
    """The CUDA caching allocator's counters; what was there at the start does not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = 0
        self._intervals: list[Interval] = []

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        self._base = torch.cuda.memory_allocated(self._device)
        self._intervals = []

    def mark(self, label: str) -> None:
        self._close()
        live = torch.cuda.memory_allocated(self._device) - self._base
        self._intervals.append(Interval(label, live, live))
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> list[Interval]:
        self._close()
        return self._intervals

    def _close(self) -> None:
        if self._intervals:
            peak = torch.cuda.max_memory_allocated(self._device) - self._base
            last = self._intervals[-1]
            self._intervals[-1] = replace(last, peak_bytes=max(last.peak_bytes, peak))


def measure_peak(function: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """Run a function and give the bytes that it added at its peak to what was allocated before.

    Args:
        function: Called once, without arguments.
        device: Where its memory counts.

    Returns:
        Peak above the start, in bytes by the allocator's own events, at least 0.
    """
    with MemoryMeter(torch.device(device)) as meter:
        function()
    return max((interval.peak_bytes for interval in meter.intervals), default=0)
