"""Check Dynamo's guards of one module's trace on another module: whether Dynamo would trace the same for it.

Dynamo guards all that it reads. So a trace holds for another module if all guards on the first module, and on what it
reaches, hold for the other one and are installed for it as well. A guard names its value by a source, as in
`L['self'].layers[0].norm.eps`; in the other module the source begins with that module's source.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, make_dupe_guard
from torch._dynamo.source import NNModuleSource, TypeSource
from torch._guards import ChainedSource, Guard, Source

from ..facts import CODE, VALUES, NotShownError, expect, facts_of, is_plain

_UNGUARDED = (inspect.Signature, inspect.Parameter)  # Dynamo assumes that these never change
_HOOKS = tuple(name for name in vars(torch.nn.Module()) if name.endswith("_hooks"))
_OF_INPUTS = "_dynamo_static_input_type"  # Dynamo's mark of parameters that become inputs
_MEMBERS = ("_parameters", "_buffers", "_modules")


def unwrapped(source: Source) -> Source:
    """Return a source without the module marks around it, which name the same value."""
    while isinstance(source, NNModuleSource):
        source = source.base
    return source


class Read:
    """What Dynamo read of a module during a traced call: its guards, aliases, and tables that are guarded in order."""

    def __init__(self, output: Any, source: Source, aliases: Sequence[tuple[Source, Source]]) -> None:
        self.root = unwrapped(source)
        self._within: dict[Source, bool] = {}
        self.guards = tuple(guard for guard in output.guards if self.has(guard.originating_source))
        self.aliases = tuple(pair for pair in aliases if any(map(self.has, pair)))
        self.tensors = {g.originating_source for g in self.guards if g.create_fn_name() == "TENSOR_MATCH"}
        self.in_order = tuple(source for source in output.guard_on_key_order if self.has(source))

    def has(self, source: Source) -> bool:
        """Whether a source goes through the module; raise `NotShownError` if the module only helps to find it."""
        if source not in self._within:
            inner = [value for value in vars(source).values() if isinstance(value, Source)]
            is_further = isinstance(source, ChainedSource) and self.has(source.base)
            expect(is_further or not any(map(self.has, inner)), f"{source.name} is found by the module")
            self._within[source] = source == self.root or is_further
        return self._within[source]


class Likeness:
    """Compare a traced module with another one, by what Dynamo read of the first.

    Attributes:
        guards: Guards that the other module needs if the trace is copied for it.

    Raises:
        NotShownError: The trace does not hold for the other module.
    """

    def __init__(self, output: Any, read: Read, other: Source) -> None:
        self._effects, self._read = output.side_effects, read
        self._scope = {"G": output.root_tx.f_globals, "L": output.root_tx.f_locals}
        self._other_sources = {read.root: unwrapped(other)}
        self._values: dict[Source, Any] = {}
        self._shared: dict[Source, Source | None] = {}
        self._guarded_as_shared: set[Source] = set()
        self._compared: set[Source] = set()
        self._by_one: dict[int, tuple[Any, Any]] = {}  # compared pairs, by identity of the first module's value
        self._by_other: dict[int, tuple[Any, Any]] = {}  # and by identity of the other's
        self.guards: list[Guard] = []
        self._compare(read.root)
        for guard in read.guards:
            self._match(guard)
        for again, first in read.aliases:
            self._compare_alias(again, first)

    def _compare_alias(self, again: Source, first: Source) -> None:
        """Expect two sources of one object in the first module to name one object in the other module, too."""
        values = [self.value_of(self._source_in_other(source)) for source in (again, first)]
        expect(values[0] is values[1], f"{again.name} is {first.name}")

    def _source_in_other(self, source: Source) -> Source:
        return self.other_of(source) if self._read.has(source) else source

    def other_of(self, source: Source) -> Source:
        """Return the other module's source for a source of the first module."""
        if source not in self._other_sources:
            expect(isinstance(source, ChainedSource), f"{source.name} is not of the module")
            changed = {
                field.name: self._source_in_other(value)
                for field in dataclasses.fields(source)
                if isinstance(value := getattr(source, field.name), Source)
            }
            self._other_sources[source] = dataclasses.replace(source, **changed)
        return self._other_sources[source]

    def value_of(self, source: Source) -> Any:
        """Return the value that a source names; raise `NotShownError` if there is none."""
        try:
            return source.get_value(self._scope, {}, self._values)
        except Exception as error:  # to evaluate a source runs code of users
            raise NotShownError(f"{source.name} is not there") from error

    def _shared_at(self, source: Source) -> Source | None:
        """Return the first source on a value's path where the modules share an object known to Dynamo, or a type."""
        if source == self._read.root or not isinstance(source, ChainedSource):
            return None
        if source not in self._shared:
            value = self._value_or_none(source)
            is_known = isinstance(source, TypeSource) or (not is_plain(value) and value in self._effects)
            is_same = is_known and value is self._value_or_none(self.other_of(source))
            self._shared[source] = self._shared_at(unwrapped(source.base)) or (source if is_same else None)
        return self._shared[source]

    def _value_or_none(self, source: Source) -> Any:
        try:
            return self.value_of(source)
        except NotShownError:
            return None

    def _match(self, guard: Guard) -> None:
        """Check one guard on the other module, and list the guard that the other module needs for it."""
        source = unwrapped(guard.originating_source)
        self._compare_links(source)
        if (shared := self._shared_at(source)) is not None:
            self._guard_shared(shared)
            return
        kind, keywords = guard.create_fn_name(), getattr(guard.create_fn, "keywords", {})
        if kind == "DUPLICATE_INPUT":  # a value that the first module has twice, or that code outside has, too
            first = keywords["source_b"]
            if self._read.has(first):
                self._compare_links(unwrapped(first))
            self._compare_alias(guard.originating_source, first)
            create = functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=self._source_in_other(first))
            self._add_guard(self.other_of(guard.originating_source), create, guard)
            return
        details = {name: value for name, value in keywords.items() if name not in _UNREAD}
        one, other = self.value_of(source), self.value_of(self.other_of(source))
        expect(kind in _COMPARISONS and _COMPARISONS[kind](one, other, **details), f"{kind} of {source.name}")
        if kind != "TENSOR_MATCH":  # Dynamo adds it when the other tensor becomes an input
            self._add_guard(self.other_of(guard.originating_source), guard.create_fn, guard)

    def _add_guard(self, source: Source, create: Any, like: Guard) -> None:
        added = Guard(source, create)
        added.stack, added.user_stack = like.stack, like.user_stack
        self.guards.append(added)

    def _guard_shared(self, source: Source) -> None:
        """Guard that the other module has the same object or class, in place of guards on what is read of it."""
        other = self.other_of(source)
        if other in self._guarded_as_shared:
            return
        self._guarded_as_shared.add(other)
        if isinstance(other, TypeSource):
            self.guards.append(Guard(other.base, GuardBuilder.TYPE_MATCH))
            return
        first = self._effects[self.value_of(other)].source
        create = make_dupe_guard(other, first)
        if create is not None and other.name != first.name:
            self.guards.append(Guard(other, create))

    def _compare_links(self, source: Source) -> None:
        """Compare a value, and each value on the way to it."""
        while source not in self._compared:
            self._compared.add(source)
            if source == self._read.root or not isinstance(source, ChainedSource):
                return
            if not isinstance(source, NNModuleSource):
                self._compare(source)
            source = source.base

    def _compare(self, source: Source) -> None:
        one, other = self._value_or_none(source), self._value_or_none(self.other_of(source))
        expect(type(one) is type(other), f"the type of {source.name}")
        if is_plain(one):
            expect(not isinstance(one, CODE) or one is other, f"the code of {source.name}")  # defaults included
            return
        self._pair(one, other, source)
        if isinstance(one, torch.nn.Module):
            _compare_modules(one, other, source.name)

    def _pair(self, one: Any, other: Any, source: Source) -> None:
        """Expect the modules' values to correspond one to one, and traced code to have changed none of them."""
        pairs = self._by_one.setdefault(id(one), (one, other)), self._by_other.setdefault(id(other), (one, other))
        expect(pairs[0][1] is other and pairs[1][0] is one, f"{source.name} is another's too")
        for value in (one, other):
            if value in self._effects:
                variable, effects = self._effects[value], self._effects
                can_change = variable.mutation_type is not None
                is_changed = can_change and (effects.is_modified(variable) or effects.has_pending_mutation(variable))
                expect(not is_changed, f"{source.name} was changed")
        if other is not one and other in self._effects:
            named = self._effects[other].source
            expect(named is not None and named.name == self.other_of(source).name, f"{source.name} is known elsewhere")


def _compare_modules(one: torch.nn.Module, other: torch.nn.Module, name: str) -> None:
    """Compare attribute names, hooks, members and mode of two modules; of torch's own modules also the constants."""
    expect(tuple(vars(one)) == tuple(vars(other)), f"the attributes of {name}")
    for hooks in _HOOKS:
        expect(not vars(one).get(hooks) and not vars(other).get(hooks), f"hooks of {name}")
    for members in _MEMBERS:
        has = [[(key, value is None) for key, value in vars(module)[members].items()] for module in (one, other)]
        expect(has[0] == has[1], f"{members} of {name}")
    expect(one.training is other.training, f"the mode of {name}")
    is_of_torch = type(one).__module__.startswith("torch.nn.")
    for attribute, value in vars(one).items():
        is_same = not isinstance(value, _UNGUARDED) or value is vars(other)[attribute]
        is_equal = not (is_of_torch and isinstance(value, VALUES)) or equal(value, vars(other)[attribute])
        expect(is_same and is_equal, f"{name}.{attribute}")


def equal(one: Any, other: Any) -> bool:
    """Whether two constants have one type and the same bits: `-0.0` differs from `0.0`, and `True` from 1."""
    return type(one) is type(other) and repr(one) == repr(other) and (one == other or one != one)


def _same_tensor_kind(one: torch.Tensor, other: torch.Tensor) -> bool:
    marks = {name for tensor in (one, other) for name in vars(tensor) if name.startswith("_dynamo")}
    return marks <= {_OF_INPUTS} and facts_of(one) == facts_of(other)


_COMPARISONS: dict[str, Callable[..., bool]] = {  # by kind of guard: whether it holds for another value, too
    "TYPE_MATCH": lambda one, other: type(one) is type(other),
    **dict.fromkeys(("ID_MATCH", "FUNCTION_MATCH", "CLASS_MATCH", "MODULE_MATCH"), operator.is_),
    **dict.fromkeys(("CLOSURE_MATCH", "BUILTIN_MATCH", "NONE_MATCH"), operator.is_),
    **dict.fromkeys(("BOOL_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH"), equal),
    "SEQUENCE_LENGTH": lambda one, other: type(one) is type(other) and len(one) == len(other),
    **dict.fromkeys(
        ("DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"),
        lambda one, other: [*one] == [*other] and all(isinstance(key, (str, int)) for key in one),
    ),
    **dict.fromkeys(
        ("DICT_CONTAINS", "DICT_NOT_CONTAINS"),
        lambda one, other, key: isinstance(key, (str, int)) and (key in one) == (key in other),
    ),
    "HASATTR": lambda one, other, attr: hasattr(one, attr) == hasattr(other, attr),
    "NOT_PRESENT_IN_GENERIC_DICT": lambda one, other, attr: attr not in vars(one) and attr not in vars(other),
    "EMPTY_NN_MODULE_HOOKS_DICT": lambda one, other: not one and not other,
    "TENSOR_MATCH": _same_tensor_kind,
}
_UNREAD = {"value", "recompile_hint"}  # guard details that may differ: a tensor's or number's value, a text
