"""Operators: what a call goes on to, whether it draws random numbers, and whether Python code computes it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.library import _impls

from . import aot

_NO_KERNELS = ("Meta", "Autograd")  # what these dispatch keys run computes no numbers


def schema_call(target: Any) -> Any:
    """Return what a call of an operator goes on to; any other function as it is."""
    return target._op if type(target) is aot.OpOverload else target


def draws(function: Any) -> bool:
    """Whether a function of torch, or a method of this name, draws random numbers."""
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    operator = getattr(torch.ops.aten, name, None)
    overloads = operator.overloads() if operator is not None else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(operator, overload).tags for overload in overloads)


def name_of(operator: Any) -> str:
    """Return the name of an operator, as "library::name"; nothing for a kernel that is no operator."""
    return str(operator._schema.name) if isinstance(operator, aot.OpOverload) else ""


@functools.cache
def written_arguments(operator: aot.OpOverload) -> tuple[tuple[int, str], ...]:
    """List the arguments that an operator writes to, by its schema: each by its position and its name."""
    arguments = enumerate(operator._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def has_python_code(operator: Any) -> bool:
    """Whether Python code computes an operator: that of `torch.library.custom_op`, or of `torch.library.impl`."""
    name = name_of(operator)
    keys = [key.split("/") for key in _impls if name]
    own = [dispatch for library, op, dispatch in keys if f"{library}::{op.partition('.')[0]}" == name]
    return name in OPDEFS or any(not dispatch.startswith(_NO_KERNELS) for dispatch in own)
