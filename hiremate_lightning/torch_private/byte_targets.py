"""Classes that are given as bytes: the kernels of `nll_loss` take them, torch's tracing of these doesn't.

PyTorch's tables of decompositions are private; `test_torch_private.py` says on which versions this was checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._decomp import decomposition_table

aten = torch.ops.aten

TARGETS = {aten.nll_loss_forward.default: 1, aten.nll_loss_backward.default: 2}  # operators, and which argument it is


@contextmanager
def traced() -> Iterator[None]:
    """Trace losses of such classes, for a while; their shapes are those of the same classes as integers."""
    originals = {op: decomposition_table[op] for op in TARGETS}
    for op, position in TARGETS.items():
        decomposition_table[op] = _with_integers(originals[op], position)
    try:
        yield
    finally:
        for op, decomposition in originals.items():
            decomposition_table[op] = decomposition


def _with_integers(decomposition: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(decomposition)  # torch looks at its name and module
    def decompose(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position and args[position].dtype == torch.uint8:
            args = (*args[:position], args[position].long(), *args[position + 1 :])
        return decomposition(*args, **kwargs)

    return decompose
