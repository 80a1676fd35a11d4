"""Measure memory: live bytes and peaks between marks, from the allocator's events.

On a CPU a profiler records each allocation; a dispatch mode would miss allocations inside kernels. On CUDA the caching
allocator's statistics are read and reset at each mark.

Steps that are not measured in full are observed. On a CPU, `Between` measures in some steps what code between the last
forward and the backward allocates: a loss, a teacher, a metric. On a GPU, `DevicePeak` reads the allocator's peak.
Code that is no part of the running step, such as planning, runs in `unmeasured`.
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

REST = 99  # `Between` pauses for this many times the cost of its last measurement, so measuring takes 1 % of the time


@dataclass(frozen=True, slots=True)
class Interval:
    """Memory between two marks, in bytes relative to the start of the measurement."""

    label: Any  # the mark at its start
    start_bytes: int  # live bytes at the mark
    peak_bytes: int  # most live bytes until the next mark
    released_bytes: int = 0  # bytes of the release that set the mark; 0 for other marks
    allocated_bytes: int = 0  # bytes allocated until the next mark, on a CPU


class LiveBytes:
    """Counts live bytes, and their peaks between marks, from allocation events that are passed to `add`."""

    lost_marks, is_counting = False, True  # as in `MemoryMeter`; nothing interrupts this one

    def __init__(self) -> None:
        self.intervals: list[Interval] = []  # one for each mark
        self._live_bytes = 0
        self._releases: list[Any] = []  # marks to set at the next releases

    def start(self) -> None:
        """Begin to count; the first mark is called "start"."""
        self.mark("start")

    def stop(self) -> None:
        """End the count."""

    def mark(self, label: Any) -> None:
        """Begin a new interval; marks of releases that did not come are set just before."""
        for release in (*self._releases, label):
            self._begin(release)
        self._releases.clear()

    def mark_release(self, label: Any) -> None:
        """Begin a new interval at the next release."""
        self._releases.append(label)

    def add(self, size_bytes: int) -> None:
        """Count an allocation, or a release if the bytes are below 0; events before the first mark don't count."""
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

    A meter that starts while another one runs pauses the outer one until it stops: the outer one does not count memory
    of that time. On a CPU, all meters of a thread end when another profiler begins.
    """

    _running: ClassVar[list[weakref.ref[MemoryMeter]]] = []  # a thread's last meter counts, its others are paused
    _left: ClassVar[dict[int, Callable[[], None]]] = {}  # by thread: a call that ends a recording left running there

    def __init__(self, device: torch.device) -> None:
        self._thread = _measured_thread(device)
        self.was_interrupted = False  # whether another meter paused it, or another profiler ended it
        self.lost_marks = False  # whether marks or allocations were not seen: then its intervals are wrong
        self._means: _HostEvents | _DeviceStatistics = (
            _DeviceStatistics(device) if device.type == "cuda" else _HostEvents()
        )
        self.intervals = self._means.intervals  # one for each mark; complete when the measurement has ended

    @staticmethod
    def is_available(device: torch.device) -> bool:
        """Whether memory can be measured now: on a CPU neither inside a backward, nor while another profiler runs."""
        if device.type == "cuda":
            return True
        # Autograd restores the profiler's state when a backward ends: a start or stop inside it would be undone.
        if backward_pass.is_running():
            return False
        is_own = MemoryMeter.is_running(device) or _measured_thread(device) in MemoryMeter._left
        return is_own or not runtime.profiler_is_running()

    @staticmethod
    def is_running(device: torch.device) -> bool:
        """Whether a meter measures a device's memory now; on a CPU, a meter of this thread."""
        return MemoryMeter._current(_measured_thread(device)) is not None

    @staticmethod
    def _current(thread: int) -> MemoryMeter | None:
        """Return the latest meter of a thread that has not ended."""
        meters = (reference() for reference in reversed(MemoryMeter._running))
        return next((meter for meter in meters if meter is not None and meter._thread == thread), None)

    @staticmethod
    def _give_way() -> None:
        """End all meters of the current thread."""
        while (meter := MemoryMeter._current(threading.get_ident())) is not None:
            meter.give_up()

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
        """Whether the meter runs, and no inner meter has paused it, even one that is gone."""
        return MemoryMeter._current(self._thread) is self and self._dropped.alive

    @property
    def is_of_this_thread(self) -> bool:
        """Whether the meter measures this thread; a mark set from another thread would land in that thread's events."""
        return self._thread in (0, threading.get_ident())

    def mark(self, label: Any) -> None:
        """Begin a new interval."""
        if self.is_counting and self.is_of_this_thread:
            self._means.mark(label)
        else:
            self.lost_marks = True

    def mark_release(self, label: Any) -> None:
        """Begin a new interval at the next release; on CUDA at once, because releases are not reported."""
        if self.is_counting and self.is_of_this_thread:
            self._means.mark_release(label)

    def stop(self) -> None:
        """End the measurement; later calls change nothing."""
        counts = self.is_counting
        if counts:
            self._pause()
        for reference in [r for r in MemoryMeter._running if r() is self]:
            MemoryMeter._running.remove(reference)
        outer = MemoryMeter._current(self._thread)
        if counts and outer is not None:
            outer._resume()

    def give_up(self) -> None:
        """End the measurement; it counts as interrupted."""
        self.was_interrupted = self.lost_marks = True
        self.stop()

    def _pause(self) -> None:
        """Stop counting. If its thread has ended, or the meter that had paused it is gone, the measurement is lost."""
        runs = self._dropped.detach() is not None
        if not runs or (self._thread != 0 and not (self.is_of_this_thread and runtime.profiler_is_running())):
            self.was_interrupted = self.lost_marks = True
        if runs:
            MemoryMeter._end(self._thread, self._means.pause)

    def _resume(self) -> None:
        end_left = MemoryMeter._left.pop(self._thread, None)
        if end_left is not None:
            end_left()
        self._means.resume()
        # A meter that is dropped must not leave a profiler running.
        self._dropped = weakref.finalize(self, MemoryMeter._end, self._thread, self._means.pause)

    @staticmethod
    def _end(thread: int, pause: Callable[[], None]) -> None:
        """End a recording.

        A backward would undo this, and another thread can't do it: then the next recording of the thread ends it first.
        """
        if thread == 0 or (thread == threading.get_ident() and not backward_pass.is_running()):
            pause()
        else:
            MemoryMeter._left[thread] = pause


def _measured_thread(device: torch.device) -> int:
    """Return the identity of the thread whose memory is measured: the current one on a CPU, 0 for all on CUDA."""
    return 0 if device.type == "cuda" else threading.get_ident()


class _HostEvents(LiveBytes):
    """The host allocator's events, with marks as named ranges among them."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: list[tuple[Callable[[Any], None], Any]] = []  # the call for each mark, by the range's name

    def resume(self) -> None:
        runtime.start_recording(MemoryMeter._give_way)

    def mark(self, label: Any) -> None:
        self._put(super().mark, label)

    def mark_release(self, label: Any) -> None:
        self._put(super().mark_release, label)

    def _put(self, begin: Callable[[Any], None], label: Any) -> None:
        self._marks.append((begin, label))
        runtime.mark(str(len(self._marks) - 1))

    def pause(self) -> None:
        for name, size in runtime.stop_recording():
            if name:
                begin, label = self._marks[int(name)]
                begin(label)
            elif size:
                self.add(size)


class _DeviceStatistics:
    """The CUDA caching allocator's counters; memory allocated before the start does not count."""

    def __init__(self, device: torch.device) -> None:
        self.intervals: list[Interval] = []
        self._device = device
        self._base = 0
        self._live = 0  # live bytes above the base at the last mark or pause

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
    """Run a function and return its peak in bytes above those allocated before, at least 0."""
    with MemoryMeter(torch.device(device)) as meter:
        function()
    return max((interval.peak_bytes for interval in meter.intervals), default=0)


# ---------------------------------------------------------------- code that is no part of the step


class RandomState:
    """States of the generators of torch, NumPy and Python at one moment, in memory that no meter counts."""

    def __init__(self) -> None:
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._host, *self._devices = (state.numpy().tobytes() for state in (torch.get_rng_state(), *devices))
        self._numpy = pickle.dumps(np.random.get_state())  # noqa: NPY002  code without a generator of its own draws there
        self._python = random.getstate()

    def __eq__(self, other: object) -> bool:
        """Whether no random number was drawn between two moments."""
        return isinstance(other, RandomState) and vars(self) == vars(other)

    def restore(self) -> None:
        """Set the generators to these states."""
        host, *devices = (torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in (self._host, *self._devices))
        torch.set_rng_state(host)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        np.random.set_state(pickle.loads(self._numpy))  # noqa: NPY002
        random.setstate(self._python)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Run code without gradients, without autocast, and as `unmeasured` does."""
    with unmeasured(device), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def unmeasured(device: torch.device) -> Iterator[None]:
    """Run code whose memory no meter counts; restore random state and the paused meter afterwards.

    A meter of its own records the events of the code, because PyTorch keeps the size of a block whose release it
    misses, and reports it when the next tensor there is released.
    """
    covering = MemoryMeter(device) if MemoryMeter.is_available(device) else nullcontext()
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()  # events need the current device
    with current, covering, tensor_state.real_mode():
        random_state = RandomState()
        try:
            yield
        finally:
            random_state.restore()


# ---------------------------------------------------------------- in steps that are not measured in full


class Between:
    """Measures the bytes that code between the last forward and the backward allocates, on a CPU."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._meter: MemoryMeter | None = None
        self._due_at = self._took_s = 0.0
        self._allocated_bytes: int | None = None
        backward_pass.add_listener(self)

    def begin(self) -> None:
        """Begin to measure after the last forward, if it is time and no other meter or profiler runs."""
        began_at, device = self._clock(), torch.device("cpu")
        is_free = MemoryMeter.is_available(device) and not MemoryMeter.is_running(device)
        if began_at < self._due_at or self._meter is not None or not is_free:
            return
        self._meter, self._allocated_bytes = MemoryMeter(device), None
        self._meter.start()
        self._took_s = self._clock() - began_at

    def backward_called(self) -> None:
        """End a measurement that runs: a backward is about to start."""
        if self._meter is None or not self._meter.is_of_this_thread:
            return
        began_at, meter, self._meter = self._clock(), self._meter, None
        meter.stop()
        if not meter.was_interrupted:
            self._allocated_bytes = sum(interval.allocated_bytes for interval in meter.intervals)
        now = self._clock()
        self._due_at = now + REST * (self._took_s + now - began_at)

    def take(self) -> int | None:
        """Return the bytes that were allocated in the step that has ended; None if not measured."""
        self.backward_called()
        allocated_bytes, self._allocated_bytes = self._allocated_bytes, None
        return allocated_bytes


class DevicePeak:
    """Reads the peak of a step on a GPU, and resets the allocator's peak only if it exceeds that of planned steps."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._peak_bytes = 0

    def begin(self, device: torch.device, known_bytes: int) -> None:
        """Begin a step, unless a meter runs; a peak of the step above `known_bytes` will be seen."""
        if MemoryMeter.is_running(device):
            return
        self._device, self._peak_bytes = device, 0
        if torch.cuda.max_memory_allocated(device) > known_bytes:
            torch.cuda.reset_peak_memory_stats(device)

    def backward_starts(self) -> None:
        """Read the peak when the running backward ends."""
        if self._device is not None:
            backward_pass.at_end(self._read)

    def _read(self) -> None:
        if self._device is not None and not MemoryMeter.is_running(self._device):
            self._peak_bytes = torch.cuda.max_memory_allocated(self._device)

    def take(self) -> int:
        """Return the peak of the step that has ended; 0 if it was not read."""
        self._device, peak_bytes, self._peak_bytes = None, self._peak_bytes, 0
        return peak_bytes
