"""What code reads beside its arguments: global names, variables of functions around it, and attributes of classes.

A call of a module runs its `forward` and what that names, wherever it is: functions, and of all classes at hand the
methods of that name. Other methods are left out: those of large libraries read almost anything.
"""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Iterable, Iterator
from functools import cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ..objects import attempt, attributes_of, is_of

# Libraries whose own data no result depends on, and this one, whose data is about the step.
_LIBRARIES = frozenset({"torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric", "hiremate_lightning"})
_LIBRARIES |= sys.stdlib_module_names
_MOST_CODE = 4096  # functions to look through
_MAKING = ("__init__", "__new__", "__post_init__")
_CALLED_BY_PYTHON = frozenset(  # beside operators, which seldom read anything outside
    f"__{name}__" for name in ("call", "getattr", "getitem", "iter", "len", "contains", "bool", "enter", "exit")
)


class Outside:
    """What a call reads outside.

    Args:
        code: Functions that it calls, and classes of the modules and objects that it uses.

    Attributes:
        names: The global names, by the namespace that they are in.
        classes: The classes whose attributes it reads.
        cells: Variables of the functions around it.
        values: Default values of arguments, attributes of functions, and objects whose methods it calls.
        is_whole: Whether all code was looked through.
    """

    def __init__(self, code: Iterable[Any]) -> None:
        self.classes, self.cells, self.values = dict[type, None](), list[CellType](), list[Any]()
        self._names, self._spaces = {"forward"}, dict[int, tuple[dict[str, Any], dict[str, None]]]()
        self._functions = 0  # that were looked through
        self._made = set[type]()
        self._seen, self._stack = set[int](), list(code)
        self.is_whole = self._follow()

    @property
    def names(self) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
        """The global names, by the namespace that they are in."""
        return [(space, tuple(names)) for space, names in self._spaces.values()]

    def _follow(self) -> bool:
        while self._stack:
            while self._stack:
                self._take(self._stack.pop())
                if self._functions > _MOST_CODE:
                    return False
            for kind in self.classes:
                self._stack += [code for code in self._methods_of(kind) if id(code) not in self._seen]
        return True

    def _methods_of(self, kind: type) -> Iterator[Any]:
        """Yield the methods of a class that code names, or Python calls by itself."""
        for name, value in list(vars(kind).items()):
            if name in _MAKING:
                is_called = kind in self._made
            elif name.startswith("__") and name.endswith("__"):
                is_called = name in _CALLED_BY_PYTHON
            else:
                is_called = name in self._names
            if is_called and is_code(value) and not is_of(value, type):
                yield value

    def _take(self, code: Any) -> None:
        """Examine a code object, once."""
        if id(code) in self._seen:
            return
        self._seen.add(id(code))
        if not is_code(code) or is_of_library(code):
            return
        if is_of(code, type):
            bases = (*code.__mro__, *type(code).__mro__)  # those of its metaclass too
            self.classes |= dict.fromkeys(base for base in bases if not is_of_library(base))
        elif is_of(code, FunctionType):
            self._take_function(code)
        elif is_of(code, property):
            self._stack += [code.fget, code.fset]
        elif is_of(code, partial):
            self.values += [*code.args, *code.keywords.values()]
            self._stack += [code.func, *code.args]
        elif is_of(code, MethodType):
            self.values.append(code.__self__)
            self._stack += [code.__func__, type(code.__self__)]
        else:
            self._stack += [getattr(code, "__func__", None), attributes_of(code).get("__wrapped__")]

    def _take_function(self, function: FunctionType) -> None:
        self._functions += 1
        space = function.__globals__
        names, attributes = _names_in(function.__code__)
        self._names |= attributes
        modules = _imported_by(function, attributes)
        for name in names:
            value: Any = space.get(name)
            if is_of(value, ModuleType):
                modules.append(value)
            else:
                self._note(space, name)
        self._take_from_modules(modules, attributes)
        self.cells += function.__closure__ or ()
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self.values += [*defaults, *vars(function).values()]
        for value in (*map(contents_of, function.__closure__ or ()), *defaults):
            self._read(value)

    def _take_from_modules(self, modules: list[ModuleType], attributes: set[str]) -> None:
        seen = set[int]()
        while modules:
            module = modules.pop()
            if id(module) in seen or is_of_library(module):
                continue
            seen.add(id(module))
            for name in attributes & vars(module).keys():
                value = vars(module)[name]
                if is_of(value, ModuleType):
                    modules.append(value)
                else:
                    self._note(vars(module), name)

    def _note(self, space: dict[str, Any], name: str) -> None:
        """Record a global name, and examine the function that it names now."""
        self._spaces.setdefault(id(space), (space, {}))[1][name] = None
        self._read(space.get(name))

    def _read(self, value: Any) -> None:
        if is_of(value, type):
            self._made.add(value)
            self._made.update(value.__mro__)
        self._stack.append(value)


def is_code(value: Any) -> bool:
    """Whether a value is a function, a class, or what is made of these for a class."""
    kinds = type, FunctionType, MethodType, staticmethod, classmethod, property, partial
    return is_of(value, kinds) or "__wrapped__" in attributes_of(value)


def is_of_library(value: Any) -> bool:
    """Whether a class, a function or a module belongs to a library whose own data no result depends on."""
    asked = "__name__" if is_of(value, ModuleType) else "__module__"
    name = attempt(lambda: getattr(value, asked, None), None, f"the name of {type(value).__name__}")
    return is_name_of_library(name)


def is_name_of_library(name: Any) -> bool:
    """Whether a module of that name belongs to such a library."""
    return type(name) is str and name.partition(".")[0] in _LIBRARIES


def contents_of(cell: CellType) -> Any:
    """Return the value of a variable of a function around another one, None where it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@cache
def _names_in(code: CodeType) -> tuple[set[str], set[str]]:
    """Return the global names, and all names, that code has, with the code inside of it."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    names, attributes = names - vars(builtins).keys(), set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner, others = _names_in(constant)
            names, attributes = names | inner, attributes | others
    return names, attributes


def _imported_by(function: FunctionType, names: set[str]) -> list[ModuleType]:
    """List the modules that a function imports when it runs, as far as names tell."""
    if not any(step.opname == "IMPORT_NAME" for step in dis.get_instructions(function.__code__)):
        return []
    package = function.__globals__.get("__package__")
    paths = [*names, *(f"{package}.{name}" for name in names)] if package else names
    found: list[Any] = [sys.modules.get(path) for path in paths]
    return [module for module in found if is_of(module, ModuleType)]
