"""Marks in the memory measurement of a step, and the memory between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ..memory.metering import Interval


class Event(Enum):
    """The event at a mark."""

    START = "the step begins"
    FORWARD = "a forward starts"
    FORWARD_DONE = "a forward has ended"
    CALLED = "someone calls the backward"
    BACKWARD = "a backward starts"
    BACKWARD_DONE = "a backward has ended"
    ENDED = "the whole backward has ended, with all that it is part of"
    OTHER = "the backward of a forward of an earlier step starts"
    OTHER_DONE = "the backward of a forward of an earlier step has ended"
    RELEASED = "an output is released"
    LEFT = "the last output of the step before is released"
    UNCOUNTED = "another tensor is released that was there before the step"
    GIVEN = "a tensor of the batch is released"
    CLOSED = "the measurement ends"

    def of(self, run: int) -> Mark:
        """Return the mark of a run."""
        return Mark(self, run)


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark.

    Attributes:
        event: The event.
        run: The run to which it happens, 0 for none.
        tensor: The output that is released.
        size_bytes: Bytes of a released tensor of the batch, or of one that was counted nowhere.
    """

    event: Event
    run: int = 0
    tensor: int = 0
    size_bytes: int = 0

    @property
    def label(self) -> str:
        """The name that a meter gets."""
        return f"{self.event.name} {self.run} {self.tensor} {self.size_bytes}"


START, CALLED, LEFT = Mark(Event.START), Mark(Event.CALLED), Mark(Event.LEFT)
OTHER, OTHER_DONE = Mark(Event.OTHER), Mark(Event.OTHER_DONE)


@dataclass(frozen=True, slots=True)
class Span:
    """Memory from a mark to the next one.

    Attributes:
        mark: The mark.
        start_bytes: Live bytes at the mark, above those at the start of the step.
        peak_bytes: The most that lived since.
    """

    mark: Mark
    start_bytes: int
    peak_bytes: int


def spans_of(intervals: Sequence[Interval], marks: Mapping[str, Mark]) -> list[Span]:
    """Return the measured spans, as if uncounted memory from before the step were never released."""
    spans, released_bytes = list[Span](), 0
    for interval in intervals:
        mark = marks.get(interval.label, START)
        if mark.event is Event.UNCOUNTED and mark.size_bytes == interval.released_bytes:
            released_bytes += interval.released_bytes
        spans.append(Span(mark, interval.start_bytes + released_bytes, interval.peak_bytes + released_bytes))
    return spans


def unseen_bytes(intervals: Sequence[Interval], marks: Mapping[str, Mark]) -> int:
    """Return the bytes of released tensors of the batch whose release the allocator did not report."""
    given = [(marks[i.label], i.released_bytes) for i in intervals if i.label in marks]
    return sum(m.size_bytes for m, told_bytes in given if m.event is Event.GIVEN and m.size_bytes != told_bytes)


def allocated_between(intervals: Sequence[Interval], marks: Mapping[str, Mark]) -> int:
    """Return the bytes that were allocated between the last forward and the first backward."""
    events = [marks.get(interval.label, START).event for interval in intervals]
    ended = next((i for i, event in enumerate(events) if event in (Event.CALLED, Event.BACKWARD)), len(events))
    done = max((i for i, event in enumerate(events[:ended]) if event is Event.FORWARD_DONE), default=ended)
    return sum(interval.allocated_bytes for interval in intervals[done:ended])


def peak_of_step(spans: Sequence[Span], at_once: bool) -> int:
    """Return the peak until the last backward ended. Where another backward began after it, return that of all spans.

    Where the step has not ended at once, the last span is left out of the others.
    """
    events = [span.mark.event for span in spans]
    ended = max((i for i, event in enumerate(events) if event is Event.ENDED), default=len(events))
    if Event.BACKWARD in events[ended:]:  # another one failed, or has others run after it
        ended = len(events)
    return max((span.peak_bytes for span in spans[: min(ended, len(events) - (not at_once))]), default=0)


def without_others(spans: Sequence[Span]) -> list[Span]:
    """Return spans as if the backwards of earlier steps' forwards had neither taken nor freed any memory."""
    own, shift_bytes, other_bytes = list[Span](), 0, None
    for span in spans:
        if span.mark == OTHER and other_bytes is None:
            other_bytes = span.start_bytes
        if span.mark == OTHER_DONE and other_bytes is not None:
            shift_bytes, other_bytes = shift_bytes + other_bytes - span.start_bytes, None
        start_bytes, peak_bytes = (
            (span.start_bytes, span.peak_bytes) if other_bytes is None else (other_bytes, other_bytes)
        )
        own.append(Span(span.mark, start_bytes + shift_bytes, peak_bytes + shift_bytes))
    return own
