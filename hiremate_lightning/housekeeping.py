"""What is kept, and for how long: files of JSON, a store that is bounded, and garbage collected in known spans.

A full collection looks at all objects, a million where PyTorch's compiler and a package of models are imported. Tracing
and planning leave many cycles; what is made in a known span can be collected without that.
"""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .errors import HiRemateError

log = logging.getLogger("hiremate_lightning")

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


@dataclass(frozen=True, slots=True)
class JsonFile:
    """A file that later runs read again. One that is spoilt, or can't be written, is no error: a warning says so."""

    path: Path | None  # None for no file
    ignored: str  # the warning where it can't be read, with places for its path and the reason
    lost: str  # the warning where it can't be written, with the same places

    def read(self, decode: Callable[[Any], V]) -> V | None:
        """Read and decode it; None where it is not there, or is spoilt."""
        if self.path is None or not self.path.is_file():
            return None
        try:
            return decode(json.loads(self.path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, HiRemateError) as error:
            log.warning(self.ignored, self.path, error)
            return None

    def write(self, data: object) -> None:
        """Write it whole, in the place of what it held."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(data))
            partial.replace(self.path)
        except OSError as error:
            log.warning(self.lost, self.path, error)


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
