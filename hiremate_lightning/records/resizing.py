"""Bounds of the bytes of a step at sizes of its inputs at which it was not captured.

Each dimension of a tensor is a number of the model (a width, say), or follows from sizes of the step's inputs. Which,
and how, is mostly seen in the operations that made it (`dimensions`). Of others it is concluded from steps of the same
code at other sizes. Where that leaves several answers, the bound from above takes the largest and the bound from below
the smallest.

- One captured step tells little. A dimension that is a multiple of one input size is taken to follow from that size,
  unless a weight has such a dimension too: then it may be either. Whatever else it may be, it does not shrink, and it
  grows no more than the sizes do.
- From two captured steps each dimension that differs is known: it lies on a line over the input size which it follows.
- A dimension that follows from several sizes at once (rows times length) grows at most with each of them.

An example: a step was captured with texts of 172 tokens, and a layer of the model is 688 = 4 x 172 wide. At 344 tokens
its activations of shape (8, 172, 688) have become (8, 344, 688), or (8, 344, 1376) if 688 followed from the length. If
no operation tells, their bytes grow by `Bounds(2, 4)`: twice at least, four times at most. A second captured step, of
100 tokens, shows 688 again; from then on it is `Bounds(2, 2)`.

What was only measured (workspaces, the bytes of code outside) does not shrink, and grows with the square of the sizes;
but a workspace that is proportional to the product of the sizes in several captured steps stays so in between.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .costs import Profile, as_plain
from .dimensions import Origin, origins_of, widths_of
from .graph import Graph, item_bytes
from .sized_numbers import Line

LEAST_SIZE = 8  # an input size from which multiples of it are taken to follow from it
LEAST_MULTIPLE = 4  # of a size: a larger one may be by chance, where the dimension is a multiple of another size too
TAKEN_OFF = 8  # from an input size, at most, where a dimension is neither a multiple of it nor a number of the model
ROUNDED = 1  # by so much a dimension may leave its line, where code divides sizes
EXACT = 1e-6  # by so much products of fractions of sizes may be off
LINEAR = 0.05  # of a workspace, by which it may leave its line
MEASURED_POWER = 2  # of the sizes, by which measured bytes grow at most
Sizes = tuple[int, ...]  # of the inputs of a step, or of one dimension at all samples
_Dimension = tuple[Sizes, Origin]  # at all samples, and the sizes of the largest one from which it follows


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a number is at least and at most: a size, or the factor by which a dimension or bytes become others."""

    low: float
    high: float

    def __mul__(self, other: Bounds) -> Bounds:
        """Bound the product of two numbers that vary apart."""
        return Bounds(self.low * other.low, self.high * other.high)

    def __or__(self, other: Bounds) -> Bounds:
        """Bound a number that is within one of two bounds, nobody knows which."""
        return Bounds(min(self.low, other.low), max(self.high, other.high))

    def __pow__(self, power: int) -> Bounds:
        """Bound a factor and all its powers up to one."""
        return self | Bounds(self.low**power, self.high**power)

    def over(self, size: float) -> Bounds:
        """Bound the factor by which a size becomes this one; of a size of 0 as of 1."""
        return Bounds(self.low / max(1, size), self.high / max(1, size))

    def or_same(self) -> Bounds:
        """Bound a factor where the number may also stay what it is."""
        return self | SAME

    def taken_off(self, share: float) -> Bounds:
        """Bound a factor where up to a share of the number is taken off first, as `x[1:]` does, and the rest grows."""
        low, high = self.low - share * (1 - self.low), self.high + share * (self.high - 1)
        return Bounds(max(0.0, low), high)


SAME = Bounds(1.0, 1.0)


def _product(factors: Iterable[Bounds]) -> Bounds:
    found = SAME
    for factor in factors:
        found *= factor
    return found


def _hull(bounds: Iterable[Bounds]) -> Bounds:
    return functools.reduce(operator.or_, bounds)


@dataclass(frozen=True)
class Sample:
    """A captured step.

    Attributes:
        shapes: The shapes of its inputs, in order.
        graph: The step.
        profile: Its costs.
        storages: Number of its first storages that captured code holds; others stand for code outside, as measured.
    """

    shapes: tuple[Sizes, ...]
    graph: Graph
    profile: Profile
    storages: int

    @property
    def sizes(self) -> Sizes:
        """The dimensions of its inputs, in order."""
        return tuple(itertools.chain.from_iterable(self.shapes))


@dataclass(frozen=True)
class Bytes:
    """Bounds at some sizes.

    Attributes:
        low: Bytes by storage, at least.
        high: Bytes by storage, at most.
        low_workspaces: Workspace by node, at least.
        high_workspaces: Workspace by node, at most.
    """

    low: np.ndarray
    high: np.ndarray
    low_workspaces: np.ndarray
    high_workspaces: np.ndarray


class Resizing:
    """Bounds the bytes of a step of known code, as plain PyTorch runs it, at any sizes.

    Args:
        samples: Steps of that code, the largest one first. Storages and nodes are numbered as in that one.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.base, self._samples = samples[0], tuple(samples)
        self.graph, self.profile = as_plain(self.base.graph, self.base.profile)
        self._columns = list(dict.fromkeys(zip(*(sample.sizes for sample in self._samples), strict=True)))
        self._width_dims = widths_of(self.base.graph)
        self._bytes = np.array(self.graph.sizes, dtype=np.float64)
        self._workspaces = np.array(self.profile.workspace_bytes, dtype=np.float64)
        self._volumes = [math.prod(c[n] / max(1, c[0]) for c in self._columns) for n in range(len(self._samples))]
        self._is_linear = self._find_linear()  # by node, whether its workspace is
        self._followed = dict[_Dimension, list[tuple[Sizes, ...]]]()  # the input sizes that a dimension may follow
        self._origins = origins_of(self.base.graph, frozenset(self.base.shapes))
        self._dims: dict[_Dimension, int] = {((1,) * len(self._samples), ()): 0}  # each that occurs, and its number
        self._places = self._find_places()  # by storage, numbers of its dimensions

    def at(self, sizes: Sizes) -> Bytes:
        """Bound the bytes at some sizes, given in the order of those of the samples."""
        ranges = self._ranges(sizes)
        found = (self._factor(dimension, ranges) for dimension in self._dims)
        factors = np.array([(factor.low, factor.high) for factor in found])
        measured = _measured_factor(ranges)
        scale = factors[self._places].prod(axis=1) if len(self._places) else np.ones((0, 2))
        is_measured = self._places[:, 0] < 0 if len(self._places) else np.zeros(0, dtype=bool)
        scale[is_measured] = measured.low, measured.high
        low, high = (np.ceil(self._bytes * scale[:, i]) for i in (0, 1))
        return Bytes(low, high, *self._workspaces_at(ranges))

    def _ranges(self, sizes: Sizes) -> dict[Sizes, Bounds]:
        """Find what the sizes of the samples become: those that were equal in all samples may differ now."""
        found: dict[Sizes, list[int]] = {}
        for column, size in zip(zip(*(s.sizes for s in self._samples), strict=True), sizes, strict=True):
            found.setdefault(column, []).append(size)
        return {column: Bounds(min(now), max(now)) for column, now in found.items()}

    def _workspaces_at(self, ranges: Mapping[Sizes, Bounds]) -> tuple[np.ndarray, np.ndarray]:
        """Bound what nodes take while they run: a linear workspace is near its line, up to the largest sample."""
        measured, volume = _measured_factor(ranges), _product(now.over(c[0]) for c, now in ranges.items())
        is_on_line = self._is_linear & (volume.high <= max(self._volumes))
        lows = np.where(is_on_line, volume.low * (1 - LINEAR), measured.low)
        highs = np.where(is_on_line, volume.high * (1 + LINEAR), measured.high)
        is_taken = self._workspaces > 0
        return (
            np.where(is_taken, lows, highs) * self._workspaces,
            np.where(is_taken, highs, lows) * self._workspaces,
        )

    def _find_linear(self) -> np.ndarray:
        """Find the nodes whose workspace is nearly proportional to the product of the sizes, in several samples."""
        found = [as_plain(sample.graph, sample.profile)[1].workspace_bytes for sample in self._samples]
        if len(set(self._volumes)) == 1 or len(set(map(len, found))) > 1:
            return np.zeros(len(self._workspaces), dtype=bool)
        lines = np.outer(self._volumes, self._workspaces)
        is_linear: np.ndarray = (np.abs(np.array(found) - lines) <= LINEAR * np.abs(lines)).all(axis=0)
        return is_linear

    # ---------------------------------------------------------------- dimensions

    def _factor(self, dimension: _Dimension, ranges: Mapping[Sizes, Bounds]) -> Bounds:
        """Bound what a dimension becomes, over what it is in the largest sample."""
        dims, _ = dimension
        if dimension not in self._followed:
            self._followed[dimension] = self._shown(*dimension)
        if self._followed[dimension]:
            return _hull(_following(dims, columns, ranges) for columns in self._followed[dimension])
        if len(set(dims)) == 1:
            return self._factor_of_same(dims[0], ranges)
        return self._factor_of_differing(dims, ranges)

    def _factor_of_differing(self, dims: Sizes, ranges: Mapping[Sizes, Bounds]) -> Bounds:
        """Bound what a dimension becomes that differs between samples: it is on a line over the sizes it follows."""
        followed = [column for column in ranges if len(set(column)) > 1 and self._follows(dims, column)]
        if not followed or not dims[0]:
            return _between(dims, ranges)
        points = (sorted(dict(zip(column, dims, strict=True)).items()) for column in followed)
        lines = {column: Line(*zip(*own, strict=True)) for column, own in zip(followed, points, strict=True)}
        low = min(max(0.0, line.straight(ranges[column].low)) for column, line in lines.items())
        high = max(_most(line, ranges[column].high) for column, line in lines.items())
        multiples = (factor for size, factor in _kept(ranges).items() if not any(dim % size for dim in dims))
        on_line = Bounds(max(0.0, low - ROUNDED), high).over(dims[0])
        return on_line * _product(factor.or_same() for factor in multiples)

    def _factor_of_same(self, dim: int, ranges: Mapping[Sizes, Bounds]) -> Bounds:
        """Bound what a dimension becomes that is the same in all samples: of the model, or of a size that is the same.

        It is taken to follow from the largest size of which it is a multiple, if no weight has a dimension that is too,
        and from others of which it is a small multiple. It may follow from others besides.
        """
        kept, sure, others = _kept(ranges), list[Bounds](), list[Bounds]()
        largest = max((size for size in kept if dim % size == 0), default=0)
        for size, factor in kept.items():
            power = _multiplicity(dim, size)
            if power:
                is_told = size == largest or dim // size <= LEAST_MULTIPLE
                is_sure = is_told and size >= LEAST_SIZE and not any(own % size == 0 for own in self._width_dims)
                (sure if is_sure else others).append(factor**power)
            elif (dim >= LEAST_SIZE and dim not in self._width_dims) or _is_fraction(dim, size):
                others.append(factor.or_same().taken_off(TAKEN_OFF / max(1, size)))
        shrunk, grown = [f.low for f in sure if f.low < 1], [f.high for f in sure if f.high > 1]
        low = math.prod(shrunk) if shrunk else min((f.low for f in sure), default=1.0)
        high = math.prod(grown) if grown else max((f.high for f in sure), default=1.0)
        return Bounds(low, high) * _product(factor.or_same() for factor in others)

    def _shown(self, dims: Sizes, origin: Origin) -> list[tuple[Sizes, ...]]:
        """List the input sizes from which a dimension may follow as its operations show, and does in all samples."""
        if origin is None:
            return []
        alike = [[column for column in self._columns if column[0] == size > 0] for size in origin]
        return [columns for columns in itertools.product(*alike) if self._is_so(dims, columns)]

    def _is_so(self, dims: Sizes, columns: tuple[Sizes, ...]) -> bool:
        for number, dim in enumerate(dims):
            factor = _following(dims[:1], columns, {c: Bounds(c[number], c[number]) for c in columns})
            if not factor.low * dims[0] - EXACT <= dim <= factor.high * dims[0] + EXACT:
                return False
        return True

    def _follows(self, dims: Sizes, column: Sizes) -> bool:
        """Whether a dimension may follow from one input size alone."""
        points = sorted(zip(column, dims, strict=True))
        for (size, dim), (next_size, next_dim) in itertools.pairwise(points):
            if next_dim < dim or (size == next_size and next_dim > dim + ROUNDED):
                return False
        is_alone = all(len(set(other)) == 1 for other in self._columns if other != column)
        return is_alone or all(abs(dim * column[0] - dims[0] * size) <= ROUNDED * column[0] for size, dim in points)

    # ---------------------------------------------------------------- storages and nodes

    def _find_places(self) -> np.ndarray:
        """Find for each storage the numbers of its dimensions, as many for each; -1 where they are not known."""
        on: dict[int, list[int]] = {}
        graph = self.base.graph
        for index, tensor in enumerate(graph.tensors):
            if tensor.storage is not None and graph.sizes[tensor.storage] and tensor.storage < self.base.storages:
                on.setdefault(tensor.storage, []).append(index)
        views = {s: view for s, tensors in on.items() if (view := self._view(tensors, graph.sizes[s])) is not None}
        rank = max(map(len, views.values()), default=1)
        places = np.full((len(graph.storages), max(1, rank)), -1, dtype=np.int64)
        for storage, dims in views.items():
            numbers = [self._dims.setdefault(dim, len(self._dims)) for dim in dims]
            places[storage] = numbers + [0] * (places.shape[1] - len(numbers))
        return places

    def _view(self, tensors: Iterable[int], size_bytes: int) -> tuple[_Dimension, ...] | None:
        """Choose, of the tensors that fill a storage, one whose dimensions tell most; None where none fills it."""
        graphs, found = [sample.graph for sample in self._samples], list[tuple[_Dimension, ...]]()
        for index in tensors:
            tensor = graphs[0].tensors[index]
            own_bytes = math.prod(tensor.shape) * item_bytes(tensor.dtype)
            if own_bytes <= size_bytes <= 1.1 * own_bytes + 1024:  # as its allocator rounds up
                dims = zip(*(graph.tensors[index].shape for graph in graphs), strict=True)
                found.append(tuple(zip(dims, self._origins[index], strict=True)))
        grown = {column: Bounds(column[0] * 1.5, column[0] * 1.5) for column in self._columns}
        return min(found, key=lambda dims: math.prod(self._factor(dim, grown).high for dim in dims), default=None)


def _measured_factor(ranges: Mapping[Sizes, Bounds]) -> Bounds:
    """Bound what becomes of measured bytes: they do not shrink, and grow with a power of the sizes at most."""
    factor = _product(now.over(column[0]).or_same() for column, now in ranges.items())
    return Bounds(factor.low**MEASURED_POWER, factor.high**MEASURED_POWER)


def _kept(ranges: Mapping[Sizes, Bounds]) -> dict[int, Bounds]:
    """Return the factors by which those input sizes change that are the same in all samples, by size."""
    same = ((column[0], now) for column, now in ranges.items() if len(set(column)) == 1)
    return {size: now.over(size) for size, now in same if size > 1}


def _is_proportional(dims: Sizes, column: Sizes) -> bool:
    """Whether a dimension was the same fraction of a size at several sizes."""
    pairs = list(zip(dims, column, strict=False))
    return len(set(pairs)) > 1 and all(dim * column[0] == dims[0] * size for dim, size in pairs)


def _following(dims: Sizes, columns: Sequence[Sizes], ranges: Mapping[Sizes, Bounds]) -> Bounds:
    """Bound what a dimension becomes that follows from some sizes: as a multiple, or nearly as a fraction.

    It is that fraction where it was in all samples of several sizes, but for what is rounded.
    """
    found, rounded = SAME, 0.0
    for column in columns:
        factor = ranges[column].over(column[0])
        if dims[0] % column[0] and factor != SAME:
            rounded = ROUNDED / dims[0]
            if len(columns) > 1 or not _is_proportional(dims, column):
                factor |= factor.taken_off(_taken_off(dims[0], column[0]))
        found *= factor
    return Bounds(max(0.0, found.low - rounded), found.high + rounded)


def _taken_off(dim: int, size: int) -> float:
    """Return what may be taken off from a size before a fraction of it, as borders are, over what is left then."""
    taken = max(TAKEN_OFF, abs(size - dim * round(size / max(1, dim))))
    return taken / max(1, size - taken)


def _most(line: Line, size: float) -> float:
    """Return what a dimension is at most at an input size: it may grow faster than the size, as squares do."""
    (x, low), (y, high) = line.ends(size)
    if low * y < high * x - ROUNDED * y:
        if size < x:
            return low * size / x
        if size > y and low and x:
            return float(high * (size / y) ** (math.log(high / low) / math.log(y / x)))
    return max(0.0, line.straight(size))


def _between(dims: Sizes, ranges: Mapping[Sizes, Bounds]) -> Bounds:
    """Bound what a dimension becomes that follows from several sizes at once, each at most linearly."""
    low, high = 0.0, math.inf
    for number, dim in enumerate(dims):
        at_sample = ((column[number], now) for column, now in ranges.items())
        factor = _product(now.over(size).or_same().taken_off(TAKEN_OFF / max(1, size)) for size, now in at_sample)
        low, high = max(low, dim * factor.low), min(high, dim * factor.high)
    return Bounds(max(0.0, low - ROUNDED), high).over(dims[0])


def _multiplicity(dim: int, size: int) -> int:
    """Return how many times a size divides a dimension: twice where that is its square. Small ones count once."""
    count = 0
    while dim and dim % size == 0 and (not count or size >= LEAST_SIZE):
        dim, count = dim // size, count + 1
    return count


def _is_fraction(dim: int, size: int) -> bool:
    """Whether a dimension is about a half, a quarter, ... of a size, as strides of convolutions make it."""
    halvings = round(math.log2(size / max(1, dim)))
    return 0 <= halvings < size and abs(size / 2**halvings - dim) <= (TAKEN_OFF if dim >= LEAST_SIZE else 0) and dim > 1
