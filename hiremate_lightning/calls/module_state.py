"""What a call of a module reads beside its arguments, as it was when the call began.

That is: attributes of the module, of the modules below it, and of the objects that these hold; what is in their lists
and dictionaries; attributes of their classes; global names and variables of functions that their code reads, and code,
defaults and attributes of these functions; generators of random numbers; and tensors. `places` says how each of them is
kept and put back.
"""

from __future__ import annotations

import random
import threading
import weakref
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import HiRemateError
from ..measuring.outside import Outside, contents_of, is_code, is_of_library
from ..objects import attributes_of, held_by, is_of
from ..torch_private import hooks, tensor_state
from .given import PLAIN_DATA
from .places import (
    AttributesPlace,
    CellPlace,
    ContextPlace,
    DictPlace,
    DrawnPlace,
    FunctionsPlace,
    HooksPlace,
    ItemsPlace,
    KindPlace,
    NamesPlace,
    Numbers,
    Place,
    RequiresGradientPlace,
    SetPlace,
    drawn,
    in_slots,
    slots_of,
)
from .slots import is_ours

MOST_THINGS, THINGS_PER_MODULE = 16384, 64  # to look at, of which most are plain data
LARGEST_ARRAY = 2**16  # bytes of a NumPy array of which a copy is kept
_PLAIN = frozenset(PLAIN_DATA)
_HOLDING = (  # classes of Python's own library whose objects hold what others put there
    *(SimpleNamespace, Namespace, UserDict, UserList, ChainMap),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class UnknownStateError(Exception):
    """A module reads what can't be kept for a second call."""


class ModuleState:
    """What a call of a module reads, as it is when this is made.

    Args:
        module: The module.
        outside: Finds what functions and classes read outside.

    Raises:
        UnknownStateError: If there is too much of it, or something that can be read only once.
    """

    def __init__(self, module: nn.Module, outside: Callable[[frozenset[Any]], Outside]) -> None:
        self._module, self._outside = module, outside
        self._places, self._tensors = list[Place](), list[torch.Tensor]()
        self._modules, self._hooks = list[nn.Module](), list[dict[int, Any]]()
        self._seen, self._stack, self._count = set[int](), list[Any](), 0
        self._code, self._classes, self._named = dict[Any, None](), set[type](), dict[int, int]()
        self._functions = dict[FunctionType, None]()
        self._add = self._places.append
        self._gather()
        self._settings, self._function_modes = tensor_state.settings(), tensor_state.function_modes()
        self._other_settings = tensor_state.apart_from_function_modes()
        self._add(RequiresGradientPlace(self._tensors))
        self._numbers = Numbers(self._tensors)

    # ---------------------------------------------------------------- whether it changed

    def has_changed(self) -> bool:
        """Whether anything is other than it was."""
        if self._settings != tensor_state.settings() or self._numbers.changed() is not None:
            return True
        with self._slots_away():
            return not all(place.is_as_it_was() or place.is_equal() for place in self._places)

    def check(self, path: str) -> None:
        """Check that what can't be put back is as it was.

        Args:
            path: Of the module.

        Raises:
            HiRemateError: If it is not.
        """
        tensor = self._numbers.changed()
        if tensor is not None:
            raise HiRemateError(
                f"{self._name_of(tensor)} of module {path!r} was changed between the call and its backward, which it "
                "was not in earlier steps, so that the module can't be computed again. Change it after the backward."
            )
        if tensor_state.apart_from_function_modes() != self._other_settings:
            raise HiRemateError(
                f"Module {path!r} can't be computed again: settings of PyTorch (sdpa_kernel, torch.backends, a "
                "dispatch mode) are others in the backward than in the call, which they were not in earlier "
                "steps. Put the call and the backward into one `with` block."
            )

    def _name_of(self, tensor: torch.Tensor) -> str:
        named = (("Parameter", self._module.named_parameters()), ("Buffer", self._module.named_buffers()))
        names = (f"{kind} {name!r}" for kind, own in named for name, value in own if value is tensor)
        return next(names, f"A tensor of shape {tuple(tensor.shape)} among the attributes")

    # ---------------------------------------------------------------- putting it back

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Put everything back as it was in the first call, and undo that afterwards."""
        with self._slots_away(), tensor_state.in_function_modes(self._function_modes):
            changed = {place: place.read() for place in self._places if not place.is_as_it_was()}
            try:
                for place in changed:
                    place.write(place.kept)
                yield
            finally:
                for place in reversed(self._places):
                    if place in changed:
                        place.write(changed[place])
                    elif not place.is_as_it_was():
                        place.write(place.kept)

    @contextmanager
    def _slots_away(self) -> Iterator[None]:
        """Take away for a while what of ours stands in for the calls of modules."""
        slots = [(module, slot) for module in self._modules if is_ours(slot := hooks.get_call(module))]
        for module, _ in slots:
            hooks.set_call(module, None)
        try:
            yield
        finally:
            for module, slot in slots:
                hooks.set_call(module, slot)

    # ---------------------------------------------------------------- the places

    def _gather(self) -> None:
        self._generators()
        self._stack.append(self._module)
        self._walk()
        code = frozenset[Any]()
        while code != (code := frozenset(self._code)):  # what it reads outside may use more code
            self._visit_outside(self._outside(code))
            self._walk()
        self._add(FunctionsPlace(list(self._functions)))
        self._add(HooksPlace([*hooks.hooks_of_all_modules(), *self._hooks]))

    def _walk(self) -> None:
        """Visit all that waits to be, and what these hold."""
        most = MOST_THINGS + THINGS_PER_MODULE * len(self._modules)
        seen, stack = self._seen, self._stack
        while stack:
            value = stack.pop()
            self._count += 1
            if type(value) in _PLAIN or id(value) in seen:
                continue
            if self._count + len(stack) > most:
                raise UnknownStateError("it reads too much beside its arguments")
            seen.add(id(value))
            self._visit(value)

    def _generators(self) -> None:
        """Note the generators that torch.utils.checkpoint does not put back, and any code may draw from."""
        self._add(DrawnPlace(random.getstate, random.setstate))
        self._add(DrawnPlace(np.random.get_state, np.random.set_state))

    def _visit(self, value: Any) -> None:
        if is_of(value, torch.Tensor):
            self._tensors.append(value)
        elif is_of(value, nn.Module):
            self._visit_module(value)
        elif is_of(value, (dict, list, deque, tuple, set, frozenset)):
            self._visit_container(value)
        elif is_code(value):
            self._visit_code(value)
        elif is_of(value, Iterator):
            raise UnknownStateError("it reads an iterator")
        elif is_of(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
            self._add(drawn(value))
        elif is_of(value, np.ndarray):
            self._visit_array(value)
        elif is_of(value, weakref.ref):
            self._stack.append(value())
        elif is_of(value, threading.local):
            self._visit_attributes(AttributesPlace(value, partial(vars, value)))
        elif is_of(value, ContextVar):
            self._visit_context(value)
        elif is_of(value, _HOLDING) or not (is_of(value, ModuleType) or is_of_library(type(value))):
            self._visit_object(value)

    def _visit_module(self, module: nn.Module) -> None:
        self._modules.append(module)
        own = DictPlace(vars(module), besides=hooks.CALL_SLOT if is_ours(hooks.get_call(module)) else None)
        self._places += [own, KindPlace(module)]
        if keeps_statistics(module):
            buffers = hooks.buffers_of(module)
            self._add(DictPlace(buffers))
            self._seen.update(map(id, (buffers, *buffers.values())))
        self._hooks += hooks.hooks_of(module)
        self._stack += [value for name, value in own.kept.items() if name not in hooks.OWN_ATTRIBUTES]
        self._stack.append(type(module))

    def _visit_code(self, code: Any) -> None:
        """Note code that an attribute holds, or whose methods an object has."""
        if is_of(code, MethodType):
            self._stack += [code.__self__, code.__func__]
        elif is_of(code, partial):
            self._stack += [code.func, *code.args, code.keywords]
        elif not is_of_library(code):
            self._code[code] = None

    def _visit_container(self, value: Any) -> None:
        kind = type(value)
        if is_of(value, dict):
            self._add(DictPlace(value))
        elif is_of(value, (list, deque)):
            self._add(ItemsPlace(value))
        elif is_of(value, set):
            self._add(SetPlace(value))
        self._stack += held_by(value)
        if kind.__module__ not in ("builtins", "collections"):
            self._visit_object(value)

    def _visit_object(self, value: Any) -> None:
        own = attributes_of(value)
        self._add(DictPlace(own))  # even if there are none yet: one may come to stand before one of the class
        self._stack += own.values()
        if slots_of(type(value)):
            place = AttributesPlace(value, partial(in_slots, value))
            self._add(place)
            self._stack += place.kept.values()
        self._stack.append(type(value))

    def _visit_context(self, variable: ContextVar[Any]) -> None:
        try:
            place = ContextPlace(variable)
        except LookupError:
            raise UnknownStateError("it reads a context variable without a value") from None
        self._add(place)
        self._stack.append(place.kept)

    def _visit_outside(self, outside: Outside) -> None:
        if not outside.is_whole:
            raise UnknownStateError("it runs too much code")
        for namespace, names in outside.names:
            if self._named.get(id(namespace)) != len(names):
                self._named[id(namespace)] = len(names)
                self._visit_attributes(NamesPlace(namespace, names))
        for kind in outside.classes.keys() - self._classes:
            self._classes.add(kind)
            self._visit_attributes(AttributesPlace(kind, partial(vars, kind)))
        self._functions |= outside.functions
        for cell in outside.cells:
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._add(CellPlace(cell))
                self._stack.append(contents_of(cell))
        self._stack += outside.values

    def _visit_attributes(self, place: NamesPlace | AttributesPlace) -> None:
        """Visit the data among what was found outside: of the code there, `outside` has found what it names."""
        self._add(place)
        if isinstance(place, NamesPlace):
            self._stack += [value for value in place.kept if not is_code(value)]
        else:
            own = (value for name, value in place.kept.items() if not name.startswith("__"))
            self._stack += [value for value in own if type(value) not in _PLAIN and not is_code(value)]

    def _visit_array(self, array: np.ndarray[Any, Any]) -> None:
        if array.nbytes > LARGEST_ARRAY:
            raise UnknownStateError("it reads a large NumPy array")
        self._add(DrawnPlace(array.copy, partial(np.copyto, array)))


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module is a batch norm of PyTorch's own in training."""
    return type(module) in _BATCH_NORMS and module.training
