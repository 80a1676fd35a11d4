"""How many GPUs a step needs: the same step planned on several numbers of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from ..planning.plan import Plan
from ..records.costs import step_time_ms
from ..reporting.terminal import plain_table
from ..reporting.timeline import Band, band_bytes, planned_run
from ..units import format_bytes, format_ratio, format_time
from .offline import ACCUMULATED, OfflineStep
from .without_device import Rates

MOST = 1024  # GPUs that "auto" looks at
ENOUGH = 8  # GPUs from which on "auto" ends where more of them don't help
FALLS = 0.98  # more GPUs help where the peak of plain training falls to this share of that on half as many
# What a peak is made of: its name, and the resident parts or bands that it sums up.
PARTS = {
    "parameters": ("parameters",),
    "optimizer state": ("optimizer state",),
    "gradients": (Band.GRADIENT, ACCUMULATED),
    "outside": (Band.OUTSIDE,),
    "activations": (Band.SAVED, Band.PASSING, Band.RECOMPUTED),
}
OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Count:
    """A step on some number of GPUs. Bytes are those of each of them."""

    gpus: int
    fsdp: int  # GPUs that parameters are sharded over
    tp: int  # GPUs that each block is divided over
    fits: bool
    unplanned_peak_bytes: int
    peak_bytes: int  # of the plan; where none fits, the smallest peak that was found
    peak_parts: dict[str, int]  # what is in memory at that peak
    step_ms: float  # of the computation of a plain step
    overhead: float  # time of recomputation over that, a ratio
    sent_bytes: int  # to the others in a step
    sending_ms: float  # if none of it overlaps with computation

    @property
    def is_plain(self) -> bool:
        """Whether nothing is recomputed."""
        return self.fits and not self.overhead


def peak_parts(plan: Plan, gradients_bytes: int) -> dict[str, int]:
    """Split the peak of a plan by what is in memory then, gradients of all parameters that this process keeps too."""
    step = planned_run(plan)
    at, end, turn = step.peak_position, len(plan.planned.timeline) - 1, plan.planned.turn
    # FSDP2 keeps shards of gradients from the backward to the end of the step: no graph knows them.
    kept = [life for life in step.lives if life.band is Band.OUTSIDE and turn <= life.first <= at <= life.last == end]
    shards_bytes = min(gradients_bytes, sum(life.size_bytes for life in kept))
    bands: dict[str, int] = {band: sizes[at] for band, sizes in band_bytes(step.lives, end + 1).items()}
    sizes = {**dict(plan.resident_parts), **bands}
    parts_bytes = {name: sum(sizes.get(part, 0) for part in parts) for name, parts in PARTS.items()}
    parts_bytes["gradients"] += shards_bytes
    parts_bytes["outside"] -= shards_bytes
    rest = plan.planned_peak_bytes - sum(parts_bytes.values())
    parts_bytes["outside"] += min(0, rest)  # outside code takes memory that dies there for what it makes
    return {**parts_bytes, OTHERS: max(0, rest)}


def look_at(counts: Sequence[int], look: Callable[[int], Count]) -> Iterator[Count]:
    """Plan on several numbers of GPUs; where none are named, on 1, 2, 4, ... until a plan fits, or more don't help."""
    if counts:
        yield from map(look, counts)
        return
    before: Count | None = None
    shards = 1
    while shards <= MOST:
        count = look(shards)
        yield count
        least_bytes = 0.0 if before is None else FALLS * before.unplanned_peak_bytes
        if count.fits or (shards > ENOUGH and count.unplanned_peak_bytes > least_bytes):
            return
        before, shards = count, 2 * shards


def answer(counts: Sequence[Count]) -> str:
    """Answer how many GPUs are needed."""
    fitting = [count for count in counts if count.fits]
    if not fitting:
        least = min(counts, key=lambda count: count.peak_bytes)
        peak, more = format_bytes(least.peak_bytes, up=True), ", or divide activations too (--tp)"
        return (
            f"None of these is enough: the smallest peak found is {peak} on each GPU, with {least.gpus}. "
            f"Raise the budget, or make the batch smaller{more if least.tp == 1 else ''}."
        )
    least = min(fitting, key=lambda count: count.gpus)
    if least.is_plain:
        return f"{_gpus(least.gpus)} enough; nothing is recomputed."
    text = f"{_gpus(least.gpus)} enough, with {format_ratio(least.overhead)} time for recomputation."
    if plain := [count for count in fitting if count.is_plain]:
        return f"{text} With {min(count.gpus for count in plain)} nothing is recomputed."
    return text


def count_line(count: Count) -> str:
    """Describe a number of GPUs in a line, as soon as it has been looked at."""
    gpus = "1 GPU" if count.gpus == 1 else f"{count.gpus} GPUs"
    if not count.fits:
        return f"{gpus}: does not fit, the smallest peak found is {format_bytes(count.peak_bytes, up=True)}"
    extra = f"extra time {format_ratio(count.overhead)}" if count.overhead else "nothing recomputed"
    return f"{gpus}: fits, peak {format_bytes(count.peak_bytes, up=True)}, {extra}"


def _gpus(count: int) -> str:
    return "1 GPU is" if count == 1 else f"{count} GPUs are"


def counts_table(counts: Sequence[Count]) -> Table:
    """Draw a column for each number of GPUs."""
    gpus = (str(count.gpus) if count.tp == 1 else f"{count.fsdp} x {count.tp}" for count in counts)
    rows = {
        "fits": ["yes" if count.fits else "no" for count in counts],
        "peak of plain training": [format_bytes(count.unplanned_peak_bytes, up=True) for count in counts],
        "peak of the plan": [format_bytes(count.peak_bytes, up=True) for count in counts],
        **{f"  {part}": [format_bytes(count.peak_parts[part]) for count in counts] for part in (*PARTS, OTHERS)},
        "extra time": [format_ratio(count.overhead) for count in counts],
        "computing": [format_time(count.step_ms) for count in counts],
        "sending": [format_time(count.sending_ms) for count in counts],
        "sent": [format_bytes(count.sent_bytes) for count in counts],
    }
    return plain_table(("GPUs", *gpus), ((name, *cells) for name, cells in rows.items()), words=("GPUs",))


def count_of(plan: Plan, captured: OfflineStep, rates: Rates) -> Count:
    """Describe a plan on some number of GPUs."""
    layout = captured.options.layout
    return Count(
        gpus=layout.count,
        fsdp=layout.shards,
        tp=layout.parts,
        fits=plan.planned_peak_bytes <= plan.budget_bytes,
        unplanned_peak_bytes=plan.unplanned_peak_bytes,
        peak_bytes=plan.planned_peak_bytes,
        peak_parts=peak_parts(plan, captured.gradients_bytes),
        step_ms=step_time_ms(plan.graph, plan.profile),
        overhead=plan.predicted_overhead,
        sent_bytes=captured.sent_bytes,
        sending_ms=captured.sent_bytes / rates.link_bytes_per_ms,
    )
