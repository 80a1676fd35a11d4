"""What the comparison with rivals found: its records, who beats whom, and the Markdown that says so.

No torch here: `rivals` measures, this module reckons. Peaks are bytes that a step adds to what is there before it
(parameters, buffers, batch); times are seconds of one step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import page_tables

EAGER = "eager"
AT = "ours-at-"  # and the name of the rival whose measured peak is the budget
READY, INFEASIBLE, ABSENT, FAILED = "ready", "infeasible", "absent", "failed"
Clock = str  # name of a field of `Timing`
CLOCKS = {"cpu": "cpu_s", "cuda": "device_s"}


@dataclass(frozen=True)
class Timing:
    """Seconds of one step, mean over the steps of a round.

    Attributes:
        wall_s: By the clock, the device's work included.
        cpu_s: Of all threads of the process.
        device_s: Between two events on the device; the clock's where there is no device.
    """

    wall_s: float
    cpu_s: float
    device_s: float


@dataclass(frozen=True)
class Row:
    """One method on one model.

    Attributes:
        model: Name of the model.
        method: Name of the method.
        status: "ready" where it ran; "infeasible" where no plan fits; "absent" where the model has no such method; or
            "failed".
        detail: Why it did not run, "" where it did.
        peak_bytes: What a step adds at its peak.
        resident_bytes: What is there before it.
        reserved_bytes: Most that the caching allocator held, resident bytes included; None on the CPU.
        predicted_bytes: What a step adds at its peak, as our plan predicts; None for rivals.
        predicted_overhead: The extra time that our plan predicts over a step without recomputation, a ratio.
        bound_overhead: The least extra time that any plan takes, as proven, a ratio.
        first_step_s: Seconds of the first step.
        warm_s: Seconds of all steps before the measured ones.
        planning_s: Seconds of tracing, profiling and solving in them; None for rivals.
        difference: Largest difference of a gradient from eager's over that gradient's largest value; 0 means all
            gradients and the loss are equal bit for bit.
        buffers_equal: Whether buffers (batch-norm statistics) are equal to eager's after the same step.
        step_s: Seconds of a step, roughly.
        rss_bytes: Memory of the process, as the system counts it.
        times: Of its rounds.
        eager_times: Of eager, right before or after each of them.
        processes: That share these rounds, each as many of them, one after the other.
    """

    model: str
    method: str
    status: str = READY
    detail: str = ""
    peak_bytes: int = 0
    resident_bytes: int = 0
    reserved_bytes: int | None = None
    predicted_bytes: int | None = None
    predicted_overhead: float | None = None
    bound_overhead: float | None = None
    first_step_s: float = 0.0
    warm_s: float = 0.0
    planning_s: float | None = None
    difference: float = 0.0
    buffers_equal: bool = True
    step_s: float = 0.0
    rss_bytes: int = 0
    times: tuple[Timing, ...] = ()
    eager_times: tuple[Timing, ...] = ()
    processes: int = 1

    def ratio(self, clock: Clock) -> Spread:
        """Give the time over that of eager beside it: median and quartiles over the rounds."""
        return spread(self._ratios(clock))

    def _ratios(self, clock: Clock) -> list[float]:
        pairs = zip(self.times, self.eager_times, strict=True)
        return [getattr(own, clock) / getattr(eager, clock) for own, eager in pairs]

    def each_process(self, clock: Clock) -> list[float]:
        """Give the medians of the processes."""
        ratios = self._ratios(clock)
        rounds = len(ratios) // self.processes
        return [statistics.median(ratios[i : i + rounds]) for i in range(0, len(ratios), rounds)]

    def together(self, other: Row) -> Row:
        """Add the rounds of another process."""
        times, eager_times = (*self.times, *other.times), (*self.eager_times, *other.eager_times)
        return replace(self, times=times, eager_times=eager_times, processes=self.processes + other.processes)

    def fastest_ratio(self, clock: Clock) -> float:
        """Give the time of the fastest round over that of the fastest of eager beside it: other load only ever adds."""
        own, eager = (min(getattr(t, clock) for t in times) for times in (self.times, self.eager_times))
        return float(own / eager)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Point:
    """Where a method lies: peak and time, ratios to eager's; eager is at 1, but for the noise of its time."""

    method: str
    peak: float
    time: Spread


@dataclass(frozen=True)
class Match:
    """A rival, and what is best of ours within its peak, and within its time; None where there is nothing."""

    rival: Point
    fastest: Point | None
    smallest: Point | None


def spread(values: Iterable[float]) -> Spread:
    """Give median and quartiles of at least one value."""
    values = sorted(values)
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, median, high)


def is_ours(method: str) -> bool:
    """Whether it is ours, with the default strategy."""
    return method.startswith("ours-")


def is_rival(method: str) -> bool:
    """Whether it is another's way of saving memory; eager saves none."""
    return method != EAGER and not method.startswith(("ours-", "fused-", "strategy-"))


def points_of(rows: Iterable[Row], clock: Clock) -> list[Point]:
    """Place the methods of one model that were measured."""
    measured = [row for row in rows if row.times]
    eager = next((row for row in measured if row.method == EAGER), None)
    if eager is None:
        return []
    return [Point(row.method, row.peak_bytes / eager.peak_bytes, row.ratio(clock)) for row in measured]


def dominates(one: Point, other: Point) -> bool:
    """Whether one has neither a higher peak nor more time than the other, and less of one of them."""
    mine, others = (one.peak, one.time.median), (other.peak, other.time.median)
    return mine != others and mine[0] <= others[0] and mine[1] <= others[1]


def dominated(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """List the points of ours that a rival dominates, each with each such rival."""
    rivals = [p for p in points if is_rival(p.method)]
    return [(p, rival) for p in points if is_ours(p.method) for rival in rivals if dominates(rival, p)]


def is_clear(ours: Point, rival: Point) -> bool:
    """Whether a domination is more than noise: the quartiles of the two times don't overlap."""
    return rival.time.high < ours.time.low


def frontier(points: Iterable[Point]) -> list[Point]:
    """Keep the points that no other of them dominates, by rising peak."""
    points = list(points)
    kept = (p for p in points if not any(dominates(other, p) for other in points))
    return sorted(kept, key=lambda p: p.peak)


def matches(points: Sequence[Point]) -> list[Match]:
    """Find, for each rival, the fastest of ours within its peak and the smallest of ours within its time."""
    ours = [p for p in points if is_ours(p.method)]
    found = []
    for rival in (p for p in points if is_rival(p.method)):
        within_peak = [p for p in ours if p.peak <= rival.peak]
        within_time = [p for p in ours if p.time.median <= rival.time.median]
        found.append(
            Match(
                rival,
                min(within_peak, key=lambda p: p.time.median, default=None),
                min(within_time, key=lambda p: p.peak, default=None),
            )
        )
    return found


# -------------------------------------------------------------------- Markdown


def per_cent(ratio: float | None) -> str:
    """Write a ratio in per cent."""
    return "-" if ratio is None else f"{100 * ratio:.1f} %"


def extra(time: float) -> str:
    """Write a time over eager's as what it takes more, in per cent."""
    return f"{100 * (time - 1):+.1f} %"


def mebibytes(size_bytes: int | None) -> str:
    """Write bytes in MiB."""
    return "-" if size_bytes is None else f"{size_bytes / 2**20:.1f}"


def gradients(row: Row) -> str:
    """Say how gradients and buffers compare with eager's."""
    text = "equal" if row.difference == 0 else f"differ by {row.difference:.0e}"
    return text if row.buffers_equal else f"{text}; buffers differ"


def grouped(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Put the rows of each model together, in the order in which they come."""
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(row.model, []).append(row)
    return models


def model_table(rows: Sequence[Row], clock: Clock) -> str:
    """Write all that was measured of one model."""
    eager_bytes = next((row.peak_bytes for row in rows if row.method == EAGER), 0)
    header = ["method", "peak MiB", "of eager's", "predicted MiB", "time over eager [quartiles]"]
    header += [
        "fastest",
        "by the clock",
        "predicted",
        "proven least",
        "first step s",
        "all warm-up s",
        "planning s",
        "gradients",
    ]
    if any(row.processes > 1 for row in rows):
        header.append("median of each process")
    if any(row.reserved_bytes is not None for row in rows):
        header.insert(2, "reserved MiB")
        header.insert(7, "host time")

    def cells(row: Row) -> list[str]:
        if not row.times:
            return [row.method, f"{row.status}: {row.detail}", *["-"] * (len(header) - 2)]
        time, overheads = row.ratio(clock), (row.predicted_overhead, row.bound_overhead)
        line = [row.method, mebibytes(row.peak_bytes), per_cent(row.peak_bytes / eager_bytes)]
        line += [mebibytes(row.predicted_bytes), f"{extra(time.median)} [{extra(time.low)}, {extra(time.high)}]"]
        line += [extra(row.fastest_ratio(clock)), extra(row.ratio("wall_s").median)]
        line += ["-" if o is None else extra(1 + o) for o in overheads]
        line += [f"{row.first_step_s:.1f}", f"{row.warm_s:.1f}"]
        line += ["-" if row.planning_s is None else f"{row.planning_s:.1f}", gradients(row)]
        if "median of each process" in header:
            line.append(", ".join(map(extra, row.each_process(clock))))
        if "reserved MiB" in header:
            line.insert(2, mebibytes(row.reserved_bytes))
            line.insert(7, extra(row.ratio("cpu_s").median))
        return line

    return page_tables.table(header, map(cells, rows))


def summary(models: dict[str, list[Row]], clock: Clock) -> str:
    """Write all models and methods in one table: peak of eager's, time over eager, and that of the fastest rounds."""
    methods = list(dict.fromkeys(row.method for rows in models.values() for row in rows))

    def cell(rows: Sequence[Row], method: str) -> str:
        row = next((row for row in rows if row.method == method), None)
        if row is None or not row.times:
            return "-" if row is None else row.status
        point = next(p for p in points_of(rows, clock) if p.method == method)
        return f"{100 * point.peak:.0f} % / {extra(point.time.median)} / {extra(row.fastest_ratio(clock))}"

    return page_tables.table(
        ["method", *models], [[method, *(cell(rows, method) for rows in models.values())] for method in methods]
    )


def equal_peaks(models: dict[str, list[Row]], clock: Clock) -> str:
    """Say what ours takes at the measured peak of each rival, and at its time."""
    lines = []
    for name, rows in models.items():
        for match in matches(points_of(rows, clock)):
            fastest, smallest, rival = match.fastest, match.smallest, match.rival
            line = [name, rival.method, per_cent(rival.peak), extra(rival.time.median)]
            line += ["none", "-"] if fastest is None else [extra(fastest.time.median), fastest.method]
            line += ["none", "-"] if smallest is None else [per_cent(smallest.peak), smallest.method]
            lines.append(line)
    header = ["model", "rival", "its peak", "its time", "ours within its peak", "by", "our peak within its time", "by"]
    return page_tables.table(header, lines)


def dominated_text(models: dict[str, list[Row]], clock: Clock) -> str:
    """List the points of ours that a rival dominates, or say that there are none."""
    lines = []
    for name, rows in models.items():
        for ours, rival in dominated(points_of(rows, clock)):
            sides = (f"{per_cent(p.peak)} / {extra(p.time.median)}" for p in (ours, rival))
            lines.append([name, ours.method, rival.method, *sides, "yes" if is_clear(ours, rival) else "no"])
    header = ["model", "ours", "rival", "our peak / time", "its peak / time", "quartiles apart"]
    return page_tables.table(header, lines) if lines else "None.\n"


def promises(models: dict[str, list[Row]]) -> str:
    """Say how well plans kept to what they promise; nothing where there are none."""
    errors, different = [0.0], []
    for row in (row for rows in models.values() for row in rows if row.times):
        if row.predicted_bytes is not None:
            errors.append(abs(row.peak_bytes - row.predicted_bytes) / (row.predicted_bytes + row.resident_bytes))
            is_same = not row.difference and row.buffers_equal
            different += [f"{row.model} {row.method}"] if is_ours(row.method) and not is_same else []
    if len(errors) == 1:
        return ""
    return (
        f"Measured peaks of {len(errors) - 1} plans differ from the predicted ones by at most {100 * max(errors):.2f} "
        "%, resident bytes included. "
        f"Gradients or buffers that differ from eager's: {', '.join(different) or 'none'}.\n"
    )


def write_markdown(title: str, about: str, rows: Sequence[Row], clock: Clock, picture: str = "") -> str:
    """Write the whole page.

    Args:
        title: Its heading.
        about: How it was measured, in Markdown.
        rows: What was measured.
        clock: The time that counts.
        picture: Name of the plot's file beside the page, "" for none.
    """
    models = grouped(rows)
    parts = [f"# {title}\n", about]
    if picture:
        parts.append(f"![Time over eager against peak, one panel for each model]({picture})\n")
    parts += [
        "## Peak of eager's / time over eager / that of the fastest rounds\n",
        summary(models, clock),
        promises(models),
    ]
    parts += ["## At the same peak, at the same time\n", equal_peaks(models, clock)]
    parts += ["## Points of ours that a rival dominates: no higher peak, no more time\n", dominated_text(models, clock)]
    for name, own in models.items():
        parts += [f"## {name}\n", model_table(own, clock)]
    return "\n".join(part for part in parts if part)


def row_from_dict(numbers: dict[str, object]) -> Row:
    """Read a row from what `dataclasses.asdict` made of it."""
    row = Row(**numbers)  # type: ignore[arg-type]

    def timings(found: Iterable[object]) -> tuple[Timing, ...]:
        return tuple(Timing(**timing) for timing in found)  # type: ignore[arg-type]

    return replace(row, times=timings(row.times), eager_times=timings(row.eager_times))
