"""The sessions of what `torch.compile(backend="hiremate")` compiles, found again by the model or the function.

All that is compiled with equal options shares one session. A session that was removed stays here: what its functions
and modules have captured, and capture later, runs as it was written.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..sessions.session import Session
from ..torch_private import compiled_by_torch
from .overseeing import listen_to_optimizers

Key = tuple[tuple[str, str], ...]  # options by name, as text


@dataclass(eq=False)
class CompiledSession:
    """What is known of a session that began with a captured graph.

    Attributes:
        key: The options.
        callables: The functions and modules whose calls were captured, not kept alive.
        is_removed: Whether all of it runs as it was written.
    """

    key: Key
    callables: list[weakref.ref[Any]] = field(default_factory=list)
    is_removed: bool = False

    def add(self, callables: Iterable[Any]) -> None:
        """Learn of functions and modules whose calls are captured."""
        known = {id(one) for one in self.alive()}
        self.callables += [weakref.ref(one) for one in callables if id(one) not in known and _has_weak(one)]

    def alive(self) -> list[Any]:
        """List the functions and modules that still exist."""
        return [one for reference in self.callables if (one := reference()) is not None]

    def has(self, callables: Iterable[Any]) -> bool:
        """Whether one of these was captured for it."""
        own = {id(one) for one in self.alive()}
        return any(id(one) in own for one in callables)


_sessions: weakref.WeakKeyDictionary[Session, CompiledSession] = weakref.WeakKeyDictionary()
_listeners: weakref.WeakKeyDictionary[Session, Any] = weakref.WeakKeyDictionary()


def sessions() -> list[tuple[Session, CompiledSession]]:
    """List the sessions that exist, latest first."""
    return [*_sessions.items()][::-1]


def begin(session: Session, key: Key) -> CompiledSession:
    """Remember a session."""
    _sessions[session] = CompiledSession(key)
    _listeners[session] = listen_to_optimizers(session)
    return _sessions[session]


def session_of(code: Any) -> Session | None:
    """Find the session of a function or a module that was compiled, or of what a module consists of."""
    code = compiled_by_torch.original(code)
    own = {id(p) for p in code.parameters()} if isinstance(code, nn.Module) else set()
    for session, known in sessions():
        is_its = known.has([code]) or any(id(p) in own for p in session.root.parameters())
        if is_its and not known.is_removed:
            return session
    return None


def remove(session: Session) -> None:
    """Stop planning all that shares a session; what is captured of it runs as it was written."""
    _sessions[session].is_removed = True
    _listeners.pop(session).remove()
    session.close()


def _has_weak(found: Any) -> bool:
    """Whether an object can be referred to without keeping it alive."""
    try:
        weakref.ref(found)
    except TypeError:
        return False
    return type(found).__name__ != "method"  # made anew each time it is looked up; its object stays
