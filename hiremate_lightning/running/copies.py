"""Copies to the host and back while the device computes, of values that programs or saved-tensor hooks offload.

A GPU has a copy stream for each direction. Each copy begins behind all operations before it, and the computing stream
waits for the copy's event before the memory is freed or read. So memory goes back to the allocator in the order of the
program: without `record_stream`, and with the bytes that the simulator counts.

A value on the CPU is copied at once: a CPU has no streams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..capturing.capture import Captured
from ..records.offload import round_block, staying
from ..rewriting.nodes import is_collective
from ..rewriting.replays import is_state
from ..torch_private import runtime, tensor_state
from ..units import format_bytes

FULL = (
    "The host has no {size} left for a value that is offloaded from the device. Name less in host_budget=, or keep "
    "values on the device with offload='off'."
)


class HostMemory:
    """Blocks of the host's memory for copies: pinned for a GPU, and reused from step to step.

    PyTorch rounds pinned memory up to a power of two. So pinned blocks have such sizes, and serve all smaller values.
    If a new block would exceed `most_bytes`, blocks without a value are freed first.
    """

    def __init__(self) -> None:
        self.size_bytes = 0  # bytes of all blocks
        self.most_bytes: int | None = None  # limit of `size_bytes`, unless more are in use at once; None for no limit
        self._idle: defaultdict[tuple[int, bool], list[Block]] = defaultdict(list)

    def take(self, size_bytes: int, is_pinned: bool) -> Block:
        """Return an unused block.

        Raises:
            MemoryError: If the host has no memory for a new block.
        """
        whole_bytes = round_block(size_bytes) if is_pinned else size_bytes
        idle = self._idle[whole_bytes, is_pinned]
        if not idle:
            if self.most_bytes is not None and self.size_bytes + whole_bytes > self.most_bytes:
                for unused in self._idle.values():
                    self.size_bytes -= sum(block.memory.nbytes for block in unused)
                    unused.clear()
                runtime.empty_host_cache()
            try:
                idle.append(Block(torch.empty(whole_bytes, dtype=torch.uint8, pin_memory=is_pinned), is_pinned))
            except RuntimeError as error:  # PyTorch has no exception class for a full host
                raise MemoryError(FULL.format(size=format_bytes(whole_bytes))) from error
            self.size_bytes += whole_bytes
        return idle.pop()

    def copy_out(self, tensor: torch.Tensor) -> Leaving:
        """Begin to copy a tensor's storage to the host."""
        return Leaving(tensor, self)

    def give(self, block: Block) -> None:
        """Take a block back; its last copy may still run."""
        self._idle[block.memory.nbytes, block.is_pinned].append(block)


@dataclass
class Block:
    """A block of the host's memory."""

    memory: torch.Tensor  # bytes of the block; a value takes the first ones
    is_pinned: bool  # whether its memory is pinned, for copies that run while the host works
    last: Any = None  # event of the last copy to or from the block; None if there is nothing to wait for


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream] | None:
    """Return a GPU's streams for copies from the host and to it; None for a device that copies at once."""
    return (torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else None


def _copy(memory: torch.Tensor, block: Block, to_host: bool) -> None:
    """Begin a copy, behind all operations so far and behind the last copy to or from the block."""
    on_host, streams = block.memory[: memory.nbytes], _streams(memory.device)
    target, source = (on_host, memory) if to_host else (memory, on_host)
    if streams is None:
        target.copy_(source)
        return
    stream = streams[to_host]
    stream.wait_stream(torch.cuda.current_stream(memory.device))
    if block.last is not None:
        stream.wait_event(block.last)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        block.last = stream.record_event()


def _let_wait(device: torch.device, event: Any) -> None:
    """Let all later operations of a device wait for a copy's event; None stands for a copy that has ended."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


class Leaving:
    """A storage that is being copied to the host, or lies there; its block is given back when this object dies."""

    def __init__(self, tensor: torch.Tensor, host: HostMemory) -> None:
        memory = tensor_state.memory_of(tensor)
        self.device, self.size_bytes, self._host = memory.device, memory.nbytes, host
        self.block = host.take(memory.nbytes, is_pinned=memory.device.type == "cuda")
        _copy(memory, self.block, to_host=True)
        self._back: Callable[[], torch.UntypedStorage | None] = lambda: None

    def wait(self) -> None:
        """Let all later operations of the device wait for the copy."""
        _let_wait(self.device, self.block.last)

    def storage(self) -> torch.UntypedStorage:
        """Return the storage on the device: copied to new memory, unless the result of an earlier call still lives."""
        storage = self._back()
        if storage is None:
            storage = Arriving(self).storage()
            self._back = tensor_state.refer_weakly(storage)
        return storage

    def __del__(self) -> None:
        if hasattr(self, "block"):
            self._host.give(self.block)


class Arriving:
    """A storage that is being copied back from the host, to new memory of the device."""

    def __init__(self, leaving: Leaving) -> None:
        self._leaving = leaving  # keeps the block from being reused before the copy ends
        self._memory = torch.empty(leaving.size_bytes, dtype=torch.uint8, device=leaving.device)
        _copy(self._memory, leaving.block, to_host=False)
        self._copied: Any = leaving.block.last

    def storage(self) -> torch.UntypedStorage:
        """Let all later operations wait for the copy, and return the storage."""
        self._wait()
        return self._memory.untyped_storage()

    def _wait(self) -> None:
        event, self._copied = self._copied, None
        _let_wait(self._leaving.device, event)

    def __del__(self) -> None:
        if hasattr(self, "_copied"):  # a step may fail before its wait: the copy must end before the memory is freed
            self._wait()


Place = Callable[[torch.UntypedStorage], torch.Tensor]  # makes a tensor on a storage


def place_of(tensor: torch.Tensor) -> Place:
    """Return a function that makes a tensor of this type, shape, strides and offset on a storage of the same bytes."""
    dtype, *place = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
    return lambda storage: torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)


@dataclass(frozen=True)
class Parked:
    """A tensor whose storage is on the host, and its place there."""

    leaving: Leaving
    place: Place


def wait_out(leaving: Leaving, *tensors: torch.Tensor) -> tuple[Parked, ...]:
    """Wait for a copy to the host; return the parked tensors that replace `tensors`, which lie on the storage."""
    leaving.wait()
    return tuple(Parked(leaving, place_of(tensor)) for tensor in tensors)


def copy_in(parked: Parked) -> Arriving:
    """Begin to copy a storage back."""
    return Arriving(parked.leaving)


def wait_in(parked: Parked, arriving: Arriving) -> torch.Tensor:
    """Wait for a copy back to the device; return the parked tensor on the new storage."""
    return parked.place(arriving.storage())


def is_copying(function: object) -> bool:
    """Whether a function that a program calls copies values to the host or back, or waits for a copy."""
    return getattr(function, "__module__", None) == __name__


def pinned_storages(captured: Captured) -> frozenset[int]:
    """Return the storages that must not be offloaded.

    These are: storages that code outside the graph sees; those that collectives read or write, since a collective goes
    on while other operations run; those of functions that their author compiled, which may keep the memory; states of
    generators; storages on another device; and storages of tensors that have more than bytes, shape and strides.
    """
    graph = captured.graph
    pinned = {graph.tensors[t].storage for t, v in enumerate(captured.fx_values) if not _is_plain(v, captured)}
    for node in graph.nodes:
        if is_collective(node.op) or node.compiled:
            pinned.update(graph.tensors[t].storage for t in (*node.inputs, *node.outputs))
    return frozenset(storage for storage in pinned.union(staying(graph)) if storage is not None)


def _is_plain(value: Any, captured: Captured) -> bool:
    shown = value.meta.get("val")
    if is_state(value) or not tensor_state.is_dense(shown) or tensor_state.has_parts(shown):
        return False
    return shown.device == captured.device and not (shown.is_conj() or shown.is_neg() or shown.is_quantized)
