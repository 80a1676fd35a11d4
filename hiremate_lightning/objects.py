"""Reads the items and attributes of users' objects without running their code.

A user's class may do anything in `__len__`, `__iter__`, `__eq__`, `__getattribute__` or a property: raise, return an
array, take long, change something. So an object is read by the methods of Python's own classes only, and known by its
type, not by its `__class__`. If there is no way but to run a user's code, and that raises, the object is left alone:
`attempt` logs this once for each place, at debug level.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from .housekeeping import Once, log

_log_once = Once(partial(log.debug, exc_info=True))

_T = TypeVar("_T")
_ITEMS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (dict, dict.values),
    (list, list.__iter__),
    (tuple, tuple.__iter__),
    (set, set.__iter__),
    (frozenset, frozenset.__iter__),
    (deque, deque.__iter__),
)


def is_of(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether the type of an object is one of some classes, or a subclass; `isinstance` would run the object's code."""
    return issubclass(type(value), kinds)


def held_by(value: Any) -> list[Any]:
    """List the items of a container, and the attributes of any other object."""
    items = next((items for kind, items in _ITEMS if is_of(value, kind)), None)
    return list(dict.values(attributes_of(value))) if items is None else list(items(value))


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the `__dict__` of an object; an empty one for an object without."""

    def read() -> Any:
        try:
            return object.__getattribute__(value, "__dict__")
        except AttributeError:
            return None

    attributes = attempt(read, None, f"the attributes of {type(value).__name__}")
    return attributes if is_of(attributes, dict) else {}


def attempt(look: Callable[[], _T], otherwise: _T, what: str) -> _T:
    """Return what `look` reads of a user's object, or `otherwise` if it raises; log that once, with `what`."""
    try:
        return look()
    except Exception as error:  # whatever a user's code raises
        _log_once("%s is left alone, since a look at it fails: %s", what, type(error).__name__, topic=what)
        return otherwise


def parameters_of(optimizer: Any) -> list[Any]:
    """List the parameters in the groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
