"""What is in memory before a step begins, and what of it the step before has left.

On CUDA all that is allocated counts, and the kinds say what of it is known; elsewhere what a step is known to use.
`ResidentMemory` in `resident_memory` counts it.
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


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes that exist when a step begins.

    Attributes:
        size_bytes: Those that stay throughout.
        stale_bytes: Those that are freed before the backward: gradients that the optimizer has used, by `zero_grad`,
            and outputs of the step before.
        left_bytes: Outputs of the step before that are freed as the last forward returns, by those that take their
            place.
        kept: Storages of the parameters whose gradients are among the bytes that stay.
        kinds: Name and bytes of what makes up `size_bytes`.
        waiting_bytes: Those of them that graphs hold whose backward is still to come.
        plain_waiting_bytes: What these graphs hold in plain training.
        waiting: These graphs, and the schedules by which they run.
        used: Bytes and storages of the gradients that the optimizer has used, where these are taken to be freed.
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
        """Return the same with bytes of another kind that stay."""
        kinds = (*self.kinds, (kind, size_bytes)) if size_bytes else self.kinds
        return replace(self, size_bytes=self.size_bytes + size_bytes, kinds=kinds)

    @property
    def state_bytes(self) -> int:
        """Those of optimizers' state."""
        return dict(self.kinds).get("optimizer state", 0)

    def with_state(self, size_bytes: int) -> Resident:
        """Return the same where optimizers' state takes so many bytes, if that is more than it did."""
        more_bytes = max(0, size_bytes - self.state_bytes)
        kinds = {**dict(self.kinds), "optimizer state": self.state_bytes + more_bytes}
        return replace(self, size_bytes=self.size_bytes + more_bytes, kinds=tuple(kinds.items()))

    @property
    def batch_bytes(self) -> int:
        """Those of the batch."""
        return dict(self.kinds).get("batch", 0)

    def with_batch(self, more_bytes: int) -> Resident:
        """Return the same where the batch takes so many bytes more."""
        kinds = {**dict(self.kinds), "batch": self.batch_bytes + more_bytes}
        return replace(self, size_bytes=self.size_bytes + more_bytes, kinds=tuple(kinds.items()))


class LeftOutputs:
    """What a step leaves to the next one: outputs still held, inputs that these hold, and retained graphs.

    They stay, or those of the next step take their place. Where the step was not measured, it is taken to leave as much
    of outputs and inputs as the latest measured one of its kind.

    Args:
        find_retained: Finds the bytes of what was retained for another backward, by storage.
    """

    def __init__(self, find_retained: Callable[[], dict[int, int]] = dict) -> None:
        self._find_retained = find_retained
        self._record: StepRecord | None = None
        self._kind: tuple[int, ...] | None = None  # of the step that has ended
        self._sizes_after: dict[tuple[int, ...] | None, tuple[int, int]] = {}  # by kind, when one was measured last
        self._outputs_bytes = self._retained_bytes = self._inputs_bytes = 0
        self._stay: bool | None = None  # beyond the next forward; None before that was seen
        self._returning: bool | None = None  # whether they go as that returns

    @property
    def _size_bytes(self) -> int:
        return self._outputs_bytes + self._retained_bytes

    @property
    def are_known(self) -> bool:
        """Whether the step that ended last was measured."""
        return self._record is not None

    def are_some(self, present: Collection[int]) -> bool:
        """Whether something still holds outputs, be it garbage, beside the storages that are there before a step."""
        return self._living_bytes(present) != (0, 0)

    @property
    def storages(self) -> set[int]:
        """Those that they lie on, and that live."""
        return {*self._output_storages(), *self._find_inputs(), *self._find_retained()}

    def _output_storages(self) -> set[int]:
        runs = self._record.runs if self._record is not None else ()
        return {storage for run in runs for lives, storage in run.outputs.values() if lives()}

    def _living_bytes(self, present: Collection[int]) -> tuple[int, int]:
        """Return the bytes of outputs, and of retained graphs, that live beside some storages."""
        outputs_bytes = self._record.left_bytes(present) if self._record is not None else 0
        seen = {*present, *self._output_storages()}
        return outputs_bytes, sum(size for storage, size in self._find_retained().items() if storage not in seen)

    def _find_inputs_bytes(self, present: Collection[int]) -> int:
        """Return the bytes of inputs, and their gradients, that live by these outputs beside some storages."""
        seen = {*present, *self._output_storages(), *self._find_retained()}
        return sum(size for storage, size in self._find_inputs().items() if storage not in seen)

    def _find_inputs(self) -> dict[int, int]:
        return tensor_state.storage_sizes(self._record.left_inputs()) if self._record is not None else {}

    def watch(self, record: StepRecord) -> None:
        """Let a record that begins see when they are released."""
        if self._record is not None and self._size_bytes and not self._retained_bytes:
            record.watch_left(self._record, self._size_bytes, is_stale=self._are_stale())

    def step_ended(self, record: StepRecord | None, kind: tuple[int, ...] | None = None) -> None:
        """Learn of the step whose outputs may be left: its record, None for one that was not recorded, and its kind."""
        self._record, self._kind = record if record is not None and record.is_measured else None, kind

    def add_to(self, resident: Resident, present: Collection[int]) -> Resident:
        """Count them with what exists before a step, beside some storages; garbage was collected.

        The inputs that they hold are taken to stay: the allocator may not tell what their release gives back.
        """
        self._look(present)
        resident = resident.with_more(INPUTS, self._inputs_bytes)
        if self._return():
            return replace(resident, left_bytes=self._size_bytes)
        if self._are_stale():
            return replace(resident, stale_bytes=resident.stale_bytes + self._size_bytes)
        return resident.with_more(LEFT, self._outputs_bytes).with_more(RETAINED, self._retained_bytes)

    def sort_out(self, resident: Resident, present: Collection[int]) -> Resident:
        """Take them for stale where they are, in a count of all that exists, beside some storages."""
        self._look(present)
        gone = self._return() or self._are_stale()
        left_bytes = min(self._size_bytes, resident.size_bytes) if gone else 0
        resident = replace(resident, size_bytes=resident.size_bytes - left_bytes)
        if self._return():
            return replace(resident, left_bytes=left_bytes)
        return replace(resident, stale_bytes=resident.stale_bytes + left_bytes)

    def _return(self) -> bool:
        """Whether they go as the forward of the next step returns; not so what is retained."""
        return bool(self._returning) and self._stay is False and not self._retained_bytes

    def _are_stale(self) -> bool:
        """Whether the next step drops them before its backward: a retained graph goes with the loss there was."""
        return self._retained_bytes > 0 if self._stay is None else not self._stay

    def _look(self, present: Collection[int]) -> None:
        outputs_bytes, self._retained_bytes = self._living_bytes(present)
        if self._record is None:
            sizes = self._sizes_after.get(self._kind, (self._outputs_bytes, self._inputs_bytes))
            self._outputs_bytes, self._inputs_bytes = sizes
        else:
            sizes = self._sizes_after[self._kind] = outputs_bytes, self._find_inputs_bytes(present)
            self._outputs_bytes, self._inputs_bytes = sizes
            if self._record.left_at_return is not None:
                self._returning = self._returning is not False and self._record.left_at_return

    def backward_starts(self) -> None:
        """See whether they are held beyond the forward."""
        if self._retained_bytes or (self._record is not None and self._outputs_bytes):
            self._stay = self._living_bytes(()) != (0, 0)
