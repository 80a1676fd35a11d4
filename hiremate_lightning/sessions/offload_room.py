"""Where steps of new sizes put what autograd saves: temporary files, or from a GPU the host's memory.

Files are kept for the next such step, until such steps run by plans.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..calls.given import tensors_inside
from ..measuring.saved_offload import HAS_FILES, Files, SavedOffload
from ..memory.allocator import free_host_bytes
from ..torch_private import hooks, sharding, tensor_state
from .planned_model import PlannedModel

OFFLOAD_SHARE = 0.5  # of what the host could still hand out, and the disk of the temporary files, at most
MOST_ROUNDING = 2  # of what is pinned: blocks are powers of two


class OffloadRoom:
    """The room in which a model's steps offload saved values; once it was full, no further step uses it.

    Args:
        model: The planned model.

    Attributes:
        files: Kept for the next step.
    """

    def __init__(self, model: PlannedModel) -> None:
        self._model, self._memory = model, model.offloading.memory
        self.files = Files()
        self._is_usable = not sharding.has_units(model.root)

    def holds(self, size_bytes: int) -> bool:
        """Whether there is room for so many bytes."""
        return not size_bytes or (self._is_usable and size_bytes <= self._room_bytes())

    def _room_bytes(self) -> int:
        free_bytes = free_host_bytes()
        if self._model.memory.device.type == "cpu":
            disk_bytes = shutil.disk_usage(tempfile.gettempdir()).free + self.files.size_bytes
            return int(OFFLOAD_SHARE * min(free_bytes, disk_bytes)) * HAS_FILES
        room_bytes, most_bytes = int(OFFLOAD_SHARE * (free_bytes + self._memory.size_bytes)), self._memory.most_bytes
        return min(room_bytes, most_bytes or room_bytes) // MOST_ROUNDING

    @contextmanager
    def saving(self, arguments: Any) -> Iterator[None]:
        """Offload what autograd saves in a call with some arguments, these and weights left out."""
        root = self._model.root
        stay = tensor_state.storages_among((*tensors_inside(arguments), *root.parameters(), *root.buffers()))
        with hooks.giving_way_to_transforms(), SavedOffload(stay, self._memory, self._are_full, self.files):
            yield

    def _are_full(self, error: OSError | MemoryError) -> None:
        """Warn that what was to be offloaded stays in memory."""
        self._is_usable = False
        self.files.forget()
        self._model.announcements.say(
            "There was no room in temporary files or in the host's memory for what the backward of a step of a new "
            "input size reads, so that it took more memory; no further step puts it there.",
            f" ({error})",
        )
