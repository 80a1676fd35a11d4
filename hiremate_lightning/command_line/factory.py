"""What the command line plans: a factory named on it, and the inputs that its model is called with.

A `Workload` builds both anew for each size, so that it can be called where tensors take no memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError
from ..torch_private import tensor_state
from .arguments import Input, no_such_module, no_such_name, no_such_type, split_factory

FORMS = (
    "a torch.nn.Module, (module, inputs) with a tensor or a tuple of tensors, "
    "or (module, kwargs) with a dict of tensors"
)


def make_input(named: Input, size: int | None) -> torch.Tensor:
    """Make an input of zeros on the default device; with another batch size where one is given."""
    dtype = getattr(torch, named.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise no_such_type(named, (name for name, value in vars(torch).items() if isinstance(value, torch.dtype)))
    shape = named.shape if size is None else (size, *named.shape[1:])
    return torch.zeros(shape, dtype=dtype)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A module, and what it is called with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the batch."""
        return tensor_state.tensors_among((self.args, self.kwargs))

    def changed(self, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs with each of them changed; what is handed in twice, as inputs and labels say, stays one."""
        changed_by_id: dict[int, Any] = {}

        def once(value: Any) -> Any:
            if id(value) not in changed_by_id:
                changed_by_id[id(value)] = change(value)
            return changed_by_id[id(value)]

        args, kwargs = tensor_state.map_leaves(once, (self.args, self.kwargs))
        return args, kwargs

    @property
    def size(self) -> int:
        """The batch size: the first dimension of the first tensor that has one, 1 where none has."""
        return next((int(t.shape[0]) for t in self.tensors if t.dim()), 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be planned."""

    factory: Any  # what the name on the command line stands for
    name: str
    inputs: tuple[Input, ...] = ()  # from the command line; none where the factory brings its own

    def module(self) -> nn.Module:
        """Build the module alone."""
        return self._make().module

    def build(self, size: int | None = None) -> ModelCall:
        """Build the module and its inputs, on the default device; with another batch size where one is given."""
        call = self._make()
        if self.inputs:
            args = tuple(make_input(named, size) for named in self.inputs if not named.name)
            kwargs = {named.name: make_input(named, size) for named in self.inputs if named.name}
            call = ModelCall(call.module, args, kwargs)
            _check_call(call)
        if not call.args and not call.kwargs:
            raise ConfigurationError(
                f"{self.name} gives a module without inputs. Name them, such as --input 64x3x224x224, "
                "or let the factory return (module, inputs)."
            )
        return call if self.inputs or size in (None, call.size) else _resized(call, size)

    def _make(self) -> ModelCall:
        """Call the factory, and take apart what it gives."""
        made = self._called()
        if isinstance(made, nn.Module):
            return ModelCall(made, (), {})
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
            module, inputs = made
            if isinstance(inputs, torch.Tensor):
                return ModelCall(module, (inputs,), {})
            if isinstance(inputs, Mapping):
                return ModelCall(module, (), dict(inputs))
            if isinstance(inputs, (tuple, list)):
                return ModelCall(module, tuple(inputs), {})
        raise ConfigurationError(f"{self.name} gives {type(made).__name__}. Expected {FORMS}.")

    def _called(self) -> Any:
        if isinstance(self.factory, nn.Module) or not callable(self.factory):
            return self.factory
        try:
            inspect.signature(self.factory).bind()
        except TypeError as error:
            raise ConfigurationError(
                f"{self.name} can't be called without arguments ({error}). Write a function that gives {FORMS}."
            ) from None
        except ValueError:  # a callable written in C, which has no signature to look at
            pass
        return self.factory()


def _check_call(call: ModelCall) -> None:
    """Check that a module takes as many inputs as were named, and those by keyword."""
    try:
        signature = inspect.signature(call.module.forward)
    except (TypeError, ValueError):  # written in C: it says what it takes when it is called
        return
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise ConfigurationError(
            f"{type(call.module).__name__} can't be called with --input as it is ({error}): its forward takes "
            f"{signature}. A comma separates inputs, and NAME=SHAPE passes one by keyword."
        ) from None


def _resized(call: ModelCall, size: int) -> ModelCall:
    """Change the first dimension of every tensor in which it is the batch size."""
    old = call.size

    def resize(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == old:
            return value.new_zeros((size, *value.shape[1:])).requires_grad_(value.requires_grad)
        return value

    return ModelCall(call.module, *call.changed(resize))


def find_factory(text: str) -> Any:
    """Find what "package.module:name" or "path/to/file.py:name" stands for."""
    place, path = split_factory(text)
    factory = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    for name in path.split("."):
        if not hasattr(factory, name):
            raise no_such_name(place, path, name, vars(factory))
        factory = getattr(factory, name)
    return factory


def _import_module(name: str) -> Any:
    _import_from(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise no_such_module(error.name) from None
        raise


def _import_file(path: Path) -> Any:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None, "a name that ends in .py has a loader"
    assert specification.loader is not None, "a name that ends in .py has a loader"
    module = importlib.util.module_from_spec(specification)
    _import_from(path.resolve().parent)
    sys.modules.setdefault(path.stem, module)  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


def _import_from(folder: Path) -> None:
    """Put a folder on the import path for good: a factory may import modules of it when it is called."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
