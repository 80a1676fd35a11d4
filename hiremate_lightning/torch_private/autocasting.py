"""Restore what an error in captured code leaves behind: autocast, torch.func transforms, hook bans, dispatcher keys.

Dynamo captures a `with torch.autocast` block as calls of the private functions that enter and leave it. An error in
between leaves autocast on for later code, with casts cached in earlier steps. A transform that was not left makes all
later code fail, and so does a ban on saved-tensor hooks.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx import graph_module

from ..housekeeping import log
from . import tensor_state
from .hacks import replaced_entries

DEVICE_TYPES = ("cpu", "cuda")


ENTER, LEAVE = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast  # a block in a graph
is_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
disabled: Any = torch._C._DisableAutocast  # a context manager


def settings() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Return for each device type whether autocast is on, and its dtype."""
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICE_TYPES)


@contextmanager
def as_found_on_error() -> Iterator[None]:
    """Restore autocast, leave torch.func transforms, and allow saved-tensor hooks, if an error leaves the block."""
    ban = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    transforms = torch._C._functorch.get_dynamic_layer_stack_depth()
    depth, remembers = open_blocks(), torch.is_autocast_cache_enabled()
    before = settings()
    try:
        yield
    except BaseException:  # Ctrl-C too: autocast would stay on in this process
        for _ in range(open_blocks() - depth):
            torch.autocast_decrement_nesting()
        if depth == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(remembers)
        for kind, is_on, dtype in before:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)
        _end_transforms(transforms)
        if ban is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        raise


def leaving_as_found(module: fx.GraphModule, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `run` so that an error restores the state before, if the captured code enters autocast or bans hooks."""
    entering = ENTER, torch._C._autograd._saved_tensors_hooks_disable
    is_entered = any(module.graph.find_nodes(op="call_function", target=target) for target in entering)
    return as_found_on_error()(run) if is_entered else run


def _end_transforms(depth: int) -> None:
    """Leave the torch.func transforms deeper than `depth`; PyTorch's own function for it fails in torch 2.11."""
    functorch = torch._C._functorch
    kinds = functorch.TransformType
    ends: dict[Any, Callable[[], Any]] = {
        kinds.Vmap: functorch._vmap_decrement_nesting,
        kinds.Grad: functorch._grad_decrement_nesting,
        kinds.Jvp: functorch._jvp_decrement_nesting,
        kinds.Functionalize: functorch._func_decrement_nesting,
    }
    while functorch.get_dynamic_layer_stack_depth() > depth:
        ends[functorch.peek_interpreter_stack().key()]()


def open_blocks() -> int:
    """Return the number of open autocast blocks."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


BLOCK = "hiremate block"  # metadata key of a cast that an autocast block caches


def block(kind: str) -> object | None:
    """Return an object that identifies the outermost open autocast block with cached casts; None outside of one."""
    cast = _remembered_cast(kind) if open_blocks() else None  # AOTAutograd turns autocast off, but the block stays open
    return None if cast is None else cast.metadata.setdefault(BLOCK, object())


def forget_casts(kind: str) -> None:
    """Clear autocast's cache of casts; the open block keeps its identity (see `block`)."""
    before = block(kind)
    torch.clear_autocast_cache()
    cast = _remembered_cast(kind)
    if before is not None and cast is not None:
        cast.metadata[BLOCK] = before


def _remembered_cast(kind: str) -> Any:
    """Return the autograd node of a cast of an empty parameter, which autocast caches like others; None without one."""
    parameter, key = _empty_on(kind), getattr(torch._C.DispatchKey, f"Autocast{kind.upper()}")
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(key, False):
        product = torch.mm(parameter, parameter).grad_fn
    cast = None if product is None else product.next_functions[0][0]
    return cast if cast is not None and cast.name().startswith("ToCopy") else None


@cache
def _empty_on(kind: str) -> torch.Tensor:
    with torch.inference_mode(mode=False), tensor_state.real_mode():
        return torch.empty(0, 0, dtype=torch.float32, device=kind, requires_grad=True)


def not_printed() -> AbstractContextManager[None]:
    """Log at debug level what graph modules print when they fail, while this is entered."""
    return replaced_entries(vars(graph_module), {"print": lambda text, **_: log.debug("%s", text)})


@contextmanager
def releasing_frames() -> Iterator[None]:
    """Clear the frames of a passing error, and restore the keys of PyTorch's dispatcher as they were before.

    A frame may hold a guard of the dispatcher (`_tensor_str._str` has one). When the guard is collected, it restores
    the keys of its own time: for example those of a torch.func transform that ended long ago.
    """
    with torch._C._PreserveDispatchKeyGuard():
        try:
            yield
        except BaseException as error:  # Ctrl-C too: its frames hold the same guards
            chain: list[BaseException] = []
            met: BaseException | None = error
            while met is not None and met not in chain:
                traceback.clear_frames(met.__traceback__)
                chain.append(met)
                met = met.__cause__ or met.__context__
            gc.collect()  # since 2.14 Dynamo keeps some errors in reference cycles, with their frames
            raise
