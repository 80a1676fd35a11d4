"""From which sizes of a step's inputs the dimensions of its tensors follow, as its operations show.

That 172 is a length and not a quarter of 688 channels shows where it comes from. Inputs have the sizes that the step
was given, weights have numbers of the model, and each operation hands dimensions on: in their places, as the rows and
columns of a product, or split and joined by a view. Where that leaves a doubt, nothing is said of a dimension.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from .graph import Graph, Node, StorageKind

Shape = tuple[int, ...]
Origin = Shape | None  # the sizes of which a dimension is a multiple or a fraction; () for a number of the model
Origins = tuple[Origin, ...]  # of a tensor's dimensions
_Given = list[tuple[Shape, Origins]]  # the tensors that an operation reads
_Rule = Callable[[Shape, _Given], Origins]

LEAST_SIZE = 8  # of the step, that is known by its value
MOST_SEEN = 16  # different shapes of what one call was given


class VaryingSizes:
    """The sizes of the latest call of a model that differ from call to call, once three calls have differed.

    Args:
        weights: Returns the shapes of the model's weights. A dimension that always has a size that varies elsewhere
            can't be told from that one: such a size is left out.
    """

    def __init__(self, weights: Callable[[], Iterable[Shape]]) -> None:
        self._weights = weights
        self._seen: dict[tuple[object, ...], list[Shape]] = {}  # different sizes of each call, by its name and ranks
        self._varied = set[int]()  # of the latest call

    def called(self, name: str, shapes: Sequence[Shape]) -> None:
        """Add a call, with the shapes of its arguments."""
        sizes = tuple(size for shape in shapes for size in shape)
        seen = self._seen.setdefault((name, *map(len, shapes)), [])
        if sizes not in seen and len(seen) < MOST_SEEN:
            seen.append(sizes)
        columns = list(zip(*seen, sizes, strict=True)) if len(seen) > 2 else []
        fixed = {column[-1] for column in columns if len(set(column)) == 1}
        self._varied = {column[-1] for column in columns} - fixed

    def __iter__(self) -> Iterator[int]:
        """Go through the sizes."""
        return iter(self._varied.difference(*self._weights()))


def origins_of(graph: Graph, given: Collection[Shape]) -> list[Origins]:
    """Find for each tensor of a captured step from which sizes its dimensions follow.

    Args:
        graph: The step.
        given: The shapes of the tensors that the step was given.
    """
    found: list[Origins] = [(None,) * len(tensor.shape) for tensor in graph.tensors]
    sizes, widths = {size for shape in given for size in shape}, widths_of(graph)
    for index in (*graph.inputs, *graph.tangents):
        tensor = graph.tensors[index]
        if tensor.storage is not None and graph.storages[tensor.storage].kind is StorageKind.PARAMETER:
            found[index] = ((),) * len(tensor.shape)
        elif tensor.shape in given:
            found[index] = tuple((dim,) for dim in tensor.shape)
        elif len(tensor.shape) > 2 and tensor.shape[:-1] in given:  # looked up outside, a vector for each word
            width = () if tensor.shape[-1] in widths else None
            found[index] = (*((dim,) for dim in tensor.shape[:-1]), width)
        else:
            found[index] = _by_value(tensor.shape, sizes, widths)
    seen = {*graph.inputs, *graph.tangents}
    for index in (*graph.forward, *graph.backward):
        node = graph.nodes[index]
        read = [(graph.tensors[t].shape, found[t]) for t in node.inputs if graph.tensors[t].shape]
        for result in set(node.outputs) - seen:
            shape = graph.tensors[result].shape
            found[result] = _of_result(node, shape, read) if read else _by_value(shape, sizes, widths)
        seen.update(node.outputs)
    return found


def widths_of(graph: Graph) -> frozenset[int]:
    """List the dimensions of a step's weights."""
    own = {s for s, storage in enumerate(graph.storages) if storage.kind is StorageKind.PARAMETER}
    return frozenset(dim for tensor in graph.tensors if tensor.storage in own for dim in tensor.shape)


def _by_value(shape: Shape, sizes: Collection[int], widths: Collection[int]) -> Origins:
    """Compare dimensions with sizes of the step that are too large, and too unlike weights', to be so by chance."""
    plain = {size for size in sizes if size >= LEAST_SIZE and not any(width % size == 0 for width in widths)}
    return tuple((dim,) if dim in plain else None for dim in shape)


def _of_result(node: Node, shape: Shape, read: _Given) -> Origins:
    name = node.op.split(".")[1] if "." in node.op else node.op
    rule = _RULES.get(name, _by_place)
    found = rule(shape, read)
    return tuple(() if dim == 1 else origin for dim, origin in zip(shape, found, strict=True))


def _by_place(shape: Shape, read: _Given) -> Origins:
    """Most operations: results look like what is read, or keep some of its dimensions, in their order."""
    same = [origins for own, origins in read if own == shape]
    if same:
        return tuple(map(_agreed, zip(*same, strict=True)))
    kept = ([o for own, origins in read for o in _in_order(place, shape, own, origins)] for place in range(len(shape)))
    return tuple(map(_only, kept))


def _in_order(place: int, shape: Shape, own: Shape, origins: Origins) -> list[Origin]:
    """List the origins of those dimensions of a tensor that may be one of a result which keeps some of them."""
    pairs = zip(own[place:], origins[place:], strict=True)
    return [o for dim, o in itertools.islice(pairs, max(0, len(own) - len(shape) + 1)) if dim == shape[place]]


def _broadcast(shape: Shape, read: _Given) -> Origins:
    """Element-wise operations: dimensions are aligned from the last one."""
    counts = [len(shape) - len(own) for own, _ in read]
    return _by_place(shape, [((1,) * n + own, (None,) * n + o) for n, (own, o) in zip(counts, read, strict=True)])


def _joined(shape: Shape, read: _Given) -> Origins:
    """Tensors side by side: all dimensions but one are the same, and that one is a sum."""
    if any(len(own) != len(shape) for own, _ in read):
        return (None,) * len(shape)
    found = list[Origin]()
    for place, dim in enumerate(shape):
        same = [origins[place] for own, origins in read if own[place] == dim]
        is_fixed = all(origins[place] == () for _, origins in read)
        found.append(() if is_fixed else _agreed(same))
    return tuple(found)


def _moved(shape: Shape, read: _Given) -> Origins:
    """Transposition: each dimension is one that was there, in another place."""
    if len(read) != 1 or sorted(read[0][0]) != sorted(shape):
        return (None,) * len(shape)
    own, origins = read[0]
    return tuple(_only(o for d, o in zip(own, origins, strict=True) if d == dim) for dim in shape)


def _transposed(shape: Shape, read: _Given) -> Origins:
    """A matrix with its rows as columns."""
    return read[0][1][::-1] if read[0][0][::-1] == shape else (None,) * len(shape)


def _product(shape: Shape, read: _Given) -> Origins:
    """A product of matrices: rows of the first, columns of the second, seen as what else is computed with it."""
    for place, ((rows, of_rows), (columns, of_columns)) in enumerate(itertools.pairwise(read)):
        if min(len(rows), len(columns)) >= 2 and rows[-1] == columns[-2]:
            product = (*rows[:-1], columns[-1]), (*of_rows[:-1], of_columns[-1])
            others = [pair for pair in (*read[:place], *read[place + 2 :]) if pair[0] == shape]
            return _by_place(shape, [(shape, _viewed(shape, [product])), *others])
    return (None,) * len(shape)


def _added_product(shape: Shape, read: _Given) -> Origins:
    """A product of matrices to which the first argument is added."""
    return _product(shape, [*read[1:], read[0]])


def _viewed(shape: Shape, read: _Given) -> Origins:
    """A view: dimensions are joined and split in their order."""
    if len(read) != 1 or 0 in shape or math.prod(read[0][0]) != math.prod(shape):
        return (None,) * len(shape)
    own, origins = read[0]
    found = list[Origin]()
    for before, after in _groups(own, shape):
        found += _regrouped([(own[i], origins[i]) for i in before], [shape[i] for i in after])
    return tuple(found)


def _groups(before: Shape, after: Shape) -> Iterable[tuple[range, range]]:
    """Split two shapes of as many elements into the shortest runs whose products are the same."""
    i = j = 0
    while i < len(before) or j < len(after):
        first, second = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (a := math.prod(before[first:i])) != (b := math.prod(after[second:j])):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        yield range(first, i), range(second, j)


def _regrouped(before: Sequence[tuple[int, Origin]], after: Sequence[int]) -> list[Origin]:
    """Find the origins of dimensions that are together what some others were: their factors keep their order."""
    if len(before) == len(after) == 1:
        return [before[0][1]]
    if any(origin is None for _, origin in before):
        return [None] * len(after)
    factors = [factor for dim, origin in before for factor in _factors(dim, origin or ())]
    found = list[Origin]()
    for dim in after:
        own: list[tuple[int, bool]] = []
        while factors and math.prod(f for f, _ in own) < dim:
            own.append(factors.pop(0))
        split = math.prod(f for f, _ in own)
        if split != dim and (split % dim or any(is_size for _, is_size in own)):
            return [None] * len(after)
        if split != dim:
            factors.insert(0, (split // dim, False))
        found.append(tuple(f for f, is_size in own if is_size))
    return found


def _factors(dim: int, origin: Shape) -> list[tuple[int, bool]]:
    """Split a dimension into sizes of the step, as they were joined, and a number of the model."""
    rest = dim // max(1, math.prod(origin))
    if math.prod(origin) * rest != dim:
        return [(dim, False)] if not origin else [(dim, True)]
    return [*((size, True) for size in origin), *([(rest, False)] if rest != 1 else [])]


def _looked_up(shape: Shape, read: _Given) -> Origins:
    """A look-up in a table: as many rows of it as there are indices."""
    if len(read) != 2 or (*read[1][0], *read[0][0][1:]) != shape:
        return (None,) * len(shape)
    return (*read[1][1], *read[0][1][1:])


def _strided(shape: Shape, read: _Given) -> Origins:
    """Convolution and pooling: pictures become larger or smaller, each side by itself."""
    pictures = [pair for pair in read if len(pair[0]) == len(shape) and pair[0][0] == shape[0]]
    if not pictures:
        return _by_place(shape, read)
    own, origins = pictures[0]
    channels = origins[1] if own[1] == shape[1] else ()
    return (origins[0], channels, *origins[2:])


def _interpolated(shape: Shape, read: _Given) -> Origins:
    """Interpolation: pictures become as large as they are asked to be."""
    return (*_by_place(shape, read)[:2], *[None] * len(shape[2:]))


def _agreed(origins: Iterable[Origin]) -> Origin:
    """Return what is known of dimensions that are the same; None where that is nothing, or not one thing."""
    return _only(origin for origin in origins if origin is not None)


def _only(origins: Iterable[Origin]) -> Origin:
    found = set(origins)
    return found.pop() if len(found) == 1 else None


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "where", "pow", "eq", "lt", "gt", "le", "ge", "minimum"), _broadcast),
    "t": _transposed,
    **dict.fromkeys(("transpose", "permute"), _moved),
    **dict.fromkeys(("mm", "bmm"), _product),
    **dict.fromkeys(("addmm", "baddbmm"), _added_product),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"), _viewed),
    **dict.fromkeys(("convolution", "max_pool", "max_pool2d_with_indices", "avg_pool2d"), _strided),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_nearest2d", "upsample_bicubic2d"), _interpolated),
    "cat": _joined,
    **dict.fromkeys(("embedding", "index", "index_select"), _looked_up),
}
