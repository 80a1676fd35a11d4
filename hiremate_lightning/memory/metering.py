"""Measure memory: live bytes and peaks between marks, by the allocator's own events.

On the CPU a profiler records each allocation; a dispatch mode would miss what kernels allocate inside. On CUDA the
caching allocator's statistics are read and reset at each mark.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch

from ..torch_private import backward_pass, runtime


@dataclass(frozen=True, slots=True)
class Interval:
    """Memory between two marks, in bytes relative to the start of the measurement.

    Attributes:
        label: The mark at its start.
        start_bytes: Live at the mark.
        peak_bytes: Most that lived until the next mark.
        released_bytes: Bytes that were released at the mark, where a release set it.
        allocated_bytes: Bytes that were allocated until the next mark, on a CPU.
    """

    label: str
    start_bytes: int
    peak_bytes: int
    released_bytes: int = 0
    allocated_bytes: int = 0


class LiveBytes:
    """Live bytes, and their peaks between marks, as an allocator's events come.

    Attributes:
        intervals: One for each mark.
    """

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self._live_bytes = 0
        self._releases: list[str] = []  # marks to set at releases to come

    def mark(self, label: str) -> None:
        """Begin a new interval, after those of releases that did not come."""
        for release in (*self._releases, label):
            self._begin(release)
        self._releases.clear()

    def mark_release(self, label: str) -> None:
        """Begin a new interval as soon as something is released."""
        self._releases.append(label)

    def add(self, size_bytes: int) -> None:
        """Count an allocation, or a release where the bytes are below 0; nothing before the first mark."""
        if self.intervals:
            self._live_bytes += size_bytes
            if size_bytes > 0:
                last = self.intervals[-1]
                peak_bytes, allocated_bytes = max(last.peak_bytes, self._live_bytes), last.allocated_bytes + size_bytes
                self.intervals[-1] = replace(last, peak_bytes=peak_bytes, allocated_bytes=allocated_bytes)
            elif self._releases and size_bytes < 0:
                self._begin(self._releases.pop(0), -size_bytes)

    def _begin(self, label: str, released_bytes: int = 0) -> None:
        self.intervals.append(Interval(label, self._live_bytes, self._live_bytes, released_bytes))


def _measured_thread(device: torch.device) -> int:
    """Name the thread whose memory is measured: on a CPU the current one, on CUDA all of them are."""
    return 0 if device.type == "cuda" else threading.get_ident()


class Meter(Protocol):
    """Measures memory from `start` to `stop`, see `MemoryMeter`."""

    intervals: list[Interval]
    lost_marks: bool

    @property
    def is_counting(self) -> bool:
        """Whether it counts now: no other meter runs."""

    def start(self) -> None:
        """Begin."""

    def mark(self, label: str) -> None:
        """Begin a new interval."""

    def mark_release(self, label: str) -> None:
        """Begin a new interval as soon as something is released."""

    def stop(self) -> None:
        """End."""


class MemoryMeter:
    """Measures from `start` to `stop`.

    To start a meter while another runs pauses that one until the inner meter stops: what happens in between does not
    count there. On a CPU all of a thread end where another profiler begins.

    Attributes:
        intervals: One for each mark, complete when the measurement has ended.
        was_interrupted: Whether another meter ran meanwhile, or it gave way to a profiler.
        lost_marks: Whether a mark came while the meter was paused: then its intervals have wrong labels.
    """

    _running: ClassVar[list[weakref.ref[MemoryMeter]]] = []  # the last one of a thread counts, the others are paused

    def __init__(self, device: torch.device) -> None:
        self._thread = _measured_thread(device)
        self.intervals: list[Interval] = []
        self.was_interrupted = False
        self.lost_marks = False
        self._means: _HostEvents | _DeviceStatistics = (
            _DeviceStatistics(device) if device.type == "cuda" else _HostEvents(MemoryMeter._give_way)
        )

    @classmethod
    def covering(cls, device: torch.device) -> MemoryMeter:
        """Return a meter that nobody reads. It keeps the running meter from counting what happens meanwhile."""
        meter = cls(device)
        if device.type != "cuda":
            meter._means = _UnreadEvents(cls._give_way)
        return meter

    @staticmethod
    def is_available(device: torch.device) -> bool:
        """Whether memory can be measured now: on a CPU not inside of a backward, nor while others profile."""
        ours = MemoryMeter._current(_measured_thread(device)) is not None
        if device.type == "cuda":
            return True
        # A profiler that begins or ends inside of a backward does so until its end: autograd restores its state.
        return not backward_pass.is_running() and (ours or not runtime.profiler_is_running())

    @staticmethod
    def is_running(device: torch.device) -> bool:
        """Whether a meter measures a device's memory now: on a CPU that of this thread."""
        return MemoryMeter._current(_measured_thread(device)) is not None

    @staticmethod
    def _current(thread: int) -> MemoryMeter | None:
        """Return the meter of a thread that counts now."""
        meters = (reference() for reference in reversed(MemoryMeter._running))
        return next((meter for meter in meters if meter is not None and meter._thread == thread), None)

    @staticmethod
    def _give_way() -> None:
        """End all meters of the current thread."""
        thread = threading.get_ident()
        current = MemoryMeter._current(thread)
        if current is not None:
            current._pause()
        for reference in list(MemoryMeter._running):
            meter = reference()
            if meter is not None and meter._thread == thread:
                meter.was_interrupted = meter.lost_marks = True
                MemoryMeter._running.remove(reference)

    def __enter__(self) -> MemoryMeter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to measure; the first mark is called "start"."""
        outer = MemoryMeter._current(self._thread)
        if outer is not None:
            outer.was_interrupted = True
            outer._pause()
        MemoryMeter._running.append(weakref.ref(self, MemoryMeter._running.remove))
        self._resume()
        self.mark("start")

    @property
    def is_counting(self) -> bool:
        """Whether it runs, and no other meter within it."""
        return MemoryMeter._current(self._thread) is self

    def mark(self, label: str) -> None:
        """Begin a new interval."""
        if self.is_counting:
            self._means.mark(label)
        else:
            self.lost_marks = True

    def mark_release(self, label: str) -> None:
        """Begin a new interval as soon as something has been released; on CUDA, where nobody tells of it, at once.

        While the meter is paused, nothing.
        """
        if self.is_counting:
            self._means.mark_release(label)

    def stop(self) -> None:
        """End the measurement; a meter that has ended already is left alone."""
        counts = self.is_counting
        if counts:
            self._pause()
        for reference in [r for r in MemoryMeter._running if r() is self]:
            MemoryMeter._running.remove(reference)
        self.intervals = self._means.intervals
        outer = MemoryMeter._current(self._thread)
        if counts and outer is not None:
            outer._resume()

    def _pause(self) -> None:
        self._dropped.detach()
        self._means.pause()

    def _resume(self) -> None:
        self._means.resume()
        # A meter that is dropped must not leave a profiler running.
        self._dropped = weakref.finalize(self, self._means.pause)


class _HostEvents:
    """The host allocator's events, with marks as named ranges among them."""

    _MARK = "mark:"
    _RELEASE = "release:"

    def __init__(self, give_way: Callable[[], None]) -> None:
        self._live = LiveBytes()
        self._give_way = give_way

    @property
    def intervals(self) -> list[Interval]:
        return self._live.intervals

    def resume(self) -> None:
        runtime.start_recording(self._give_way)

    def mark(self, label: str) -> None:
        runtime.mark(self._MARK + label)

    def mark_release(self, label: str) -> None:
        runtime.mark(self._RELEASE + label)

    def pause(self) -> None:
        for name, size in runtime.stop_recording():
            if name.startswith(self._MARK):
                self._live.mark(name.removeprefix(self._MARK))
            elif name.startswith(self._RELEASE):
                self._live.mark_release(name.removeprefix(self._RELEASE))
            elif size:
                self._live.add(size)


class _UnreadEvents(_HostEvents):
    """Events that are recorded and not looked at: a proof has many.

    They have to be recorded. PyTorch keeps the size of a block whose release it does not see, and reports it again when
    the next tensor at that address is released.
    """

    def pause(self) -> None:
        runtime.drop_recording()


class _DeviceStatistics:
    """The CUDA caching allocator's counters; memory that was allocated at the start does not count."""

    def __init__(self, device: torch.device) -> None:
        self.intervals: list[Interval] = []
        self._device = device
        self._base = 0
        self._live = 0  # above the base, when it was paused

    def resume(self) -> None:
        torch.cuda.synchronize(self._device)
        self._base = torch.cuda.memory_allocated(self._device) - self._live
        torch.cuda.reset_peak_memory_stats(self._device)

    def mark(self, label: str) -> None:
        self.pause()
        self.intervals.append(Interval(label, self._live, self._live))
        torch.cuda.reset_peak_memory_stats(self._device)

    mark_release = mark

    def pause(self) -> None:
        self._live = torch.cuda.memory_allocated(self._device) - self._base
        if self.intervals:
            peak = torch.cuda.max_memory_allocated(self._device) - self._base
            last = self.intervals[-1]
            self.intervals[-1] = replace(last, peak_bytes=max(last.peak_bytes, peak))


def measure_peak(function: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """Run a function and return the bytes that it added at its peak to those allocated before.

    Args:
        function: Called once, without arguments.
        device: Where its memory counts.

    Returns:
        Peak above the start, in bytes by the allocator's own events, at least 0.
    """
    with MemoryMeter(torch.device(device)) as meter:
        function()
    return max((interval.peak_bytes for interval in meter.intervals), default=0)
