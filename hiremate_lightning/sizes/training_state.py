"""What training changes: weights, buffers, gradients, optimizers, random numbers. Kept, and put back as it was.

Copies lie in host memory, so that keeping them takes nothing of the device's. Tensors are filled again, not replaced:
whoever refers to one finds it as it was.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn


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
        self._tensors = [(t, _on_host(t)) for t in (*module.parameters(), *module.buffers())]
        self._buffers = [(m, name, b) for m in module.modules() for name, b in m.named_buffers(recurse=False)]
        self._gradients = [(p, p.grad, None if p.grad is None else _on_host(p.grad)) for p in module.parameters()]
        self._modes = {m: m.training for m in module.modules()}
        self._random = RandomState()
        self._others = [(other, copy.deepcopy(other.state_dict())) for other in others]
        self._optimizers: dict[torch.optim.Optimizer, _OptimizerState] = {}
        for optimizer in optimizers:
            self.watch(optimizer)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers whose state is kept."""
        return tuple(self._optimizers)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the state of an optimizer, before its first step; one that is kept already stays as kept."""
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = _OptimizerState(optimizer)

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for module, name, buffer in self._buffers:
                setattr(module, name, buffer)
            for tensor, values in self._tensors:
                tensor.copy_(values)
            for parameter, gradient, numbers in self._gradients:
                parameter.grad = gradient
                if gradient is not None and numbers is not None:
                    gradient.copy_(numbers)
        for state in self._optimizers.values():
            state.restore()
        for other, state_dict in self._others:
            other.load_state_dict(state_dict)
        for module, mode in self._modes.items():
            module.training = mode
        self._random.restore()


class RandomState:
    """The generators of torch, numpy and Python at one moment."""

    def __init__(self) -> None:
        self._host = torch.get_rng_state()
        self._devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._numpy = np.random.get_state()  # noqa: NPY002 - the generator that user code without its own draws from
        self._python = random.getstate()

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self._host)
        if self._devices:
            torch.cuda.set_rng_state_all(self._devices)
        np.random.set_state(self._numpy)  # noqa: NPY002
        random.setstate(self._python)


class _OptimizerState:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {p: {name: _kept(value) for name, value in s.items()} for p, s in optimizer.state.items()}
        self._settings = [{k: _kept(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]

    def restore(self) -> None:
        self._optimizer.state.clear()
        for parameter, state in self._state.items():
            self._optimizer.state[parameter] = {name: _put_back(value) for name, value in state.items()}
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            for name in set(group) - {"params", *settings}:
                del group[name]
            group.update({name: _put_back(value) for name, value in settings.items()})


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _kept(value: Any) -> tuple[Any, Any]:
    """Keep a value: a tensor with a copy of its numbers, anything else as a copy of it."""
    return (value, _on_host(value)) if isinstance(value, torch.Tensor) else (None, copy.deepcopy(value))


def _put_back(kept: tuple[Any, Any]) -> Any:
    tensor, values = kept
    if tensor is None:
        return values
    with torch.no_grad():
        return tensor.copy_(values)
