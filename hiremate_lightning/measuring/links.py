"""The speed of copies to the host and back: measured once, in both directions at once, as plans use them."""

from __future__ import annotations

import torch

from ..memory.allocator import free_bytes
from ..records.costs import Link
from .apart import undisturbed

SIZE_BYTES, FREE_SHARE = 40_000_000, 0.1  # most bytes of a copy, and most of the device's free memory for a copy
REPEATS, SMALL_BYTES = 5, 4096
LEAST_MS = 1e-3  # no clock here resolves less


def measure_link(device: torch.device) -> Link:
    """Measure the link between a GPU and the host.

    Returns:
        The fastest of a few copies in each direction, while as much goes in the other one.
    """
    with undisturbed(device):
        size = max(SMALL_BYTES, min(SIZE_BYTES, int(FREE_SHARE * free_bytes(device))))
        latency_ms = min(min(_both_ways_ms(device, SMALL_BYTES)) for _ in range(REPEATS))
        times = [_both_ways_ms(device, size) for _ in range(REPEATS)]
    out_ms, in_ms = (max(LEAST_MS, min(of_one) - latency_ms) for of_one in zip(*times, strict=True))
    return Link(size / out_ms, size / in_ms, latency_ms)


def _both_ways_ms(device: torch.device, size_bytes: int) -> tuple[float, float]:
    """Copy to the host and back at once; return the milliseconds of each."""
    on_device = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    on_host = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    torch.cuda.synchronize(device)
    events = []
    pairs = zip(streams, (on_host[0], on_device[1]), (on_device[0], on_host[1]), strict=True)
    for stream, target, source in pairs:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            before.record(stream)
            target.copy_(source, non_blocking=True)
            after.record(stream)
        events.append((before, after))
    torch.cuda.synchronize(device)
    out_ms, in_ms = (before.elapsed_time(after) for before, after in events)
    return out_ms, in_ms
