"""What training changes: weights, buffers, gradients, optimizers, random numbers. Kept, and put back as it was.

Copies lie in host memory, so that keeping them takes nothing of the device's. Tensors are filled again, not replaced:
whoever refers to one finds it as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ..calls.given import RandomState

_Kept = dict[str, tuple[torch.Tensor | None, Any]]  # values by name: a tensor and its numbers, or anything else


class Stateful(Protocol):
    """A scheduler, a gradient scaler, or whatever else has a state that it gives and takes."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state."""


class TrainingState:
    """The state of a module's training at one moment.

    Args:
        module: Its parameters, buffers, gradients and modes are kept.
        optimizers: Their states and settings are kept.
        others: Whatever else is kept, each by its state dict.
    """

    def __init__(
        self, module: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = (), others: Iterable[Stateful] = ()
    ) -> None:
        self._module = module
        self._gradients = {parameter: parameter.grad for parameter in module.parameters()}
        gradients = (gradient for gradient in self._gradients.values() if gradient is not None)
        self._tensors = [(t, _on_host(t)) for t in (*self._gradients, *module.buffers(), *gradients)]
        self._buffers = [(m, name, b) for m in module.modules() for name, b in m.named_buffers(recurse=False)]
        self._modes = {m: m.training for m in module.modules()}
        self._random = RandomState()
        self._others = [(other, copy.deepcopy(other.state_dict())) for other in others]
        self._optimizers: dict[torch.optim.Optimizer, tuple[dict[Any, _Kept], list[_Kept]]] = {}
        for optimizer in optimizers:
            self.watch(optimizer)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers whose state is kept."""
        return tuple(self._optimizers)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the state of an optimizer, before its first step; one that is kept already stays as kept."""
        if optimizer not in self._optimizers:
            state = {parameter: _kept(values) for parameter, values in optimizer.state.items()}
            groups = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
            self._optimizers[optimizer] = state, [_kept(group) for group in groups]

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for module, name, buffer in self._buffers:
                setattr(module, name, buffer)
            for tensor, values in self._tensors:
                tensor.copy_(values)
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        for optimizer, (states, groups) in self._optimizers.items():
            optimizer.state.clear()
            optimizer.state.update({parameter: _put_back(values) for parameter, values in states.items()})
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                for name in set(group) - {"params", *settings}:
                    del group[name]
                group.update(_put_back(settings))
        for other, state_dict in self._others:
            other.load_state_dict(state_dict)
        for module, mode in self._modes.items():
            module.training = mode
        self._random.restore()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _kept(values: Mapping[str, Any]) -> _Kept:
    """Keep values: each tensor with a copy of its numbers, anything else as a copy of it."""
    return {n: (v, _on_host(v)) if isinstance(v, torch.Tensor) else (None, copy.deepcopy(v)) for n, v in values.items()}


def _put_back(kept: _Kept) -> dict[str, Any]:
    with torch.no_grad():
        return {n: value if tensor is None else tensor.copy_(value) for n, (tensor, value) in kept.items()}
