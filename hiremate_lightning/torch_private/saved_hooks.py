"""Hooks on what autograd saves, where `torch.func` is used below them: its gradients refuse to run with any.

Checked with PyTorch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_HOOKS = torch._C._autograd
_Hooks = tuple[Callable[..., Any], Callable[..., Any]]


@contextmanager
def giving_way_to_transforms() -> Iterator[None]:
    """Take away, while a transform of `torch.func` runs, the hooks that were set since: what it saves stays in memory.

    Hooks that were there before stay, so that such a transform refuses them as it always does.
    """
    graph = torch.autograd.graph
    found, outermost = graph.disable_saved_tensors_hooks, _HOOKS._top_saved_tensors_default_hooks(True)

    @contextmanager
    def disabled(error_message: str) -> Iterator[None]:
        taken = list[_Hooks]()
        try:
            while (hooks := _HOOKS._top_saved_tensors_default_hooks(True)) != outermost:
                taken.append(hooks)
                _HOOKS._pop_saved_tensors_default_hooks()
            with found(error_message):
                yield
        finally:
            for pack, unpack in reversed(taken):
                _HOOKS._push_saved_tensors_default_hooks(pack, unpack)

    graph.disable_saved_tensors_hooks = disabled
    try:
        yield
    finally:
        graph.disable_saved_tensors_hooks = found
