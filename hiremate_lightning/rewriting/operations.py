"""What readers of a joint graph must know of its operations, registered once by the module that puts them there.

A pass that rewrites a joint graph puts functions of this package in the place of PyTorch's operators. The records ask
here what plain PyTorch needs for the same; the passes that overwrite memory ask whether they may. PyTorch's dropout is
registered too: captured code holds a smaller mask. A new pass registers its functions and is named in
`capturing.passes`; no other module knows the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import fx


class Into(Enum):
    """Which of its arguments an operation may compute into, where it is told so by the argument `out`."""

    NONE = "none"
    FIRST = "its first argument, however the others lie in memory"
    BY_ROWS = "any that looks like the result: it is made some rows after the other"


@dataclass(frozen=True, slots=True)
class Operation:
    """What others must know of a function that stands in a joint graph.

    Attributes:
        plain_bytes: Returns the bytes that plain PyTorch needs for a node while it runs, beside its result.
        plain_reads: Returns what plain PyTorch reads for a node beside what the node reads.
        plain_only_reads: Returns what the node reads and plain PyTorch does not read for the same.
        plain_times: Returns how many times as large plain PyTorch holds the result at a position, of several.
        is_random: Whether it draws random numbers.
        is_fresh: Whether its results have new memory, of the size that a trace says.
        into: What of its arguments it may compute into.
        keeps_nothing: Whether nothing but its result refers to what it is given, once it has run.
        follows_strides: Whether its result lies in memory as its first argument does.
    """

    plain_bytes: Callable[[fx.Node], int] = lambda node: 0
    plain_reads: Callable[[fx.Node], tuple[fx.Node, ...]] = lambda node: ()
    plain_only_reads: Callable[[fx.Node], tuple[fx.Node, ...]] = lambda node: ()
    plain_times: Callable[[fx.Node, int], int] = lambda node, position: 1
    is_random: bool = False
    is_fresh: bool = False
    into: Into = Into.NONE
    keeps_nothing: bool = False
    follows_strides: bool = False


_DEFAULTS = Operation()
_registered: dict[Any, Operation] = {}


def register(function: Callable[..., Any], operation: Operation) -> None:
    """Register what a function promises that stands in joint graphs."""
    _registered[function] = operation


def operation_named(target: Any) -> Operation:
    """Return what is promised of a node's target; the defaults of `Operation` where nothing is registered."""
    return _registered.get(target, _DEFAULTS) if callable(target) else _DEFAULTS
