"""Where steps of new sizes put what autograd saves: temporary files, or from a GPU the host's memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..calls.given import tensors_inside
from ..measuring.aside import HAS_FILES, SavedAside
from ..memory.free_memory import free_host_bytes
from ..torch_private import saved_hooks, sharding, tensor_state
from .planned_model import PlannedModel

SHARE_ASIDE = 0.5  # of what the host could still hand out, and the disk of the temporary files, at most


class AsideRoom:
    """The room in which a model's steps put saved values aside; once it was full, no further step uses it.

    Args:
        model: The planned model.
    """

    def __init__(self, model: PlannedModel) -> None:
        self._root, self._announcements = model.root, model.announcements
        self._is_usable = HAS_FILES and not sharding.has_units(model.root)

    def holds(self, size_bytes: int) -> bool:
        """Whether there is room for so many bytes."""
        if not size_bytes:
            return True
        free_bytes = min(free_host_bytes(), shutil.disk_usage(tempfile.gettempdir()).free)
        return self._is_usable and size_bytes <= SHARE_ASIDE * free_bytes

    @contextmanager
    def saving(self, arguments: Any) -> Iterator[None]:
        """Put aside what autograd saves in a call with some arguments, these and weights left out."""
        stay = (*tensors_inside(arguments), *self._root.parameters(), *self._root.buffers())
        with (
            saved_hooks.giving_way_to_transforms(),
            SavedAside(tensor_state.storages_among(stay), self._are_full),
        ):
            yield

    def _are_full(self, error: OSError) -> None:
        """Warn that what was to be put aside stays in memory."""
        self._is_usable = False
        self._announcements.say(
            "There was no room for temporary files in which a step of a new input size was to put what its backward "
            "reads, so that it took more memory; no further step does that.",
            f" ({error})",
        )
