"""The functions that Dynamo compiles for planned calls, one copy with a code object of its own for each."""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..sessions.session import Session
from ..torch_private import dynamo


def call_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a module's class."""
    dynamo.hooks_of_all_modules()
    return type(module).forward(module, *args, **kwargs)


def call_found(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a forward that was assigned to a module in place of that of its class."""
    dynamo.hooks_of_all_modules()
    return forward(*args, **kwargs)


def call_training_step(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the training step of a LightningModule's class."""
    dynamo.hooks_of_all_modules()
    return type(module).training_step(module, *args, **kwargs)


_Copies = list[tuple[Callable[..., Any], Callable[..., Any]]]  # each of the functions above with a copy of it

# Unused copies by function. Dynamo stores compiled code and counts recompilations by code object, so each planned call
# needs a code object of its own. Copies are used again and never dropped: if the garbage collector frees a code object,
# Dynamo frees its entries inside of the collector, which crashes.
_unused: defaultdict[Callable[..., Any], list[Callable[..., Any]]] = defaultdict(list)
_numbers = itertools.count(1)


def _take(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an unused copy of a function."""
    if _unused[function]:
        return _unused[function].pop()
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return types.FunctionType(code, function.__globals__, code.co_name)


def _give_back(copies: _Copies) -> None:
    """Forget the code compiled for copies, and mark them as unused."""
    while copies:
        function, copy = copies.pop()
        dynamo.forget_compiled(copy)
        _unused[function].append(copy)


class Compiler:
    """Compiles the calls of one session.

    Attributes:
        replaced: For each module, how often a forward that was assigned to it was replaced by another one.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._forwards: dict[nn.Module, tuple[Any, Callable[..., Any]]] = {}
        self.replaced: Counter[nn.Module] = Counter()
        self._copies: _Copies = []
        weakref.finalize(self, _give_back, self._copies)

    def compile(self, function: Callable[..., Any], first: Any) -> Callable[..., Any]:
        """Compile a copy of a function of this file, with its first argument bound."""
        copy = _take(function)
        self._copies.append((function, copy))
        return functools.partial(torch.compile(copy, backend=self._session.backend()), first)

    def forward_of(self, module: nn.Module, forward: Callable[..., Any] | None) -> Callable[..., Any]:
        """Return the compiled forward of a module: that of its class (None), or one that was assigned to the module."""
        before, compiled = self._forwards.get(module, (None, None))
        if compiled is None or before is not forward:
            self.replaced[module] += before is not None and forward is not None
            compiled = self.compile(call_forward, module) if forward is None else self.compile(call_found, forward)
            self._forwards[module] = forward, compiled
        return compiled

    def forget(self, module: nn.Module) -> None:
        """Forget the compiled forward of a module: its next call compiles it again."""
        self._forwards.pop(module, None)

    def close(self) -> None:
        """Forget all compiled code."""
        self._forwards.clear()
        _give_back(self._copies)
