"""Let `torch.cuda` tell of the simulated device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

TOTAL_BYTES = 8 * 2**30
DEVICE = 0


class Event:
    """Each operation ends before the next begins, so an event happens when it is recorded."""

    def __init__(self, **_: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        """Give the milliseconds to another one."""
        return (other._at - self._at) * 1e3

    def synchronize(self) -> None:
        """Wait, which takes no time."""

    wait = query = synchronize


class Stream:
    """Work in any stream runs at once."""

    def __init__(self, **_: Any) -> None:
        self.stream_id = self.cuda_stream = id(self)
        self.device_index, self.device_type = DEVICE, 1

    def wait_stream(self, other: Any) -> None:
        """Wait, which takes no time."""

    wait_event = wait_stream

    def synchronize(self) -> None:
        """Wait, which takes no time."""


def install(device: ModuleType) -> None:
    """Replace what `torch.cuda` asks of the CUDA runtime.

    Args:
        device: The library that `build.load` gives.
    """
    import torch

    current, default = [Stream()], Stream()
    current[0] = default

    @contextmanager
    def stream(chosen: Stream | None) -> Iterator[None]:
        before, current[0] = current[0], chosen or current[0]
        try:
            yield
        finally:
            current[0] = before

    fraction = [1.0]

    def set_fraction(value: float, device_: Any = None) -> None:
        fraction[0] = value
        device.set_capacity(int(TOTAL_BYTES * value))

    def statistic(position: int) -> Callable[..., int]:
        return lambda device_=None: device.statistics()[position]

    def statistics(device_: Any = None) -> dict[str, int]:
        names = ("allocated_bytes.all.current", "allocated_bytes.all.peak")
        names += ("reserved_bytes.all.current", "reserved_bytes.all.peak", "num_ooms")
        return dict(zip(names, device.statistics(), strict=True))

    def snapshot() -> dict[str, Any]:
        actions = {True: "alloc", False: "free_completed"}
        events = [{"action": actions[given], "addr": at, "size": size} for given, at, size in device.events()]
        return {"device_traces": [events], "segments": []}

    set_fraction(1.0)
    properties = SimpleNamespace(name="simulated", total_memory=TOTAL_BYTES, major=9, minor=0, multi_processor_count=8)
    constants = {
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "device_count": 1,
        "current_device": DEVICE,
        "_exchange_device": DEVICE,
        "_maybe_exchange_device": DEVICE,
        "get_device_name": properties.name,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "_get_device_properties": properties,
        "get_arch_list": ["sm_90"],
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "_lazy_init": None,
        "init": None,
        "set_device": None,
        "synchronize": None,
        "_sleep": None,
        "ipc_collect": None,
    }
    replaced: dict[str, Any] = {name: lambda *_, value=value, **__: value for name, value in constants.items()}
    replaced |= {
        "memory_allocated": statistic(0),
        "max_memory_allocated": statistic(1),
        "memory_reserved": statistic(2),
        "max_memory_reserved": statistic(3),
        "memory_stats": statistics,
        "mem_get_info": lambda device_=None: (TOTAL_BYTES - device.statistics()[2], TOTAL_BYTES),
        "reset_peak_memory_stats": lambda device_=None: device.reset_peak(),
        "empty_cache": device.empty_cache,
        "get_per_process_memory_fraction": lambda device_=None: fraction[0],
        "set_per_process_memory_fraction": set_fraction,
        "_record_memory_history": lambda enabled=None, **_: device.record_events(enabled is not None),
        "_snapshot": snapshot,
        "default_generators": (device.default_generator(),),
        "Event": Event,
        "Stream": Stream,
        "stream": stream,
        "current_stream": lambda device_=None: current[0],
        "default_stream": lambda device_=None: default,
    }
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
        for name, value in replaced.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
