"""Bounds of the bytes of a step at sizes of its inputs at which it was not captured.

A dimension of a tensor is a number of the model (a width, say), or follows from sizes of the step's inputs. Steps of
the same code at a few sizes show which; where several answers fit, the bound from above takes the largest and the bound
from below the smallest. Nothing is larger than in a captured step at no smaller sizes. One captured step tells less: a
multiple of a size may follow from that size, or be a number of the model. It follows from the size where no weight has
such a dimension, else it only grows with it. Measured bytes (workspaces, those of code outside) do not shrink, and grow
with the square of the sizes at most.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .costs import Profile, in_eager
from .expressions import Line, Sizes
from .graph import Graph, StorageKind, item_bytes

LEAST_SIZE = 8  # an input size from which multiples of it are taken to follow from it
TAKEN_OFF = 8  # most that a dimension is below an input size, where it is neither its multiple nor a model's number
ROUNDED = 1  # most that a dimension may be off its line, where code divides sizes
MOST_FACTORS = 3  # of a dimension that is a product of sizes
MEASURED_POWER = 2  # of the sizes, by which measured bytes grow at most


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a number: of a size, or of the factor by which a dimension or bytes change."""

    low: float
    high: float

    def __mul__(self, other: Bounds) -> Bounds:
        """Bound the product of two numbers that vary apart."""
        return Bounds(self.low * other.low, self.high * other.high)

    def __or__(self, other: Bounds) -> Bounds:
        """Bound a number that is within one of two bounds, unknown which."""
        return Bounds(min(self.low, other.low), max(self.high, other.high))

    def over(self, size: float) -> Bounds:
        """Bound the factor from a size to this one; a size of 0 counts as 1."""
        return Bounds(self.low / max(1, size), self.high / max(1, size))


SAME = Bounds(1.0, 1.0)


def _product(factors: Iterable[Bounds]) -> Bounds:
    return functools.reduce(operator.mul, factors, SAME)


def _hull(bounds: Iterable[Bounds]) -> Bounds:
    return functools.reduce(operator.or_, bounds)


@dataclass(frozen=True)
class Sample:
    """A captured step."""

    shapes: tuple[Sizes, ...]  # the shapes of its inputs, in order
    graph: Graph  # the step
    profile: Profile  # its costs
    storages: int  # number of its first storages that captured code holds; others stand for code outside, as measured

    @property
    def sizes(self) -> Sizes:
        """The dimensions of its inputs, in order."""
        return tuple(itertools.chain.from_iterable(self.shapes))


@dataclass(frozen=True)
class Bytes:
    """Bounds at some sizes: the bytes of each storage, and the workspace of each node."""

    low: np.ndarray
    high: np.ndarray
    low_workspaces: np.ndarray
    high_workspaces: np.ndarray


class Resizing:
    """Bounds the bytes of a step of known code, as eager PyTorch runs it, at any sizes.

    Args:
        samples: Steps of that code, the largest one first. Storages and nodes are numbered as in that one.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = tuple(samples)
        plain = [in_eager(sample.graph, sample.profile) for sample in samples]
        self.graph = plain[0][0]
        self._columns = list(dict.fromkeys(zip(*(sample.sizes for sample in samples), strict=True)))
        self._varied = [column for column in self._columns if len(set(column)) > 1]
        weights = {s for s, storage in enumerate(self.graph.storages) if storage.kind is StorageKind.PARAMETER}
        self._widths = {dim for tensor in self.graph.tensors if tensor.storage in weights for dim in tensor.shape}
        self._bytes = [np.array(graph.sizes, dtype=np.float64) for graph, _ in plain]
        self._workspaces = [np.array(profile.workspace_bytes, dtype=np.float64) for _, profile in plain]
        self._shapes = self._find_shapes()
        dimensions = dict.fromkeys(itertools.chain.from_iterable(self._shapes.values()))
        self._followed = {dims: self._find_followed(dims) for dims in dimensions}

    def at(self, sizes: Sizes) -> Bytes:
        """Bound the bytes at some sizes, given in the order of those of the samples."""
        ranges: dict[Sizes, Bounds] = {}  # by the sizes of the samples: what was equal in all may differ now
        for column, size in zip(zip(*(s.sizes for s in self._samples), strict=True), sizes, strict=True):
            ranges[column] = ranges.get(column, Bounds(size, size)) | Bounds(size, size)
        factors = {dims: self._factor(dims, ranges) for dims in self._followed}
        # Measured bytes do not shrink, and grow with a power of the sizes at most.
        growth = _product(now.over(column[0]) | SAME for column, now in ranges.items())
        measured = Bounds(growth.low**MEASURED_POWER, growth.high**MEASURED_POWER)
        of_shapes = {shape: _product(factors[dims] for dims in shape) for shape in set(self._shapes.values())}
        scales = [of_shapes[self._shapes[s]] if s in self._shapes else measured for s in range(len(self._bytes[0]))]
        low = self._bytes[0] * [scale.low for scale in scales]
        high = self._bytes[0] * [scale.high for scale in scales]
        least, most = self._workspaces[0] * measured.low, self._workspaces[0] * measured.high
        for sample, own, workspaces in zip(self._samples, self._bytes, self._workspaces, strict=True):
            if own.shape != high.shape or workspaces.shape != most.shape:
                continue  # the code outside differs
            if all(map(operator.le, sizes, sample.sizes)):
                high, most = np.minimum(high, own), np.minimum(most, workspaces)
            if all(map(operator.ge, sizes, sample.sizes)):
                low, least = np.maximum(low, own), np.maximum(least, workspaces)
        return Bytes(np.ceil(low), np.ceil(high), least, most)

    # ---------------------------------------------------------------- dimensions

    def _find_followed(self, dims: Sizes) -> list[tuple[Sizes, ...]]:
        """List the products of sizes, each by its columns, that a dimension may follow."""
        columns = [c for c in self._columns if len(set(c)) > 1 or not any(dim % max(1, c[0]) for dim in dims)]
        counts = range(MOST_FACTORS + 1)
        candidates = (p for count in counts for p in itertools.combinations_with_replacement(columns, count))
        products = [product for product in candidates if self._may_follow(dims, product)]
        if len(set(dims)) == 1:
            sure = [column for product in products for column in product if self._is_sure(column)]
            products = [product for product in products if not sure or max(sure) in product]
        return products

    def _may_follow(self, dims: Sizes, product: tuple[Sizes, ...]) -> bool:
        """Whether a dimension was the same multiple of a product of sizes, or fraction of up to two, in all samples."""
        numbers = [math.prod(sizes) for sizes in zip(*product, strict=True)] or [1] * len(dims)
        if 0 in numbers:
            return False
        columns = [*product, tuple(numbers)]
        kept = math.lcm(*(column[0] for column in columns if len(set(column)) == 1))
        is_same = all(dim * numbers[0] == dims[0] * number for dim, number in zip(dims, numbers, strict=True))
        is_whole = not any(dim % kept for dim in dims) and (len(product) <= 2 or not dims[0] % numbers[0])
        return is_same and is_whole

    def _is_sure(self, column: Sizes) -> bool:
        """Whether a multiple of a size is no number of the model."""
        is_same = len(set(column)) == 1 and column[0] >= LEAST_SIZE
        return is_same and not any(width % column[0] == 0 for width in self._widths)

    def _factor(self, dims: Sizes, ranges: Mapping[Sizes, Bounds]) -> Bounds:
        """Bound the factor by which a dimension changes from its value in the largest sample."""
        factors = [_product(ranges[c].over(c[0]) for c in product) for product in self._followed[dims]]
        if len(set(dims)) > 1:
            factors += [factor for column in self._varied if (factor := self._on_line(dims, column, ranges))]
            return _hull(factors) if factors else self._between(dims, ranges)
        others = (column for column in ranges if len(set(column)) == 1 and self._may_be_near(dims[0], column))
        return _hull(factors) * _product(_near(ranges[column], column[0]) for column in others)

    def _may_be_near(self, dim: int, column: Sizes) -> bool:
        """Whether a dimension may be a size without its borders, or a part of it, and not a number of the model.

        Such numbers are widths, and parts of these, as heads are.
        """
        size, is_own = column[0], any(c[0] == dim and self._is_sure(c) for c in self._columns)
        if is_own or not dim % max(1, size):
            return False
        if dim >= LEAST_SIZE and not any(width % dim == 0 for width in self._widths):
            return True
        # Strides of convolutions make about a half, a quarter, ... of a size.
        halvings = round(math.log2(size / max(1, dim)))
        taken_off = (ROUNDED if dim in self._widths else TAKEN_OFF) if dim >= LEAST_SIZE else 0
        return dim > 1 and 0 <= halvings < size and abs(size / 2**halvings - dim) <= taken_off

    def _on_line(self, dims: Sizes, column: Sizes, ranges: Mapping[Sizes, Bounds]) -> Bounds | None:
        """Bound the factor of a dimension that lies on a line over one size; None where it does not."""
        points = sorted(set(zip(column, dims, strict=True)))
        if any(size == after or dim > more for (size, dim), (after, more) in itertools.pairwise(points)):
            return None
        (first, least), (last, most) = points[0], points[-1]
        ends, line, now = Line((first, last), (least, most)), Line(*zip(*points, strict=True)), ranges[column]
        is_straight = all(abs(dim - ends.straight(size)) <= ROUNDED for size, dim in points)
        if len(self._varied) > 1 and (abs(ends.straight(0)) > TAKEN_OFF or not is_straight):
            return None  # it may be another size's
        kept = (
            now.over(c[0]) for c, now in ranges.items() if len(set(c)) == 1 and not any(d % max(1, c[0]) for d in dims)
        )
        high = max(line.measured(now.high), least * min(1.0, now.high / max(1, first)))  # it may be a square
        on_line = Bounds(max(0.0, line.straight(now.low) - ROUNDED), high).over(dims[0])
        return on_line * _product(factor | SAME for factor in kept)

    def _between(self, dims: Sizes, ranges: Mapping[Sizes, Bounds]) -> Bounds:
        """Bound the factor of a dimension that follows from several sizes at once, each at most linearly."""
        low, high = 0.0, math.inf
        for number, dim in enumerate(dims):
            factor = _product(_near(now, column[number]) for column, now in ranges.items())
            low, high = max(low, dim * factor.low), min(high, dim * factor.high)
        return Bounds(max(0.0, low - ROUNDED), high).over(dims[0])

    def _find_shapes(self) -> dict[int, tuple[Sizes, ...]]:
        """Find for each storage, where that is known, the dimensions of the tensor that fills it."""
        graphs = [sample.graph for sample in self._samples]
        shapes = dict[int, tuple[Sizes, ...]]()
        for tensors in zip(*(graph.tensors for graph in graphs), strict=False):  # those of code outside may differ
            storage, own_bytes = tensors[0].storage, math.prod(tensors[0].shape) * item_bytes(tensors[0].dtype)
            if storage is None or storage >= self._samples[0].storages or not own_bytes:
                continue
            # Its allocator may round up. Of views the one of most dimensions tells most.
            fills = own_bytes <= graphs[0].sizes[storage] <= 1.1 * own_bytes + 1024
            if fills and (storage not in shapes or len(tensors[0].shape) > len(shapes[storage])):
                shapes[storage] = tuple(zip(*(tensor.shape for tensor in tensors), strict=True))
        return shapes


def _near(now: Bounds, size: int) -> Bounds:
    """Bound the factor of a dimension that follows from a size, of which code first takes off some, as `x[1:]` does."""
    factor, share = now.over(size) | SAME, TAKEN_OFF / max(1, size)
    return Bounds(max(0.0, factor.low - share * (1 - factor.low)), factor.high + share * (factor.high - 1))
