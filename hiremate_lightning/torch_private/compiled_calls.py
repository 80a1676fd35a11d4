"""What `torch.compile` returned: what it was made from, and whose calls are under way."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

_WRAPPERS = "torch._dynamo.eval_frame"  # the module whose functions run in the place of what is compiled


def original(found: Any) -> Any:
    """Return what was given to `torch.compile`; what was not returned by it is its own original."""
    inside = vars(found) if hasattr(found, "__dict__") else {}
    if "dynamo_ctx" in inside:
        return original(found._orig_mod)
    if inside.get("_torchdynamo_wrapper_id") == id(found):
        return original(found._torchdynamo_orig_callable)
    return found


def under_way() -> list[Any]:
    """List the functions and modules whose compiled calls are under way, innermost first.

    Only the frames of these calls know: a backend is given a graph, and not what the graph is of.
    """
    found: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals if frame.f_globals.get("__name__") == _WRAPPERS else {}
        if callable(names.get("fn")) and callable(names.get("callback")):  # torch.compiler.disable has no callback
            found += _owners(names["fn"])
        frame = frame.f_back
    return found


def _owners(function: Any) -> Iterator[Any]:
    """Go through what a call belongs to: the function, what it wraps, and the object whose method it is."""
    while function is not None:
        yield function
        if (owner := getattr(function, "__self__", None)) is not None:
            yield owner
        function = vars(function).get("__wrapped__") if hasattr(function, "__dict__") else None
