"""What a call of a module reads beside its arguments, as it was when the call began.

That is: attributes of the module, of the modules below it, and of the objects that these hold; what is in their lists
and dictionaries; attributes of their classes; global names and variables of functions that their code reads; generators
of random numbers; and tensors. Each place that can change is noted with a copy of what it refers to. No tensor is
copied: its version and its storage show whether its numbers are still there.
"""

from __future__ import annotations

import random
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import is_
from types import CellType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from ..errors import HiRemateError
from ..measuring.outside import Outside, contents_of, is_code, is_of_library
from ..objects import attempt, attributes_of, held_by, is_of
from ..torch_private import hooks, tensor_state
from .given import PLAIN_DATA
from .slots import is_ours

MOST_THINGS, THINGS_PER_MODULE = 16384, 64  # to look at, of which most are plain data
LARGEST_ARRAY = 2**16  # bytes of a NumPy array of which a copy is kept
_PLAIN = frozenset(PLAIN_DATA)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_MISSING = object()


class UnknownStateError(Exception):
    """A module reads what can't be kept for a second call."""


class _Place(Protocol):
    """Something that can change, with what it was."""

    def is_as_it_was(self) -> bool:
        """Whether it holds the very same things."""

    def is_equal(self) -> bool:
        """Whether it holds the same things, or plain data that is equal."""

    def now(self) -> _Place:
        """Note what it is now."""

    def put(self) -> None:
        """Make it what it was."""


class _Dict:
    """A dictionary: of attributes, for the most part. What classes of users make of it is passed by."""

    __slots__ = ("_holder", "kept")

    def __init__(self, holder: dict[Any, Any], besides: str | None = None) -> None:
        self._holder, self.kept = holder, dict(dict.items(holder))
        if besides is not None:
            self.kept.pop(besides, None)

    def is_as_it_was(self) -> bool:
        return _are_same_dicts(self._holder, self.kept)

    def is_equal(self) -> bool:
        kept, now = self.kept, self.now().kept
        return list(kept) == list(now) and all(map(_are_equal, kept.values(), now.values()))

    def now(self) -> _Dict:
        return _Dict(self._holder)

    def put(self) -> None:
        own = OrderedDict if is_of(self._holder, OrderedDict) else dict
        own.clear(self._holder)
        own.update(self._holder, self.kept)


class _Items:
    """A list or a deque."""

    __slots__ = ("_holder", "kept")

    def __init__(self, holder: Any) -> None:
        self._holder, self.kept = holder, tuple(held_by(holder))

    def is_as_it_was(self) -> bool:
        now = held_by(self._holder)
        return len(self.kept) == len(now) and all(map(is_, self.kept, now))

    def is_equal(self) -> bool:
        now = held_by(self._holder)
        return len(self.kept) == len(now) and all(map(_are_equal, self.kept, now))

    def now(self) -> _Items:
        return _Items(self._holder)

    def put(self) -> None:
        own: Any = deque if is_of(self._holder, deque) else list
        own.clear(self._holder)
        own.extend(self._holder, self.kept)


class _Set:
    """A set."""

    __slots__ = ("_holder", "kept")

    def __init__(self, holder: set[Any]) -> None:
        self._holder, self.kept = holder, tuple(held_by(holder))

    def is_as_it_was(self) -> bool:
        return {*map(id, self.kept)} == {*map(id, held_by(self._holder))}

    def is_equal(self) -> bool:
        return self.is_as_it_was() or set(held_by(self._holder)) == set(self.kept)

    def now(self) -> _Set:
        return _Set(self._holder)

    def put(self) -> None:
        set.clear(self._holder)
        set.update(self._holder, self.kept)


class _Names:
    """Names of a global namespace."""

    __slots__ = ("_holder", "_names", "kept")

    def __init__(self, holder: dict[str, Any], names: tuple[str, ...]) -> None:
        self._holder, self._names, self.kept = holder, names, tuple([holder.get(name, _MISSING) for name in names])

    def is_as_it_was(self) -> bool:
        holder = self._holder
        return all(map(is_, self.kept, [holder.get(name, _MISSING) for name in self._names]))

    def is_equal(self) -> bool:
        return all(map(_are_equal, self.kept, self.now().kept))

    def now(self) -> _Names:
        return _Names(self._holder, self._names)

    def put(self) -> None:
        for name, value in zip(self._names, self.kept, strict=True):
            if value is not _MISSING:
                self._holder[name] = value
            else:
                self._holder.pop(name, None)


class _Attributes:
    """Attributes of a class, or those of an object that are in slots.

    Args:
        holder: The class or the object.
        read: Reads them, by name.
    """

    __slots__ = ("_holder", "_read", "kept")

    def __init__(self, holder: Any, read: Callable[[], Mapping[str, Any]]) -> None:
        self._holder, self._read, self.kept = holder, read, dict(read())

    def is_as_it_was(self) -> bool:
        now = self._read()
        return len(now) == len(self.kept) and all(map(is_, self.kept.values(), now.values()))

    def is_equal(self) -> bool:
        now = self._read()
        return now.keys() == self.kept.keys() and all(_are_equal(now[name], self.kept[name]) for name in now)

    def now(self) -> _Attributes:
        return _Attributes(self._holder, self._read)

    def put(self) -> None:
        now = dict(self._read())
        for name in now.keys() - self.kept.keys():
            delattr(self._holder, name)
        for name, value in self.kept.items():
            if now.get(name, _MISSING) is not value:
                setattr(self._holder, name, value)


class _Cell:
    """A variable of a function around another one."""

    __slots__ = ("_holder", "kept")

    def __init__(self, holder: CellType) -> None:
        self._holder, self.kept = holder, contents_of(holder)

    def is_as_it_was(self) -> bool:
        return contents_of(self._holder) is self.kept

    def is_equal(self) -> bool:
        return _are_equal(contents_of(self._holder), self.kept)

    def now(self) -> _Cell:
        return _Cell(self._holder)

    def put(self) -> None:
        self._holder.cell_contents = self.kept


class _Kind:
    """The class of a module, which parametrizations and adapters change."""

    __slots__ = ("_holder", "kept")

    def __init__(self, holder: Any) -> None:
        self._holder, self.kept = holder, type(holder)

    def is_as_it_was(self) -> bool:
        return type(self._holder) is self.kept

    is_equal = is_as_it_was

    def now(self) -> _Kind:
        return _Kind(self._holder)

    def put(self) -> None:
        self._holder.__class__ = self.kept


class _Hooks:
    """The hooks of modules: few have any, so all are looked at in one go."""

    __slots__ = ("_holders", "kept")

    def __init__(self, holders: list[dict[int, Any]]) -> None:
        self._holders, self.kept = holders, [dict(holder) for holder in holders] if any(holders) else None

    def is_as_it_was(self) -> bool:
        if self.kept is None:
            return not any(self._holders)
        return all(map(_are_same_dicts, self._holders, self.kept))

    is_equal = is_as_it_was

    def now(self) -> _Hooks:
        return _Hooks(self._holders)

    def put(self) -> None:
        for holder, kept in zip(self._holders, self.kept or repeat({}), strict=False):
            holder.clear()
            holder.update(kept)


class _Drawn:
    """A generator of random numbers, or an array, with functions that read and write what it holds."""

    __slots__ = ("_read", "_write", "kept")

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self._read, self._write, self.kept = read, write, read()

    def is_as_it_was(self) -> bool:
        return _is_same_state(self._read(), self.kept)

    is_equal = is_as_it_was

    def now(self) -> _Drawn:
        return _Drawn(self._read, self._write)

    def put(self) -> None:
        self._write(self.kept)


class _RequiresGradient:
    """Whether gradients of tensors are computed; only that of what no code has computed can be changed."""

    __slots__ = ("_tensors", "kept")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors, self.kept = tensors, [tensor.requires_grad for tensor in tensors]

    def is_as_it_was(self) -> bool:
        return [tensor.requires_grad for tensor in self._tensors] == self.kept

    is_equal = is_as_it_was

    def now(self) -> _RequiresGradient:
        return _RequiresGradient(self._tensors)

    def put(self) -> None:
        for tensor, kept in zip(self._tensors, self.kept, strict=True):
            if tensor.requires_grad is not kept and tensor.is_leaf:
                tensor.requires_grad_(kept)


class Numbers:
    """Whether tensors still hold the numbers that they held."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors, self._versions = tensors, tensor_state.versions_of(tensors)
        self._storages = tensor_state.storages_of(tensors)  # kept, so that no other one gets the identity of one

    def changed(self) -> torch.Tensor | None:
        """Return a tensor that was changed in place, or has other memory; None where there is none."""
        versions, storages = tensor_state.versions_of(self._tensors), tensor_state.storages_of(self._tensors)
        if versions == self._versions and all(map(is_, storages, self._storages)):
            return None
        now = zip(self._tensors, versions, storages, strict=True)
        kept = zip(self._versions, self._storages, strict=True)
        for (tensor, version, storage), (version_before, storage_before) in zip(now, kept, strict=True):
            if version != version_before or storage is not storage_before:
                return tensor
        return None


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
        self._places, self._tensors = list[_Place](), list[torch.Tensor]()
        self._modules, self._hooks = list[nn.Module](), list[dict[int, Any]]()
        self._seen, self._stack, self._count = set[int](), list[Any](), 0
        self._code, self._classes, self._named = dict[Any, None](), set[type](), dict[int, int]()
        self._add = self._places.append
        self._gather()
        self._settings, self._function_modes = tensor_state.settings(), tensor_state.function_modes()
        self._other_settings = tensor_state.apart_from_function_modes()
        self._add(_RequiresGradient(self._tensors))
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
            places = [(place, None if place.is_as_it_was() else place.now()) for place in self._places]
            try:
                for place, now in places:
                    if now is not None:
                        place.put()
                yield
            finally:
                for place, now in reversed(places):
                    if now is not None:
                        now.put()
                    elif not place.is_as_it_was():
                        place.put()

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
        self._add(_Hooks([*hooks.hooks_of_all_modules(), *self._hooks]))

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
        self._add(_Drawn(random.getstate, random.setstate))
        self._add(_Drawn(np.random.get_state, np.random.set_state))

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
            self._add(_drawn(value))
        elif is_of(value, np.ndarray):
            self._visit_array(value)
        elif is_of(value, weakref.ref):
            self._stack.append(value())
        elif is_of(value, SimpleNamespace) or not (is_of(value, ModuleType) or is_of_library(type(value))):
            self._visit_object(value)

    def _visit_module(self, module: nn.Module) -> None:
        self._modules.append(module)
        own = _Dict(vars(module), besides=hooks.CALL_SLOT if is_ours(hooks.get_call(module)) else None)
        self._places += [own, _Kind(module)]
        if keeps_statistics(module):
            buffers = hooks.buffers_of(module)
            self._add(_Dict(buffers))
            self._seen.update(map(id, (buffers, *buffers.values())))
        self._hooks += hooks.hooks_of(module)
        self._stack += [value for name, value in own.kept.items() if name not in hooks.OWN_ATTRIBUTES]
        self._stack.append(type(module))

    def _visit_code(self, code: Any) -> None:
        """Note code that an attribute holds, or whose methods an object has."""
        if is_of(code, MethodType):
            self._stack += [code.__self__, code.__func__]
        elif is_of(code, partial):
            self._stack += [code.func, *code.args, *code.keywords.values()]
        elif not is_of_library(code):
            self._code[code] = None

    def _visit_container(self, value: Any) -> None:
        kind = type(value)
        if is_of(value, dict):
            self._add(_Dict(value))
        elif is_of(value, (list, deque)):
            self._add(_Items(value))
        elif is_of(value, set):
            self._add(_Set(value))
        self._stack += held_by(value)
        if kind.__module__ not in ("builtins", "collections"):
            self._visit_object(value)

    def _visit_object(self, value: Any) -> None:
        own = attributes_of(value)
        if own:
            self._add(_Dict(own))
            self._stack += own.values()
        if _slots_of(type(value)):
            place = _Attributes(value, partial(_in_slots, value))
            self._add(place)
            self._stack += place.kept.values()
        self._stack.append(type(value))

    def _visit_outside(self, outside: Outside) -> None:
        if not outside.is_whole:
            raise UnknownStateError("it runs too much code")
        for namespace, names in outside.names:
            if self._named.get(id(namespace)) != len(names):
                self._named[id(namespace)] = len(names)
                self._visit_attributes(_Names(namespace, names))
        for kind in outside.classes.keys() - self._classes:
            self._classes.add(kind)
            self._visit_attributes(_Attributes(kind, partial(vars, kind)))
        for cell in outside.cells:
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._add(_Cell(cell))
                self._stack.append(contents_of(cell))
        self._stack += outside.values

    def _visit_attributes(self, place: _Names | _Attributes) -> None:
        """Visit the data among what was found outside: of the code there, `outside` has found what it names."""
        self._add(place)
        if isinstance(place, _Names):
            self._stack += [value for value in place.kept if not is_code(value)]
        else:
            own = (value for name, value in place.kept.items() if not name.startswith("__"))
            self._stack += [value for value in own if type(value) not in _PLAIN and not is_code(value)]

    def _visit_array(self, array: np.ndarray[Any, Any]) -> None:
        if array.nbytes > LARGEST_ARRAY:
            raise UnknownStateError("it reads a large NumPy array")
        self._add(_Drawn(array.copy, partial(np.copyto, array)))


def _are_same_dicts(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two dictionaries have the very same things, in the same order."""
    if dict.__len__(one) != dict.__len__(other):
        return False
    pairs = zip(dict.items(one), dict.items(other), strict=True)
    return all(value is other_value and name == other_name for (name, value), (other_name, other_value) in pairs)


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module is a batch norm of PyTorch's own in training."""
    return type(module) in _BATCH_NORMS and module.training


def _slots_of(kind: type) -> tuple[str, ...]:
    names = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    return tuple(name for own in names for name in ([own] if isinstance(own, str) else own))


def _in_slots(value: Any) -> dict[str, Any]:
    names = [name for name in _slots_of(type(value)) if not name.startswith("__")]
    nothing: list[tuple[str, Any]] = []
    found = attempt(
        lambda: [(name, getattr(value, name, _MISSING)) for name in names],
        nothing,
        f"the slots of {type(value).__name__}",
    )
    return {name: own for name, own in found if own is not _MISSING}


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two things are one, or equal plain data."""
    return one is other or (type(one) is type(other) and type(one) in _PLAIN and bool(one == other))


def _drawn(generator: Any) -> _Drawn:
    """Note what a generator of random numbers holds."""
    if isinstance(generator, torch.Generator):
        return _Drawn(generator.get_state, generator.set_state)
    if isinstance(generator, random.Random):
        return _Drawn(generator.getstate, generator.setstate)
    if isinstance(generator, np.random.RandomState):
        return _Drawn(generator.get_state, generator.set_state)
    bits = generator.bit_generator
    return _Drawn(lambda: bits.state, lambda state: setattr(bits, "state", state))


def _is_same_state(one: Any, other: Any) -> bool:
    """Whether two states of a generator, or two arrays, are the same, bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return one is other or (len(one) == len(other) and all(map(_is_same_state, one, other)))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same_state(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    return bool(one == other)
