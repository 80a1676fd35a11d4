"""Steps of other sizes that fit the budget with nothing recomputed: they run as the user wrote them, uncaptured.

To capture a size takes seconds, and gains nothing where plain PyTorch fits. What a plain step takes at a new size
follows from known steps of the same code: each byte count is a sum of products of sizes with positive coefficients,
so it grows with each size, and is convex along a line on which none of them falls. Between two known steps the straight
line is therefore an upper bound, from sizes of zero on, where only what has none of them remains; and a step that is
nowhere larger than another takes no more. One that is larger takes at most as many times more as the highest power of
the sizes that grew.

Eager PyTorch holds more than a captured graph with nothing recomputed: masks of dropouts as floats, for example. By how
much shows the first plain step, which must be small enough that it fits in any case, and later ones correct it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch

from .kinds import Kind

UNMEASURED_RATIO = 1.5  # of eager's peak to that of the captured graph, before it was measured
LEAST_RATIO = 1.2  # once it was: that is usual, and a bound that lies high makes it look like less
TRIES = 4  # steps to measure in a row: on a CPU the first one does not see all that is freed
CLEARLY_LARGER = 1.1  # than all that were measured: such a step is measured too
LEAST_POWER = 2  # of a size: maps of attention
LEAST_SIZE = 8  # that tells its powers from sizes of the model
ROUNDING = 1.01  # sizes that code divides, and an allocator's blocks, leave the convex curve by a little


@dataclass(frozen=True, slots=True)
class PlainPeak:
    """What a planned kind of step takes without its plan.

    Attributes:
        added_bytes: What it adds to the resident bytes at its peak.
        room_bytes: What it may add.
        without: Returns what it adds beside the tensors that have certain sizes; None where these can't be told.
    """

    added_bytes: int
    room_bytes: int
    without: Callable[[frozenset[int]], int | None] = lambda sizes: None


@dataclass(frozen=True, slots=True)
class _Sample:
    sizes: tuple[int, ...]
    added_bytes: float


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """What one call of a planned module is given.

    Attributes:
        name: The path of the module, or what stands for it.
        dtypes: The types of its tensors.
        shapes: Their shapes.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(name: str, tensors: Sequence[torch.Tensor]) -> ModuleCall:
        """Describe a call with some tensors."""
        return ModuleCall(name, tuple(t.dtype for t in tensors), tuple(tuple(t.shape) for t in tensors))


class PlainSteps:
    """Predicts what a plain step takes at sizes that were not planned, and corrects that by what is measured."""

    def __init__(self) -> None:
        self._calls: dict[Kind, tuple[ModuleCall, ...]] = {}
        self._code: dict[Kind, Kind] = {}
        self._foreseen: dict[Kind, int] = {}
        self._ratio = UNMEASURED_RATIO
        self._power = LEAST_POWER
        self._measured_bytes = 0.0  # the largest bound that was compared with a measured peak
        self._tries = 0

    def learn(
        self,
        kind: Kind,
        calls: Sequence[ModuleCall],
        code: Kind,
        added_bytes: int | None = None,
        shapes: Iterable[tuple[int, ...]] = (),
    ) -> None:
        """Learn what a kind of step was called with.

        Args:
            kind: The kind.
            calls: What each call of a planned module was given in such a step, in order.
            code: The first kind that runs the same code at other sizes.
            added_bytes: What it adds at its peak where nothing is recomputed, if it ran by the plan of another size.
            shapes: Of all its tensors, where they are known.
        """
        self._calls[kind], self._code[kind] = tuple(calls), code
        self._power = max(self._power, power_of(_sizes(calls), shapes))
        if added_bytes is not None:
            self._foreseen[kind] = added_bytes

    def called_like(self, calls: Sequence[ModuleCall], kinds: Iterable[Kind]) -> list[Kind]:
        """List those of some kinds whose first calls were given exactly what these are given."""
        return [kind for kind in kinds if self._calls.get(kind, ())[: len(calls)] == tuple(calls)]

    def with_margin(self, added_bytes: float) -> float:
        """Return what a plain step takes, of which the captured graph takes so many bytes."""
        return added_bytes * self._ratio

    def bound_bytes(self, calls: Sequence[ModuleCall], peaks: Mapping[Kind, PlainPeak], likely: Kind) -> float | None:
        """Bound what the step under way adds to the resident bytes at its peak, if it runs plain and that fits.

        Args:
            calls: What its calls were given so far.
            peaks: What planned kinds of steps take.
            likely: The kind whose code the step most likely runs.

        Returns:
            Bytes, as of the captured graph with nothing recomputed; None where a plain step may not fit, or where
            there is a plan for exactly these sizes.
        """
        if self.called_like(calls, peaks):
            return None
        samples = self._samples(calls, peaks)
        sizes, expected = _sizes(calls), samples.get(self._code.get(likely, likely), [])
        bound = _bound(sizes, expected)
        if bound is None:
            bound = min((_beyond(sizes, sample, self._power) for sample in expected), default=None)
        if bound is None:
            return None
        # Other code may come instead. Where its own samples do not tell, it takes as much more as it did at theirs.
        for others in samples.values():
            own = _bound(sizes, others)
            if own is None:
                pairs = [(other.added_bytes, _bound(other.sizes, expected)) for other in others]
                own = bound * max((added / there for added, there in pairs if there), default=1.0)
            bound = max(bound, own)
        return bound if self.fits(bound, peaks) else None

    def fits(self, bound_bytes: float, peaks: Mapping[Kind, PlainPeak]) -> bool:
        """Whether a plain step fits, of which the captured graph takes so many bytes at most."""
        return self.with_margin(bound_bytes) * ROUNDING <= max(peak.room_bytes for peak in peaks.values())

    def _samples(self, calls: Sequence[ModuleCall], peaks: Mapping[Kind, PlainPeak]) -> dict[Kind, list[_Sample]]:
        """Return the known steps whose calls look the same but for sizes, by their code."""
        form, found = _form(calls), dict[Kind, list[_Sample]]()
        known = self._foreseen | {kind: peak.added_bytes for kind, peak in peaks.items()}
        for kind, added_bytes in known.items():
            begun = self._calls.get(kind, ())[: len(calls)]
            if _form(begun) == form:
                own = found.setdefault(self._code[kind], [])
                own.append(_Sample(_sizes(begun), added_bytes))
                own += [] if kind not in peaks else _at_zero(_sizes(calls), own[-1].sizes, peaks[kind])
        return found

    def is_to_be_measured(self, bound_bytes: float) -> bool:
        """Whether to measure a plain step: the first ones are, and the first clearly larger ones."""
        return bound_bytes > CLEARLY_LARGER * self._measured_bytes or 0 < self._tries < TRIES

    def measured(self, bound_bytes: float, added_bytes: int | None) -> None:
        """Learn how much more eager PyTorch takes than the captured graph.

        Args:
            bound_bytes: What was expected of the captured graph.
            added_bytes: What the plain step added at its peak; None where the measurement did not see all.
        """
        self._tries += 1
        if added_bytes is not None:
            ratio = added_bytes / bound_bytes
            self._ratio = max(LEAST_RATIO, ratio, self._ratio if self._measured_bytes else 0.0)
        if added_bytes is not None or self._tries == TRIES:
            self._measured_bytes = max(self._measured_bytes, bound_bytes)
            self._tries = 0


def _form(calls: Sequence[ModuleCall]) -> tuple[tuple[Any, ...], ...]:
    return tuple((call.name, call.dtypes, tuple(map(len, call.shapes))) for call in calls)


def _sizes(calls: Sequence[ModuleCall]) -> tuple[int, ...]:
    return tuple(size for call in calls for shape in call.shapes for size in shape)


def _bound(sizes: tuple[int, ...], samples: Sequence[_Sample]) -> float | None:
    """Return the least upper bound that samples of the same code give, None where none of them is as large."""
    larger = [sample for sample in samples if _is_no_larger(sizes, sample.sizes)]
    smaller = [sample for sample in samples if _is_no_larger(sample.sizes, sizes)]
    bounds = [sample.added_bytes for sample in larger]
    bounds += [_on_line(sizes, low, high) for low in smaller for high in larger]
    return min(bounds, default=None)


def _beyond(sizes: tuple[int, ...], sample: _Sample, power: int) -> float:
    """Return what a step adds at most that is larger than a known one: sizes that grew alike are taken to be one."""
    if 0 in sample.sizes:
        return inf
    grown = {(own, new) for own, new in zip(sample.sizes, sizes, strict=True) if new > own}
    return sample.added_bytes * prod((new / own) ** power for own, new in grown)


def power_of(sizes: Iterable[int], shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the highest power of one size in the shapes of tensors, multiples of it included; at least 2."""
    told = [size for size in set(sizes) if size >= LEAST_SIZE]
    powers = (sum(not length % size for length in shape if length) for shape in set(shapes) for size in told)
    return max(LEAST_POWER, max(powers, default=0))


def _at_zero(sizes: tuple[int, ...], known: tuple[int, ...], peak: PlainPeak) -> list[_Sample]:
    """Return a known step as it would be if its sizes that differ from another step's were zero; none if unknown."""
    changed = frozenset(own for own, other in zip(known, sizes, strict=True) if own != other)
    if not changed or min(changed) < LEAST_SIZE or _is_no_larger(known, sizes):
        return []
    added_bytes = peak.without(changed)
    at_zero = tuple(0 if own in changed else own for own in known)
    return [] if added_bytes is None else [_Sample(at_zero, added_bytes)]


def _on_line(sizes: tuple[int, ...], low: _Sample, high: _Sample) -> float:
    """Return the bytes on the straight line between two steps, at the first point that is nowhere smaller."""
    way = max(_ways(sizes, low.sizes, high.sizes), default=0.0)
    return low.added_bytes + way * max(0.0, high.added_bytes - low.added_bytes)


def _ways(sizes: tuple[int, ...], low: tuple[int, ...], high: tuple[int, ...]) -> Iterator[float]:
    return ((s - a) / (b - a) for s, a, b in zip(sizes, low, high, strict=True) if b > a)


def _is_no_larger(sizes: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return all(size <= other for size, other in zip(sizes, others, strict=True))
