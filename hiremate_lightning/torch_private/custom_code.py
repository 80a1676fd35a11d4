"""Operators that users define with `torch.library`, and the Python code of those of `custom_op`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C import DispatchKeySet
from torch._library.custom_ops import OPDEFS

from .aot import OpOverload

__all__ = ["DispatchKeySet", "arguments_of", "code_of"]


def code_of(operator: Any) -> list[Callable[..., Any]]:
    """List the functions that compute an operator; nothing for one of PyTorch's, or of a compiled extension."""
    definition = OPDEFS.get(operator._schema.name) if isinstance(operator, OpOverload) else None
    if definition is None:
        return []
    return [definition._init_fn, *definition._backend_fns.values()]


def arguments_of(operator: Any) -> int:
    """Count the arguments of an operator; none for a kernel that isn't one."""
    return len(operator._schema.arguments) if isinstance(operator, OpOverload) else 0
