"""Guards that Dynamo makes of what it has read, made as captures need them."""

from __future__ import annotations

import functools
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._guards import Guard


@functools.wraps(GuardBuilder.SEQUENCE_LENGTH)  # torch looks at what it has noted there
def _guard_own_length(builder: GuardBuilder, guard: Guard) -> None:
    """Guard on how many items a tuple holds; its class may say otherwise, or nothing, by a `__len__` of its own."""
    value = builder.get(guard)
    if not isinstance(value, tuple) or type(value).__len__ is tuple.__len__:
        _guard_length(builder, guard)
        return
    length = tuple.__len__(value)
    builder.TYPE_MATCH(guard)
    told = [f"tuple.__len__({guard.name}) == {length}"]
    builder.get_guard_manager(guard).add_lambda_guard(lambda v: tuple.__len__(v) == length, told, guard.user_stack)


@functools.wraps(GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT)
def _guard_hooks_once(builder: Any, guard: Guard) -> None:
    """Guard on a module having no hooks; Dynamo lists each such guard twice, with two sources of one name."""
    guarded: set[str] = vars(builder).setdefault("hiremate_without_hooks", set())
    if guard.name not in guarded:
        guarded.add(guard.name)
        _guard_hooks(builder, guard)


_guard_length, _guard_hooks = GuardBuilder.SEQUENCE_LENGTH, GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT
LENGTHS = ((GuardBuilder, "SEQUENCE_LENGTH", _guard_own_length),)
HOOKS = ((GuardBuilder, "EMPTY_NN_MODULE_HOOKS_DICT", _guard_hooks_once),)
