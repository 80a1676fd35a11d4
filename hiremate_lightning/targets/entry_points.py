"""Functions for Dynamo to compile: what a planned call enters, each time with a code object of its own."""

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
    """Call a forward that somebody has put in the place of its class's."""
    dynamo.hooks_of_all_modules()
    return forward(*args, **kwargs)


def call_training_step(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the training step of a LightningModule's class."""
    dynamo.hooks_of_all_modules()
    return type(module).training_step(module, *args, **kwargs)


_Copies = list[tuple[Callable[..., Any], Callable[..., Any]]]  # functions above, and a copy of each

# Copies that no one uses, by their functions. Dynamo keeps what it compiled, and counts recompilations, by code object.
# So each planned call needs its own. They are used again, never dropped: a code object that dies takes Dynamo's entries
# with it inside the garbage collector, which crashes.
_unused: defaultdict[Callable[..., Any], list[Callable[..., Any]]] = defaultdict(list)
_numbers = itertools.count(1)


def _take(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy that no one uses."""
    if _unused[function]:
        return _unused[function].pop()
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return types.FunctionType(code, function.__globals__, code.co_name)


def _give_back(taken: _Copies) -> None:
    """Forget what was compiled for copies, and let others use them."""
    while taken:
        function, copy = taken.pop()
        dynamo.forget_compiled(copy)
        _unused[function].append(copy)


class Compiler:
    """Compiles the calls of one session.

    Attributes:
        replaced: How often another forward took the place of one that somebody had put into a module.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._forwards: dict[nn.Module, tuple[Any, Callable[..., Any]]] = {}
        self.replaced: Counter[nn.Module] = Counter()
        self._taken: _Copies = []
        weakref.finalize(self, _give_back, self._taken)

    def compile(self, function: Callable[..., Any], first: Any) -> Callable[..., Any]:
        """Compile a function of this module, its first argument given."""
        copy = _take(function)
        self._taken.append((function, copy))
        return functools.partial(torch.compile(copy, backend=self._session.backend()), first)

    def forward_of(self, module: nn.Module, forward: Callable[..., Any] | None) -> Callable[..., Any]:
        """Return the compiled forward of a module: that of its class, or one that somebody has put there."""
        before, compiled = self._forwards.get(module, (None, None))
        if compiled is None or before is not forward:
            self.replaced[module] += before is not None and forward is not None
            compiled = self.compile(call_forward, module) if forward is None else self.compile(call_found, forward)
            self._forwards[module] = forward, compiled
        return compiled

    def forget(self, module: nn.Module) -> None:
        """Compile the forward of a module anew where it is called next."""
        self._forwards.pop(module, None)

    def close(self) -> None:
        """Forget all that was compiled."""
        self._forwards.clear()
        _give_back(self._taken)
