"""The record of a call of a planned module, and the tensors in its arguments and results, in objects of any class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ..objects import held_by, is_of
from ..torch_private import tensor_state

_PLAIN_DATA = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_WHOLE = (torch.Tensor, nn.Module, type, FunctionType, MethodType, ModuleType)
MOST_THINGS = 4096  # most objects in which to look for tensors


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """Types and shapes of the tensors that one call of a planned module is given."""

    name: str  # the path of the module, or another name for it
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(name: str, tensors: Sequence[torch.Tensor]) -> ModuleCall:
        """Return the record of a call with some tensors."""
        return ModuleCall(name, tuple(t.dtype for t in tensors), tuple(tuple(t.shape) for t in tensors))

    def at(self, becomes: Mapping[int, int]) -> ModuleCall:
        """Return the call with other sizes: `becomes` has the new one of each size that changes."""
        return replace(self, shapes=tuple(tuple(becomes.get(n, n) for n in shape) for shape in self.shapes))


def tensors_inside(values: Any) -> list[torch.Tensor]:
    """List the tensors in a tree of containers; if there are none, those in attributes of its objects, not modules."""
    tensors = tensor_state.tensors_among(values)
    return tensors or [thing for thing in islice(_things_in(values), MOST_THINGS) if is_of(thing, torch.Tensor)]


def _things_in(value: Any) -> Iterator[Any]:
    """Yield the items of containers and the attributes of objects, at any depth, each once, without plain data.

    Attributes of tensors, modules, classes and functions are not visited.
    """
    seen, stack = set[int](), [value]
    while stack:
        thing = stack.pop()
        if id(thing) not in seen and not is_of(thing, _PLAIN_DATA):
            seen.add(id(thing))
            yield thing
            if not is_of(thing, _WHOLE):
                stack.extend(reversed(held_by(thing)))
