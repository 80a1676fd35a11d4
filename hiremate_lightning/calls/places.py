"""Places that a module's call reads and that can change: each notes what it refers to, and can be made to again.

No tensor is copied: its version and its storage show whether its numbers are still there.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from operator import is_
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch

from ..measuring.outside import contents_of
from ..objects import attempt, held_by, is_of
from ..torch_private import tensor_state
from .given import PLAIN_DATA

_PLAIN = frozenset(PLAIN_DATA)
_MISSING = object()


class Place(ABC):
    """Something that can change.

    Attributes:
        kept: What it referred to when this was made: a dictionary by name, a tuple of items, or one thing.
    """

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: Any = self._read()

    @abstractmethod
    def _read(self) -> Any:
        """Return what it refers to now, in the form of `kept`."""

    @abstractmethod
    def _write(self, value: Any) -> None:
        """Make it refer to that."""

    def read(self) -> Any:
        """Return what it refers to now, for `write`."""
        return self._read()

    def write(self, value: Any) -> None:
        """Make it refer to what was read from it."""
        self._write(value)

    def is_as_it_was(self) -> bool:
        """Whether it refers to the very same things."""
        return self._matches(is_)

    def is_equal(self) -> bool:
        """Whether it refers to the same things, or to plain data that is equal."""
        return self._matches(_are_equal)

    def _matches(self, are_alike: Callable[[Any, Any], bool]) -> bool:
        return _match(self.kept, self._read(), are_alike)


class DictPlace(Place):
    """A dictionary: of attributes, for the most part. What classes of users make of it is passed by.

    Args:
        holder: The dictionary.
        besides: A name that is left out.
    """

    __slots__ = ("_holder",)

    def __init__(self, holder: dict[Any, Any], besides: str | None = None) -> None:
        self._holder = holder
        super().__init__()
        self.kept.pop(besides, None)

    def _read(self) -> dict[Any, Any]:
        return dict(dict.items(self._holder))

    def _write(self, value: dict[Any, Any]) -> None:
        own = OrderedDict if is_of(self._holder, OrderedDict) else dict
        own.clear(self._holder)
        own.update(self._holder, value)

    def _matches(self, are_alike: Callable[[Any, Any], bool]) -> bool:
        return _match(self.kept, self._holder, are_alike)  # without a copy: most places are dictionaries


class ItemsPlace(Place):
    """A list or a deque."""

    __slots__ = ("_holder",)

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        super().__init__()

    def _read(self) -> tuple[Any, ...]:
        return tuple(held_by(self._holder))

    def _write(self, value: tuple[Any, ...]) -> None:
        own: Any = deque if is_of(self._holder, deque) else list
        own.clear(self._holder)
        own.extend(self._holder, value)


class SetPlace(Place):
    """A set."""

    __slots__ = ("_holder",)

    def __init__(self, holder: set[Any]) -> None:
        self._holder = holder
        super().__init__()

    def _read(self) -> tuple[Any, ...]:
        return tuple(held_by(self._holder))

    def _write(self, value: tuple[Any, ...]) -> None:
        set.clear(self._holder)
        set.update(self._holder, value)

    def _matches(self, are_alike: Callable[[Any, Any], bool]) -> bool:
        now = self._read()
        is_same = {*map(id, self.kept)} == {*map(id, now)}
        return is_same or (are_alike is _are_equal and set(now) == set(self.kept))


class NamesPlace(Place):
    """Names of a global namespace."""

    __slots__ = ("_holder", "_names")

    def __init__(self, holder: dict[str, Any], names: tuple[str, ...]) -> None:
        self._holder, self._names = holder, names
        super().__init__()

    def _read(self) -> tuple[Any, ...]:
        return tuple([self._holder.get(name, _MISSING) for name in self._names])

    def _write(self, value: tuple[Any, ...]) -> None:
        for name, own in zip(self._names, value, strict=True):
            if own is not _MISSING:
                self._holder[name] = own
            else:
                self._holder.pop(name, None)


class AttributesPlace(Place):
    """Attributes of a class, or those of an object that are in slots.

    Args:
        holder: The class or the object.
        look: Reads them, by name.
    """

    __slots__ = ("_holder", "_look")

    def __init__(self, holder: Any, look: Callable[[], Mapping[str, Any]]) -> None:
        self._holder, self._look = holder, look
        super().__init__()

    def _read(self) -> dict[str, Any]:
        return dict(self._look())

    def _write(self, value: dict[str, Any]) -> None:
        now = self._read()
        for name in now.keys() - value.keys():
            delattr(self._holder, name)
        for name, own in value.items():
            if now.get(name, _MISSING) is not own:
                setattr(self._holder, name, own)


class CellPlace(Place):
    """A variable of a function around another one."""

    __slots__ = ("_holder",)

    def __init__(self, holder: CellType) -> None:
        self._holder = holder
        super().__init__()

    def _read(self) -> Any:
        return contents_of(self._holder)

    def _write(self, value: Any) -> None:
        self._holder.cell_contents = value

    def _matches(self, are_alike: Callable[[Any, Any], bool]) -> bool:
        return are_alike(self.kept, self._read())  # whatever it refers to is one thing


class ContextPlace(Place):
    """A context variable that has a value.

    Raises:
        LookupError: If it has none: it could not be made to have none again.
    """

    __slots__ = ("_holder",)

    def __init__(self, holder: ContextVar[Any]) -> None:
        self._holder = holder
        super().__init__()

    def _read(self) -> Any:
        return self._holder.get()

    def _write(self, value: Any) -> None:
        self._holder.set(value)

    def _matches(self, are_alike: Callable[[Any, Any], bool]) -> bool:
        return are_alike(self.kept, self._read())  # whatever its value is


class KindPlace(Place):
    """The class of a module, which parametrizations and adapters change."""

    __slots__ = ("_holder",)

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        super().__init__()

    def _read(self) -> type:
        return type(self._holder)

    def _write(self, value: type) -> None:
        self._holder.__class__ = value


class FunctionsPlace(Place):
    """Functions: their code, defaults and attributes. Few are ever changed, so all are looked at in one go."""

    __slots__ = ("_holders",)

    def __init__(self, holders: Sequence[FunctionType]) -> None:
        self._holders = holders
        super().__init__()

    def _read(self) -> tuple[Any, ...]:
        return tuple([_parts_of(holder) for holder in self._holders])

    def _write(self, value: tuple[Any, ...]) -> None:
        for holder, parts in zip(self._holders, value, strict=True):
            if not _match_all(_parts_of(holder), parts, is_):
                holder.__code__, holder.__defaults__, holder.__kwdefaults__ = parts[:3]
                for own, kept in zip((holder.__kwdefaults__, vars(holder)), parts[3:], strict=True):
                    if own is not None:
                        own.clear()
                        own.update(kept)

    def _matches(self, are_alike: Callable[[Any, Any], bool]) -> bool:
        return all(
            _match_all(kept, _parts_of(holder), are_alike)
            for kept, holder in zip(self.kept, self._holders, strict=True)
        )


def _parts_of(function: FunctionType) -> tuple[Any, ...]:
    """Return what is kept of a function: code, defaults, and what is in its dictionaries of defaults and attributes."""
    named, own = function.__kwdefaults__, function.__dict__
    return function.__code__, function.__defaults__, named, dict(named) if named else {}, dict(own) if own else {}


class HooksPlace(Place):
    """The hooks of modules: few have any, so all are looked at in one go."""

    __slots__ = ("_holders",)

    def __init__(self, holders: Sequence[dict[int, Any]]) -> None:
        self._holders = holders
        super().__init__()

    def _read(self) -> tuple[dict[int, Any], ...]:
        return tuple([dict(holder) for holder in self._holders]) if any(self._holders) else ()

    def _write(self, value: tuple[dict[int, Any], ...]) -> None:
        for holder, hooks in zip(self._holders, value or [{}] * len(self._holders), strict=True):
            holder.clear()
            holder.update(hooks)

    def _matches(self, are_alike: Callable[[Any, Any], bool]) -> bool:
        if not self.kept:
            return not any(self._holders)
        return all(_match(hooks, holder, is_) for hooks, holder in zip(self.kept, self._holders, strict=True))


class DrawnPlace(Place):
    """A generator of random numbers, or an array.

    Args:
        get: Returns what it holds.
        put: Takes what it is to hold.
    """

    __slots__ = ("_get", "_put")

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._get, self._put = get, put
        super().__init__()

    def _read(self) -> Any:
        return self._get()

    def _write(self, value: Any) -> None:
        self._put(value)

    def _matches(self, are_alike: Callable[[Any, Any], bool]) -> bool:
        return _is_same_state(self._get(), self.kept)


class RequiresGradientPlace(Place):
    """Whether gradients of tensors are computed; only that of what no code has computed can be changed."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        super().__init__()

    def _read(self) -> tuple[bool, ...]:
        return tuple([tensor.requires_grad for tensor in self._tensors])

    def _write(self, value: tuple[bool, ...]) -> None:
        for tensor, needs_gradient in zip(self._tensors, value, strict=True):
            if tensor.requires_grad is not needs_gradient and tensor.is_leaf:
                tensor.requires_grad_(needs_gradient)


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


def drawn(generator: Any) -> DrawnPlace:
    """Note what a generator of random numbers holds."""
    if isinstance(generator, torch.Generator):
        return DrawnPlace(generator.get_state, generator.set_state)
    if isinstance(generator, random.Random):
        return DrawnPlace(generator.getstate, generator.setstate)
    if isinstance(generator, np.random.RandomState):
        return DrawnPlace(generator.get_state, generator.set_state)
    bits = generator.bit_generator
    return DrawnPlace(lambda: bits.state, lambda state: setattr(bits, "state", state))


def slots_of(kind: type) -> tuple[str, ...]:
    """List the names in the slots of a class and of those that it inherits from."""
    names = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    return tuple(name for own in names for name in ([own] if isinstance(own, str) else own))


def in_slots(value: Any) -> dict[str, Any]:
    """Return what an object holds in its slots, by name."""
    names = [name for name in slots_of(type(value)) if not name.startswith("__")]
    nothing: list[tuple[str, Any]] = []
    found = attempt(
        lambda: [(name, getattr(value, name, _MISSING)) for name in names],
        nothing,
        f"the slots of {type(value).__name__}",
    )
    return {name: own for name, own in found if own is not _MISSING}


def _match(one: Any, other: Any, are_alike: Callable[[Any, Any], bool]) -> bool:
    """Compare two dictionaries, names in order, two tuples item by item, or two things."""
    if is_of(one, dict):
        same_names = dict.__len__(one) == dict.__len__(other) and list(dict.keys(one)) == list(dict.keys(other))
        return same_names and all(map(are_alike, dict.values(one), dict.values(other)))
    if is_of(one, tuple):
        return len(one) == len(other) and all(map(are_alike, one, other))
    return are_alike(one, other)


def _match_all(some: tuple[Any, ...], others: tuple[Any, ...], are_alike: Callable[[Any, Any], bool]) -> bool:
    """Compare tuples whose items may be dictionaries or tuples."""
    pairs = zip(some, others, strict=True)
    return all(one is other or (type(one) is type(other) and _match(one, other, are_alike)) for one, other in pairs)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two things are one, or equal plain data."""
    return one is other or (type(one) is type(other) and type(one) in _PLAIN and bool(one == other))


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
