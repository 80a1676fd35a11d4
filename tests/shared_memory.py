"""Collectives of FSDP2 between processes of one machine, whose buffers are freed in the thread that calls them.

Those of gloo free their buffers in threads of their own, which a measurement of the calling thread's memory misses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, _Work
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

SLOT_BYTES = 2**23  # the most that one process hands over at once
LIMIT_S = 60.0


class SharedMemory:
    """Memory that all processes map from files, each of which writes to its own slots."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.rank, self.world, self._turn = rank, world, 0
        size = 2 * world * SLOT_BYTES
        slots = torch.from_file(str(folder / "slots"), shared=True, size=size, dtype=torch.uint8)
        self._slots = slots.view(2, world, SLOT_BYTES)  # by turns: who is late still reads those of the turn before
        self._arrived = torch.from_file(str(folder / "arrived"), shared=True, size=world, dtype=torch.int64)

    def exchange(self, own: Tensor) -> list[Tensor]:
        """Hand over a tensor; return what each process has handed over, to be read before the next call."""
        size_bytes = own.nbytes
        assert size_bytes <= SLOT_BYTES, size_bytes
        slots = self._slots[self._turn % 2]
        slots[self.rank, :size_bytes].view(own.dtype).copy_(own.view(-1))
        self._turn += 1
        self._wait()
        return [slots[rank, :size_bytes].view(own.dtype) for rank in range(self.world)]

    def _wait(self) -> None:
        """Wait for the other processes to come as far."""
        self._arrived[self.rank] = self._turn
        end = time.perf_counter() + LIMIT_S
        while int(self._arrived.min()) < self._turn:
            assert time.perf_counter() < end, "another process has not come"
            time.sleep(2e-5)


class Gather(DefaultAllGather):
    """An all-gather through shared memory."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **options: Any) -> None:
        parts = output_tensor.chunk(self._memory.world)
        for part, found in zip(parts, self._memory.exchange(input_tensor), strict=True):
            part.copy_(found)


class ReduceScatter(DefaultReduceScatter):
    """A reduce-scatter through shared memory, by sums or means."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, **options: Any) -> None:
        found = [values.chunk(self._memory.world)[self._memory.rank] for values in self._memory.exchange(input_tensor)]
        _sum(output_tensor, found)
        if op == ReduceOp.AVG:
            output_tensor.div_(self._memory.world)


class Done(_Work):
    """A collective that has ended."""

    def __init__(self, results: list[Tensor]) -> None:
        super().__init__()
        self._future = torch.futures.Future[Any]()
        self._future.set_result(results)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class SharedGroup(ProcessGroup):
    """The collectives of DistributedDataParallel through shared memory, on whatever device."""

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__(memory.rank, memory.world)
        self._memory = memory

    def getBackendName(self) -> str:  # noqa: N802  as PyTorch calls it
        return "shared"

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Done:
        for tensor in tensors:
            _sum(tensor, [part.view(tensor.shape) for part in self._memory.exchange(tensor.contiguous())])
        return Done(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Done:
        for tensor in tensors:
            tensor.copy_(self._memory.exchange(tensor.contiguous())[options.rootRank].view(tensor.shape))
        return Done(tensors)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any = None) -> Done:
        for parts, tensor in zip(outputs, tensors, strict=True):
            for part, value in zip(parts, self._memory.exchange(tensor.contiguous()), strict=True):
                part.copy_(value.view(part.shape))
        return Done(tensors)


@contextmanager
def collectives_through(memory: SharedMemory) -> Iterator[None]:
    """Let collectives that tensor parallelism runs inside of blocks go through shared memory while a block runs."""

    def parts_of(own: Tensor, group: str) -> list[Tensor]:
        return memory.exchange(own.contiguous()) if _resolve_process_group(group).size() > 1 else [own.view(-1)]

    def all_reduce(own: Tensor, how: str, group: str) -> Tensor:
        assert how == "sum", how
        parts = parts_of(own, group)
        return _sum(torch.empty_like(own), [part.view(own.shape) for part in parts])

    def all_gather(own: Tensor, size: int, group: str) -> Tensor:
        return torch.cat(parts_of(own, group)).view(size * own.shape[0], *own.shape[1:]).to(own.device)

    def reduce_scatter(own: Tensor, how: str, size: int, group: str) -> Tensor:
        assert how == "sum", how
        rank = memory.rank if size > 1 else 0
        parts = [part.view(own.shape).chunk(size)[rank] for part in parts_of(own, group)]
        return _sum(torch.empty_like(parts[0]), parts)

    with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
        for device in ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",):
            library.impl("all_reduce", all_reduce, device)
            library.impl("all_gather_into_tensor", all_gather, device)
            library.impl("reduce_scatter_tensor", reduce_scatter, device)
        yield


def _sum(total: Tensor, parts: list[Tensor]) -> Tensor:
    """Add parts up, by kernels that allocate nothing on the device."""
    if total.device.type != "cpu":
        return total.copy_(_sum(torch.empty_like(total, device="cpu"), parts))
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)
    return total


def communicate_through(memory: SharedMemory, model: torch.nn.Module) -> None:
    """Let all units of a model communicate through shared memory."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Gather(memory))
            module.set_custom_reduce_scatter(ReduceScatter(memory))
