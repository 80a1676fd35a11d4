"""The function that Dynamo compiles for planned calls, one copy with a code object of its own for each."""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..sessions.session import Session
from ..torch_private import dynamo


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a module, or the training step of a LightningModule."""
    dynamo.hooks_of_all_modules()
    return function(*args, **kwargs)


# Unused copies of `call`. Dynamo stores compiled code and counts recompilations by code object, so each planned call
# needs a code object of its own. Copies are used again and never dropped: if the garbage collector frees a code object,
# Dynamo frees its entries inside of the collector, which crashes.
_unused: list[Callable[..., Any]] = []
_numbers = itertools.count(1)


def _give_back(copies: list[Callable[..., Any]]) -> None:
    """Forget the code compiled for copies, and mark them as unused."""
    while copies:
        copy = copies.pop()
        dynamo.forget_compiled(copy)
        _unused.append(copy)


class Compiler:
    """Compiles the calls of one session.

    Attributes:
        replaced: For each module, how often a forward that was assigned to it was replaced by another one.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._forwards: dict[nn.Module, tuple[Any, Callable[..., Any]]] = {}
        self.replaced: Counter[nn.Module] = Counter()
        self._copies: list[Callable[..., Any]] = []
        weakref.finalize(self, _give_back, self._copies)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a copy of `call` for a function."""
        if not _unused:
            code = call.__code__.replace(co_name=f"call_{next(_numbers)}")
            _unused.append(types.FunctionType(code, call.__globals__, code.co_name))
        self._copies.append(_unused.pop())
        return functools.partial(torch.compile(self._copies[-1], backend=self._session.backend()), function)

    def forward_of(self, module: nn.Module) -> Callable[..., Any]:
        """Return the compiled forward of a module: that of its class, or one that was assigned to the module."""
        forward = module.__dict__.get("forward")  # None for that of the class
        before, compiled = self._forwards.get(module, (None, None))
        if compiled is None or before is not forward:
            self.replaced[module] += before is not None and forward is not None
            compiled = self.compile(module.forward)
            self._forwards[module] = forward, compiled
        return compiled

    def forget(self, module: nn.Module) -> None:
        """Forget the compiled forward of a module: its next call compiles it again."""
        self._forwards.pop(module, None)

    def close(self) -> None:
        """Forget all compiled code."""
        self._forwards.clear()
        _give_back(self._copies)
