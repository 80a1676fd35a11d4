"""Slots: what stands in for the call, or the training step, of a module whose calls may be planned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

from .. import thresholds
from ..errors import ConfigurationError
from ..torch_private import hooks

WITH_COMPILE = (
    "Call it without torch.compile; with transformers' Trainer pass torch_compile=False. Or call "
    "remove_hiremate(model) and keep torch.compile(model, backend='hiremate', options={'budget': ...})."
)


class Caller(Protocol):
    """Takes over the calls of modules.

    Attributes:
        is_inside: Whether one of these calls is under way.
    """

    is_inside: bool

    def call(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module, planned or not."""

    def call_copy(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a copy of a module of that name, which is not planned."""


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
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = hooks.called_module()
        if module is None or module is self._module:
            return self.targets.call(self._name, self._module, args, kwargs)
        return self.targets.call_copy(self._name, module, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave copies of a module unplanned; LightningModule copies its whole state."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave pickled modules unplanned."""
        return (type(None), ())


class HookedSlot(Slot):
    """Stands in for the call of a module with backward hooks, where graphs end.

    All slots share their code. What Dynamo captures of it up to such a module would be taken for the calls of others,
    which then run as they are: so it doesn't look at this one.
    """

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, planned where it is to be."""
        return self._call(args, kwargs)


def slot_for(targets: Caller, name: str, module: nn.Module) -> Slot:
    """Make what stands in for the call of a module."""
    kind = HookedSlot if hooks.has_backward_hooks(module) else Slot
    return kind(targets, name, module)


def is_ours(call: Any) -> TypeGuard[Slot]:
    """Whether what stands in for the call of a module is ours, and not of a user who has compiled it."""
    return isinstance(call, Slot)


class WaitingSlots(dict[nn.Module, Slot]):
    """Slots of what is inside of planned modules, by module, in place between calls: they see what is called alone.

    During a call they are taken away, since Dynamo would capture them. To put them back takes time, and makes Dynamo
    look at all guards of these modules: it is done after the first calls, and then now and again.
    """

    _calls = 0

    @contextmanager
    def away(self) -> Iterator[None]:
        """Take the slots away during one call."""
        if self._is_watching:
            for module, slot in self.items():
                if hooks.get_call(module) is slot:
                    hooks.set_call(module, None)
        self._calls += 1
        try:
            yield
        finally:
            if self._is_watching:
                for module, slot in self.items():
                    if hooks.get_call(module) is None:
                        hooks.set_call(module, slot)

    @property
    def _is_watching(self) -> bool:
        """Whether slots are put back after this call: after the first `watched_calls` ones, then after one in so many.

        There they see what is called alone.
        """
        watched = thresholds.current.watched_calls
        return self._calls < watched or self._calls % watched == 0


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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_outer_compile() -> None:
    """Stop a torch.compile around a planned module: its graph ends here, so that the error comes as it is.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(f"A torch.compile is around a module that is planned by hiremate(). {WITH_COMPILE}")
