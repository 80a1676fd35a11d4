"""What keeps the host's memory small: a store that is bounded, and garbage collected in known spans.

A full collection looks at all objects, a million where PyTorch's compiler and a package of models are imported. Tracing
and planning leave many cycles; what is made in a known span can be collected without that.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Latest(dict[K, V]):
    """The values that were set or made last, each by its key: one more than `most` drops the oldest."""

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


@contextmanager
def collecting_what_it_leaves() -> Iterator[None]:
    """Collect, when it ends, the cycles that were made meanwhile; what is older is not looked at.

    Nothing is collected before: what is alive then would count as old. So would an error on its way through, with the
    frames that it holds, and all tensors there: these are left to the next collection.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.collect(1)
    finally:
        if is_enabled:
            gc.enable()
