"""What a call is given, or returns: the tensors in containers and in objects of any class, and their shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ..objects import held_by, is_of
from ..torch_private.tensor_state import tensors_among

_PLAIN_DATA = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_WHOLE = (torch.Tensor, nn.Module, type, FunctionType, MethodType, ModuleType)
MOST_THINGS = 4096  # in which to look for tensors


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """What one call of a planned module is given.

    Attributes:
        name: The path of the module, or what stands for it.
        dtypes: The types of its tensors.
        shapes: Their shapes.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(name: str, tensors: Sequence[torch.Tensor]) -> ModuleCall:
        """Describe a call with some tensors."""
        return ModuleCall(name, tuple(t.dtype for t in tensors), tuple(tuple(t.shape) for t in tensors))


def tensors_inside(values: Any) -> list[torch.Tensor]:
    """List the tensors in a tree of containers; where there are none, those that its objects hold, modules left out."""
    tensors = tensors_among(values)
    return tensors or [thing for thing in islice(_things_in(values), MOST_THINGS) if is_of(thing, torch.Tensor)]


def _things_in(value: Any) -> Iterator[Any]:
    """Go through what containers and objects hold, however deep, each thing once, and no plain data."""
    seen, stack = set[int](), [value]
    while stack:
        thing = stack.pop()
        if id(thing) in seen or is_of(thing, _PLAIN_DATA):
            continue
        seen.add(id(thing))
        yield thing
        stack.extend(reversed(parts_of(thing)))


def parts_of(value: Any) -> list[Any]:
    """List what a container or an object holds; nothing for tensors, modules, classes and functions."""
    return [] if is_of(value, _WHOLE) else held_by(value)
