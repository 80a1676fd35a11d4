"""Slots: what stands in for the call, or the training step, of a module whose calls may be planned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ..errors import ConfigurationError
from ..torch_private import hooks

WITH_COMPILE = (
    "Call it without torch.compile. Or call remove_hiremate(model) and keep "
    "torch.compile(model, backend='hiremate', options={'budget': ...})."
)


class Caller(Protocol):
    """Takes over the calls of modules.

    Attributes:
        is_inside: Whether one of these calls is under way.
    """

    is_inside: bool

    def call(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module, planned or not."""


class Slot:
    """Stands in for the call of one module.

    Attributes:
        targets: Who takes its calls.
    """

    def __init__(self, targets: Caller, name: str, module: nn.Module) -> None:
        self.targets = targets
        self._name = name
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, planned where it is to be."""
        if torch.compiler.is_dynamo_compiling():
            if not self.targets.is_inside:
                _refuse_outer_compile()
            return hooks.plain_call(self._module, *args, **kwargs)
        return self.targets.call(self._name, self._module, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave copies of a module unplanned; LightningModule copies its whole state."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave pickled modules unplanned."""
        return (type(None), ())


class StepSlot:
    """Stands in for the training step of one module. Lightning reads the signature of what it wraps.

    Args:
        call: Runs the step, planned where it is to be.
        plain: The step as it is without a plan.
    """

    def __init__(self, call: Callable[..., Any], plain: Callable[..., Any]) -> None:
        self._call = call
        self._plain = plain
        self.__wrapped__ = getattr(plain, "__wrapped__", plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave copies and pickled modules unplanned."""
        return (functools.partial, (self._plain,))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refuse_outer_compile() -> None:
    """Stop a torch.compile around a planned module; Dynamo calls this while it traces, and passes the error on.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(f"A torch.compile is around a module that is planned by hiremate(). {WITH_COMPILE}")
