"""Which functions of users a call runs, seen while it runs.

The dispatcher of PyTorch doesn't give away what `torch.library.impl` has registered: nothing else leads there.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

from torch import nn

from ..objects import is_of
from ..torch_private.custom_code import DispatchKeySet
from .outside import is_name_of_library, is_of_library

_CONTAINERS = (dict, set)  # no operator has such arguments


def functions_called(run: Callable[[], Any], most: int) -> tuple[Any, list[FunctionType] | None]:
    """Call an operator, and list the functions of users that it calls.

    Args:
        run: Calls it.
        most: How many arguments it has.

    Returns:
        What it returns, and functions of the same code with the same variables around them. None where one belongs to
        an object or is given more than operators are, and under another profiler of Python: there is one at a time.
    """
    if sys.getprofile() is not None:
        return run(), None
    seen = _Seen(most)
    with _without_garbage_collection():
        sys.setprofile(seen.note)
        try:
            result = run()
        finally:
            sys.setprofile(None)
    return result, None if seen.are_given_more else list(seen.functions.values())


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Put off the collection of garbage: what it calls back would be taken for what the operator calls."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Seen:
    """What Python calls while it is watched."""

    def __init__(self, most: int) -> None:
        self.functions = dict[CodeType, FunctionType]()
        self.are_given_more = False
        self._most = most

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call."""
        if event != "call":
            return
        is_users = not _is_of_library(frame)
        if frame.f_back is None or _is_of_library(frame.f_back):  # by an operator, or by what this calls
            given = [value for value in _given_to(frame) if not is_of(value, DispatchKeySet)]
            self.are_given_more |= any(is_of(v, nn.Module) or not is_of_library(type(v)) for v in given)
            if is_users:
                self.are_given_more |= len(given) > self._most or any(is_of(v, _CONTAINERS) for v in given)
        if is_users and frame.f_code not in self.functions:
            self.functions[frame.f_code] = _function_of(frame)


def _is_of_library(frame: FrameType) -> bool:
    return is_name_of_library(frame.f_globals.get("__name__"))


def _given_to(frame: FrameType) -> Iterator[Any]:
    """Yield what a function that begins is given."""
    given = inspect.getargvalues(frame)
    yield from (given.locals[name] for name in given.args)
    yield from given.locals[given.varargs] if given.varargs else ()
    yield from given.locals[given.keywords].values() if given.keywords else ()


def _function_of(frame: FrameType) -> FunctionType:
    """Make a function with the code of one that runs, and the variables of the functions around it."""
    code, values = frame.f_code, frame.f_locals
    around = tuple(CellType(values[name]) if name in values else CellType() for name in code.co_freevars)
    return FunctionType(code, frame.f_globals, code.co_name, None, around)
