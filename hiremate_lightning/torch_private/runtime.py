"""Read private state of devices, allocators and process groups, and record the allocation events of the host.

The recorder is torch's older profiler: the newer one writes into freed memory if it stops inside of an operation that
began while it ran. Operator names are not recorded: they would be ten of sixteen events.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import _enable_record_function
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig, _RecordFunctionFast
from torch.autograd import profiler

MARK = "hiremate:"  # prefix of a mark's name, to tell it from an operator's
profiler_is_running: Callable[[], bool] = torch.autograd._profiler_enabled  # any of torch's, in this thread
_ERROR = 2  # the level ERROR of torch's C++ log
_levels: list[int] = []  # C++ log levels to restore at the end of recordings
_giving_way: dict[int, Callable[[], None]] = {}  # by recorded thread: the function that ends its recording


def keep_busy(milliseconds: float = 0.5) -> None:
    """Keep the current CUDA device busy for about this long, while the host launches the kernels that follow."""
    torch.cuda._sleep(int(2_000_000 * milliseconds))  # in clock cycles


def empty_host_cache() -> None:
    """Return unused pinned memory to the operating system."""
    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


def has_expandable_segments() -> bool:
    """Whether CUDA's caching allocator uses expandable segments, set by the environment or by a call."""
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):  # torch 2.11
        return bool(torch._C._cuda_memorySnapshot(None)["allocator_settings"]["expandable_segments"])
    settings = str(torch._C._accelerator_getAllocatorSettings()).replace(" ", "")
    return "expandable_segments:True" in settings


def world_size() -> int:
    """Return the number of processes of torch.distributed; 1 where it does not run."""
    group = torch.distributed
    return group.get_world_size() if group.is_available() and group.is_initialized() else 1


def process_group_store() -> tuple[Any, int, int] | None:
    """Return the process group's key-value store, this process's rank and the world size; None for a single process."""
    if world_size() == 1:
        return None
    group = torch.distributed
    store = group.PrefixStore("hiremate", group.distributed_c10d._get_default_store())
    return store, group.get_rank(), group.get_world_size()


# ---------------------------------------------------------------- events of the host's allocator


def start_recording(give_way: Callable[[], None]) -> None:
    """Begin a recording; `give_way` must end it, and is called before another profiler begins in this thread."""
    _watch_others()
    _giving_way[threading.get_ident()] = give_way
    level = _log_level()
    if level is not None:  # otherwise it warns of every thousandth freed tensor that was allocated before
        _levels.append(level.value)
        level.value = max(level.value, _ERROR)
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    torch.autograd._enable_profiler_legacy(config)
    _enable_record_function(False)


def mark(name: str) -> None:
    """Record a name among the events; traced code does not capture the mark, as it captures `record_function`."""
    _enable_record_function(True)
    with _RecordFunctionFast(MARK + name):
        pass
    _enable_record_function(False)


def stop_recording() -> list[tuple[str, int]]:
    """End the recording and return its events in order.

    They are ("", bytes) for an allocation, below 0 for a release, and (name, 0) for a mark.
    """
    _giving_way.pop(threading.get_ident(), None)
    _enable_record_function(True)
    # There are none if the recording ended with its thread.
    threads: list[list[Any]] = torch.autograd._disable_profiler_legacy() if profiler_is_running() else []
    level = _log_level()
    if level is not None and _levels:
        level.value = _levels.pop()
    events: list[tuple[Any, str, int]] = []
    for thread in threads:
        for event in thread:
            kind = event.kind()
            if kind == "memory_alloc":
                events.append((event, "", event.cpu_memory_usage()))
            elif kind == "push" and (name := event.name()).startswith(MARK):
                events.append((event, name.removeprefix(MARK), 0))
    if events:
        first = events[0][0]
        events.sort(key=lambda event: float(first.cpu_elapsed_us(event[0])))
    return [(name, size) for _, name, size in events]


@functools.cache
def _watch_others() -> None:
    """Make torch's newer profilers end our recording of their thread before they begin: there can be only one."""
    enable = profiler._enable_profiler

    @functools.wraps(enable)
    def enable_alone(*arguments: Any, **options: Any) -> None:
        give_way = _giving_way.get(threading.get_ident())
        if give_way is not None:
            give_way()
        enable(*arguments, **options)

    profiler._enable_profiler = enable_alone


@functools.cache
def _log_level() -> ctypes.c_int | None:
    """Return the lowest level that torch's C++ code logs, which can be set; None if the build does not export it."""
    name = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
