"""What of a model is offloaded to the host's memory: values of plans, and what autograd saves in steps without one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..calls.given import tensors_inside
from ..capturing.capture import Captured
from ..measuring.saved_offload import Files, SavedOffload
from ..memory.allocator import free_host_bytes
from ..options import SessionOptions
from ..planning.solvers.base import Solution
from ..records.offload import Host, split_offloads, storages_in, with_offloads
from ..records.schedule import lower
from ..records.step import Step
from ..running.copies import HostMemory, pinned_storages
from ..running.program import Program
from ..running.program_at_sizes import program_of
from ..torch_private import hooks, sharding, tensor_state
from ..units import format_bytes

FREE_SHARE = 0.5  # of the host's free memory, for all processes of this machine; of the disk of the temporary files
MOST_ROUNDING = 2  # of what is pinned: blocks are powers of two
NOTHING = "offload={asked} does nothing here: {why}. Plans keep all values on the device, or compute them again."
ON_HOST = "the model is on {device}, whose memory is the host's"
FUSED = "values of fused kernels (compile='inductor') are not offloaded"
WAITING = (
    "graphs wait for a backward that comes in a later step, and nobody knows how long their values would be offloaded"
)


class Offloading:
    """What of a model may be offloaded to the host's memory: by plans where the option `offload` allows it.

    In steps of new sizes that run without a plan, what autograd saves is offloaded where they fit in no other way: to
    temporary files, or from a GPU to the host's memory. Files are kept for the next such step, until such steps run by
    plans. Once there was no room, no further step without a plan is offloaded.
    """

    def __init__(
        self, root: nn.Module, options: SessionOptions, device: Callable[[], torch.device], say: Callable[..., None]
    ) -> None:
        self._option, self._budget, self._fuses = options.offload, options.host_budget, options.compile is not None
        self._root, self._device, self._say = root, device, say
        self.memory = HostMemory()  # the blocks of the host that values lie in
        self.files = Files()  # kept for the next step without a plan
        self._takes_saved = not sharding.has_units(root)

    # ---------------------------------------------------------------- values of plans

    def _why_not(self, waits: bool) -> str:
        """Return why no values of plans are offloaded though that was asked for; "" where they may be."""
        device = self._device()
        if device.type != "cuda":
            return ON_HOST.format(device=device.type)
        return FUSED if self._fuses else WAITING if waits else ""

    @property
    def is_on(self) -> bool:
        """Whether values of plans may be offloaded."""
        return self._option != "off" and not self._why_not(waits=False)

    def _reserve(self) -> int:
        """Decide, the first time, how many bytes of the host values may take, by what is free then; return that."""
        if self.memory.most_bytes is not None:
            return self.memory.most_bytes
        share_bytes = int(FREE_SHARE * free_host_bytes() / max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        named_bytes = self._budget.size_bytes
        if named_bytes is None:
            named_bytes = share_bytes
        elif named_bytes > share_bytes and self._option != "always allowed":
            self._say(
                f"The host has too little memory free for host_budget={format_bytes(named_bytes)}: plans offload at "
                f"most {format_bytes(share_bytes)}. offload='always allowed' takes as much as is named."
            )
            named_bytes = share_bytes
        self.memory.most_bytes = named_bytes
        return named_bytes

    def host(self, step: Step, calls: Sequence[Captured], waits: bool = False) -> Host:
        """Return the memory that values of a step may be offloaded to.

        It has no bytes where all stays on the device, as where graphs wait for a later backward, before the step or
        after it: why is announced where `offload` was asked for.
        """
        if self._option == "off":
            return Host(0)
        if why := self._why_not(waits):
            self._say(NOTHING.format(asked=repr(self._option), why=why))
            return Host(0)
        stay = storages_in(step, [pinned_storages(call) for call in calls])
        return Host(self._reserve(), stay, has_round_blocks=True)

    def build(self, step: Step, calls: Sequence[Captured], solution: Solution) -> Iterator[Program]:
        """Generate the programs of the calls of a step, whose values are offloaded in the blocks of this model."""
        offloads = split_offloads(step, solution.recompute, solution.offloads)
        for captured, rows, own in zip(calls, step.split(solution.recompute), offloads, strict=True):
            schedule = with_offloads(captured.graph, lower(captured.graph, rows), own)
            yield program_of(captured, schedule, self.memory)

    # ---------------------------------------------------------------- what autograd saves without a plan

    def has_room(self, size_bytes: int) -> bool:
        """Whether a step without a plan may offload so many bytes."""
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
        """Offload what autograd saves in a call with some arguments, these and weights left out."""
        own = (*tensors_inside(arguments), *self._root.parameters(), *self._root.buffers())
        stay = tensor_state.storages_among(own)
        with hooks.giving_way_to_transforms(), SavedOffload(stay, self.memory, self._are_full, self.files):
            yield

    def _are_full(self, error: OSError | MemoryError) -> None:
        """Warn that what was to be offloaded stays in memory."""
        self._takes_saved = False
        self.files.forget()
        self._say(
            "There was no room in temporary files or in the host's memory for what the backward of a step of a new "
            "input size reads, so that it took more memory; no further step puts it there.",
            f" ({error})",
        )
