"""Record one training step: the captured graphs that run, and the memory that uncaptured code between them allocates.

A `StepMeasurement` lives for one step. It marks the start and the end of each forward and backward in the memory
measurement, finds the inputs that are an earlier run's outputs, and finds the outputs that live at each mark.
`recorded_calls` turns the record into the calls that `step.merge` puts together.
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
from ..housekeeping import weakly
from ..memory.allocator import allocated_bytes, storage_bytes
from ..memory.metering import Interval, LiveBytes, MemoryMeter
from ..records.graph import bytes_of
from ..records.step import Output
from ..running.accumulation import Leaves, existing_gradients, find_leaves, positions_to_add
from ..running.execution import GraphRuntime, missing_gradients
from ..running.program import Program
from ..torch_private import backward_pass, sharding, tensor_state
from .profiling import TimedRun
from .resident import Resident
from .runs import CALLED, CLOSED, LEFT, OTHER, OTHER_DONE, START, Event, Mark, Run

MOST_BACKWARDS = 1000  # calls of backwards after which a step is measured no longer: its events fill the host's memory


class StepMeasurement:
    """The record of one step: its runs, and its memory from mark to mark.

    The host's allocator reports the size of a release only if the allocation was watched too, and a step frees
    gradients of the previous one. So the peak of a step is measured only if the previous step was (`sees_frees`).
    `device` is None if tensors have no memory; `root` is the model that FSDP2 may have sharded.
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
        # Bytes that the previous step left, and that are not expected to be freed; None if none are watched.
        self._unexpected_bytes: int | None = None
        self._left = set[Mark]()  # releases of this step's outputs that the next step has not seen yet
        self._next: weakref.ref[StepMeasurement] | None = None
        self._thread = threading.get_ident()
        self.has_memory = device is not None
        self.resident, self._sees_frees = resident, sees_frees
        self.counted = frozenset[int]()  # known storages of the resident memory
        self.runs: list[Run] = []  # in the order of their forwards
        self.backwards: list[int] = []  # indices of the runs, in the order of their backwards
        self._waiting: list[Run] = []  # runs that wait when the first backward begins, or at the end without a backward
        self.parameters = set[int]()  # identities of the parameters that the runs take
        self.timed: TimedRun | None = None  # times of the step's operations, if they were taken
        self._tangents: dict[int, Callable[[], bool]] = {}  # by position: does the tangent live?
        self.alive_at: dict[Mark, list[Output]] = {}  # outputs that live at a mark
        self._meter = meter
        self._is_closed = False
        self._calls = 0  # calls of backwards so far
        self._unwatch: list[Callable[[], Any]] = []
        self.allocated_bytes = 0  # bytes allocated between the last forward and the first backward, on a CPU
        # Growth of live bytes from the step's start to the next step; None if not all was seen.
        self.grown_bytes: int | None = None
        # Memory from mark to mark, once the measurement has ended; without releases of uncounted, older memory.
        self.spans: Sequence[Interval] = ()
        self._ended = 0  # number of runs whose whole backward in autograd has ended
        self._peak_bytes = 0  # peak above the bytes that existed when the step began
        if meter is None and device is not None and MemoryMeter.is_available(device):
            self._meter = MemoryMeter(device)
        if self._meter is not None:
            self._meter.start()
            backward_pass.add_listener(self)

    @property
    def is_measured(self) -> bool:
        """Whether memory is measured: not while another profiler runs, nor after another meter has interrupted."""
        return self._meter is not None and not self._meter.lost_marks

    @property
    def is_whole(self) -> bool:
        """Whether all backwards that began have ended; if one failed, much of the step was not seen."""
        return self._ended == len(self.backwards)

    @property
    def planned(self) -> list[Run]:
        """The runs that have a backward, in the order of their forwards; other runs count as uncaptured code."""
        return [run for run in self.runs if run.index in self.backwards]

    @property
    def unfinished(self) -> list[Run]:
        """The runs that wait for a backward in a later step."""
        return [run for run in self._waiting if run.index not in self.backwards]

    @property
    def has_dropped_by_plan(self) -> bool:
        """Whether a run by a plan has no backward, now or later: it saved more than it will from now on."""
        kept = {*self.backwards, *(run.index for run in self._waiting)}
        return any(run.index not in kept and not run.program.protects for run in self.runs)

    @property
    def left_nothing(self) -> bool:
        """Whether the step ran something, of which no saved value waits and no output lives."""
        return bool(self.runs) and not any(run.is_waiting or run.living for run in self.runs)

    @property
    def graphs(self) -> tuple[int, ...]:
        """Numbers of the captured graphs that ran, in the order of their forwards."""
        return tuple(run.runtime.number for run in self.runs)

    @property
    def freed_bytes(self) -> int:
        """Bytes of stale and left memory that were seen freed before the backward, `returned_bytes` aside."""
        if not self._sees_frees:
            return 0
        return self.resident.stale_bytes + (0 if self.returned_bytes else self.resident.left_bytes)

    @property
    def returned_bytes(self) -> int:
        """Bytes of the previous step's outputs that were freed unexpectedly as the last forward returned."""
        return (self._unexpected_bytes or 0) if self.left_at_return else 0

    @property
    def left_at_return(self) -> bool | None:
        """Whether the previous step's outputs were freed as the last forward returned; None if there were none."""
        if self._unexpected_bytes is None or not self.backwards:
            return None
        marks = [span.label for span in self.spans]
        returned = Event.FORWARD_DONE.of(max(self.backwards))
        if returned not in marks or LEFT not in marks[marks.index(returned) :]:
            return False
        before = self.spans[marks.index(returned) : marks.index(LEFT)]
        return all(span.peak_bytes == span.start_bytes for span in before)

    def watch_left(self, before: StepMeasurement, unexpected_bytes: int) -> None:
        """Mark the release of the previous step's left outputs; 0 bytes if this step is expected to free them."""
        self._unexpected_bytes = unexpected_bytes
        living = ((run, tensor) for run in before.runs for tensor in run.living)
        before._left = {Mark(Event.RELEASED, r.index, t) for r, t in living if r.graph.tensors[t].shape}
        before._next = weakref.ref(self)

    def watch_releases(self, event: Event, tensors: Iterable[torch.Tensor]) -> None:
        """Mark the releases of host tensors: uncounted ones from before the step, or tensors of the batch."""
        for tensor in tensors:
            mark = Mark(event, size_bytes=tensor.untyped_storage().nbytes())
            self._unwatch.append(self._mark_release(tensor, mark))

    def begin(self, runtime: GraphRuntime, program: Program, arguments: Sequence[Any]) -> Run:
        """Record the start of a forward."""
        run = Run(runtime, len(self.runs), program)
        tensors = dict(zip(runtime.captured.graph.inputs, arguments, strict=False))
        made = {storage: (r.index, t) for r in self.runs for t, (lives, storage) in r.outputs.items() if lives()}
        for tensor, value in tensors.items():
            if tensor_state.is_dense(value) and not isinstance(value, torch.nn.Parameter):
                storage = tensor_state.storage_id(value)
                if storage in made:
                    run.links[tensor] = made[storage]
                elif not value.is_leaf and storage not in self.counted:
                    size_bytes = allocated_bytes(value.untyped_storage().nbytes(), value.device)
                    run.made_outside[storage] = tensor_state.watch_storage(value), size_bytes
        parameters = {id(value) for value in tensors.values() if isinstance(value, torch.nn.Parameter)}
        pairs = [] if self._sharded is None else sharding.whole_parameters(self._sharded)
        lent = {id(whole): id(shard) for whole, shard in pairs}  # by FSDP2
        self.parameters.update(parameters, (lent[p] for p in parameters if p in lent))
        run.passed_on = _passed_on(runtime, arguments, lent)
        leaves = find_leaves(runtime.captured, arguments).values()
        run.trained = tuple(weakref.ref(leaf) for leaf in leaves if id(leaf) not in parameters)
        self.runs.append(run)
        self._mark_alive(Event.FORWARD.of(run.index))
        return run

    def forward_done(self, run: Run, outputs: Sequence[Any]) -> None:
        """Record the end of a forward, and watch its outputs."""
        captured = run.runtime.captured
        tensor_of = captured.tensor_of
        for node, value in zip(captured.forward_outputs, outputs, strict=True):
            if node in tensor_of and tensor_state.is_dense(value):
                run.outputs[tensor_of[node]] = (tensor_state.watch_storage(value), tensor_state.storage_id(value))
                self._mark_release(value, Mark(Event.RELEASED, run.index, tensor_of[node]))
        self._mark_alive(Event.FORWARD_DONE.of(run.index))

    def backward_called(self) -> None:
        """Mark the call of a backward, which begins in uncaptured code, the loss for example.

        If no step follows, the end of this one is never seen: after `MOST_BACKWARDS` calls its meter gives up.
        """
        if self._is_closed or threading.get_ident() != self._thread:
            return
        self._calls += 1
        if self.runs and not self.backwards:
            self._mark(CALLED)
        if self._calls > MOST_BACKWARDS and isinstance(self._meter, MemoryMeter):
            self._meter.give_up()

    def backward_starts(self, run: Run | None, tangents: Sequence[Any], leaves: Leaves, retains: bool) -> None:
        """Record the start of a backward: its tangents, and the leaves whose gradients it computes."""
        if run is None or run not in self.runs:  # its forward ran in an earlier step
            self._mark(OTHER)
            self.eager_backward_starts()
            return
        added = positions_to_add(run.runtime.captured, leaves)
        run.added = _added(run.runtime.captured, leaves, added)
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
        """Record the start of a backward of code that runs eagerly."""
        backward_pass.at_end(partial(self._whole_backward_ended, None))

    def _whole_backward_ended(self, run: Run | None) -> None:
        """Mark the end of autograd's whole backward; later code, such as the optimizer's step, is not planned."""
        self._ended += run is not None
        if not self._is_closed:
            self._mark(Event.ENDED.of(0 if run is None else run.index))

    def backward_done(self, run: Run | None) -> None:
        """Record the end of a captured backward, and the outputs and tangents that still live then."""
        if run is None or run not in self.runs:
            self._mark(OTHER_DONE)
            return
        run.released_bytes = sum(size_bytes for lives, size_bytes in run.made_outside.values() if not lives())
        run.outlasting = tuple(position for position, lives in self._tangents.items() if lives())
        self._mark_alive(Event.BACKWARD_DONE.of(run.index))
        backward_pass.at_end(partial(self._whole_backward_ended, run))

    def _mark_alive(self, mark: Mark) -> None:
        """Set a mark, and store the outputs that live there."""
        self.alive_at[mark] = [(run.index, tensor) for run in self.runs for tensor in run.living]
        self._mark(mark)

    def _mark(self, mark: Mark) -> None:
        if self._meter is not None:
            self._meter.mark(mark)

    def _mark_release(self, value: torch.Tensor, mark: Mark) -> Callable[[], Any]:
        """Set a mark when a tensor's memory is released; return the function that cancels this."""
        return tensor_state.at_release(value, partial(weakly(self._released), mark))  # outputs may be kept for ever

    def _released(self, mark: Mark) -> None:
        """Mark the release of an output. After this step, mark the last release in the record of the next step."""
        record: StepMeasurement | None = self
        if self._is_closed:
            is_last = self._left == {mark}
            self._left.discard(mark)
            record, mark = self._next() if self._next is not None and is_last else None, LEFT
        if record is not None and record._meter is not None and not record._is_closed:
            record._meter.mark_release(mark)

    def close(self, at_once: bool = True) -> None:
        """End the measurement; later calls do nothing.

        Code after the last backward, such as the optimizer's step, is left out. With `at_once=False` the step has ended
        some time ago, and code after the last mark is left out too.
        """
        if not self.backwards:
            self._waiting = [run for run in self.runs if run.is_waiting]
        if self._meter is not None and not self._is_closed:
            self._is_closed = True
            sees_end = self._meter.is_counting  # else another meter runs, and a mark would be lost
            if sees_end:
                self._mark(CLOSED)
            self._meter.stop()
            for unwatch in self._unwatch:  # these tensors may live for ever, and later records will watch them
                unwatch()
            spans = _spans_of(self._meter.intervals)
            closed = spans.pop() if sees_end and spans else None  # there are none if its thread has ended
            if closed is not None and not at_once and self.is_measured and self._sees_frees:
                batch = [span for span in spans if span.label.event is Event.GIVEN]
                unseen = [span.label.size_bytes for span in batch if span.label.size_bytes != span.released_bytes]
                self.grown_bytes = closed.start_bytes - sum(unseen)  # the allocator did not report these releases
            self._peak_bytes = _peak_of_step(spans, at_once)
            self.allocated_bytes = _allocated_between(spans)
            self.spans = _without_others(spans)

    @property
    def peak_bytes(self) -> int | None:
        """Peak of the step, resident bytes included; None if it was not measured."""
        if not self.is_measured or not self._sees_frees:
            return None
        return self.resident.existing_bytes + self._peak_bytes

    def left_outputs(self) -> dict[int, int]:
        """Return the bytes of outputs that still live after the step, by storage; 0 for a scalar, such as a loss."""
        sizes = dict[int, int]()
        for run in self.runs:
            for tensor, (lives, storage) in run.outputs.items():
                if lives():
                    size_bytes = bytes_of(run.graph, (tensor,)) if run.graph.tensors[tensor].shape else 0
                    sizes[storage] = max(size_bytes, sizes.get(storage, 0))
        return sizes

    def left_inputs(self) -> list[torch.Tensor]:
        """List the leaves, parameters aside, that outputs hold by their autograd graphs, and the leaves' gradients."""
        leaves = [leaf() for run in self.runs if run.living for leaf in run.trained]
        return [tensor for leaf in leaves if leaf is not None for tensor in (leaf, leaf.grad) if tensor is not None]


def _passed_on(runtime: GraphRuntime, arguments: Sequence[Any], lent: Collection[int]) -> tuple[int, ...]:
    """List the gradients that don't stay in an input's `.grad`: other code computed the input, or FSDP2 has lent it."""
    captured = runtime.captured
    pairs = zip(arguments, captured.backward_outputs, strict=False)
    gradients = (
        captured.tensor_of[g]
        for a, g in pairs
        if g in captured.tensor_of and isinstance(a, torch.Tensor) and (not a.is_leaf or id(a) in lent)
    )
    return tuple(dict.fromkeys(gradients))


def _added(captured: Captured, leaves: Leaves, added: frozenset[int]) -> dict[int, frozenset[int]]:
    """Return the gradients that are only added to leaves at the positions in `added`, with the leaves' storages."""
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
    """Return the measured intervals as they would be if uncounted memory from before the step were never released."""
    spans, released_bytes = list[Interval](), 0
    for interval in intervals:
        mark = interval.label if isinstance(interval.label, Mark) else START  # the meter's own first one
        if mark.event is Event.UNCOUNTED and mark.size_bytes == interval.released_bytes:
            released_bytes += interval.released_bytes
        spans.append(_raised(replace(interval, label=mark), released_bytes))
    return spans


def _without_others(spans: Sequence[Interval]) -> list[Interval]:
    """Return the spans as they would be if backwards of earlier steps' forwards neither took nor freed memory."""
    shifted, shift_bytes, other_bytes = list[Interval](), 0, None
    for span in spans:
        if span.label == OTHER and other_bytes is None:
            other_bytes = span.start_bytes
        if span.label == OTHER_DONE and other_bytes is not None:
            shift_bytes, other_bytes = shift_bytes + other_bytes - span.start_bytes, None
        if other_bytes is not None:
            span = replace(span, start_bytes=other_bytes, peak_bytes=other_bytes)
        shifted.append(_raised(span, shift_bytes))
    return shifted


def _raised(span: Interval, by_bytes: int) -> Interval:
    return replace(span, start_bytes=span.start_bytes + by_bytes, peak_bytes=span.peak_bytes + by_bytes)


def _allocated_between(spans: Sequence[Interval]) -> int:
    """Return the bytes that were allocated between the last forward and the first backward."""
    events = [span.label.event for span in spans]
    ended = next((i for i, event in enumerate(events) if event in (Event.CALLED, Event.BACKWARD)), len(events))
    done = max((i for i, event in enumerate(events[:ended]) if event is Event.FORWARD_DONE), default=ended)
    return sum(span.allocated_bytes for span in spans[done:ended])


def _peak_of_step(spans: Sequence[Interval], at_once: bool) -> int:
    """Return the peak of the spans up to the end of the last backward, or of all spans if a backward began after it.

    Unless `at_once`, the last span is left out.
    """
    events = [span.label.event for span in spans]
    ended = max((i for i, event in enumerate(events) if event is Event.ENDED), default=len(events))
    if Event.BACKWARD in events[ended:]:  # a later backward failed, or runs other backwards after it
        ended = len(events)
    return max((span.peak_bytes for span in spans[: min(ended, len(events) - (not at_once))]), default=0)
