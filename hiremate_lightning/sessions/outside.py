"""What code reads beside its arguments: global names, variables of functions around it, and attributes of classes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ..objects import is_of

_LIBRARIES = frozenset({"torch", "numpy", *sys.stdlib_module_names})  # whose own data no result depends on
_CODE = (type, FunctionType, MethodType, staticmethod, classmethod, property)
_MOST_CODE = 2048  # functions and classes to look through

Place = Callable[[], Any]  # returns what is there now


def data_read_by(kind: type) -> list[Place]:
    """Find the places of data that the methods of a class read outside, and all code that they name."""
    found, seen, stack = list[Place](), set[int](), list[Any]([kind])
    while stack and len(seen) < _MOST_CODE:
        code = stack.pop()
        if id(code) in seen or str(getattr(code, "__module__", None)).partition(".")[0] in _LIBRARIES:
            continue
        seen.add(id(code))
        for place in _places_in(code):
            value = place()
            if is_of(value, _CODE):
                stack.append(value)
            elif not is_of(value, ModuleType):
                found.append(place)
    return found


def _places_in(code: Any) -> Iterator[Place]:
    """List what code names itself."""
    if is_of(code, type):
        own = vars(code)
        yield from (_in(own, name) for name in own if not name.startswith("__"))
        yield from (_always(base) for base in code.__mro__[1:])
    elif is_of(code, FunctionType):
        names = set(_names_in(code.__code__))
        spaces = [code.__globals__]
        spaces += [vars(v) for n in names if is_of(v := code.__globals__.get(n), ModuleType) and _is_own(v)]
        yield from (_in(space, name) for space in spaces for name in names & space.keys())
        yield from (_in_cell(cell) for cell in code.__closure__ or ())
        yield from map(_always, (*(code.__defaults__ or ()), *(code.__kwdefaults__ or {}).values()))
    elif is_of(code, property):
        yield _always(code.fget)
    else:
        yield from (_always(code.__func__), _always(getattr(code, "__self__", None)))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_own(module: ModuleType) -> bool:
    return str(getattr(module, "__name__", "")).partition(".")[0] not in _LIBRARIES


def _in(space: Any, name: str) -> Place:
    return lambda: space.get(name)


def _in_cell(cell: CellType) -> Place:
    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # it has no value yet
            return None

    return read


def _always(value: Any) -> Place:
    return lambda: value
