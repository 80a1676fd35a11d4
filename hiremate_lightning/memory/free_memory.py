"""What a device could still hand out: of a GPU, of the machine, of the container that a process runs in."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

CONTAINER = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**62


def free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that a device could still hand out."""
    if device.type != "cuda":
        return free_host_bytes()
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    capped = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free + reserved, capped) - allocated)


def free_host_bytes() -> int:
    """Return the bytes of memory that this process could still be handed, what would be taken from caches included."""
    return min(_free_bytes_of_machine(), _free_bytes_of_container())


def _free_bytes_of_machine() -> int:
    with suppress(OSError, StopIteration):  # Linux says it; "free" is there what not even the cache of files takes
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return _NO_LIMIT  # a system that does not tell


def _free_bytes_of_container() -> int:
    """Read what the limit of a container leaves, as Linux shows it inside (control groups, version 2)."""
    try:
        limit, used = (int((CONTAINER / f"memory.{name}").read_text()) for name in ("max", "current"))
        kinds = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(kinds["inactive_file"]))
    except (OSError, ValueError, KeyError):  # there is none, or its limit is "max"
        return _NO_LIMIT
