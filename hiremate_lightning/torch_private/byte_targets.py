"""Classes that are given as bytes: the kernels of `nll_loss` take them, torch's tracing of these doesn't.

PyTorch's tables of decompositions are private; `test_torch_private.py` says on which versions this was checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._decomp import decomposition_table

from .replacing import replaced_entries

aten = torch.ops.aten

TARGETS = {aten.nll_loss_forward.default: 1, aten.nll_loss_backward.default: 2}  # operators, and which argument it is


def traced() -> AbstractContextManager[None]:
    """Trace losses of such classes, for a while; their shapes are those of the same classes as integers."""
    stand_ins = {op: _with_integers(decomposition_table[op], position) for op, position in TARGETS.items()}
    return replaced_entries(decomposition_table, stand_ins)


def _with_integers(decomposition: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(decomposition)  # torch looks at its name and module
    def decompose(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position and args[position].dtype == torch.uint8:
            args = (*args[:position], args[position].long(), *args[position + 1 :])
        return decomposition(*args, **kwargs)

    return decompose
