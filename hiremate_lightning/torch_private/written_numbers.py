"""Numbers that vary from call to call, where the code that Dynamo captures writes them into strings.

All names of torch here are private; `test_torch_private.py` says on which versions this was checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.misc import StringFormatVariable
from torch._dynamo.variables.tensor import SymNodeVariable

_CONVERTS = 3  # of the flags: by !s, !r or !a


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
WHILE_CAPTURING = ((InstructionTranslatorBase, "_format_value", _format_as_it_is),)
