"""The model that the command line plans: a factory, and the inputs of its model.

A `Workload` builds model and inputs for each size. `build_on_fakes` builds them on tensors without memory.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..calls.refused import refuse
from ..errors import ConfigurationError, did_you_mean
from ..housekeeping import log
from ..torch_private import tensor_state
from .arguments import Input

FORMS = (
    "a torch.nn.Module, (module, inputs) with a tensor or a tuple of tensors, "
    "or (module, kwargs) with a dict of tensors"
)


def make_input(named: Input, size: int | None) -> torch.Tensor:
    """Return an input of zeros on the default device; `size` replaces the batch size."""
    dtype = getattr(torch, named.dtype, None)
    if not isinstance(dtype, torch.dtype):
        types = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
        hint = did_you_mean(named.dtype, types)
        raise ConfigurationError(f"torch has no type {named.dtype!r}, in {str(named)!r}.{hint} Name one such as int64.")
    return torch.zeros(named.shape if size is None else (size, *named.shape[1:]), dtype=dtype)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A module and the arguments of its call."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the batch."""
        return tensor_state.tensors_among((self.args, self.kwargs))

    @property
    def size(self) -> int:
        """The batch size: the first dimension of the first tensor that has one, 1 if none has."""
        return next((int(t.shape[0]) for t in self.tensors if t.dim()), 1)

    def changed(self, module: nn.Module, change: Callable[[Any], Any]) -> ModelCall:
        """Return a call of a module with each input changed; one object passed twice (inputs and labels) stays one."""
        inputs = self.args, self.kwargs
        changed = {id(value): change(value) for value in tensor_state.leaves(inputs)}
        return ModelCall(module, *tensor_state.map_leaves(lambda value: changed[id(value)], inputs))

    def resized(self, size: int) -> ModelCall:
        """Return the call with another batch size in every tensor whose first dimension is the batch size."""
        old = self.size

        def resize(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == old:
                return value.new_zeros((size, *value.shape[1:])).requires_grad_(value.requires_grad)
            return value

        return self.changed(self.module, resize)


@dataclass(frozen=True, slots=True)
class Workload:
    """A factory and its inputs: the model to plan."""

    factory: Any  # the object that the command line names
    name: str
    inputs: tuple[Input, ...] = ()  # from the command line; none if the factory returns inputs

    def make(self) -> ModelCall:
        """Call the factory; return the module, and the inputs if the factory returns any."""
        made = self._called()
        module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, ())
        if isinstance(module, nn.Module):
            if isinstance(inputs, Mapping):
                return ModelCall(module, (), dict(inputs))
            if isinstance(inputs, torch.Tensor | tuple | list):
                return ModelCall(module, (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs), {})
        raise ConfigurationError(f"{self.name} gives {type(made).__name__}. Expected {FORMS}.")

    def build(self, size: int | None = None) -> ModelCall:
        """Build the module and its inputs on the default device; `size` replaces the batch size."""
        call = self.make()
        if self.inputs:
            args = tuple(make_input(named, size) for named in self.inputs if not named.name)
            kwargs = {named.name: make_input(named, size) for named in self.inputs if named.name}
            call = ModelCall(call.module, args, kwargs)
            if fault := _misfit(call.module.forward, *args, **kwargs):
                raise ConfigurationError(
                    f"{type(call.module).__name__} can't be called with --input as it is ({fault}): its forward takes "
                    f"{inspect.signature(call.module.forward)}. A comma separates inputs, and NAME=SHAPE passes one by "
                    "keyword."
                )
        if not call.args and not call.kwargs:
            raise ConfigurationError(
                f"{self.name} gives a module without inputs. Name them, such as --input 64x3x224x224, "
                "or let the factory return (module, inputs)."
            )
        return call if size in (None, call.size) else call.resized(size)

    def _called(self) -> Any:
        if isinstance(self.factory, nn.Module) or not callable(self.factory):
            return self.factory
        if fault := _misfit(self.factory):
            raise ConfigurationError(
                f"{self.name} can't be called without arguments ({fault}). Write a function that gives {FORMS}."
            )
        return self.factory()


def _misfit(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return why a function can't take the number or the keywords of some arguments; "" if it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: its call will raise the error
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


# ---------------------------------------------------------------- on tensors without memory


def build_on_fakes(workload: Workload, device: torch.device, size: int | None, mode: Any) -> ModelCall:
    """Build a workload, with each tensor that is not a fake one on the device replaced; refuse unsupported modules.

    Tensors of the module are replaced in a copy of it.
    """
    built = _built(workload, device, size, mode)
    refuse(built.module)

    def as_fake(value: Any) -> Any:
        is_there = tensor_state.is_fake(value) and value.device.type == device.type
        if is_there or not isinstance(value, torch.Tensor):
            return value
        fake = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
        if isinstance(value, nn.Parameter):
            return nn.Parameter(fake, value.requires_grad)
        return fake.requires_grad_(value.requires_grad and value.is_leaf)

    with mode:
        memo = {id(value): fake for value in _tensors_of(built.module) if (fake := as_fake(value)) is not value}
        return built.changed(copy.deepcopy(built.module, memo) if memo else built.module, as_fake)


def _built(workload: Workload, device: torch.device, size: int | None, mode: Any) -> ModelCall:
    """Build a workload with as little memory as its code allows.

    Fake tensors can't have their type changed once they are parameters, and tensors of the meta device can't be read.
    A factory that needs both gets memory, on the CPU, for its weights and inputs.
    """
    for tensors, place in ((mode, device), (nullcontext(), torch.device("meta"))):
        try:
            with tensors, place:
                return workload.build(size)
        except ConfigurationError:
            raise
        except Exception as error:  # from the factory: the next attempt may work, and the last one raises
            log.debug("%s can't be built on %s: %s", workload.name, place, error)
    return workload.build(size)


def same_tensors(module: nn.Module) -> nn.Module:
    """Copy a module but share its tensors: Python attributes that a call changes, change in the copy only."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in _tensors_of(module)})


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield all tensors of a module: parameters, buffers, and plain attributes."""
    yield from module.parameters()
    yield from module.buffers()
    for inner in module.modules():
        yield from tensor_state.tensors_among(list(vars(inner).values()))
