"""Modules that a script compiles: the compiled code stands aside where a plan takes what it calls.

`module.compile()` puts the compiled call in the place of the module's own, so that a `Finder` would not see it: while
one is in place, a `CompiledCall` stands there instead. `torch.compile(module)` may be in a model as one of its parts.
Whole models and single layers are compiled in both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..torch_private import compiled_by_torch, hooks

Call = Callable[..., Any]


class CompiledCall:
    """Stands in for the call of a module that was compiled in place.

    Args:
        call: Is given the module, the compiled call, and arguments: calls the module by a plan, or else the latter.
        module: The module.
        compiled: The compiled call.

    Attributes:
        compiled: The compiled call.
    """

    def __init__(self, call: Call, module: nn.Module, compiled: Call) -> None:
        self._call, self._module, self.compiled = call, module, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, by a plan or compiled; what is compiled around it has it in its own code."""
        if torch.compiler.is_compiling():
            return hooks.plain_call(self._module, *args, **kwargs)
        return self._call(self._module, self.compiled, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave copies of a module as they were written, as those of compiled modules are."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave pickled modules as they were written."""
        return (type(None), ())


def take_aside(model: nn.Module) -> list[Callable[[], None]]:
    """Take the compiled code out of a model that is to be planned; return what puts each of it back."""
    put_back = [compiled_by_torch.run_as_written(inner) for inner in compiled_by_torch.compiled_inside(model)]
    for module in model.modules():
        call = hooks.get_call(module)
        if isinstance(call, CompiledCall):
            hooks.set_call(module, None)
            put_back.append(partial(hooks.set_call, module, call))
    return put_back
