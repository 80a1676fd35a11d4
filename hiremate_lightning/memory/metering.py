"""Measure memory: live bytes and peaks between marks, by the allocator's own events.

On the CPU a profiler records each allocation; a dispatch mode would miss what kernels allocate inside. On CUDA the
caching allocator's statistics are read and reset at each mark.

Steps that are not measured in full are observed beside that. On a CPU, `Between` records now and then what code between
the last forward and the backward allocates: a loss, a teacher, a metric. On a GPU, `DevicePeak` reads the peak that the
allocator keeps. What runs beside the step under way is `unmeasured`.
"""

from __future__ import annotations

import pickle
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from ..torch_private import backward_pass, runtime, tensor_state

REST = 99  # `Between` rests for this many times the duration of its last look: looks take 1 % of the time


@dataclass(frozen=True, slots=True)
class Interval:
    """Memory between two marks, in bytes relative to the start of the measurement."""

    label: Any  # the mark at its start
    start_bytes: int  # live at the mark
    peak_bytes: int  # most that lived until the next mark
    released_bytes: int = 0  # bytes that were released at the mark, where a release set it
    allocated_bytes: int = 0  # bytes that were allocated until the next mark, on a CPU


class LiveBytes:
    """Live bytes, and their peaks between marks, as an allocator's events come."""

    lost_marks, is_counting = False, True  # nothing interrupts it

    def __init__(self) -> None:
        self.intervals: list[Interval] = []  # one for each mark
        self._live_bytes = 0
        self._releases: list[Any] = []  # marks to set at releases to come

    def start(self) -> None:
        """Begin to count; the first mark is called "start"."""
        self.mark("start")

    def stop(self) -> None:
        """End the count."""

    def mark(self, label: Any) -> None:
        """Begin a new interval, after those of releases that did not come."""
        for release in (*self._releases, label):
            self._begin(release)
        self._releases.clear()

    def mark_release(self, label: Any) -> None:
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

    def _begin(self, label: Any, released_bytes: int = 0) -> None:
        self.intervals.append(Interval(label, self._live_bytes, self._live_bytes, released_bytes))


class MemoryMeter:
    """Measures from `start` to `stop`.

    To start a meter while another runs pauses that one until the inner meter stops: what happens in between does not
    count there. On a CPU all of a thread end where another profiler begins.

    Nobody reads the intervals of a meter that only covers others (`is_read=False`).
    """

    _running: ClassVar[list[weakref.ref[MemoryMeter]]] = []  # the last one of a thread counts, the others are paused

    def __init__(self, device: torch.device, is_read: bool = True) -> None:
        self._thread = _measured_thread(device)
        self.intervals: list[Interval] = []  # one for each mark, complete when the measurement has ended
        self.was_interrupted = False  # by another meter, or by a profiler that it gave way to
        self.lost_marks = False  # that came while it was paused: then its intervals have wrong labels
        self._means: _HostEvents | _DeviceStatistics = (
            _DeviceStatistics(device) if device.type == "cuda" else _HostEvents(MemoryMeter._give_way, is_read)
        )

    @staticmethod
    def is_available(device: torch.device) -> bool:
        """Whether memory can be measured now: on a CPU not inside of a backward, nor while others profile."""
        if device.type == "cuda":
            return True
        # A profiler that begins or ends inside of a backward does so until its end: autograd restores its state.
        if backward_pass.is_running():
            return False
        return MemoryMeter.is_running(device) or not runtime.profiler_is_running()

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

    @property
    def _is_of_this_thread(self) -> bool:
        """Whether the meter measures this thread. A mark from another thread would land in the events of its meter."""
        return self._thread in (0, threading.get_ident())

    def mark(self, label: Any) -> None:
        """Begin a new interval."""
        if self.is_counting and self._is_of_this_thread:
            self._means.mark(label)
        else:
            self.lost_marks = True

    def mark_release(self, label: Any) -> None:
        """Begin a new interval as soon as something is released; on CUDA, where nobody tells of it, at once."""
        if self.is_counting and self._is_of_this_thread:
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


def _measured_thread(device: torch.device) -> int:
    """Name the thread whose memory is measured: on a CPU the current one, on CUDA all of them are."""
    return 0 if device.type == "cuda" else threading.get_ident()


class _HostEvents(LiveBytes):
    """The host allocator's events, with marks as named ranges among them.

    Where nobody reads the events, they are still recorded, and not looked at: a proof has many. PyTorch keeps the size
    of a block whose release it does not see, and reports it again when the next tensor at that address is released.
    """

    def __init__(self, give_way: Callable[[], None], is_read: bool) -> None:
        super().__init__()
        self._give_way, self._is_read = give_way, is_read
        self._marks: list[tuple[Callable[[Any], None], Any]] = []  # what to do at the event of this number

    def resume(self) -> None:
        runtime.start_recording(self._give_way)

    def mark(self, label: Any) -> None:
        self._put(super().mark, label)

    def mark_release(self, label: Any) -> None:
        self._put(super().mark_release, label)

    def _put(self, begin: Callable[[Any], None], label: Any) -> None:
        self._marks.append((begin, label))
        runtime.mark(str(len(self._marks) - 1))

    def pause(self) -> None:
        if not self._is_read:
            runtime.drop_recording()
            return
        for name, size in runtime.stop_recording():
            if name:
                begin, label = self._marks[int(name)]
                begin(label)
            elif size:
                self.add(size)


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

    def mark(self, label: Any) -> None:
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
    """Run a function and return the bytes that it added at its peak to those allocated before, at least 0."""
    with MemoryMeter(torch.device(device)) as meter:
        function()
    return max((interval.peak_bytes for interval in meter.intervals), default=0)


# ---------------------------------------------------------------- beside the step under way


class RandomState:
    """The generators of torch, NumPy and Python at one moment, kept in memory that no measurement sees."""

    def __init__(self) -> None:
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._host, *self._devices = (state.numpy().tobytes() for state in (torch.get_rng_state(), *devices))
        self._numpy = pickle.dumps(np.random.get_state())  # noqa: NPY002  code without a generator of its own draws there
        self._python = random.getstate()

    def __eq__(self, other: object) -> bool:
        """Whether nothing was drawn between two moments."""
        return isinstance(other, RandomState) and vars(self) == vars(other)

    def restore(self) -> None:
        """Put them back."""
        host, *devices = (torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in (self._host, *self._devices))
        torch.set_rng_state(host)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        np.random.set_state(pickle.loads(self._numpy))  # noqa: NPY002
        random.setstate(self._python)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Restore random state, gradient mode, autocast, and a measurement of the step under way afterwards."""
    with unmeasured(device), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def unmeasured(device: torch.device) -> Iterator[None]:
    """Restore random state, and a measurement of the step under way afterwards."""
    covering = MemoryMeter(device, is_read=False) if MemoryMeter.is_available(device) else nullcontext()
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()  # events are of the current device
    with current, covering, tensor_state.real_mode():
        random_state = RandomState()
        try:
            yield
        finally:
            random_state.restore()


# ---------------------------------------------------------------- in steps that are not measured in full


class Between:
    """Measures the allocations of code between the forwards and the backward of a step, on a CPU."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._meter: MemoryMeter | None = None
        self._thread = 0
        self._due_at = self._took_s = 0.0
        self._allocated_bytes: int | None = None
        backward_pass.tell(self)

    def begin(self) -> None:
        """Begin to look, where that is due and no other meter or profiler runs: the last forward has ended."""
        began_at, device = self._clock(), torch.device("cpu")
        is_free = MemoryMeter.is_available(device) and not MemoryMeter.is_running(device)
        if began_at < self._due_at or self._meter is not None or not is_free:
            return
        self._thread, self._meter, self._allocated_bytes = threading.get_ident(), MemoryMeter(device), None
        self._meter.start()
        self._took_s = self._clock() - began_at

    def backward_called(self) -> None:
        """End the look, where one is under way: a backward is about to run."""
        if self._meter is None or threading.get_ident() != self._thread:
            return
        began_at, meter, self._meter = self._clock(), self._meter, None
        meter.stop()
        if not meter.was_interrupted:
            self._allocated_bytes = sum(interval.allocated_bytes for interval in meter.intervals)
        now = self._clock()
        self._due_at = now + REST * (self._took_s + now - began_at)

    def take(self) -> int | None:
        """Return the bytes that were allocated in the step that has ended; None where that was not seen."""
        self.backward_called()
        allocated_bytes, self._allocated_bytes = self._allocated_bytes, None
        return allocated_bytes


class DevicePeak:
    """Reads the peak of a step on a GPU; the user's peak stays, as long as nothing takes more than planned steps."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._peak_bytes = 0

    def begin(self, device: torch.device, known_bytes: int) -> None:
        """Begin a step, where no other meter runs; a peak above the known bytes will be seen."""
        if MemoryMeter.is_running(device):
            return
        self._device, self._peak_bytes = device, 0
        if torch.cuda.max_memory_allocated(device) > known_bytes:
            torch.cuda.reset_peak_memory_stats(device)

    def backward_starts(self) -> None:
        """Read the peak as soon as the backward ends that has begun."""
        if self._device is not None:
            backward_pass.at_end(self._read)

    def _read(self) -> None:
        if self._device is not None and not MemoryMeter.is_running(self._device):
            self._peak_bytes = torch.cuda.max_memory_allocated(self._device)

    def take(self) -> int:
        """Return the peak of the step that has ended; 0 where it was not read."""
        self._device, peak_bytes, self._peak_bytes = None, self._peak_bytes, 0
        return peak_bytes
