"""What a call of a module may change beside its results: kept, and put back to make the call once more.

It is kept in memory of NumPy, which no measurement of a step sees.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ..torch_private import tensor_state
from .given import tensors_inside

MOST_BYTES = 2**20  # of a buffer that is kept: statistics and counters are smaller, and what is larger hardly changes


class RandomState:
    """The generators of torch, numpy and Python at one moment."""

    def __init__(self) -> None:
        self._host = torch.get_rng_state().numpy().copy()
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._devices = [state.numpy().copy() for state in devices]
        self._numpy = np.random.get_state()  # noqa: NPY002 - the generator that user code without its own draws from
        self._python = random.getstate()

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(torch.from_numpy(self._host))
        if self._devices:
            torch.cuda.set_rng_state_all([torch.from_numpy(state) for state in self._devices])
        np.random.set_state(self._numpy)  # noqa: NPY002
        random.setstate(self._python)


class BeforeCall:
    """What a call of a module finds: random numbers, buffers, and its arguments in containers of their own."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._arguments = tensor_state.map_leaves(lambda value: value, (args, dict(kwargs)))
        others = [buffer for buffer in module.buffers() if not _can_be_copied(buffer)]
        self._read = [*module.parameters(), *others, *tensors_inside(self._arguments)]
        self._versions = tensor_state.versions_of(self._read)
        self._buffers: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                if _can_be_copied(buffer):
                    memory = torch.from_numpy(np.empty(buffer.numel() * buffer.element_size(), np.uint8))
                    values = memory.view(buffer.dtype).reshape(buffer.shape).copy_(buffer.detach())
                    self._buffers.append((owner, name, buffer, values))
        self._random = RandomState()

    @property
    def can_be_restored(self) -> bool:
        """Whether neither weights nor arguments were overwritten since."""
        return tensor_state.versions_of(self._read) == self._versions

    def restore(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put random numbers and buffers back; return the arguments."""
        for owner, name, buffer, values in self._buffers:
            setattr(owner, name, buffer)
            with torch.no_grad():
                buffer.copy_(values)
        self._random.restore()
        args, kwargs = self._arguments
        return args, kwargs


def _can_be_copied(buffer: torch.Tensor) -> bool:
    """Whether a buffer is a plain tensor with numbers, and small; others must not change in a call."""
    if type(buffer) is not torch.Tensor or not tensor_state.is_dense(buffer):
        return False
    return 0 < buffer.numel() * buffer.element_size() <= MOST_BYTES
