"""A store that is bounded: it keeps what was used last."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Latest(dict[K, V]):
    """The values that were set or made last, each by its key: one too many drops the oldest.

    Args:
        most: How many are kept.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)  # what is set again is the latest one
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]

    def get_or(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key, made where there is none: it is the latest one then."""
        self[key] = value = self[key] if key in self else make()
        return value
