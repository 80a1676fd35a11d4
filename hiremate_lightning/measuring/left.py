"""Memory that exists before a step and is no part of the model: what the step before has left, what an iteration made.

In the middle of an iteration, where graphs wait for a later backward, eager code between such a graph and its loss has
saved values, and a script holds gradients and weights that it has made: these can't be counted tensor by tensor. On
CUDA all that is allocated counts. On a CPU the allocator's events show it, where each step of an iteration is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import torch

from ..torch_private import tensor_state
from .recording import StepRecord
from .resident import INPUTS, LEFT, RETAINED, Resident

Numbers = tuple[int, ...]
Place = tuple[Numbers | None, Numbers]  # the graphs of the step before, and the identities of the parts that wait
NOT_MEASURED = StepRecord(None)


class LeftOutputs:
    """The memory that a step leaves to the next one: outputs still held, inputs that these hold, and retained graphs.

    In the next step all of this stays, or new outputs take its place. A step that was not measured is taken to leave
    as many bytes of outputs and inputs as the latest measured step of its signature.
    """

    def __init__(self, find_retained: Callable[[], dict[int, int]] = dict) -> None:
        self._find_retained = find_retained  # returns the bytes of values retained for another backward, by storage
        self._record = NOT_MEASURED  # of the step that has ended
        self._signature: Numbers | None = None  # the signature of the step that has ended
        self._sizes_after: dict[Numbers | None, tuple[int, int]] = {}  # of outputs and inputs, by measured signature
        self._outputs_bytes = self._retained_bytes = self._inputs_bytes = 0
        self._stay: bool | None = None  # whether outputs outlive the next forward; None before that was seen
        self._returning: bool | None = None  # whether they are freed as that forward returns

    @property
    def _size_bytes(self) -> int:
        return self._outputs_bytes + self._retained_bytes

    @property
    def are_known(self) -> bool:
        """Whether the step that ended last was measured."""
        return self._record.is_measured

    def are_some(self, present: Collection[int]) -> bool:
        """Whether outputs or retained graphs still live, even as garbage; some storages don't count."""
        return self._living_bytes(present) != (0, 0)

    @property
    def storages(self) -> set[int]:
        """The storages of all that is left and still lives."""
        return {*self._record.left_outputs(), *self._find_inputs(), *self._find_retained()}

    def _find_inputs(self) -> dict[int, int]:
        return tensor_state.storage_sizes(self._record.left_inputs())

    def _living_bytes(self, present: Collection[int]) -> tuple[int, int]:
        """Return the bytes of outputs, and of retained graphs, that still live, without some storages."""
        outputs = self._record.left_outputs()
        return _bytes_beside(present, outputs), _bytes_beside({*present, *outputs}, self._find_retained())

    def watch(self, record: StepRecord) -> None:
        """Watch, in a record that begins, for the release of outputs of the step before."""
        if self.are_known and self._size_bytes and not self._retained_bytes:
            record.watch_left(self._record, self._size_bytes, is_stale=self._are_stale())

    def step_ended(self, record: StepRecord | None, signature: Numbers | None = None) -> None:
        """Store the last step, whose outputs may still exist: its record, None where it has none, and its signature."""
        self._record = record if record is not None and record.is_measured else NOT_MEASURED
        self._signature = signature

    def add_to(self, resident: Resident) -> Resident:
        """Return a count without left memory with it added."""
        # Inputs that outputs hold count as staying: the allocator may not report their release.
        resident = resident.with_more(INPUTS, self._inputs_bytes)
        if self._return():
            return replace(resident, left_bytes=self._size_bytes)
        if self._are_stale():
            return replace(resident, stale_bytes=resident.stale_bytes + self._size_bytes)
        return resident.with_more(LEFT, self._outputs_bytes).with_more(RETAINED, self._retained_bytes)

    def sort_out(self, resident: Resident) -> Resident:
        """Return a count of all that exists without left memory that will be freed."""
        gone = self._return() or self._are_stale()
        left_bytes = min(self._size_bytes, resident.size_bytes) if gone else 0
        resident = replace(resident, size_bytes=resident.size_bytes - left_bytes)
        if self._return():
            return replace(resident, left_bytes=left_bytes)
        return replace(resident, stale_bytes=resident.stale_bytes + left_bytes)

    def _return(self) -> bool:
        """Whether outputs are freed as the forward of the next step returns; retained graphs are not."""
        return bool(self._returning) and self._stay is False and not self._retained_bytes

    def _are_stale(self) -> bool:
        """Whether the next step frees left memory before its backward: a retained graph goes with its loss."""
        return self._retained_bytes > 0 if self._stay is None else not self._stay

    def measure(self, present: Collection[int]) -> None:
        """Measure left memory beside some storages: outputs, retained graphs, and inputs that outputs keep alive.

        Whoever asks collects garbage first.
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

    def backward_starts(self) -> None:
        """Check whether outputs of the step before are still held after the forward."""
        if self._retained_bytes or (self.are_known and self._outputs_bytes):
            self._stay = self._living_bytes(()) != (0, 0)


def _bytes_beside(present: Collection[int], sizes: dict[int, int]) -> int:
    return sum(size_bytes for storage, size_bytes in sizes.items() if storage not in present)


class Iterations:
    """Counts memory that exists before a step in the middle of an iteration, beside tensors that are counted.

    An iteration begins where nothing waits, and graphs have waited before or an optimizer has stepped. Only memory that
    was allocated since and not freed counts: a script may hold the rest for ever. Where something was not measured, the
    bytes of the latest measured step count that came after the same step signature, beside the same graphs.
    """

    def __init__(self) -> None:
        self.needs_measured_steps = False  # whether steps are to be measured, since nothing is known of this memory
        self._have_waited = False  # any graphs, before any step
        self._begins = True  # with this step
        self._existing_bytes: int | None = None  # before this step; None where the iteration was not seen so far
        self._place: Place = (None, ())  # of this step
        self._sizes: dict[Place, int] = {}  # bytes beside, when they were seen last
        self._own_sizes: dict[Place, int] = {}  # those of this iteration
        self._storages_before: dict[int, Callable[[], bool]] = {}  # the iteration, and whether each lives

    def step_begins(
        self, before: StepRecord | None, signature: Numbers | None, waiting: Numbers, has_stepped: bool
    ) -> None:
        """Begin a step, beside waiting parts; an optimizer has stepped since the latest backward, or not.

        There is no record of the step before where not all of its allocations were seen, and no unknown signature.
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
        counted_bytes = resident.existing_bytes
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
        """Note the storages from before the iteration; return tensors, one for each of these storages.

        What the iteration has made, `note_and_add` counts.
        """
        tensors = list(uncounted)
        if self._begins or not self._have_waited or self._existing_bytes is None:
            self._storages_before = {tensor_state.storage_id(t): tensor_state.watch_storage(t) for t in tensors}
            return tensors
        living = {storage for storage, lives in self._storages_before.items() if lives()}
        return [tensor for tensor in tensors if tensor_state.storage_id(tensor) in living]
