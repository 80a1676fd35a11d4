"""Memory that exists before a step begins, and the part of it that the step before has left.

On CUDA all allocated memory counts, and kinds name the known parts of it. Elsewhere only memory counts that a step is
known to use. `ResidentMemory` in `resident_memory` counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from ..records.schedule import Schedule
from ..running.execution import Part
from ..torch_private import tensor_state
from .recording import StepRecord

WAITING = "graphs that wait for their backward"  # a kind of resident bytes
RETAINED = "graphs retained for another backward"
LEFT = "outputs of the step before"
INPUTS = "inputs that these outputs hold"
BESIDE = "other values of the iteration"

GradientState = tuple[frozenset[int], bool]


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes that exist when a step begins.

    Attributes:
        size_bytes: Bytes that stay for the whole step.
        stale_bytes: Bytes that are freed before the backward: gradients that the optimizer has used, which `zero_grad`
            frees, and outputs of the step before.
        left_bytes: Outputs of the step before that are freed as the last forward returns: new ones take their place.
        kept: Storages of the parameters whose gradients are part of `size_bytes`.
        kinds: The parts of `size_bytes`: names and bytes.
        waiting_bytes: The part of `size_bytes` that graphs hold whose backward is still to come, with the values that
            an iteration has made beside them.
        plain_waiting_bytes: Bytes of these graphs in plain training, with the values beside them.
        waiting: These graphs, each with the schedule by which it runs.
        used: Bytes and parameters' storages of gradients that the optimizer has used, where these count as stale.
    """

    size_bytes: int
    stale_bytes: int
    left_bytes: int = 0
    kept: frozenset[int] = frozenset()
    kinds: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    waiting_bytes: int = 0
    plain_waiting_bytes: int = 0
    waiting: tuple[tuple[Part, Schedule], ...] = ()
    used: tuple[int, frozenset[int]] = field(default=(0, frozenset()), compare=False)

    def with_more(self, kind: str, size_bytes: int) -> Resident:
        """Return a copy with more bytes of a kind, which stay for the whole step."""
        if not size_bytes:
            return self
        kinds = dict(self.kinds)
        kinds[kind] = kinds.get(kind, 0) + size_bytes
        return replace(self, size_bytes=self.size_bytes + size_bytes, kinds=tuple(kinds.items()))

    def with_beside(self, size_bytes: int) -> Resident:
        """Return a copy with more bytes that an iteration has made beside graphs that wait, as plain training does."""
        return replace(
            self.with_more(BESIDE, size_bytes),
            waiting_bytes=self.waiting_bytes + size_bytes,
            plain_waiting_bytes=self.plain_waiting_bytes + size_bytes,
        )

    @property
    def gradients(self) -> GradientState:
        """The state of the gradients before the step: which of them stay, and whether others are freed in it."""
        return self.kept, self.stale_bytes > 0

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizers' state."""
        return dict(self.kinds).get("optimizer state", 0)

    def with_state(self, size_bytes: int) -> Resident:
        """Return a copy in which the optimizers' state takes at least so many bytes."""
        return self.with_more("optimizer state", max(0, size_bytes - self.state_bytes))

    @property
    def batch_bytes(self) -> int:
        """Bytes of the batch."""
        return dict(self.kinds).get("batch", 0)


class LeftOutputs:
    """The memory that a step leaves to the next one: outputs still held, inputs that these hold, and retained graphs.

    In the next step all of this stays, or new outputs take its place. A step that was not measured is taken to leave
    as many bytes of outputs and inputs as the latest measured step of its kind.

    Args:
        find_retained: Returns the bytes of values retained for another backward, by storage.
    """

    def __init__(self, find_retained: Callable[[], dict[int, int]] = dict) -> None:
        self._find_retained = find_retained
        self._record: StepRecord | None = None
        self._kind: tuple[int, ...] | None = None  # of the step that has ended
        self._sizes_after: dict[tuple[int, ...] | None, tuple[int, int]] = {}  # by kind, when one was measured last
        self._outputs_bytes = self._retained_bytes = self._inputs_bytes = 0
        self._stay: bool | None = None  # whether outputs outlive the next forward; None before that was seen
        self._returning: bool | None = None  # whether they are freed as that forward returns

    @property
    def _size_bytes(self) -> int:
        return self._outputs_bytes + self._retained_bytes

    @property
    def are_known(self) -> bool:
        """Whether the step that ended last was measured."""
        return self._record is not None

    def are_some(self, present: Collection[int]) -> bool:
        """Whether outputs or retained graphs still live, even as garbage; some storages don't count."""
        return self._living_bytes(present) != (0, 0)

    @property
    def storages(self) -> set[int]:
        """The storages of all that is left and still lives."""
        return {*self._output_storages(), *self._find_inputs(), *self._find_retained()}

    def _output_storages(self) -> set[int]:
        runs = self._record.runs if self._record is not None else ()
        return {storage for run in runs for lives, storage in run.outputs.values() if lives()}

    def _living_bytes(self, present: Collection[int]) -> tuple[int, int]:
        """Return the bytes of outputs, and of retained graphs, that still live, without some storages."""
        outputs_bytes = self._record.outputs_held_bytes(present) if self._record is not None else 0
        seen = {*present, *self._output_storages()}
        return outputs_bytes, sum(size for storage, size in self._find_retained().items() if storage not in seen)

    def _find_inputs(self) -> dict[int, int]:
        return tensor_state.storage_sizes(self._record.left_inputs()) if self._record is not None else {}

    def watch(self, record: StepRecord) -> None:
        """Watch, in a record that begins, for the release of outputs of the step before."""
        if self._record is not None and self._size_bytes and not self._retained_bytes:
            record.watch_left(self._record, self._size_bytes, is_stale=self._are_stale())

    def step_ended(self, record: StepRecord | None, kind: tuple[int, ...] | None = None) -> None:
        """Store the last step, whose outputs may still exist: its record, None where it has none, and its kind."""
        self._record = record if record is not None and record.is_measured else None
        self._kind = kind

    def add_to(self, resident: Resident, present: Collection[int]) -> Resident:
        """Add left memory, beside some storages, to a count without it, after a garbage collection.

        Inputs that outputs hold count as staying: the allocator may not report their release.
        """
        self._look(present)
        resident = resident.with_more(INPUTS, self._inputs_bytes)
        if self._return():
            return replace(resident, left_bytes=self._size_bytes)
        if self._are_stale():
            return replace(resident, stale_bytes=resident.stale_bytes + self._size_bytes)
        return resident.with_more(LEFT, self._outputs_bytes).with_more(RETAINED, self._retained_bytes)

    def sort_out(self, resident: Resident, present: Collection[int]) -> Resident:
        """Subtract left memory that will be freed, beside some storages, from a count of all that exists."""
        self._look(present)
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

    def _look(self, present: Collection[int]) -> None:
        """Measure left memory beside some storages: outputs, retained graphs, and inputs that outputs keep alive."""
        outputs_bytes, self._retained_bytes = self._living_bytes(present)
        if self._record is None:
            sizes = self._sizes_after.get(self._kind, (self._outputs_bytes, self._inputs_bytes))
            self._outputs_bytes, self._inputs_bytes = sizes
        else:
            seen = {*present, *self._output_storages(), *self._find_retained()}
            inputs_bytes = sum(size for storage, size in self._find_inputs().items() if storage not in seen)
            self._outputs_bytes, self._inputs_bytes = self._sizes_after[self._kind] = outputs_bytes, inputs_bytes
            if self._record.left_at_return is not None:
                self._returning = self._returning is not False and self._record.left_at_return

    def backward_starts(self) -> None:
        """Check whether outputs of the step before are still held after the forward."""
        if self._retained_bytes or (self._record is not None and self._outputs_bytes):
            self._stay = self._living_bytes(()) != (0, 0)
