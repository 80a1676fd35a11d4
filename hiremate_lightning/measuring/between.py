"""Memory that a step takes outside of its plan, observed in steps that are not measured in full.

On a CPU, this is what code between the last forward and the backward allocates: a loss, a teacher, a metric. Its events
are recorded now and then, for 1 % of the time. On a GPU the allocator keeps the peak, which is read in each step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from ..memory.metering import MemoryMeter
from ..torch_private import backward_pass

REST = 99  # a look is followed by this many times its own duration without one


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
        is_whole = not meter.was_interrupted
        self._allocated_bytes = sum(i.allocated_bytes for i in meter.intervals) if is_whole else None
        now = self._clock()
        self._due_at = now + REST * (self._took_s + now - began_at)

    def forget(self) -> None:
        """End the look, where one is under way, and forget its result: the step has more forwards, or failed."""
        self.backward_called()
        self._allocated_bytes = None

    def take(self) -> int | None:
        """Return the bytes that were allocated in the step that has ended; None where that was not seen."""
        self.backward_called()
        allocated_bytes, self._allocated_bytes = self._allocated_bytes, None
        return allocated_bytes


class DevicePeak:
    """Reads the peak of a step on a GPU, which the allocator keeps.

    The user reads the same peak as ever, as long as nothing takes more than the planned steps.
    """

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
