"""Python's own functions that Dynamo reads otherwise than captures need, since PyTorch 2.13: `range` and `getattr`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch._dynamo.variables import BuiltinVariable, ConstantVariable, RangeVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import GetAttrBuiltinVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from .hacks import replaced_entries


class _RangeToASize(RangeVariable):  # type: ignore[misc]
    """A range in steps to a size that varies: its items are those of a range to a number.

    Args:
        items: Of the range to a number: start, end and step.
        size: Where it ends as it was written; None for a copy of which nobody knows.
    """

    def __init__(self, items: list[VariableTracker], size: VariableTracker | None = None, **kwargs: Any) -> None:
        super().__init__(items, **kwargs)
        self.size = size

    def _end_as_written(self, tracer: Any, name: str) -> Any:
        is_end = name == "stop" and self.size is not None
        return self.size if is_end else _attribute_of_range(self, tracer, name)


_ATTRIBUTE = "var_getattr" if hasattr(RangeVariable, "var_getattr") else "tp_getattro_impl"  # before 2.14, and since
_attribute_of_range = getattr(RangeVariable, _ATTRIBUTE)
setattr(_RangeToASize, _ATTRIBUTE, _RangeToASize._end_as_written)


def _range_of_steps(tracer: Any, arguments: Sequence[VariableTracker], named: dict[str, VariableTracker]) -> Any:
    """Guard on how many steps a range takes to a size, where Dynamo would guard on the size: blocks of tokens, say."""
    start, size, step = arguments
    first, end, width = start.as_python_constant(), size.sym_num, step.as_python_constant()
    if width <= 1 or not end.node.has_hint():
        return _range(tracer, arguments, named)
    last = first + width * len(range(first, end.node.hint, width))
    if last > first and last - width < end <= last:  # which guards these
        return _RangeToASize([start, ConstantVariable.create(last), step], size)
    return _range(tracer, arguments, named)


def ranges_of_steps() -> AbstractContextManager[None]:
    """Guard ranges to sizes that vary by how many steps they take: Dynamo looks for who makes them in a table."""
    return replaced_entries(BuiltinVariable.call_function_handler_cache, {(range, *_TO_A_SIZE): _range_of_steps})


def _name_at_once(variable: Any, tracer: Any, arguments: Sequence[VariableTracker], named: Any) -> Any:
    """Read the name of a class or function of torch, or of its module, which Dynamo 2.13 takes for no string."""
    asked, name, *others = arguments
    if isinstance(asked, TorchInGraphFunctionVariable) and not others and name.is_python_constant():
        value = getattr(asked.value, name.as_python_constant(), None)
        if name.as_python_constant() in _NAMES and isinstance(value, str):
            return ConstantVariable.create(value)
    return _attribute(variable, tracer, arguments, named)


_TO_A_SIZE = [ConstantVariable, SymNodeVariable, ConstantVariable]
_range = BuiltinVariable._make_handler(range, _TO_A_SIZE, False)
_NAMES = ("__module__", "__name__", "__qualname__")
_attribute = GetAttrBuiltinVariable.call_function
NAMES = ((GetAttrBuiltinVariable, "call_function", _name_at_once),)
