"""The log, weak methods, JSON files for later runs, a bounded dictionary, texts shown once, and garbage collection.

A full collection visits all objects, a million once PyTorch's compiler and a package of models are imported. Tracing
and planning leave many reference cycles; `collecting_what_it_leaves` collects only cycles made in its block.
"""

from __future__ import annotations

import gc
import json
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .errors import HiRemateError

log = logging.getLogger("hiremate_lightning")

K = TypeVar("K")
V = TypeVar("V")


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method without keeping its object alive. It returns None if the object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*arguments)

    return call


class Latest(dict[K, V]):
    """A dictionary of the latest values: if it exceeds `most` entries, the oldest one is dropped."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)  # setting a key again makes it the latest
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]

    def get_or(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key, which becomes the latest one; call `make` if there is none."""
        self[key] = value = self[key] if key in self else make()
        return value


class Once:
    """Passes each text once to a function that shows it: a warning, a reported line or a log entry.

    Texts of one topic are one text. Each object counts for itself: that of a module for the process, that of a session
    for the session.
    """

    def __init__(self, show: Callable[..., None]) -> None:
        self._show, self._topics = show, set[str]()

    def __call__(self, text: str, *more: object, topic: str = "") -> bool:
        """Show a text and what belongs to it, unless its topic (else the text) was shown; return whether it is new."""
        is_new = (topic or text) not in self._topics
        if is_new:
            self._topics.add(topic or text)
            self._show(text, *more)
        return is_new

    def __contains__(self, topic: str) -> bool:
        return topic in self._topics


@dataclass(frozen=True, slots=True)
class JsonFile:
    """A file for later runs. A broken file, or one that can't be written, is no error: it is logged."""

    path: Path | None  # None for no file
    ignored: str  # log text for a file that can't be read, with %s for the path and the reason
    lost: str  # log text for a file that can't be written, with the same placeholders

    def read(self, decode: Callable[[Any], V]) -> V | None:
        """Read and decode the file; return None if it is missing or broken."""
        if self.path is None or not self.path.is_file():
            return None
        try:
            return decode(json.loads(self.path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, HiRemateError) as error:
            log.warning(self.ignored, self.path, error)
            return None

    def write(self, data: object) -> None:
        """Replace the file's contents as a whole."""
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
    """Collect, when the block ends, the reference cycles made in it; older objects are not visited.

    Nothing is collected earlier: a collection would make the objects that are alive then old. For the same reason
    nothing is collected if the block raises, since the error holds its frames and their tensors.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.collect(1)
    finally:
        if is_enabled:
            gc.enable()
