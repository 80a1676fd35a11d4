"""What a device could still hand out: of a GPU, of the machine, of the container that a process runs in."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

CONTAINER = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that a device could still hand out."""
    if device.type != "cuda":
        return free_host_bytes()
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    capped = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free + reserved, capped) - allocated)


def free_host_bytes() -> int:
    """Return the bytes of memory that the host could still give this process, including what caches would give up.

    The limit of a container is read as Linux shows it inside (control groups, version 2).
    """
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((CONTAINER / f"memory.{name}").read_text()) for name in ("max", "current"))
        kinds = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        return min(free, max(0, limit - used + int(kinds["inactive_file"])))
    except (OSError, ValueError, KeyError):  # there is no container, or its limit is "max"
        return free
