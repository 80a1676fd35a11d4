"""What devices, allocators and process groups have and do not show."""

from __future__ import annotations

from typing import Any

import torch


def keep_busy(milliseconds: float = 0.5) -> None:
    """Make the current CUDA device wait about so long, in which the host can launch what follows."""
    torch.cuda._sleep(int(2_000_000 * milliseconds))  # clock cycles


def empty_host_cache() -> None:
    """Return unused pinned memory to the operating system."""
    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


def has_expandable_segments() -> bool:
    """Whether CUDA's caching allocator grows its segments in place, by the environment or by a call."""
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):  # torch 2.11
        return bool(torch._C._cuda_memorySnapshot(None)["allocator_settings"]["expandable_segments"])
    settings = str(torch._C._accelerator_getAllocatorSettings()).replace(" ", "")
    return "expandable_segments:True" in settings


def process_group_store() -> tuple[Any, int, int] | None:
    """Return the process group's key-value store, this process's rank and their number; None outside of a group."""
    group = torch.distributed
    if not group.is_available() or not group.is_initialized() or group.get_world_size() == 1:
        return None
    return (
        group.PrefixStore("hiremate", group.distributed_c10d._get_default_store()),
        group.get_rank(),
        group.get_world_size(),
    )
