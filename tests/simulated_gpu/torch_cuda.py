"""Let `torch.cuda` tell of the simulated device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

TOTAL_BYTES = 8 * 2**30
DEVICE = 0
_installed: list[ModuleType] = []


def streams_of(device: ModuleType) -> tuple[type, type]:
    """Make the classes of streams and events of a device.

    What is computed ends before the next operation begins, so nobody waits for it. A copy between host and device in a
    stream of its own runs when somebody waits for it, and not before.
    """
    numbers = count()  # the first is the default stream's

    class Event:
        """A place in a stream; it happens when it is recorded, but for copies before it."""

        def __init__(self, **_: Any) -> None:
            self._at, self.stream, self.asked = 0.0, 0, 0

        def record(self, stream: Any = None) -> None:
            self._at = time.perf_counter()
            self.stream = (stream or torch_stream()).number
            self.asked = device.record(self.stream)

        def elapsed_time(self, other: Event) -> float:
            """Give the milliseconds to another one."""
            return (other._at - self._at) * 1e3

        def synchronize(self) -> None:
            """Wait, which takes no time."""
            device.wait(0, self.stream, self.asked)

        wait = query = synchronize

    class Stream:
        """A stream."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.number = next(numbers)
            self.stream_id = self.cuda_stream = id(self)
            self.device_index, self.device_type = DEVICE, 1

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def wait_event(self, event: Event) -> None:
            device.wait(self.number, event.stream, event.asked)

        def wait_stream(self, other: Stream) -> None:
            self.wait_event(other.record_event())

        def synchronize(self) -> None:
            device.wait(0, self.number, device.record(self.number))

    def torch_stream() -> Any:
        import torch

        return torch.cuda.current_stream()

    return Stream, Event


def is_installed() -> bool:
    """Whether this process has the simulated device."""
    return bool(_installed)


@contextmanager
def any_order(seed: int | None = None) -> Iterator[None]:
    """Let kernels that a GPU lets add in any order do so, as long as PyTorch is not asked for deterministic ones.

    Args:
        seed: Draws one order for all calls that add up to the same sum, so that a step can be run again; None for
            another order in each call, as on a GPU.
    """
    (device,) = _installed
    device.add_in_any_order(time.time_ns() if seed is None else seed, seed is None)
    try:
        yield
    finally:
        device.add_in_fixed_order()


def install(device: ModuleType) -> None:
    """Replace what `torch.cuda` asks of the CUDA runtime.

    Args:
        device: The library that `build.load` gives.
    """
    import torch

    _installed.append(device)
    stream_class, event_class = streams_of(device)
    default = stream_class()
    current = threading.local()

    def current_stream(device_: Any = None) -> Any:
        return getattr(current, "stream", default)

    @contextmanager
    def stream(chosen: Any | None) -> Iterator[None]:
        before, current.stream = current_stream(), chosen or current_stream()
        device.set_stream(current.stream.number)
        try:
            yield
        finally:
            current.stream = before
            device.set_stream(before.number)

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

    resize_on_host = torch.UntypedStorage.resize_

    def resize(storage: Any, size_bytes: int) -> Any:
        if storage.device.type != "cuda":
            return resize_on_host(storage, size_bytes)
        device.resize_storage(torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage), size_bytes)
        return storage

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
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
        "_sleep": None,
        "ipc_collect": None,
    }
    replaced: dict[str, Any] = {name: lambda *_, value=value, **__: value for name, value in constants.items()}
    replaced |= {
        "_initialized": True,  # checkpoint keeps the random state of devices that are
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
        "synchronize": lambda device_=None: device.finish(),
        "Event": event_class,
        "Stream": stream_class,
        "stream": stream,
        "current_stream": current_stream,
        "default_stream": lambda device_=None: default,
    }
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
        for name, value in replaced.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
