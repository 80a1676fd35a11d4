"""The state that a call of a module changes, kept to make the call again.

The copies are in memory of NumPy, which measurements of a step don't count.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from ..memory.metering import RandomState
from ..torch_private import tensor_state
from .module_call import tensors_inside
from .slots import Called

MOST_BYTES = 2**20  # largest buffer to copy: statistics and counters are smaller, and larger buffers hardly change


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

    def __init__(self, called: Called) -> None:
        super().__init__(called.module)
        args, kwargs = tensor_state.map_leaves(lambda value: value, called.arguments)
        self._called = replace(called, args=args, kwargs=kwargs)
        self._read = [*called.module.parameters(), *tensors_inside(self._called.arguments)]
        for buffer in called.module.buffers():
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

    def restore(self) -> Called:
        """Restore random numbers and buffers; return the call, with its arguments."""
        self.put_back()
        return self._called
