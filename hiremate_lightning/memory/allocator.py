"""What a device's allocator hands out for a request: CUDA's caching allocator gives more than it was asked for.

Its rules are those of `get_allocation_size` and `should_split` in PyTorch's c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from ..records.graph import Graph
from ..torch_private import runtime, tensor_state

BLOCK_BYTES = 512  # a request is rounded up to a multiple of it
SEGMENT_BYTES = 2 * 2**20  # what a large request takes from the driver is a multiple of it
LEAST_LARGE_BYTES = 10 * 2**20  # a request from here on gets memory of its own
LEAST_REST_BYTES = 2**20  # what is left of it is only split off where it is more


def allocated_bytes(size_bytes: int, device: torch.device) -> int:
    """Return the bytes that a device's allocator takes for a request: CUDA's caching allocator rounds up to 512."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES if device.type == "cuda" else size_bytes


def storage_bytes(tensors: Iterable[torch.Tensor], device: torch.device, seen: set[int] | None = None) -> int:
    """Add up the storages of tensors as a device's allocator rounds them, each once.

    Args:
        tensors: The tensors.
        device: The device.
        seen: Storages that were counted before, and are not counted again; those of the tensors are added.
    """
    seen = set() if seen is None else seen
    sizes = tensor_state.storage_sizes(tensors)
    total = sum(allocated_bytes(size, device) for storage, size in sizes.items() if storage not in seen)
    seen.update(sizes)
    return total


def in_blocks(graph: Graph, device: torch.device) -> Graph:
    """Return a graph with the bytes that each storage occupies on a device.

    What is left of the memory for a large request, at most 1 MiB, is not used for another. With expandable segments
    nothing is lost.
    """
    if device.type != "cuda" or runtime.has_expandable_segments():
        return graph
    storages = tuple(replace(storage, size_bytes=block_bytes(storage.size_bytes)) for storage in graph.storages)
    return replace(graph, storages=storages)


def block_bytes(size_bytes: int) -> int:
    """Return the bytes that a request for fresh memory occupies on CUDA without expandable segments."""
    if size_bytes < LEAST_LARGE_BYTES:
        return size_bytes
    taken = -(-size_bytes // SEGMENT_BYTES) * SEGMENT_BYTES
    return taken if taken - size_bytes <= LEAST_REST_BYTES else size_bytes
