"""Slots, which replace the call or the training step of a module that may be planned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from .. import thresholds
from ..errors import ConfigurationError
from ..torch_private import hooks

WITH_COMPILE = (
    "Call it without torch.compile; with transformers' Trainer pass torch_compile=False. Or call "
    "remove_hiremate(model) and keep torch.compile(model, backend='hiremate', options={'budget': ...})."
)


@dataclass(frozen=True, slots=True)
class Called:
    """A call of a module, with the module's path in the model and the arguments."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments."""
        return self.args, self.kwargs

    @property
    def name(self) -> str:
        """The name of the module in messages: its path, or the class of the model itself."""
        return self.path or type(self.module).__name__

    def run(self) -> Any:
        """Call the module without its slot."""
        return hooks.plain_call(self.module, *self.args, **self.kwargs)


class Caller(Protocol):
    """Takes over the calls of modules."""

    is_inside: bool  # whether one of these calls is under way

    def call(self, called: Called) -> Any:
        """Call a module, planned or not."""

    def call_copy(self, called: Called) -> Any:
        """Call a copy of the module of that path, which is not planned."""


class StandIn:
    """Replaces the call of a module. Copies and pickles of the module have the original call."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave copies and pickles of a module unplanned; LightningModule copies its whole state."""
        return (type(None), ())


class Slot(StandIn):
    """Replaces the call of one module, and hands its calls to its targets."""

    def __init__(self, targets: Caller, path: str, module: nn.Module) -> None:
        self.targets, self._path, self._module = targets, path, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, by its plan if it has one."""
        if torch.compiler.is_dynamo_compiling():
            if not self.targets.is_inside:
                _refuse_outer_compile()
            return hooks.plain_call(self._module, *args, **kwargs)
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = hooks.called_module()
        if module is None or module is self._module:
            return self.targets.call(Called(self._path, self._module, args, kwargs))
        return self.targets.call_copy(Called(self._path, module, args, kwargs))


class HookedSlot(Slot):
    """Replaces the call of a module with backward hooks, which break graphs.

    All slots share their code. If Dynamo captured the code up to such a module, it would run this capture for other
    slots too, whose calls would then be unplanned. So Dynamo is disabled here.
    """

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, by its plan if it has one."""
        return self._call(args, kwargs)


def slot_for(targets: Caller, path: str, module: nn.Module) -> Slot:
    """Make the slot of a module."""
    kind = HookedSlot if hooks.has_backward_hooks(module) else Slot
    return kind(targets, path, module)


class InnerSlots(dict[nn.Module, Slot]):
    """Slots of the modules inside of planned ones: between planned calls they see which of these are called alone.

    During a planned call they are taken away, since Dynamo would capture them. To put them back takes time, and makes
    Dynamo check all guards of these modules: so that is done after the first calls only, and later now and then.
    """

    _calls = 0

    @contextmanager
    def away(self) -> Iterator[None]:
        """Take the slots away during one call; put them back after the first `watched_calls`, then now and again."""
        self._move(from_slot=True)
        self._calls += 1
        try:
            yield
        finally:
            self._move(from_slot=False)

    def _move(self, from_slot: bool) -> None:
        watched = thresholds.current.watched_calls
        if self._calls < watched or self._calls % watched == 0:
            for module, slot in self.items():
                if hooks.get_call(module) is (slot if from_slot else None):
                    hooks.set_call(module, None if from_slot else slot)


class TrainingStepSlot:
    """Replaces the training step of one module, `plain`, whose signature Lightning reads from `__wrapped__`."""

    def __init__(self, call: Callable[..., Any], plain: Callable[..., Any]) -> None:
        self._call, self._plain = call, plain
        self.__wrapped__ = getattr(plain, "__wrapped__", plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave copies and pickled modules unplanned."""
        return (functools.partial, (self._plain,))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_outer_compile() -> None:
    """Refuse a torch.compile around a planned module; Dynamo is disabled here, so that the error reaches the user."""
    raise ConfigurationError(f"A torch.compile is around a module that is planned by hiremate(). {WITH_COMPILE}")
