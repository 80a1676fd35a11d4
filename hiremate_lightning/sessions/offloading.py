"""Offloading to host memory: values that plans choose, and saved tensors of eager steps of new sizes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..calls.module_call import tensors_inside
from ..capturing.capture import Captured
from ..measuring.saved_offload import Files, SavedOffload
from ..memory.allocator import free_host_bytes
from ..options import SessionOptions
from ..planning.solvers.base import Solution
from ..records.offload import Host, split_offloads, storages_in, with_offloads
from ..records.schedule import lower
from ..records.step import MergedStep
from ..running.copies import HostMemory, pinned_storages
from ..running.program import Program
from ..running.program_at_sizes import program_of
from ..torch_private import hooks, sharding, tensor_state
from ..units import format_bytes

FREE_SHARE = 0.5  # share of the host's free memory, for all processes of this machine, and of the free disk for files
MOST_ROUNDING = 2  # most by which pinned memory is larger than its values: blocks are powers of two
DOES_NOTHING = "offload={asked} does nothing here: {why}. Plans keep all values on the device, or compute them again."
ON_HOST = "the model is on {device}, whose memory is the host's"
FUSED = "values of fused kernels (compile='inductor') are not offloaded"
WAITING = (
    "graphs wait for a backward that comes in a later step, and nobody knows how long their values would be offloaded"
)


class Offloading:
    """Offloads values of one model to host memory: values of plans, if the option `offload` allows it.

    Eager steps of new sizes that fit in no other way offload their saved tensors: on a CPU to temporary files, on a GPU
    to host memory. Files are kept for the next such step, until such steps run by plans. After the first failure for
    want of free memory or disk, no further eager step is offloaded.
    """

    def __init__(
        self, root: nn.Module, options: SessionOptions, device: Callable[[], torch.device], warn: Callable[..., None]
    ) -> None:
        self._option, self._budget, self._fuses = options.offload, options.host_budget, options.compile is not None
        self._root, self._device, self._warn = root, device, warn
        self.memory = HostMemory()  # blocks of host memory for offloaded values
        self.files = Files()  # temporary files, kept for the next eager step
        self._takes_saved = not sharding.has_units(root)

    # ---------------------------------------------------------------- values of plans

    def _why_not(self, waits: bool) -> str:
        """Return why plans can't offload values; "" if they can."""
        device = self._device()
        if device.type != "cuda":
            return ON_HOST.format(device=device.type)
        return FUSED if self._fuses else WAITING if waits else ""

    @property
    def is_on(self) -> bool:
        """Whether values of plans may be offloaded."""
        return self._option != "off" and not self._why_not(waits=False)

    def _decide_most_bytes(self) -> int:
        """Return the most bytes of host memory for offloaded values; the first call decides, by what is free then."""
        if self.memory.most_bytes is not None:
            return self.memory.most_bytes
        share_bytes = int(FREE_SHARE * free_host_bytes() / max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        named_bytes = self._budget.size_bytes
        if named_bytes is None:
            named_bytes = share_bytes
        elif named_bytes > share_bytes and self._option != "always allowed":
            self._warn(
                f"The host has too little memory free for host_budget={format_bytes(named_bytes)}: plans offload at "
                f"most {format_bytes(share_bytes)}. offload='always allowed' takes as much as is named."
            )
            named_bytes = share_bytes
        self.memory.most_bytes = named_bytes
        return named_bytes

    def reserve(self, step: MergedStep, calls: Sequence[Captured], waits: bool = False) -> Host:
        """Reserve and return the host memory to which a step may offload values.

        It has 0 bytes if nothing can be offloaded, for example while graphs wait for a later backward, before the step
        or after it. If the option `offload` is on, a warning says why.
        """
        if self._option == "off":
            return Host(0)
        if why := self._why_not(waits):
            self._warn(DOES_NOTHING.format(asked=repr(self._option), why=why))
            return Host(0)
        stay = storages_in(step, [pinned_storages(call) for call in calls])
        return Host(self._decide_most_bytes(), stay, has_round_blocks=True)

    def build(self, step: MergedStep, calls: Sequence[Captured], solution: Solution) -> Iterator[Program]:
        """Yield the program of each call of a step by a solution, with the offloads of the solution."""
        offloads = split_offloads(step, solution.recompute, solution.offloads)
        for captured, rows, offloaded in zip(calls, step.split(solution.recompute), offloads, strict=True):
            schedule = with_offloads(captured.graph, lower(captured.graph, rows), offloaded)
            yield program_of(captured, schedule, self.memory)

    # ---------------------------------------------------------------- saved tensors of eager steps

    def has_room(self, size_bytes: int) -> bool:
        """Whether an eager step may offload so many bytes."""
        if not size_bytes or not self._takes_saved:
            return not size_bytes
        free_bytes = free_host_bytes()
        if self._device().type == "cpu":
            disk_bytes = shutil.disk_usage(tempfile.gettempdir()).free + self.files.size_bytes
            return size_bytes <= int(FREE_SHARE * min(free_bytes, disk_bytes))
        room_bytes, most_bytes = int(FREE_SHARE * (free_bytes + self.memory.size_bytes)), self.memory.most_bytes
        return size_bytes <= min(room_bytes, most_bytes or room_bytes) // MOST_ROUNDING

    @contextmanager
    def saving(self, arguments: Any) -> Iterator[None]:
        """Offload the saved tensors of a call, but not its arguments, parameters and buffers."""
        kept_tensors = (*tensors_inside(arguments), *self._root.parameters(), *self._root.buffers())
        stay = tensor_state.storages_among(kept_tensors)
        with hooks.giving_way_to_transforms(), SavedOffload(stay, self.memory, self._are_full, self.files):
            yield

    def _are_full(self, error: OSError | MemoryError) -> None:
        """Warn that saved tensors stay in memory, and offload no further eager step."""
        self._takes_saved = False
        self.files.forget()
        self._warn(
            "There was no room in temporary files or in the host's memory for what the backward of a step of a new "
            "input size reads, so that it took more memory; no further step puts it there.",
            f" ({error})",
        )
