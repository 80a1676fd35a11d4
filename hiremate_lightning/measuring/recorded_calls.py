"""Turn a recorded step into calls for `step.merge`, with the memory that uncaptured code around them takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from .. import thresholds
from ..memory.metering import Interval
from ..records.graph import bytes_of
from ..records.step import HELD_TO_THE_END, Call, Gap, Output, OutsideStage
from .profiling import as_laid_out
from .recording import StepMeasurement
from .runs import CALLED, LEFT, OTHER, START, Event, Mark, Run


def calls_of(measurement: StepMeasurement) -> tuple[list[Call], list[int]]:
    """Return the calls of a recorded step whose graphs have costs, and the order of their backwards."""
    recorded = _RecordedCalls(measurement)
    calls = [recorded.call(run) for run in recorded.planned]
    return calls, [recorded.place[run.index] for run in recorded.backwards]


class _RecordedCalls:
    """The runs of a record that have a backward, and the memory spans around them."""

    def __init__(self, measurement: StepMeasurement) -> None:
        self._record = measurement
        self.planned = measurement.planned
        self.place = {run.index: position for position, run in enumerate(self.planned)}  # the call of each run
        self.backwards = [measurement.runs[index] for index in dict.fromkeys(measurement.backwards)]  # as executed
        self._span_at = {span.label: position for position, span in enumerate(measurement.spans)}
        self._ends = [Event.FORWARD.of(run.index) for run in self.planned[1:]]  # ends of the code after each forward
        self._ends += [Event.BACKWARD.of(run.index) for run in self.backwards[:1]]
        # For each run, by output: the number of forwards and backwards that have run when code frees the output.
        self._held_until = {run.index: dict[int, int]() for run in self.planned}
        for ended, mark in enumerate(self._ends, start=1):
            for index, tensor in self._alive_at(mark):
                self._held_until[index][tensor] = ended
        for run in self.planned:
            outlive = [t for i, t in self._alive_at(Event.BACKWARD_DONE.of(run.index)) if i == run.index]
            self._held_until[run.index].update(self._held_into_backwards(run, outlive))
            self._held_until[run.index].update(dict.fromkeys(outlive, HELD_TO_THE_END))

    def call(self, run: Run) -> Call:
        """Return the call of a run, with the uncaptured code before, between and after its halves."""
        measurement, place = self._record, self.place
        number, profile = place[run.index], run.runtime.profile
        assert profile is not None, "costs are known of what has run in a step"
        if measurement.timed is not None and thresholds.current.measures_times:
            profile = measurement.timed.refine(profile, run.graph)
        if measurement.is_measured and measurement.has_memory:
            profile = as_laid_out(run.runtime.captured, profile, run.tangent_strides)
        graph, profile = run.as_run(profile)
        # The uncaptured code after the forward runs until the next forward, or until the first backward.
        done, mark = Event.FORWARD_DONE.of(run.index), self._ends[number]
        lived = [(i, t) for i, t in self._alive_at(done) if i <= run.index]
        died = list[Output]()  # no longer alive, and not saved by their run
        if self._spans(done, mark) and mark in measurement.alive_at:
            alive = set(self._alive_at(mark))
            died = [(i, t) for i, t in lived if (i, t) not in alive and not measurement.runs[i].saves(t)]
        stages, called_at = self._stages(run, mark, lived, died)
        is_alone = not died and all(i == run.index for i, _ in lived)
        # It is unknown when they die: a plan may save some.
        unknown = [] if is_alone else [OutsideStage(held=tuple(lived))]
        begun = self._between(START, Event.FORWARD.of(run.index)) or Gap()
        ended = self._between(Event.BACKWARD_DONE.of(run.index), Event.ENDED.of(run.index)) or Gap()
        before = self.backwards.index(run)
        outlasting = (graph.tangents[position] for position in run.outlasting)
        return Call(
            graph=graph,
            profile=profile,
            links={t: (place[r], o) for t, (r, o) in run.links.items() if r in place},
            died=tuple(t for i, t in died if i == run.index),
            held_until=self._held_until[run.index],
            passed_on=run.passed_on,
            released_bytes=run.released_bytes,
            outlasting=tuple(t for t in outlasting if t not in graph.held),
            is_retained=run.is_retained,
            stages=tuple(
                replace(stage, held=tuple((place[i], t) for i, t in stage.held)) for stage in stages[:-1] or unknown
            ),
            called_at=called_at,
            before_forward=Gap() if number else Gap(max(0, begun.held_bytes), begun.peak_bytes),
            after_forward=self._gap_after_forward(done, mark, died, stages, called_at),
            before_backward=self._gap_before_backward(before) if before else Gap(),
            after_backward=Gap() if before + 1 < len(self.backwards) else replace(ended, held_bytes=0),
        )

    def _held_into_backwards(self, run: Run, outlive: Collection[int]) -> dict[int, int]:
        """Return the outputs of a run that uncaptured code holds into the backward, for example to read them there.

        They are freed after the last backward at whose start they live. Outputs that outlive their own backward don't
        count. Neither do outputs that a captured graph, whose backward has not run yet, may hold: as a saved value of
        this run, or as an input of another one.
        """
        stay, held = {run.graph.tensors[t].storage for t in outlive}, dict[int, int]()
        for number, starting in enumerate(self.backwards):
            may_hold = self.backwards[number:]
            links = {output for other in may_hold for output in other.links.values()}
            alive = self._alive_at(Event.BACKWARD.of(starting.index))
            for t in (t for i, t in alive if i == run.index):
                is_saved = (run.index, t) in links or (run in may_hold and run.saves(t))
                if not is_saved and run.graph.tensors[t].storage not in stay:
                    held[t] = len(self.planned) + number + 1
        return held

    def _alive_at(self, mark: Mark) -> list[Output]:
        """List the outputs of planned runs that live at a mark."""
        return [(i, t) for i, t in self._record.alive_at.get(mark, ()) if i in self.place]

    def _sizes(self, outputs: Iterable[Output]) -> dict[int, int]:
        """Return the bytes of outputs by storage."""
        runs = self._record.runs
        return {runs[i].outputs[t][1]: bytes_of(runs[i].graph, (t,)) for i, t in outputs}

    # ---------------------------------------------------------------- memory of uncaptured code

    def _gap_after_forward(
        self, done: Mark, following: Mark, died: Iterable[Output], stages: Sequence[OutsideStage], called_at: int | None
    ) -> Gap:
        """Return the gap after a forward, in bytes above the outputs that live on.

        The gap holds the growth of live bytes, plus the bytes of outputs that died in it, minus the tangents that it
        hands to the first backward. A negative sum frees bytes of earlier gaps.
        """
        gap, died_bytes = self._between(done, following), sum(self._sizes(died).values())
        if gap is None:
            return Gap()
        handed_bytes = 0
        if following.event is Event.BACKWARD:
            died_bytes += self._record.returned_bytes
            handed_bytes = sum(self.backwards[0].tangent_bytes)
        freed_bytes = 0 if called_at is None else self._record.freed_bytes
        peak_bytes = stages[-1].peak_bytes if stages else gap.peak_bytes + died_bytes
        return Gap(gap.held_bytes + died_bytes + freed_bytes - handed_bytes, peak_bytes, gap.has_others)

    def _stages(
        self, run: Run, following: Mark, lived: Iterable[Output], died: Iterable[Output]
    ) -> tuple[list[OutsideStage], int | None]:
        """Divide the uncaptured code after a forward into stages, at deaths of outputs and the call of the backward.

        Returns the stages and the number of them before that call; no stages if the death of an output was not seen.
        """
        measurement, sizes, dead, stages = self._record, self._sizes(died), set[int](), list[OutsideStage]()
        storage_of = {Mark(Event.RELEASED, i, t): measurement.runs[i].outputs[t][1] for i, t in died}
        spans = self._spans(Event.FORWARD_DONE.of(run.index), following)
        calls = [i for i, span in enumerate(spans) if span.label == CALLED]
        is_last = following.event is Event.BACKWARD  # between two forwards, another backward is called
        called = calls[-1] if calls and is_last else None
        returned_bytes = measurement.returned_bytes if is_last else 0
        left = next((i for i, span in enumerate(spans) if span.label == LEFT), len(spans))
        called_at, stale_bytes = None, measurement.freed_bytes
        for position, span in enumerate(spans[:-1]):
            storage = storage_of.get(span.label)
            if storage is not None:
                dead.add(storage)
            held = tuple((i, t) for i, t in lived if measurement.runs[i].outputs[t][1] not in dead)
            if position == called:
                called_at = len(stages)
            if not stages or position == called or held != stages[-1].held:
                stages.append(OutsideStage(held=held))
            freed_bytes = sum(sizes[s] for s in dead) + (0 if called_at is None else stale_bytes)
            freed_bytes += returned_bytes if position >= left else 0
            above_bytes = span.peak_bytes - spans[0].start_bytes + freed_bytes
            stages[-1] = replace(stages[-1], peak_bytes=max(stages[-1].peak_bytes, above_bytes))
        return (stages, called_at) if dead == sizes.keys() else ([], None)

    def _gap_before_backward(self, ended: int) -> Gap:
        """Return the gap between backward number `ended` of the step and the one before it."""
        previous, run = self.backwards[ended - 1], self.backwards[ended]
        gap = self._between(Event.BACKWARD_DONE.of(previous.index), Event.BACKWARD.of(run.index))
        if gap is None:
            return Gap()
        freed_bytes = bytes_of(previous.graph, previous.passed_on) + previous.accumulated_bytes
        freed_bytes += sum(previous.tangent_bytes[position] for position in previous.outlasting)
        for other in self.planned:
            held_until = self._held_until[other.index].items()
            freed_bytes += bytes_of(other.graph, (t for t, until in held_until if until == len(self.planned) + ended))
        return replace(gap, held_bytes=gap.held_bytes + freed_bytes - sum(run.tangent_bytes))

    def _between(self, first: Mark, last: Mark) -> Gap | None:
        """Return growth and peak of memory between two marks; None if not measured."""
        spans = self._spans(first, last)
        if not spans:
            return None
        *between, end = spans
        base = spans[0].start_bytes
        peak = max((span.peak_bytes for span in between), default=base)
        has_others = any(span.label == OTHER for span in between)
        return Gap(end.start_bytes - base, max(0, peak - base), has_others)

    def _spans(self, first: Mark, last: Mark) -> Sequence[Interval]:
        """List the spans from one mark to another, both included; none if a mark is missing."""
        at = self._span_at
        return self._record.spans[at[first] : at[last] + 1] if first in at and last in at else ()
