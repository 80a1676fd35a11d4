"""Garbage collection around tracing and planning, which leave many cycles.

A full collection looks at all objects, a million where PyTorch's compiler and a package of models are imported, and
takes 0.2 to 0.5 s. What is made in a known span can be collected without that.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_what_it_leaves() -> Iterator[None]:
    """Collect, when it ends, the cycles that were made meanwhile: those of before are not looked at."""
    is_frozen = gc.get_freeze_count() > 0  # by someone else, or around this: what it freed would not be ours to free
    if not is_frozen:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if not is_frozen:
            gc.unfreeze()
