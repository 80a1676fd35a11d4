"""What `torch.compile(backend="hiremate")` compiles: the models, as far as graphs show them, and their sessions.

All that is compiled with equal options shares one session. A session that was removed stays here: what its functions
and modules have captured, and capture later, runs as it was written.
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
from ..torch_private import compiled_by_torch
from .modules import planned_module_with
from .overseeing import listen_to_optimizers

Key = tuple[tuple[str, str], ...]  # options by name, as text


class CompiledModel(nn.Module):
    """Stands for the model in a session that began with a captured graph; what it knows of is not kept alive.

    Attributes:
        key: The options.
        is_removed: Whether all of it runs as it was written.
    """

    def __init__(self, key: Key) -> None:
        super().__init__()
        self.key, self.is_removed = key, False
        self._callables = WeakIdKeyDictionary()  # the functions and modules whose calls were captured
        self._trained = WeakIdKeyDictionary()  # parameters, and other leaves that train, of the graphs that have run
        self._held = WeakIdKeyDictionary()  # their buffers
        self._has_trained = False
        self._somewhere = torch.empty(0)  # tells the device where there are no parameters

    @property
    def is_gone(self) -> bool:
        """Whether there were parameters, and none of them exists any more; torch may keep what it compiled longer."""
        return self._has_trained and not list(self._trained)

    def add_callables(self, callables: Iterable[Any]) -> None:
        """Learn of functions and modules whose calls are captured."""
        for one in callables:
            if type(one).__name__ != "method":  # made anew each time it is looked up; its object stays
                with suppress(TypeError):  # of what can't be referred to without keeping it alive
                    self._callables[one] = None

    def has_any(self, callables: Iterable[Any]) -> bool:
        """Whether the calls of one of these were captured."""
        return any(one in self._callables for one in callables)

    def see(self, tensors: Sequence[torch.Tensor], buffers: Iterable[torch.Tensor]) -> None:
        """Learn of the tensors that a graph is called with.

        At each run: torch runs what it compiled for one model with the parameters of another of the same kind.

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
        """Go through the parameters that still exist; an empty one where there are none, to tell the device."""
        yield from list(self._trained) or [self._somewhere]

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Go through the buffers that still exist."""
        return iter(self._held)


_sessions: weakref.WeakKeyDictionary[Session, Any] = weakref.WeakKeyDictionary()  # and what ends their listening


def sessions() -> list[tuple[Session, CompiledModel]]:
    """List the sessions that exist, latest first."""
    return [(session, session.root) for session in [*_sessions][::-1] if isinstance(session.root, CompiledModel)]


def begin(session: Session) -> None:
    """Remember a session."""
    _sessions[session] = listen_to_optimizers(session)


def session_of(code: Any) -> Session | None:
    """Find the session of a function or a module that was compiled, or of what a module consists of."""
    code = compiled_by_torch.original(code)
    own = {id(p) for p in code.parameters()} if isinstance(code, nn.Module) else set()
    for session, model in sessions():
        is_its = model.has_any([code]) or any(id(p) in own for p in model.parameters())
        if is_its and not model.is_removed:
            return session
    return None


def remove(session: Session) -> None:
    """Stop planning all that shares a session; what is captured of it runs as it was written."""
    assert isinstance(session.root, CompiledModel), "only such sessions are found here"
    session.root.is_removed = True
    _sessions[session].remove()
    session.close()
