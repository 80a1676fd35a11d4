"""Operators that users define with `torch.library`: which of them have Python code."""

from __future__ import annotations

from typing import Any

from torch._library.custom_ops import OPDEFS
from torch.library import _impls

from .aot import OpOverload

_NO_KERNELS = ("Meta", "Autograd")  # what these dispatch keys run computes no numbers


def name_of(operator: Any) -> str:
    """Return the name of an operator, as "library::name"; nothing for a kernel that is no operator."""
    return str(operator._schema.name) if isinstance(operator, OpOverload) else ""


def has_python_code(operator: Any) -> bool:
    """Whether Python code computes an operator: that of `torch.library.custom_op`, or of `torch.library.impl`."""
    name = name_of(operator)
    keys = [key.split("/") for key in _impls if name]
    own = [dispatch for library, op, dispatch in keys if f"{library}::{op.partition('.')[0]}" == name]
    return name in OPDEFS or any(not dispatch.startswith(_NO_KERNELS) for dispatch in own)
