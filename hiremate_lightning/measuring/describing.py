"""Describe a recorded step for `step.merge`: its calls, and the memory that the code around them takes and holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ..memory.metering import Interval
from ..records.costs import Profile
from ..records.graph import bytes_of
from ..records.step import Call, Gap, GapPart, Output
from .profiling import as_laid_out
from .recording import StepRecord
from .runs import CALLED, LEFT, OTHER, START, Event, Mark, Run


def describe(record: StepRecord, profiles: Mapping[int, Profile]) -> tuple[list[Call], list[int]]:
    """Describe a recorded step, with costs by number of part: its calls, and the order of their backwards.

    A run without a backward is part of the outside.
    """
    planned = [run for run in record.runs if run.index in record.backwards]
    place = {run.index: position for position, run in enumerate(planned)}
    backwards = [record.runs[index] for index in dict.fromkeys(record.backwards)]
    lingering = [_lingering(record, run, backwards) for run in planned]
    released = Counter[int]()  # bytes of outputs that outside code releases, by how many backwards have run
    for run, own in zip(planned, lingering, strict=True):
        for ended in {ended for _, ended in own}:
            released[ended] += bytes_of(run.graph, (t for t, at in own if at == ended))
    calls = []
    for run, following, own in zip(planned, [*planned[1:], None], lingering, strict=True):
        profile = profiles[run.number]
        if record.timed is not None:
            profile = record.timed.refine(profile, run.graph)
        if record.is_measured and record.has_memory:
            profile = as_laid_out(run.part.captured, profile, run.tangent_strides)
        call = _forward_call(record, run, profile, following, backwards[0], place)
        calls.append(_with_backward(record, replace(call, lingering=own), run, backwards, released))
    return calls, [place[run.index] for run in backwards]


def _forward_call(
    record: StepRecord, run: Run, profile: Profile, following: Run | None, first: Run, place: Mapping[int, int]
) -> Call:
    """Describe a forward, and the code outside before it and until the following one, or the first backward.

    Places are positions among the planned runs, by index.
    """
    graph, profile = run.as_run(profile)
    mark = Event.BACKWARD.of(first.index) if following is None else Event.FORWARD.of(following.index)
    done = Event.FORWARD_DONE.of(run.index)
    lived, stay = _lived(record, run, done, place), _lived(record, run, mark, place)
    died, alive = list[Output](), set(stay)
    if _spans(record, done, mark) and mark in record.alive_at:  # nobody held them, and no saved value lies there
        died = [(i, t) for i, t in lived if (i, t) not in alive and not record.runs[i].saves(t)]
    stages, called_at = _stages(record, run, mark, lived, died)
    before = _between(record, START, Event.FORWARD.of(run.index)) or Gap()
    is_alone = not died and all(i == run.index for i, _ in lived)
    unknown = [] if is_alone else [GapPart(tuple(lived), 0)]  # nobody knows when they die: a plan may save some
    return Call(
        graph=graph,
        profile=profile,
        links={t: (place[r], o) for t, (r, o) in run.links.items() if r in place},
        died=tuple(t for i, t in died if i == run.index),
        beside_after=tuple((place[i], t) for i, t in stay if i != run.index),
        before_forward=Gap() if place[run.index] else Gap(max(0, before.held_bytes), before.peak_bytes),
        before_deaths=tuple(
            replace(stage, alive=tuple((place[i], t) for i, t in stage.alive)) for stage in stages[:-1] or unknown
        ),
        called_at=called_at,
        after_forward=_gap_after_forward(
            record,
            _between(record, done, mark),
            died,
            stages,
            first if following is None else None,
            0 if called_at is None else record.freed_bytes,
        ),
    )


def _with_backward(
    record: StepRecord, call: Call, run: Run, backwards: Sequence[Run], released: Mapping[int, int]
) -> Call:
    """Add the backward, and the code outside before and after it, to a call that describes a forward.

    Released are bytes of outputs that outside code releases, by how many backwards have run.
    """
    before, tangents = backwards.index(run), call.graph.tangents
    gap = _gap_before_backward(record, backwards[before - 1], run, released[before]) if before else Gap()
    gap_after = Gap()
    if before + 1 == len(backwards):
        until_end = _between(record, Event.BACKWARD_DONE.of(run.index), Event.ENDED.of(run.index)) or Gap()
        gap_after = replace(until_end, held_bytes=0)
    return replace(
        call,
        alive=run.alive or (),
        passed_on=run.passed_on,
        released_bytes=run.released_bytes,
        outlasting=tuple(t for p in run.outlasting if (t := tangents[p]) not in call.graph.held),
        is_retained=run.is_retained,
        before_backward=gap,
        after_backward=gap_after,
    )


def _lingering(record: StepRecord, run: Run, order: Sequence[Run]) -> tuple[tuple[int, int], ...]:
    """List the outputs of a run that code outside holds into the backward, as it does what its own backward reads.

    Each comes with the number of backwards after which it is released: those until the last one at whose start it
    lives. Outputs that a captured graph holds don't count, nor those that a later one may hold as its input, as long as
    its backward has not run.
    """
    held, lingering = {run.graph.tensors[t].storage for t in run.alive or ()}, dict[int, int]()
    for ended, starting in enumerate(order):
        may_hold = order[ended:]
        links = {output for other in may_hold for output in other.links.values()}
        alive = record.alive_at.get(Event.BACKWARD.of(starting.index), ())
        for t in (t for i, t in alive if i == run.index):
            is_saved = (run.index, t) in links or (run in may_hold and run.saves(t))
            if not is_saved and run.graph.tensors[t].storage not in held:
                lingering[t] = ended + 1
    return tuple(lingering.items())


def _lived(record: StepRecord, run: Run, mark: Mark, among: Collection[int]) -> list[Output]:
    """List the outputs that lived at a mark, of a run and of those before it, among the runs of some indices."""
    return [(i, t) for i, t in record.alive_at.get(mark, ()) if i <= run.index and i in among]


def _sizes(record: StepRecord, outputs: Iterable[Output]) -> dict[int, int]:
    """Return the bytes of outputs that live at the same time, by storage."""
    return {record.runs[i].outputs[t][1]: bytes_of(record.runs[i].graph, (t,)) for i, t in outputs}


def _gap_after_forward(
    record: StepRecord,
    gap: Gap | None,
    died: Iterable[Output],
    stages: Sequence[GapPart],
    tangents: Run | None,
    freed_bytes: int,
) -> Gap:
    """Describe the memory of outside code after a forward, above the outputs that live on.

    It holds the growth of a gap, and the memory of outputs that died in it, less the tangents: those of the run whose
    backward is next, None between two forwards. It may give back memory that it held. Freed are stale bytes.
    """
    if gap is None:
        return Gap()
    died_bytes = sum(_sizes(record, died).values()) + (0 if tangents is None else record.returned_bytes)
    held_bytes = gap.held_bytes + died_bytes + freed_bytes
    if tangents is not None:
        held_bytes -= sum(tangents.tangent_bytes)
    peak_bytes = stages[-1].peak_bytes if stages else gap.peak_bytes + died_bytes
    return Gap(held_bytes, peak_bytes, gap.has_others)


def _stages(
    record: StepRecord, run: Run, following: Mark, lived: Iterable[Output], died: Iterable[Output]
) -> tuple[list[GapPart], int | None]:
    """Divide the code outside after a forward into stages, at the deaths of outputs and the call of the backward.

    How many of them come before that call comes with them; no stages where a death was not seen.
    """
    sizes, dead, stages = _sizes(record, died), set[int](), list[GapPart]()
    storage_of = {Mark(Event.RELEASED, i, t): record.runs[i].outputs[t][1] for i, t in died}
    spans = _spans(record, Event.FORWARD_DONE.of(run.index), following)
    calls = [i for i, span in enumerate(spans) if span.label == CALLED]
    # Between two forwards the call is of another backward.
    is_last = following == Event.BACKWARD.of(record.backwards[0])
    called = calls[-1] if calls and is_last else None
    returned_bytes = record.returned_bytes if is_last else 0
    left = next((i for i, span in enumerate(spans) if span.label == LEFT), len(spans))
    called_at, stale_bytes = None, record.freed_bytes
    for position, span in enumerate(spans[:-1]):
        storage = storage_of.get(span.label)
        if storage is not None:
            dead.add(storage)
        alive = tuple((i, t) for i, t in lived if record.runs[i].outputs[t][1] not in dead)
        if position == called:
            called_at = len(stages)
        if not stages or position == called or alive != stages[-1].alive:
            stages.append(GapPart(alive, 0))
        freed_bytes = sum(sizes[s] for s in dead) + (0 if called_at is None else stale_bytes)
        freed_bytes += returned_bytes if position >= left else 0
        above_bytes = span.peak_bytes - spans[0].start_bytes + freed_bytes
        stages[-1] = replace(stages[-1], peak_bytes=max(stages[-1].peak_bytes, above_bytes))
    return (stages, called_at) if dead == sizes.keys() else ([], None)


def _gap_before_backward(record: StepRecord, previous: Run, run: Run, released_bytes: int) -> Gap:
    """Describe the memory that outside code takes, holds, and gives back between the backwards of two runs."""
    gap = _between(record, Event.BACKWARD_DONE.of(previous.index), Event.BACKWARD.of(run.index))
    if gap is None:
        return Gap()
    freed_bytes = bytes_of(previous.graph, previous.passed_on) + previous.accumulated_bytes + released_bytes
    freed_bytes += sum(previous.tangent_bytes[position] for position in previous.outlasting)
    return replace(gap, held_bytes=gap.held_bytes + freed_bytes - sum(run.tangent_bytes))


def _between(record: StepRecord, first: Mark, last: Mark) -> Gap | None:
    """Describe how memory grew and peaked between two marks, None where that was not measured."""
    spans = _spans(record, first, last)
    if not spans:
        return None
    *between, end = spans
    base = spans[0].start_bytes
    peak = max((span.peak_bytes for span in between), default=base)
    has_others = any(span.label == OTHER for span in between)
    return Gap(end.start_bytes - base, max(0, peak - base), has_others)


def _spans(record: StepRecord, first: Mark, last: Mark) -> Sequence[Interval]:
    """List the spans from one mark to another, both included; none where one of them is missing."""
    at = {span.label: position for position, span in enumerate(record.spans)}
    return record.spans[at[first] : at[last] + 1] if first in at and last in at else ()
