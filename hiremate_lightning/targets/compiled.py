"""The models and sessions of `torch.compile(backend="hiremate")`; a model is known by its captured graphs alone.

All functions and modules compiled with equal options share one session. A removed session stays here: the code of its
functions and modules, captured before or later, runs eager.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..calls.slots import WITH_COMPILE
from ..errors import ConfigurationError
from ..sessions.session import Session
from .modules import planned_module_with
from .overseeing import listen_to_optimizers

Key = tuple[tuple[str, str], ...]  # options by name, as text


class CompiledModel(nn.Module):
    """The model of a session that began with a captured graph; it refers weakly to parameters, buffers and functions.

    Attributes:
        key: The options.
        is_removed: Whether all of its code runs eager.
    """

    def __init__(self, key: Key) -> None:
        super().__init__()
        self.key, self.is_removed = key, False
        self._callables = WeakIdKeyDictionary()  # the functions and modules whose calls were captured
        self._trained = WeakIdKeyDictionary()  # parameters, and other leaves that train, of the graphs that have run
        self._held = WeakIdKeyDictionary()  # the buffers of these graphs
        self._has_trained = False
        self._somewhere = torch.empty(0)  # shows the device if there are no parameters

    @property
    def is_gone(self) -> bool:
        """Whether it had parameters, and none of them exists any more; torch may keep compiled code longer."""
        return self._has_trained and not list(self._trained)

    def add_callables(self, callables: Iterable[Any]) -> None:
        """Add functions and modules whose calls are captured."""
        for one in callables:
            if type(one).__name__ != "method":  # a bound method is a new object at each lookup
                with suppress(TypeError):  # of an object without weak references
                    self._callables[one] = None

    def has_any(self, callables: Iterable[Any]) -> bool:
        """Whether the calls of one of these were captured."""
        return any(one in self._callables for one in callables)

    def see(self, tensors: Sequence[torch.Tensor], buffers: Iterable[torch.Tensor]) -> None:
        """Add the parameters and buffers that a graph is called with, at each run.

        They may change: torch may run a graph that it compiled for one model with the parameters of another one.

        Raises:
            ConfigurationError: If a parameter belongs to a module that is planned.
        """
        trained = [t for t in tensors if isinstance(t, nn.Parameter) or (t.requires_grad and t.is_leaf)]
        new = [t for t in trained if t not in self._trained]
        if any(isinstance(t, nn.Parameter) for t in new):
            module = planned_module_with(new)
            if module is not None:  # Dynamo goes past its slots, so that its plan would never run
                raise ConfigurationError(f"{type(module).__name__} is planned already by hiremate(). {WITH_COMPILE}")
        self._trained.update(dict.fromkeys(new))
        self._held.update(dict.fromkeys(b for b in buffers if b not in self._held))
        self._has_trained = self._has_trained or bool(new)
        if tensors and self._somewhere.device != tensors[0].device:
            self._somewhere = torch.empty(0, device=tensors[0].device)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters that still exist; an empty tensor on the device if there are none."""
        yield from list(self._trained) or [self._somewhere]

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Yield the buffers that still exist."""
        return iter(self._held)


_models: weakref.WeakKeyDictionary[Session, CompiledModel] = weakref.WeakKeyDictionary()


def sessions() -> list[tuple[Session, CompiledModel]]:
    """List the sessions that exist, latest first."""
    return [*_models.items()][::-1]


def begin(session: Session, model: CompiledModel) -> None:
    """Remember the session of a model."""
    _models[session] = model
    session.closing.callback(setattr, model, "is_removed", True)  # its captured code runs eager then
    listen_to_optimizers(session)


def session_of(code: Any) -> Session | None:
    """Return the session of what was compiled, or of a module with any of its parameters; None for none."""
    parameter_ids = {id(p) for p in code.parameters()} if isinstance(code, nn.Module) else set()
    for session, model in sessions():
        is_its = model.has_any([code]) or any(id(p) in parameter_ids for p in model.parameters())
        if is_its and not model.is_removed:
            return session
    return None
