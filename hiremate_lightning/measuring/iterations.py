"""Memory of an iteration that can't be counted tensor by tensor, where graphs wait for a later backward.

Eager code between such a graph and its loss saves values, and a script holds gradients and weights that it has made. On
CUDA all that is allocated counts. On a CPU the allocator's events show it, where each step of an iteration is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..torch_private import tensor_state
from .recording import StepRecord
from .resident import Resident

GraphNumbers = tuple[int, ...]  # of the parts that a step signature runs
PartIds = tuple[int, ...]  # of parts whose graphs wait
Place = tuple[GraphNumbers | None, PartIds]  # the signature of the step before, and the parts that wait


class Iterations:
    """Counts memory that exists before a step in the middle of an iteration, beside tensors that are counted.

    An iteration begins where nothing waits, and graphs have waited before or an optimizer has stepped. Uncounted memory
    that a script holds then, for ever perhaps, does not count in the following steps. Only memory counts that was
    allocated since and not freed. Where something was not measured, the bytes of the latest measured step count that
    came after the same step signature, beside the same graphs.

    Attributes:
        needs_measured_steps: Whether steps are to be measured, since nothing is known of this memory.
    """

    def __init__(self) -> None:
        self.needs_measured_steps = False
        self._have_waited = False  # any graphs, before any step
        self._begins = True  # with this step
        self._existing_bytes: int | None = None  # before this step; None where the iteration was not seen so far
        self._place: Place = (None, ())  # of this step
        self._sizes: dict[Place, int] = {}  # bytes beside, when they were seen last
        self._own_sizes: dict[Place, int] = {}  # those of this iteration
        self._storages_before: dict[int, Callable[[], bool]] = {}  # the iteration, and whether each lives

    def step_begins(
        self, before: StepRecord | None, signature: GraphNumbers | None, waiting: PartIds, has_stepped: bool
    ) -> None:
        """Begin a step.

        Args:
            before: The record of the step before, None where not all of its allocations were seen.
            signature: The signature of the step before, None where that is not known.
            waiting: Identities of the parts whose graphs wait for their backward.
            has_stepped: Whether an optimizer has stepped since the latest backward.
        """
        waited, existing_bytes = bool(self._place[1]), self._existing_bytes
        grown_bytes = None if before is None else before.grown_bytes
        self._place, self._existing_bytes = (signature, waiting), None
        self._have_waited = self._have_waited or bool(waiting)
        self._begins = not waiting and (waited or has_stepped)
        if self._begins:
            self.needs_measured_steps = self.needs_measured_steps and not (waited and existing_bytes is not None)
            self._own_sizes = {}
        elif existing_bytes is not None and grown_bytes is not None:
            self._existing_bytes = existing_bytes + grown_bytes
        elif waiting and self._place not in self._sizes:
            self.needs_measured_steps = True

    def note_and_add(self, resident: Resident) -> Resident:
        """Note the memory of the iteration, and return a count with it added, before the step that begins."""
        counted_bytes = resident.size_bytes + resident.stale_bytes + resident.left_bytes
        if self._begins:
            self._existing_bytes = counted_bytes
        if self._begins or not self._have_waited:
            return resident
        if self._existing_bytes is None:
            return resident.with_beside(self._sizes.get(self._place, 0))
        beside_bytes = max(0, self._existing_bytes - counted_bytes)
        self._own_sizes[self._place] = max(beside_bytes, self._own_sizes.get(self._place, 0))
        self._sizes[self._place] = self._own_sizes[self._place]
        return resident.with_beside(beside_bytes)

    def note_uncounted(self, uncounted: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Note which storages were there before the iteration; return those of the tensors that are among them.

        There is one tensor for each storage. What the iteration has made, `note_and_add` counts.
        """
        tensors = list(uncounted)
        if self._begins or not self._have_waited or self._existing_bytes is None:
            self._storages_before = {tensor_state.storage_id(t): tensor_state.watch_storage(t) for t in tensors}
            return tensors
        living = {storage for storage, lives in self._storages_before.items() if lives()}
        return [tensor for tensor in tensors if tensor_state.storage_id(tensor) in living]
