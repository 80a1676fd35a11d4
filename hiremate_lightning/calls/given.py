"""Arguments and results of calls: tensors in containers and objects of any class. And how to make a call once more.

What a call of a module may change beside its results is kept in memory of NumPy, which no measurement of a step sees.
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
MOST_THINGS = 4096  # in which to look for tensors
MOST_BYTES = 2**20  # of a buffer that is kept: statistics and counters are smaller, and what is larger hardly changes


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """What one call of a planned module is given."""

    name: str  # the path of the module, or what stands for it
    dtypes: tuple[torch.dtype, ...]  # of its tensors
    shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(name: str, tensors: Sequence[torch.Tensor]) -> ModuleCall:
        """Describe a call with some tensors."""
        return ModuleCall(name, tuple(t.dtype for t in tensors), tuple(tuple(t.shape) for t in tensors))


def tensors_inside(values: Any) -> list[torch.Tensor]:
    """List the tensors in a tree of containers; where there are none, those that its objects hold, modules left out."""
    tensors = tensor_state.tensors_among(values)
    return tensors or [thing for thing in islice(_things_in(values), MOST_THINGS) if is_of(thing, torch.Tensor)]


def _things_in(value: Any) -> Iterator[Any]:
    """Go through what containers and objects hold, however deep, each thing once, and no plain data.

    Tensors, modules, classes and functions hold nothing.
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
    """Random numbers, the buffers of a module, and the numbers of tensors, kept to be put back.

    Tensors are filled again, not replaced: whoever refers to one finds it as it was.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [(m, name, b) for m in module.modules() for name, b in m.named_buffers(recurse=False)]
        self._random = RandomState()
        self._numbers: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors, and a copy of each

    def put_back(self) -> None:
        """Put everything back."""
        for module, name, buffer in self._buffers:
            setattr(module, name, buffer)
        with torch.no_grad():
            for tensor, numbers in self._numbers:
                tensor.copy_(numbers)
        self._random.restore()


class BeforeCall(KeptState):
    """What a call of a module finds: random numbers, buffers, and its arguments in containers of their own."""

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
            else:  # must not change in the call
                self._read.append(buffer)
        self._versions = tensor_state.versions_of(self._read)

    @property
    def can_be_restored(self) -> bool:
        """Whether neither weights nor arguments were overwritten since."""
        return tensor_state.versions_of(self._read) == self._versions

    def restore(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put random numbers and buffers back; return the arguments."""
        self.put_back()
        args, kwargs = self._arguments
        return args, kwargs
