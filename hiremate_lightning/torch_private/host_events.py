"""The host allocator's events, by a private torch API.

Checked on the torch versions in `CHECKED_VERSIONS`; `test_metering.py` fails loudly when it moves.
It is the older of torch's two profilers: the newer one writes into freed memory where it stops inside an operation that
began while it ran, and nobody can know what surrounds a training step. Names of operators are not recorded: they would
be ten of the sixteen events of an addition.
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

MARK = "hiremate:"  # begins the names of marks among those of operators
# Ends a recording, and makes no Python objects of its events: that takes longer than recording them.
_UNREAD: Any = torch._C._autograd._ProfilerDisableOptions(True, False)  # type: ignore[attr-defined]
_ERROR = 2  # of the levels at which torch's C++ code logs
_levels: list[int] = []  # those that were set before events were recorded
_giving_way: dict[int, Callable[[], None]] = {}  # by thread that is recorded


def profiler_is_running() -> bool:
    """Whether any of torch's profilers records this thread."""
    return bool(torch.autograd._profiler_enabled())


def start(give_way: Callable[[], None]) -> None:
    """Begin to record.

    Args:
        give_way: Called when another profiler begins in this thread meanwhile: has to end the recording, or that fails.
    """
    _watch_others()
    _giving_way[threading.get_ident()] = give_way
    level = _log_level()
    if level is not None:  # else it warns of every thousandth tensor that is freed now and was allocated before
        _levels.append(level.value)
        level.value = max(level.value, _ERROR)
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    torch.autograd._enable_profiler_legacy(config)
    _enable_record_function(False)


def mark(name: str) -> None:
    """Put a name among the events; code that is being traced does not get it, as it gets `record_function`."""
    _enable_record_function(True)
    with _RecordFunctionFast(MARK + name):
        pass
    _enable_record_function(False)


def stop() -> list[tuple[str, int]]:
    """End the recording.

    Returns:
        In order of time, ("", bytes) for each allocation (above 0) and release (below 0), and (name, 0) for each
        `mark`.
    """
    events: list[tuple[Any, str, int]] = []
    for thread in _end():
        for event in thread:
            kind = event.kind()
            if kind == "memory_alloc":
                events.append((event, "", event.cpu_memory_usage()))
            elif kind == "push" and (name := event.name()).startswith(MARK):
                events.append((event, name.removeprefix(MARK), 0))
    if not events:
        return []
    first = events[0][0]
    timed = [(first.cpu_elapsed_us(event), name, size) for event, name, size in events]
    return [(name, size) for _, name, size in sorted(timed, key=lambda e: e[0])]


def drop() -> None:
    """End the recording, and look at nothing that was recorded."""
    _end(_UNREAD)


def _end(*options: Any) -> list[list[Any]]:
    """End the recording, and return the events of each thread as PyTorch has them."""
    _giving_way.pop(threading.get_ident(), None)
    _enable_record_function(True)
    threads: list[list[Any]] = torch.autograd._disable_profiler_legacy(*options)
    level = _log_level()
    if level is not None and _levels:
        level.value = _levels.pop()
    return threads


@functools.cache
def _watch_others() -> None:
    """Make torch's newer profilers stop our recorder of their thread before they begin: there can be one."""
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
    """Find the least level that torch's C++ code logs; None in builds that don't show it."""
    name = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
