"""Memory that exists before a step and is no part of the model: left by the previous step, or made by the iteration.

In the middle of an iteration, graphs wait for a later backward, eager code between such a graph and its loss has saved
tensors, and a script may hold gradients and weights that it has made. They can't be counted tensor by tensor. On CUDA
all allocated memory counts. On a CPU the allocator's events show it if each step of the iteration is measured.
CONTRIBUTING.md draws these words on the time line of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from enum import Enum

import torch

from ..torch_private import tensor_state
from .recording import StepMeasurement
from .resident import BESIDE, INPUTS, LEFT, RETAINED, Resident

Numbers = tuple[int, ...]
Place = tuple[Numbers | None, Numbers]  # the signature of the previous step, and the identities of the waiting graphs
NOT_MEASURED = StepMeasurement(None)


class LeftUntil(Enum):
    """When the next step frees left memory."""

    RETURN = "its last forward returns"
    BACKWARD = "its backward begins"
    END = "it has ended, or later"


class LeftOutputs:
    """The memory that a step leaves to the next one: outputs still held, inputs that these hold, and retained graphs.

    In the next step this memory stays, or is freed when new outputs replace it. A step that was not measured is assumed
    to leave as many bytes of outputs and inputs as the latest measured step of its signature.
    """

    def __init__(self, find_retained: Callable[[], dict[int, int]] = dict) -> None:
        self._find_retained = find_retained  # returns the bytes of values retained for another backward, by storage
        self._record = NOT_MEASURED  # record of the step that ended last
        self._signature: Numbers | None = None  # signature of the step that ended last
        self._sizes_after: dict[Numbers | None, tuple[int, int]] = {}  # bytes left of outputs and inputs, by signature
        self._outputs_bytes = self._retained_bytes = self._inputs_bytes = 0
        self._stay: bool | None = None  # whether outputs outlive the next step's forward; None if not yet seen
        self._returning: bool | None = None  # whether outputs are freed as the next step's last forward returns

    @property
    def _size_bytes(self) -> int:
        return self._outputs_bytes + self._retained_bytes

    @property
    def are_known(self) -> bool:
        """Whether the step that ended last was measured."""
        return self._record.is_measured

    def are_some(self, present: Collection[int]) -> bool:
        """Whether outputs or retained graphs still live, even as garbage; storages in `present` don't count."""
        return self._living_bytes(present) != (0, 0)

    @property
    def storages(self) -> set[int]:
        """The storages of left outputs, inputs and retained graphs that still live."""
        return {*self._record.left_outputs(), *self._find_inputs(), *self._find_retained()}

    def _find_inputs(self) -> dict[int, int]:
        return tensor_state.storage_sizes(self._record.left_inputs())

    def _living_bytes(self, present: Collection[int]) -> tuple[int, int]:
        """Return the live bytes of outputs and of retained graphs, without the storages in `present`."""
        outputs = self._record.left_outputs()
        return _bytes_beside(present, outputs), _bytes_beside({*present, *outputs}, self._find_retained())

    def watch(self, measurement: StepMeasurement) -> None:
        """Let the record of a step that begins mark the release of the previous step's outputs."""
        if self.are_known and self._size_bytes and not self._retained_bytes:
            measurement.watch_left(self._record, self._size_bytes if self._until is LeftUntil.END else 0)

    def step_ended(self, measurement: StepMeasurement | None, signature: Numbers | None = None) -> None:
        """Store the record (None for a step without one) and the signature of the step that has ended."""
        self._record = measurement if measurement is not None and measurement.is_measured else NOT_MEASURED
        self._signature = signature

    def add_to(self, resident: Resident) -> Resident:
        """Add left memory to a count that does not include it; return the sum."""
        # Inputs that outputs hold count as staying, because the allocator may not report their release.
        resident = resident.with_more(INPUTS, self._inputs_bytes)
        if self._until is LeftUntil.END:
            return resident.with_more(LEFT, self._outputs_bytes).with_more(RETAINED, self._retained_bytes)
        return self._with_freed(resident, self._size_bytes)

    def sort_out(self, resident: Resident) -> Resident:
        """Move left memory that will be freed out of `size_bytes`, in a count of all allocated memory."""
        if self._until is LeftUntil.END:
            return resident
        freed_bytes = min(self._size_bytes, resident.size_bytes)
        return self._with_freed(replace(resident, size_bytes=resident.size_bytes - freed_bytes), freed_bytes)

    def _with_freed(self, resident: Resident, freed_bytes: int) -> Resident:
        """Return a copy with more bytes that the next step frees."""
        if self._until is LeftUntil.RETURN:
            return replace(resident, left_bytes=freed_bytes)
        return replace(resident, stale_bytes=resident.stale_bytes + freed_bytes)

    @property
    def _until(self) -> LeftUntil:
        """When the next step frees left memory; a retained graph is freed with its loss, before the backward."""
        if self._stay is None:  # not seen yet
            return LeftUntil.BACKWARD if self._retained_bytes else LeftUntil.END
        if self._stay:
            return LeftUntil.END
        return LeftUntil.RETURN if self._returning and not self._retained_bytes else LeftUntil.BACKWARD

    def measure(self, present: Collection[int]) -> None:
        """Store the bytes of left outputs, retained graphs and inputs, without the storages in `present`.

        The caller collects garbage first.
        """
        outputs_bytes, self._retained_bytes = self._living_bytes(present)
        if not self.are_known:
            sizes = self._sizes_after.get(self._signature, (self._outputs_bytes, self._inputs_bytes))
            self._outputs_bytes, self._inputs_bytes = sizes
        else:
            seen = {*present, *self._record.left_outputs(), *self._find_retained()}
            inputs_bytes = _bytes_beside(seen, self._find_inputs())
            self._outputs_bytes, self._inputs_bytes = self._sizes_after[self._signature] = outputs_bytes, inputs_bytes
            if self._record.left_at_return is not None:
                self._returning = self._returning is not False and self._record.left_at_return

    def learn_frees(self) -> None:
        """Store whether the previous step's outputs are still held after this step's forward."""
        if self._retained_bytes or (self.are_known and self._outputs_bytes):
            self._stay = self._living_bytes(()) != (0, 0)


def _bytes_beside(present: Collection[int], sizes: dict[int, int]) -> int:
    return sum(size_bytes for storage, size_bytes in sizes.items() if storage not in present)


class Iterations:
    """Counts the bytes that an iteration has made before a step, besides the tensors that `ResidentMemory` counts.

    An iteration begins with a step beside which no graph waits, if graphs waited before the previous step or an
    optimizer has stepped. Only memory that was allocated since then and not freed counts; a script may hold older
    memory for ever. If a step of the iteration was not measured, the latest measured bytes at the same place count.
    """

    def __init__(self) -> None:
        self.needs_measured_steps = False  # whether steps must be measured, because these bytes are unknown
        self._have_waited = False  # whether any graph has waited before any step
        self._begins = True  # whether an iteration begins with this step
        self._existing_bytes: int | None = None  # bytes before this step; None if a step of the iteration was not seen
        self._place: Place = (None, ())  # the place of this step
        self._sizes: dict[Place, int] = {}  # latest measured bytes by place
        self._sizes_now: dict[Place, int] = {}  # measured bytes of this iteration by place
        self._storages_before: dict[int, Callable[[], bool]] = {}  # storages from before the iteration: is it alive?

    def step_begins(
        self, before: StepMeasurement | None, signature: Numbers | None, waiting: Numbers, has_stepped: bool
    ) -> None:
        """Begin a step, after an optimizer's step or not, beside the graphs that wait for a backward.

        `before` and `signature` are of the previous step; None if not all of its allocations were seen, or if unknown.
        """
        waited, existing_bytes = bool(self._place[1]), self._existing_bytes
        grown_bytes = None if before is None else before.grown_bytes
        self._place, self._existing_bytes = (signature, waiting), None
        self._have_waited = self._have_waited or bool(waiting)
        self._begins = not waiting and (waited or has_stepped)
        if self._begins:
            self.needs_measured_steps = self.needs_measured_steps and not (waited and existing_bytes is not None)
            self._sizes_now = {}
        elif existing_bytes is not None and grown_bytes is not None:
            self._existing_bytes = existing_bytes + grown_bytes
        elif waiting and self._place not in self._sizes:
            self.needs_measured_steps = True

    def measure(self, counted_bytes: int) -> None:
        """Store the bytes that the iteration has made before this step, beside `counted_bytes`."""
        if self._begins:
            self._existing_bytes = counted_bytes
        elif self._have_waited and self._existing_bytes is not None:
            most_bytes = max(self._existing_bytes - counted_bytes, self._sizes_now.get(self._place, 0))
            self._sizes[self._place] = self._sizes_now[self._place] = most_bytes

    def add_to(self, resident: Resident) -> Resident:
        """Add the bytes that the iteration has made to a count that does not include them; return the sum."""
        if self._begins or not self._have_waited:
            return resident
        if self._existing_bytes is None:
            return resident.with_more(BESIDE, self._sizes.get(self._place, 0))
        return resident.with_more(BESIDE, max(0, self._existing_bytes - resident.existing_bytes))

    def older(self, uncounted: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors from before the iteration; at its beginning, or if not seen, store and return all."""
        tensors = list(uncounted)
        if self._begins or not self._have_waited or self._existing_bytes is None:
            self._storages_before = {tensor_state.storage_id(t): tensor_state.watch_storage(t) for t in tensors}
            return tensors
        living = {storage for storage, lives in self._storages_before.items() if lives()}
        return [tensor for tensor in tensors if tensor_state.storage_id(tensor) in living]
