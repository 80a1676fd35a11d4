"""Build a module and its inputs on tensors without memory."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError
from ..torch_private import tensor_state
from .factory import ModelCall, Workload

log = logging.getLogger("hiremate_lightning")


def build(workload: Workload, device: torch.device, size: int | None, mode: Any) -> ModelCall:
    """Build a workload with as little memory as it lets us.

    Fake tensors can't have their type changed once they are parameters, and tensors of the meta device can't be read.
    A factory that needs both is given memory, on the CPU, for its weights and inputs.

    Args:
        workload: What to build.
        device: Where its tensors are to be.
        size: Batch size; None for that of its inputs.
        mode: The mode in which tensors are fake.
    """
    for context in ((mode, device), (torch.device("meta"),)):
        with ExitStack() as stack:
            for manager in context:
                stack.enter_context(manager)
            try:
                return workload.build(size)
            except ConfigurationError:
                raise
            except Exception as error:  # of the factory; the next attempt may suit it, and the last one raises
                log.debug("%s can't be built in %s: %s", workload.name, context, error)
    return workload.build(size)


def on_fakes(call: ModelCall, device: torch.device) -> ModelCall:
    """Replace each tensor that is not a fake one on the device by such a one, in a copy of the module."""
    memo: dict[int, Any] = {}
    for value in _tensors_of(call.module):
        if not _is_fake_on(value, device) and id(value) not in memo:
            memo[id(value)] = _fake_of(value, device)

    def as_fake(value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and not _is_fake_on(value, device)
        return _fake_of(value, device) if is_real else value

    module = copy.deepcopy(call.module, memo) if memo else call.module
    return ModelCall(module, *call.changed(as_fake))


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Go through all tensors of a module: parameters, buffers, and plain attributes."""
    yield from module.parameters()
    yield from module.buffers()
    for inner in module.modules():
        yield from tensor_state.tensors_among(list(vars(inner).values()))


def _fake_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _is_fake_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor_state.is_fake(tensor) and tensor.device.type == device.type
