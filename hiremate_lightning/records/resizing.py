"""Bounds of the bytes of a step at input sizes at which it was not captured.

The elements of a value are a number of the model times a product of sizes of the step's inputs. Captured steps of the
same code show which product; if several products fit, the upper bound takes the largest and the lower bound the
smallest. If a size was the same in all captured steps, a dimension that is a multiple of it may follow from the size or
be a number of the model; it counts as following from the size if no weight has such a dimension. All other bytes grow
by a factor between 1 and the square of the sizes' growth: sums of sizes, sizes that strides round, values that may
follow from a size that did not vary, and measured bytes (workspaces, uncaptured code). Of the bounds by several
captured steps, the closest counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .costs import Profile, in_eager
from .expressions import Sizes
from .graph import Graph, StorageKind, item_bytes

LEAST_SIZE = 8  # multiples of an input size of at least this are assumed to follow from it
TAKEN_OFF = 8  # most that code subtracts from a size, as `x[1:]` and borders of pictures do
MOST_FACTORS = 4  # most sizes in a product
SAME = np.ones(2)  # the bounds of a factor that does not grow

Product = tuple[Sizes, ...]  # a product of input sizes, each by its values in the captured steps


@dataclass(frozen=True)
class Sample:
    """A captured step."""

    shapes: tuple[Sizes, ...]  # the shapes of its inputs, in order
    graph: Graph  # the step
    profile: Profile  # its costs
    storages: int  # number of its first storages, of captured code; the others are measured in uncaptured code

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


@dataclass(frozen=True)
class Value:
    """The sizes that a value, which fills a storage, may follow from.

    Attributes:
        products: The products of sizes of which its elements are the same multiple in all samples.
        is_sure: Whether it surely follows from a size that was the same in all samples.
        power: The power with which it may also follow from sizes that were the same in all samples.
    """

    products: list[Product]
    is_sure: bool
    power: int


class Resizing:
    """Bounds the bytes of a step of known code, as eager PyTorch runs it, at any sizes.

    Args:
        samples: Steps of the code, the largest one first. Storages and nodes are numbered as in the first one.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        eager = [in_eager(sample.graph, sample.profile) for sample in samples]
        self.graph = eager[0][0]
        # For each dimension of the inputs, its sizes in the samples.
        self._columns = list(zip(*(sample.sizes for sample in samples), strict=True))
        # Most dimensions of one input with the same size, as in square pictures.
        self._repeats = max((shape.count(size) for shape in samples[0].shapes for size in shape), default=1)
        weights = {s for s, storage in enumerate(self.graph.storages) if storage.kind is StorageKind.PARAMETER}
        self._widths = {dim for tensor in self.graph.tensors if tensor.storage in weights for dim in tensor.shape}
        measured = [(graph.sizes, profile.workspace_bytes) for graph, profile in eager]
        self._measured = [tuple(np.array(values, dtype=np.float64) for values in pair) for pair in measured]
        outside = range(samples[0].storages, len(samples[0].graph.storages))  # storages of uncaptured code
        self._shapes = _find_shapes([graph for graph, _ in eager], outside)
        self._values = {shapes: self._find_value(shapes) for shapes in set(self._shapes.values())}

    def at(self, sizes: Sizes) -> Bytes:
        """Return bounds of the bytes at these sizes, which are in the order of `Sample.sizes`."""
        shapes = [[values.shape for values in measured] for measured in self._measured]
        alike = [number for number, shape in enumerate(shapes) if shape == shapes[0]]  # uncaptured code is the same too
        low, high, least, most = zip(*(self._by_sample(number, sizes) for number in alike), strict=True)
        return Bytes(np.ceil(np.max(low, 0)), np.ceil(np.min(high, 0)), np.max(least, 0), np.min(most, 0))

    def _by_sample(self, number: int, sizes: Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return lower and upper bounds of the bytes of storages, and of workspaces, by those of one sample."""
        ratios: dict[Sizes, np.ndarray] = {}  # by sizes in the samples; dimensions equal there may differ now
        for column, size in zip(self._columns, sizes, strict=True):
            ratio = size / max(1, column[number]) * SAME
            ratios[column] = _hull([ratio, ratios.get(column, ratio)])
        near = {c: np.maximum(0, r + (r - 1) * TAKEN_OFF / max(1, c[number])) for c, r in ratios.items()}
        unknown, measured = _growth(near.values()) ** 2, _growth(ratios.values()) ** 2
        of_constant = _growth(ratio for column, ratio in near.items() if len(set(column)) == 1)
        factors: dict[tuple[Sizes, ...] | None, np.ndarray] = {None: measured}
        for shapes, value in self._values.items():
            growths = [math.prod((ratios[column] for column in product), start=SAME) for product in value.products]
            low, high = of_constant**value.power
            factors[shapes] = _hull(growths) * (1.0 if value.is_sure else low, high) if growths else unknown
        storages, workspaces = self._measured[number]
        low, high = np.array([factors[self._shapes.get(s)] for s in range(len(storages))]).T
        return storages * low, storages * high, workspaces * measured[0], workspaces * measured[1]

    def _find_value(self, shapes: tuple[Sizes, ...]) -> Value:
        """Return the sizes that a value may follow from, by its shapes in the samples."""
        shape, elements = shapes[0], tuple(map(math.prod, shapes))
        columns = dict.fromkeys(self._columns)
        constant = {dim: [c for c in columns if len(set(c)) == 1 and not dim % max(1, c[0])] for dim in shape}
        candidates = [c for c in columns if len(set(c)) > 1 or any(c in dims for dims in constant.values())]
        # Sizes whose multiples surely follow from them: large ones that are no numbers of the model.
        long = {c for c in columns if c[0] >= LEAST_SIZE and not self._is_number(c[0])}
        sure = [max(long.intersection(constant[dim]), default=None) for dim in shape]
        products = [
            product
            for count in range(MOST_FACTORS + 1)
            for product in itertools.combinations_with_replacement(candidates, count)
            if _may_follow(elements, product) and all(product.count(c) >= sure.count(c) for c in sure if c)
        ]
        open_dims = [dim for dim, column in zip(shape, sure, strict=True) if not column and not self._is_number(dim)]
        return Value(products, any(sure), max(self._repeats, min(2, len(open_dims))))

    def _is_number(self, dim: int) -> bool:
        """Whether a dimension may be a number of the model: it is, or divides, a dimension of a weight."""
        return dim == 1 or any(width % dim == 0 for width in self._widths)


def _find_shapes(graphs: Sequence[Graph], outside: range) -> dict[int, tuple[Sizes, ...]]:
    """Return, for each storage of captured code that a tensor fills, the shapes of this tensor in the graphs."""
    sizes, shapes = graphs[0].sizes, dict[int, tuple[Sizes, ...]]()
    for tensors in zip(*(graph.tensors for graph in graphs), strict=False):  # uncaptured code may differ
        storage, tensor_bytes = tensors[0].storage, math.prod(tensors[0].shape) * item_bytes(tensors[0].dtype)
        if storage is None or storage in outside or not tensor_bytes:
            continue
        # The allocator may round up. Of several views, the one of most dimensions shows most sizes.
        fills = tensor_bytes <= sizes[storage] <= 1.1 * tensor_bytes + 1024
        if fills and (storage not in shapes or len(tensors[0].shape) > len(shapes[storage][0])):
            shapes[storage] = tuple(tensor.shape for tensor in tensors)
    return shapes


def _may_follow(elements: Sizes, product: Product) -> bool:
    """Whether a value's elements are the same multiple of a product of sizes in all samples.

    If the product does not vary, the multiple must be an integer.
    """
    numbers = [math.prod(sizes) for sizes in zip(*product, strict=True)] or [1] * len(elements)
    if 0 in numbers or (len(set(numbers)) == 1 and elements[0] % numbers[0]):
        return False
    return all(count * numbers[0] == elements[0] * number for count, number in zip(elements, numbers, strict=True))


def _hull(bounds: Iterable[np.ndarray]) -> np.ndarray:
    """Return the bounds of a factor that is within one of several bounds."""
    low, high = zip(*bounds, strict=True)
    return np.array([min(low), max(high)])


def _growth(ratios: Iterable[np.ndarray]) -> np.ndarray:
    """Return the bounds of a factor that lies between following from no size and following from each size."""
    return math.prod((_hull([ratio, SAME]) for ratio in ratios), start=SAME)
