"""The bytes that a device's allocator takes for a request, and the bytes that it could still hand out.

CUDA's caching allocator takes more bytes than requested, by the rules of `get_allocation_size` and `should_split` in
PyTorch's c10/cuda/CUDACachingAllocator.cpp. Free memory is that of the GPU, of the machine, or of the container in
which the process runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from ..records.costs import Profile
from ..records.graph import Graph
from ..records.step import Call, MergedStep, merge
from ..torch_private import runtime, tensor_state

BLOCK_BYTES = 512  # a request is rounded up to a multiple of this
SEGMENT_BYTES = 2 * 2**20  # a large request takes a multiple of this from the driver
LEAST_LARGE_BYTES = 10 * 2**20  # a request of at least this size gets a segment of its own
LEAST_REST_BYTES = 2**20  # the rest of that segment is split off for other requests only if it is larger than this
CONTAINER = Path("/sys/fs/cgroup")


def allocated_bytes(size_bytes: int, device: torch.device) -> int:
    """Return the bytes that a device's allocator takes for a request: CUDA's caching allocator rounds up to 512."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES if device.type == "cuda" else size_bytes


def storage_bytes(tensors: Iterable[torch.Tensor], device: torch.device, seen: set[int] | None = None) -> int:
    """Return the bytes that an allocator takes for the tensors' storages not in `seen`; add these storages to it."""
    seen = set() if seen is None else seen
    sizes = tensor_state.storage_sizes(tensors)
    total = sum(allocated_bytes(size, device) for storage, size in sizes.items() if storage not in seen)
    seen.update(sizes)
    return total


def in_blocks(graph: Graph, device: torch.device) -> Graph:
    """Return a graph whose storages have the bytes that they occupy on a device.

    A large request also occupies the rest of its segment, up to 1 MiB, unless segments are expandable.
    """
    if device.type != "cuda" or runtime.has_expandable_segments():
        return graph
    storages = tuple(replace(storage, size_bytes=block_bytes(storage.size_bytes)) for storage in graph.storages)
    return replace(graph, storages=storages)


def alone(graph: Graph, profile: Profile, device: torch.device) -> MergedStep:
    """Return a step of one captured graph, with the bytes that its storages occupy on a device."""
    return merge([Call(in_blocks(graph, device), profile)], [0])


def block_bytes(size_bytes: int) -> int:
    """Return the bytes that a request for fresh memory occupies on CUDA without expandable segments."""
    if size_bytes < LEAST_LARGE_BYTES:
        return size_bytes
    taken = -(-size_bytes // SEGMENT_BYTES) * SEGMENT_BYTES
    return taken if taken - size_bytes <= LEAST_REST_BYTES else size_bytes


def free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that a device could still hand out."""
    if device.type != "cuda":
        return free_host_bytes()
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    capped = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free + reserved, capped) - allocated)


def free_host_bytes(container: Path = CONTAINER) -> int:
    """Return the bytes of memory that the host could still give this process, including caches that it would drop.

    `container` is the folder in which Linux shows the limit of a container (control groups, version 2).
    """
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((container / f"memory.{name}").read_text()) for name in ("max", "current"))
        kinds = dict(line.split() for line in (container / "memory.stat").read_text().splitlines())
        return min(free, max(0, limit - used + int(kinds["inactive_file"])))
    except (OSError, ValueError, KeyError):  # no container, or its limit is "max"
        return free
