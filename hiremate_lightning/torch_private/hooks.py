"""Take over `nn.Module.__call__` by the slot of `nn.Module.compile`, and hide hooks on modules and saved tensors.

The slot is the only way to take over a call that keeps state_dict, deepcopy and pickle as they are. Hooks on saved
tensors are hidden from captured code and from torch.func transforms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

from .hacks import instead_of

_SAVED: Any = torch._C._autograd
_SAVING = "hiremate_lightning.measuring.saved_offload"  # the module of our saved-tensor hooks
CALL_SLOT = "_compiled_call_impl"
CALLERS = 3  # most frames between a module's call and its replacement, plus one
_CALL = torch.nn.Module._wrapped_call_impl.__code__
_CALLED = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def get_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return the function that replaces a module's call, None without one."""
    call: Callable[..., Any] | None = module.__dict__.get(CALL_SLOT)
    return call


def set_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Replace a module's call, hooks included, by a function; None restores the module's own call."""
    if call is None:
        module.__dict__.pop(CALL_SLOT, None)
    else:
        module.__dict__[CALL_SLOT] = call


def set_call_of_all(call: Callable[..., Any] | None) -> None:
    """Set a function that replaces the calls of all modules without a slot of their own; None removes it.

    The function gets the module first. It is an attribute of the class `Module`, which a module's own slot hides.
    """
    torch.nn.Module._compiled_call_impl = call


def on_compile_in_place(stand_in: Callable[[torch.nn.Module, Any, Any, Any], Any]) -> Callable[[], None]:
    """Let `stand_in` choose the function that replaces the call of a module compiled in place (`module.compile()`).

    It gets the module, its replacement before, its compiled call, and the backend. Calling the result ends this.
    """
    compile_in_place = torch.nn.Module.compile

    @wraps(compile_in_place)
    def compile_and_choose(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        before = get_call(module)
        compile_in_place(module, *args, **kwargs)
        set_call(module, stand_in(module, before, get_call(module), kwargs.get("backend")))

    setattr(torch.nn.Module, "compile", compile_and_choose)  # noqa: B010 - mypy takes no function for a method
    return lambda: setattr(torch.nn.Module, "compile", compile_in_place)


def plain_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module as if nothing replaced its call: hooks, then its current forward."""
    return module._call_impl(*args, **kwargs)


def called_module() -> torch.nn.Module | None:
    """Return the module whose call a function replaces that runs now, read from the frames; None if unknown.

    Copies of a module that share what its `__dict__` holds, as learn2learn's clones do, share that function too.
    """
    frame = sys._getframe(1)
    for _ in range(CALLERS):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if frame.f_code is _CALL:
            module: torch.nn.Module = frame.f_locals["self"]
            return module
    return None


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has backward hooks, which torch.compile does not capture."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def kinds_in(module: torch.nn.Module) -> frozenset[str]:
    """Return the kinds of hooks on a module, on its submodules, or on all modules."""
    shared, inner = vars(torch.nn.modules.module), [vars(part) for part in module.modules()]
    return frozenset(kind for kind in _CALLED if shared[f"_global{kind}"] or any(own.get(kind) for own in inner))


@contextmanager
def without_labels(module: torch.nn.Module) -> Iterator[bool]:
    """Remove hooks of Lightning's profiler below a module in a `with` block: they break graphs. Yield if any exist."""
    first = next(module.children(), None)  # the profiler adds them to all modules
    has_labels = first is not None and any(map(_is_label, first._forward_pre_hooks.values()))
    inner = [part for part in module.modules() if part is not module] if has_labels else []
    with ExitStack() as restored:
        for table in (table for part in inner for table in (part._forward_pre_hooks, part._forward_hooks)):
            restored.enter_context(patch.dict(table))
            for number in [number for number, hook in table.items() if _is_label(hook)]:
                del table[number]
        yield has_labels


def _is_label(hook: Any) -> bool:
    return type(getattr(getattr(hook, "func", None), "__self__", None)).__name__ == "RegisterRecordFunction"


def no_saved_tensor_hooks() -> AbstractContextManager[None]:
    """Hide saved-tensor hooks around a block, for example those of torch.utils.checkpoint, from code in the block."""
    return _without_saved_tensor_hooks(False, lambda hooks: True)


@contextmanager
def _without_saved_tensor_hooks(ignores_ban: bool, is_hidden: Callable[[Any], bool]) -> Iterator[None]:
    removed: list[Any] = []
    try:
        while (hooks := _SAVED._top_saved_tensors_default_hooks(ignores_ban)) is not None and is_hidden(hooks):
            removed.append(hooks)
            _SAVED._pop_saved_tensors_default_hooks()
        yield
    finally:
        for pack, unpack in reversed(removed):
            _SAVED._push_saved_tensors_default_hooks(pack, unpack)


@instead_of("torch.autograd.graph.disable_saved_tensors_hooks")
@contextmanager
def giving_way_to_transforms(disable: Callable[[str], Any], error_message: str) -> Iterator[None]:
    """Remove our saved-tensor hooks while a transform of `torch.func` runs, which refuses all such hooks."""
    with _without_saved_tensor_hooks(True, lambda hooks: hooks[0].__module__ == _SAVING), disable(error_message):
        yield
