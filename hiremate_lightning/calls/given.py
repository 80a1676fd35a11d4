"""Finds tensors in arguments and results of calls, in objects of any class; and keeps the state to make a call again.

Copies of that state are in memory of NumPy, which measurements of a step don't count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from ..memory.metering import RandomState
from ..objects import held_by, is_of
from ..torch_private import tensor_state

_PLAIN_DATA = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_WHOLE = (torch.Tensor, nn.Module, type, FunctionType, MethodType, ModuleType)
MOST_THINGS = 4096  # most objects in which to look for tensors
MOST_BYTES = 2**20  # largest buffer to copy: statistics and counters are smaller, and larger buffers hardly change


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


class KeptState:
    """A copy of the random state, of a module's buffers, and of the numbers of some tensors, to restore.

    Tensors are filled in place, not replaced, so that references to them stay valid.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [(m, name, b) for m in module.modules() for name, b in m.named_buffers(recurse=False)]
        self._random = RandomState()
        self._numbers: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors, and a copy of each

    def put_back(self) -> None:
        """Restore the state."""
        for module, name, buffer in self._buffers:
            setattr(module, name, buffer)
        with torch.no_grad():
            for tensor, numbers in self._numbers:
                tensor.copy_(numbers)
        self._random.restore()


class BeforeCall(KeptState):
    """The state before a call of a module: random numbers, buffers, and its arguments in copied containers."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__(module)
        self._arguments = tensor_state.map_leaves(lambda value: value, (args, dict(kwargs)))
        self._read = [*module.parameters(), *tensors_inside(self._arguments)]
        for buffer in module.buffers():
            is_plain = type(buffer) is torch.Tensor and tensor_state.is_dense(buffer)
            size_bytes = buffer.numel() * buffer.element_size() if is_plain else 0
            if 0 < size_bytes <= MOST_BYTES:
                memory = torch.from_numpy(np.empty(size_bytes, np.uint8))
                numbers = memory.view(buffer.dtype).reshape(buffer.shape).copy_(buffer.detach())
                self._numbers.append((buffer, numbers))
            else:  # not copied: the call must not change it
                self._read.append(buffer)
        self._versions = tensor_state.versions_of(self._read)

    @property
    def can_be_restored(self) -> bool:
        """Whether neither weights nor arguments were overwritten since."""
        return tensor_state.versions_of(self._read) == self._versions

    def restore(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Restore random numbers and buffers; return the arguments."""
        self.put_back()
        args, kwargs = self._arguments
        return args, kwargs
