"""Which sizes of what a model is given vary from call to call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

Shape = tuple[int, ...]
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
