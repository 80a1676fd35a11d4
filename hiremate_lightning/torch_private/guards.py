"""Guards that Dynamo makes of what it has read, made as captures need them: of hooks, lengths, and written numbers.

Numbers that vary from call to call are written into strings as they are, and guarded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.misc import StringFormatVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._guards import Guard

_CONVERTS = 3  # of the flags: by !s, !r or !a


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


def _format_as_it_is(translator: Any, specification: Any, flags: int) -> None:
    """Write a number into a string as it is now, which is guarded; Dynamo would forget its format.

    A string that shows a tensor before it is put together as the code runs. So is the number then: the messages of
    checks, which transformers writes at each call, are dropped, and their code serves all sizes.
    """
    number = translator.stack[-1]
    if isinstance(number, SymNodeVariable):
        translator.pop()
        if _shows_a_tensor(translator.stack) and not flags & _CONVERTS:
            form = f"{{:{specification.as_python_constant()}}}"
            translator.push(StringFormatVariable(form, [number], {}))
            return
        translator.push(ConstantVariable.create(number.evaluate_expr()))
    _format(translator, specification, flags)


def _shows_a_tensor(stack: Sequence[VariableTracker]) -> bool:
    """Whether the parts of a string on top of a stack are not all known while the code is traced."""
    for part in reversed(stack):
        if isinstance(part, StringFormatVariable):
            return True
        if not (isinstance(part, ConstantVariable) and isinstance(part.value, str)):
            return False
    return False


_format = InstructionTranslatorBase._format_value
NUMBERS = ((InstructionTranslatorBase, "_format_value", _format_as_it_is),)
