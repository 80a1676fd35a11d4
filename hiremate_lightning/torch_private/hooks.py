"""Where code of ours runs without a trace in a model: in the place of a module's call, beside an optimizer's step.

The slot that `nn.Module.compile` uses is the only way to take over a call that keeps state_dict, deepcopy and pickle as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

CALL_SLOT = "_compiled_call_impl"


def get_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return the function that stands in for a module's call, None where there is none."""
    call: Callable[..., Any] | None = module.__dict__.get(CALL_SLOT)
    return call


def set_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Let a function stand in for a module's call, hooks included; None restores the module."""
    if call is None:
        module.__dict__.pop(CALL_SLOT, None)
    else:
        module.__dict__[CALL_SLOT] = call


def set_call_of_all(call: Callable[..., Any] | None) -> None:
    """Let a function stand in for the calls of all modules that have nothing in the place of theirs; None ends that.

    It is given the module first. It is an attribute of the class, which those of modules hide.
    """
    torch.nn.Module._compiled_call_impl = call


def plain_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module as if nothing stood in for it: hooks, then its forward as found now."""
    return module._call_impl(*args, **kwargs)


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether functions are called with the gradients of a module, which torch.compile does not capture."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether functions of others are called with a module or its parts, or with all modules."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_all = any(vars(torch.nn.modules.module)[f"_global{name}"] for name in names)
    return of_all or any(inner.__dict__.get(name) for inner in module.modules() for name in names)


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the very dictionary in which a module keeps its own buffers."""
    return module._buffers


def on_optimizer_step(hook: Callable[[torch.optim.Optimizer], None]) -> Any:
    """Call a function after each step of any optimizer; the handle that is returned removes it."""
    return register_optimizer_step_post_hook(lambda optimizer, args, kwargs: hook(optimizer))


def before_optimizer_step(hook: Callable[[torch.optim.Optimizer], None]) -> Any:
    """Call a function before each step of any optimizer; the handle that is returned removes it."""
    return register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: hook(optimizer))


@contextmanager
def no_saved_tensor_hooks() -> Iterator[None]:
    """Hide what runs meanwhile from hooks on saved tensors around it, as torch.utils.checkpoint sets them."""
    find: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
    taken = []
    while (top := find(False)) is not None:
        taken.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
