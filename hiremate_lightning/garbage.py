"""Garbage collection around tracing and planning, which leave many cycles.

A full collection looks at all objects, a million where PyTorch's compiler and a package of models are imported. What is
made in a known span can be collected without that.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
