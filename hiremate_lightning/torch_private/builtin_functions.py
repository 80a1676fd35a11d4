"""Python's own functions that Dynamo reads otherwise than captures need, since PyTorch 2.13: `range` and `getattr`."""

from __future__ import annotations

from typing import Any, cast

from torch._dynamo.variables import BuiltinVariable, ConstantVariable, RangeVariable, builtin
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable


class _RangeToASize(RangeVariable):
    """A range in steps to a size that varies: its items are those of a range to a number.

    Args:
        items: Start, end and step of the range to a number.
        size: The end in the user's code; None for copies that Dynamo makes, whose end is that number.
    """

    def __init__(self, items: list[VariableTracker], size: VariableTracker | None = None, **kwargs: Any) -> None:
        super().__init__(items, **kwargs)
        self.size = size

    @property
    def end(self) -> VariableTracker:
        """The end in the user's code."""
        return self.items[1] if self.size is None else self.size

    def _attribute(self, tracer: Any, name: str) -> Any:
        return self.end if name == "stop" else _attribute_of_range(self, tracer, name)


_MEMBERS: dict[str, Any] = getattr(RangeVariable, "tp_members", {})  # since 2.15
if "stop" in _MEMBERS:
    _end = type(_MEMBERS["stop"])(lambda own, _: own.end, _MEMBERS["stop"].setter)
    setattr(_RangeToASize, "tp_members", {**_MEMBERS, "stop": _end})  # noqa: B010 - earlier releases have no such table
else:
    _ATTRIBUTE = "var_getattr" if hasattr(RangeVariable, "var_getattr") else "tp_getattro_impl"  # before 2.14; of 2.14
    _attribute_of_range = getattr(RangeVariable, _ATTRIBUTE)
    setattr(_RangeToASize, _ATTRIBUTE, _RangeToASize._attribute)


def _range_of_steps(variable: Any, tracer: Any, arguments: list[VariableTracker], named: Any) -> Any:
    """Guard on how many steps a range takes to a size, where Dynamo would guard on the size: blocks of tokens, say."""
    if variable.fn is range and len(arguments) == 3:
        start, size, step = (argument.realize() for argument in arguments)
        if isinstance(size, SymNodeVariable) and start.is_python_constant() and step.is_python_constant():
            first, end, width = start.as_python_constant(), cast(Any, size.sym_num), step.as_python_constant()
            goes_by_steps = width > 1 and end.node.has_hint()
            last = first + width * len(range(first, end.node.hint, width)) if goes_by_steps else first
            if last > first and last - width < end <= last:  # Dynamo guards these two comparisons
                return _RangeToASize([start, ConstantVariable.create(last), step], size)
    return _call(variable, tracer, arguments, named)


def _name_at_once(variable: Any, tracer: Any, arguments: list[VariableTracker], named: Any) -> Any:
    """Read the name of a class or function of torch, or of its module, which Dynamo 2.13 takes for no string."""
    asked, name, *others = arguments
    if isinstance(asked, TorchInGraphFunctionVariable) and not others and name.is_python_constant():
        value = getattr(asked.value, name.as_python_constant(), None)
        if name.as_python_constant() in _NAMES and isinstance(value, str):
            return ConstantVariable.create(value)
    return _read(variable, tracer, arguments, named)


_NAMES = ("__module__", "__name__", "__qualname__")
_Getting: Any = getattr(builtin, "GetAttrBuiltinVariable", None)  # since 2.13: on earlier releases nothing is changed
_call, _read = BuiltinVariable.call_function, cast(Any, getattr(_Getting, "call_function", None))
RANGES = ((BuiltinVariable, "call_function", _range_of_steps),) if _Getting else ()
NAMES = ((_Getting, "call_function", _name_at_once),) if _Getting else ()
