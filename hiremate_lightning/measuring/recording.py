"""Record one training step: the captured graphs that run, and what the code between them allocates.

A `StepRecord` lives for one step. It marks the start and the end of each forward and backward in the memory
measurement, finds the inputs that are an earlier run's outputs, and sees which outputs are still held when a backward
starts. `describing` turns that into the records that `step.merge` puts together.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from ..capturing.capture import Captured
from ..memory.allocator import allocated_bytes, storage_bytes
from ..memory.metering import Interval, LiveBytes, MemoryMeter
from ..records.graph import bytes_of
from ..records.step import Output
from ..running.accumulation import Leaves, existing_gradients, find_leaves, positions_to_add
from ..running.execution import Part, missing_gradients
from ..running.program import Program
from ..torch_private import backward_pass, sharding, tensor_state
from .profiling import TimedRun
from .resident import Resident
from .runs import CALLED, CLOSED, LEFT, OTHER, OTHER_DONE, START, Event, Mark, Run


class StepRecord:
    """What is measured in one step: its runs, and memory from mark to mark.

    The host's allocator reports the size of a release only if the allocation was watched, too. A step frees the
    gradients of the one before. So the peak of a step is measured only where the step before was measured: whether it
    was says `sees_frees`, of the resident memory. There is no device where a step runs on tensors without memory, and
    no root where none of the model can be sharded.
    """

    def __init__(
        self,
        device: torch.device | None,
        resident: Resident = Resident(0, 0),
        sees_frees: bool = False,
        root: torch.nn.Module | None = None,
        meter: MemoryMeter | LiveBytes | None = None,
    ) -> None:
        self._sharded = root if root is not None and sharding.has_units(root) else None
        self._watched: tuple[int, bool] | None = None  # bytes that the step before left, and whether they are stale
        self._left = set[Mark]()  # of this step's outputs, those that the next one has not seen released
        self._next: weakref.ref[StepRecord] | None = None
        self._thread = threading.get_ident()
        self.has_memory = device is not None
        self.resident, self._sees_frees = resident, sees_frees
        self.counted = frozenset[int]()  # storages of this memory, where they are known
        self.runs: list[Run] = []  # in the order of their forwards
        self.backwards: list[int] = []  # indices of the runs, in the order of their backwards
        self._waiting: list[Run] = []  # as the first backward begins, or as the step ends without one
        self.parameters = set[int]()  # identities of those that the runs were given
        self.timed: TimedRun | None = None  # times of its operations, where they were taken
        self._tangents: dict[int, Callable[[], bool]] = {}  # of the running backward, whether each of them lives
        self.alive_at: dict[Mark, list[Output]] = {}  # outputs that lived
        self._meter = meter
        self._is_closed = False
        self._unwatch: list[Callable[[], Any]] = []
        self.allocated_bytes = 0  # between the last forward and the first backward, on a CPU
        # Since it began, when it was closed before the next step; None where not all was seen.
        self.grown_bytes: int | None = None
        # Memory from each mark to the next, when the measurement has ended. The release of uncounted memory from before
        # the step does not count as given back by the step.
        self.spans: Sequence[Interval] = ()
        self._ended = 0  # the number of the backwards that have ended, with all that they are part of
        self._peak_bytes = 0  # above what existed when the step began
        if meter is None and device is not None and MemoryMeter.is_available(device):
            self._meter = MemoryMeter(device)
        if self._meter is not None:
            self._meter.start()
            backward_pass.tell(self)

    @property
    def is_measured(self) -> bool:
        """Whether memory is measured; another profiler may occupy the means, or another meter interrupt."""
        return self._meter is not None and not self._meter.lost_marks

    @property
    def is_whole(self) -> bool:
        """Whether all backwards that began have ended: where one failed, much of the step was not seen."""
        return self._ended == len(self.backwards)

    @property
    def planned(self) -> list[Run]:
        """The runs that have a backward, in the order of their forwards; those without one are part of the outside."""
        return [run for run in self.runs if run.index in self.backwards]

    @property
    def unfinished(self) -> list[Run]:
        """The runs that wait for a backward which is not part of the step."""
        return [run for run in self._waiting if run.index not in self.backwards]

    @property
    def has_dropped_by_plan(self) -> bool:
        """Whether a forward whose backward never comes ran by a plan: it saved more than it will from now on."""
        kept = {*self.backwards, *(run.index for run in self._waiting)}
        return any(run.index not in kept and not run.program.protects for run in self.runs)

    @property
    def left_nothing(self) -> bool:
        """Whether only forwards ran, and none of their outputs lives any more."""
        return bool(self.runs) and not any(run.is_waiting or run.living for run in self.runs)

    @property
    def graphs(self) -> tuple[int, ...]:
        """Numbers of the parts that ran, in the order of their forwards."""
        return tuple(run.part.number for run in self.runs)

    @property
    def freed_bytes(self) -> int:
        """Bytes that the measurement sees freed before the backward, without `returned_bytes`."""
        if not self._sees_frees:
            return 0
        return self.resident.stale_bytes + (0 if self.returned_bytes else self.resident.left_bytes)

    @property
    def returned_bytes(self) -> int:
        """Bytes of outputs of the step before that were seen freed as the last forward returned."""
        if self._watched is None or not self.left_at_return:
            return 0
        left_bytes, is_stale = self._watched
        return 0 if is_stale else left_bytes

    @property
    def left_at_return(self) -> bool | None:
        """Whether outputs of the step before were freed as the last forward returned; None where there were none."""
        if self._watched is None or not self.backwards:
            return None
        marks = [span.label for span in self.spans]
        returned = Event.FORWARD_DONE.of(max(self.backwards))
        if returned not in marks or LEFT not in marks[marks.index(returned) :]:
            return False
        before = self.spans[marks.index(returned) : marks.index(LEFT)]
        return all(span.peak_bytes == span.start_bytes for span in before)

    def watch_left(self, before: StepRecord, left_bytes: int, is_stale: bool) -> None:
        """Mark when the outputs that the step before has left, of so many bytes, are released."""
        self._watched = left_bytes, is_stale
        living = ((run, tensor) for run in before.runs for tensor in run.living)
        before._left = {Mark(Event.RELEASED, r.index, t) for r, t in living if r.graph.tensors[t].shape}
        before._next = weakref.ref(self)

    def watch_releases(self, event: Event, tensors: Iterable[torch.Tensor]) -> None:
        """Mark the releases of tensors on the host: uncounted ones from before the step, or those of the batch."""
        for tensor in tensors:
            mark = Mark(event, size_bytes=tensor.untyped_storage().nbytes())
            self._unwatch.append(self._mark_release(tensor, mark))

    def begin(self, part: Part, program: Program, arguments: Sequence[Any]) -> Run:
        """Record the start of a forward."""
        run = Run(part, len(self.runs), program)
        tensors = dict(zip(part.captured.graph.inputs, arguments, strict=False))
        made = {storage: (r.index, t) for r in self.runs for t, (lives, storage) in r.outputs.items() if lives()}
        for tensor, value in tensors.items():
            if tensor_state.is_dense(value) and not isinstance(value, torch.nn.Parameter):
                storage = tensor_state.storage_id(value)
                if storage in made:
                    run.links[tensor] = made[storage]
                elif not value.is_leaf and storage not in self.counted:
                    size_bytes = allocated_bytes(value.untyped_storage().nbytes(), value.device)
                    run.made_outside[storage] = tensor_state.watch_storage(value), size_bytes
        given = {id(value) for value in tensors.values() if isinstance(value, torch.nn.Parameter)}
        pairs = [] if self._sharded is None else sharding.whole_parameters(self._sharded)
        lent = {id(whole): id(shard) for whole, shard in pairs}  # by FSDP2
        self.parameters.update(given, (lent[p] for p in given if p in lent))
        run.passed_on = _passed_on(part, arguments, lent)
        leaves = find_leaves(part.captured, arguments).values()
        run.trained = tuple(weakref.ref(leaf) for leaf in leaves if id(leaf) not in given)
        self.runs.append(run)
        self._mark_alive(Event.FORWARD.of(run.index))
        return run

    def forward_done(self, run: Run, outputs: Sequence[Any]) -> None:
        """Record the end of a forward, and watch its outputs."""
        captured = run.part.captured
        tensor_of = {captured.fx_values[t]: t for t in captured.graph.outputs}
        for node, value in zip(captured.forward_outputs, outputs, strict=True):
            if node in tensor_of and tensor_state.is_dense(value):
                run.outputs[tensor_of[node]] = (tensor_state.watch_storage(value), tensor_state.storage_id(value))
                self._mark_release(value, Mark(Event.RELEASED, run.index, tensor_of[node]))
        self._mark_alive(Event.FORWARD_DONE.of(run.index))

    def backward_called(self) -> None:
        """Record the call of a backward, which begins with code outside of captured graphs, the loss for example."""
        if self.runs and not self.backwards and not self._is_closed and threading.get_ident() == self._thread:
            self._mark(CALLED)

    def backward_starts(self, run: Run | None, tangents: Sequence[Any], leaves: Leaves, retains: bool) -> None:
        """Record the start of a backward, the gradients that arrived, and the inputs that its own belong to."""
        if run is None or run not in self.runs:  # it is of a forward of an earlier step
            self._mark(OTHER)
            self.eager_backward_starts()
            return
        added = positions_to_add(run.part.captured, leaves)
        run.added = _added(run.part.captured, leaves, added)
        run.accumulated_bytes = sum(leaves[position].nbytes for position in existing_gradients(leaves).keys() - added)
        run.missing = missing_gradients(tangents)
        run.is_retained = retains or run.is_retained
        seen = set[int]()  # each storage counts once
        run.tangent_bytes = tuple(
            storage_bytes([t], t.device, seen) if isinstance(t, torch.Tensor) else 0 for t in tangents
        )
        run.tangent_strides = tuple(tuple(t.stride()) if tensor_state.is_dense(t) else None for t in tangents)
        run.made_outside = {storage: made for storage, made in run.made_outside.items() if made[0]()}
        watched = ((position, t) for position, t in enumerate(tangents) if tensor_state.is_dense(t))
        self._tangents = {position: tensor_state.watch_storage(t) for position, t in watched}
        if not self.backwards:
            self._waiting = [other for other in self.runs if other.is_waiting]
        self.backwards.append(run.index)
        self._mark_alive(Event.BACKWARD.of(run.index))

    def eager_backward_starts(self) -> None:
        """Record the start of a backward of code that runs as the user wrote it."""
        backward_pass.at_end(partial(self._whole_backward_ended, None))

    def _whole_backward_ended(self, run: Run | None) -> None:
        """Record the end of a whole backward; later code, the optimizer's step for example, is not planned."""
        self._ended += run is not None
        if not self._is_closed:
            self._mark(Event.ENDED.of(0 if run is None else run.index))

    def backward_done(self, run: Run | None) -> None:
        """Record the end of a backward, and the outputs that others than the part itself held until then."""
        if run is None or run not in self.runs:
            self._mark(OTHER_DONE)
            return
        run.alive = run.living
        run.released_bytes = sum(size_bytes for lives, size_bytes in run.made_outside.values() if not lives())
        run.outlasting = tuple(position for position, lives in self._tangents.items() if lives())
        self._mark(Event.BACKWARD_DONE.of(run.index))
        backward_pass.at_end(partial(self._whole_backward_ended, run))

    def _mark_alive(self, mark: Mark) -> None:
        """Mark a place, and note the outputs that live there."""
        self.alive_at[mark] = [(run.index, tensor) for run in self.runs for tensor in run.living]
        self._mark(mark)

    def _mark(self, mark: Mark) -> None:
        if self._meter is not None:
            self._meter.mark(mark)

    def _mark_release(self, value: torch.Tensor, mark: Mark) -> Callable[[], Any]:
        """Mark the release of a tensor's memory; return the function that stops this."""
        reference = weakref.ref(self)  # outputs may be kept for ever

        def note() -> None:
            record = reference()
            if record is not None:
                record._released(mark)

        return tensor_state.at_release(value, note)

    def _released(self, mark: Mark) -> None:
        """Mark the release of an output. After this step, mark the last release in the record of the next step."""
        record: StepRecord | None = self
        if self._is_closed:
            is_last = self._left == {mark}
            self._left.discard(mark)
            record, mark = self._next() if self._next is not None and is_last else None, LEFT
        if record is not None and record._meter is not None and not record._is_closed:
            record._meter.mark_release(mark)

    def close(self, at_once: bool = True) -> None:
        """End the measurement, once; later calls do nothing.

        Code that ran since the last backward ended, the optimizer's step say, is left out. So is all that ran since the
        last mark, where the step has not ended just now, at once.
        """
        if not self.backwards:
            self._waiting = [run for run in self.runs if run.is_waiting]
        if self._meter is not None and not self._is_closed:
            self._is_closed = True
            sees_end = self._meter.is_counting  # else another meter runs, and a mark would be lost
            if sees_end:
                self._mark(CLOSED)
            self._meter.stop()
            for unwatch in self._unwatch:  # they may stay for ever, and others will watch them
                unwatch()
            spans = _spans_of(self._meter.intervals)
            closed = spans.pop() if sees_end else None
            if closed is not None and not at_once and self.is_measured and self._sees_frees:
                given = [
                    (span.label.size_bytes, span.released_bytes) for span in spans if span.label.event is Event.GIVEN
                ]
                unseen = sum(size_bytes for size_bytes, told_bytes in given if size_bytes != told_bytes)
                self.grown_bytes = closed.start_bytes - unseen  # the allocator did not report all that was released
            self._peak_bytes = _peak_of_step(spans, at_once)
            self.allocated_bytes = _allocated_between(spans)
            self.spans = _without_others(spans)

    @property
    def peak_bytes(self) -> int | None:
        """Peak of the step, resident bytes included; None where it was not measured to its end."""
        if not self.is_measured or not self._sees_frees:
            return None
        return self.resident.existing_bytes + self._peak_bytes

    def left_outputs(self) -> dict[int, int]:
        """Return the bytes of outputs that someone holds after the step, by storage: none for a loss, say, a number."""
        sizes = dict[int, int]()
        for run in self.runs:
            for tensor, (lives, storage) in run.outputs.items():
                if lives():
                    size_bytes = bytes_of(run.graph, (tensor,)) if run.graph.tensors[tensor].shape else 0
                    sizes[storage] = max(size_bytes, sizes.get(storage, 0))
        return sizes

    def left_inputs(self) -> list[torch.Tensor]:
        """List the inputs, beside parameters, that outputs hold after the step by their graphs, and their gradients."""
        leaves = [leaf() for run in self.runs if run.living for leaf in run.trained]
        return [tensor for leaf in leaves if leaf is not None for tensor in (leaf, leaf.grad) if tensor is not None]


def _passed_on(part: Part, arguments: Sequence[Any], lent: Collection[int]) -> tuple[int, ...]:
    """List the gradients that don't stay with an input: some other code computed that, or FSDP2 has lent it."""
    captured = part.captured
    tensor_of = {captured.fx_values[t]: t for t in captured.graph.gradients}
    pairs = zip(arguments, captured.backward_outputs, strict=False)
    gradients = (
        tensor_of[g]
        for a, g in pairs
        if g in tensor_of and isinstance(a, torch.Tensor) and (not a.is_leaf or id(a) in lent)
    )
    return tuple(dict.fromkeys(gradients))


def _added(captured: Captured, leaves: Leaves, added: frozenset[int]) -> dict[int, frozenset[int]]:
    """List the gradients that are only added to those of leaves at these positions, with the leaves' storages."""
    positions_of = dict[fx.Node, list[int]]()
    for position, gradient in enumerate(captured.backward_outputs):
        positions_of.setdefault(gradient, []).append(position)
    tensor_of = {captured.fx_values[t]: t for n in captured.graph.backward for t in captured.graph.nodes[n].outputs}
    return {
        tensor_of[gradient]: frozenset(tensor_state.storage_id(leaves[p]) for p in positions)
        for gradient, positions in positions_of.items()
        if gradient in tensor_of and added.issuperset(positions)
    }


# ---------------------------------------------------------------- spans of memory between marks


def _spans_of(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the measured intervals, as if uncounted memory from before the step were never released."""
    spans, released_bytes = list[Interval](), 0
    for interval in intervals:
        mark = interval.label if isinstance(interval.label, Mark) else START  # the meter's own first one
        if mark.event is Event.UNCOUNTED and mark.size_bytes == interval.released_bytes:
            released_bytes += interval.released_bytes
        spans.append(_raised(replace(interval, label=mark), released_bytes))
    return spans


def _without_others(spans: Sequence[Interval]) -> list[Interval]:
    """Return spans as if the backwards of earlier steps' forwards had neither taken nor freed any memory."""
    own, shift_bytes, other_bytes = list[Interval](), 0, None
    for span in spans:
        if span.label == OTHER and other_bytes is None:
            other_bytes = span.start_bytes
        if span.label == OTHER_DONE and other_bytes is not None:
            shift_bytes, other_bytes = shift_bytes + other_bytes - span.start_bytes, None
        if other_bytes is not None:
            span = replace(span, start_bytes=other_bytes, peak_bytes=other_bytes)
        own.append(_raised(span, shift_bytes))
    return own


def _raised(span: Interval, by_bytes: int) -> Interval:
    return replace(span, start_bytes=span.start_bytes + by_bytes, peak_bytes=span.peak_bytes + by_bytes)


def _allocated_between(spans: Sequence[Interval]) -> int:
    """Return the bytes that were allocated between the last forward and the first backward."""
    events = [span.label.event for span in spans]
    ended = next((i for i, event in enumerate(events) if event in (Event.CALLED, Event.BACKWARD)), len(events))
    done = max((i for i, event in enumerate(events[:ended]) if event is Event.FORWARD_DONE), default=ended)
    return sum(span.allocated_bytes for span in spans[done:ended])


def _peak_of_step(spans: Sequence[Interval], at_once: bool) -> int:
    """Return the peak until the last backward ended. Where another backward began after it, return that of all spans.

    Where the step has not ended at once, the last span is left out of the others.
    """
    events = [span.label.event for span in spans]
    ended = max((i for i, event in enumerate(events) if event is Event.ENDED), default=len(events))
    if Event.BACKWARD in events[ended:]:  # another one failed, or has others run after it
        ended = len(events)
    return max((span.peak_bytes for span in spans[: min(ended, len(events) - (not at_once))]), default=0)
