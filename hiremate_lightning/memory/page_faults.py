"""The cost of touching memory for the first time on a CPU: the system maps and clears each page then.

The first step of a training touches new pages wherever its memory grows. Later steps don't. So this cost is subtracted
from times that were taken in the first step.
"""

from __future__ import annotations

import functools
import mmap
import time
from collections.abc import Callable

import torch

try:
    from resource import RUSAGE_SELF, getrusage
except ImportError:  # on Windows
    ARE_COUNTED = False
else:
    ARE_COUNTED = True

_PROBE_BYTES = 8 * 2**20


def count() -> int:
    """Return how many pages this process has touched for the first time so far; 0 where the system does not count."""
    return getrusage(RUSAGE_SELF).ru_minflt if ARE_COUNTED else 0


@functools.cache
def cost_ms() -> float:
    """Measure, once, the milliseconds that a first touch of a page takes."""
    return min(_measure() for _ in range(3)) if ARE_COUNTED else 0.0


def _measure(clock: Callable[[], float] = time.perf_counter, count: Callable[[], int] = count) -> float:
    with mmap.mmap(-1, _PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        touched = torch.frombuffer(memory, dtype=torch.uint8)
        clocks, faults = [clock()], count()
        for _ in range(2):
            touched.fill_(1)
            clocks.append(clock())
        faults = count() - faults
        del touched
    first, again = clocks[1] - clocks[0], clocks[2] - clocks[1]
    return max(0.0, 1e3 * (first - again) / max(1, faults))
