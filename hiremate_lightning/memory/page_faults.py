"""What it costs on a CPU to touch memory for the first time: the system maps and clears each page then.

The first step of a training does so wherever its memory grows; later steps find the pages there. So times taken in the
first step are of use only without.
"""

from __future__ import annotations

import functools
import mmap
import time

import torch

try:
    from resource import RUSAGE_SELF, getrusage
except ImportError:  # on Windows
    ARE_COUNTED = False
else:
    ARE_COUNTED = True

_PROBE_BYTES = 8 * 2**20


def count() -> int:
    """Return the number of pages that this process has touched first so far; 0 where the system does not count."""
    return getrusage(RUSAGE_SELF).ru_minflt if ARE_COUNTED else 0


@functools.cache
def cost_ms() -> float:
    """Measure, once, the milliseconds that each takes."""
    return min(_measure() for _ in range(3)) if ARE_COUNTED else 0.0


def _measure() -> float:
    with mmap.mmap(-1, _PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        touched = torch.frombuffer(memory, dtype=torch.uint8)
        clocks, faults = [time.perf_counter()], count()
        for _ in range(2):
            touched.fill_(1)
            clocks.append(time.perf_counter())
        faults = count() - faults
        del touched
    first, again = clocks[1] - clocks[0], clocks[2] - clocks[1]
    return max(0.0, 1e3 * (first - again) / max(1, faults))
