"""Hooks on what autograd saves, where `torch.func` is used below them: its gradients refuse to run with any.

Checked with PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx

from .replacing import replaced

_HOOKS = torch._C._autograd
_SAVING = "hiremate_lightning.measuring.aside"  # whose hooks save memory
_Hooks = tuple[Callable[..., Any], Callable[..., Any]]


def giving_way_to_transforms() -> AbstractContextManager[None]:
    """Remove the hooks that save memory while a transform of `torch.func` runs: its saved tensors stay in memory.

    All others stay, so that such a transform refuses them as it always does.
    """
    found = torch.autograd.graph.disable_saved_tensors_hooks

    @contextmanager
    def disabled(error_message: str) -> Iterator[None]:
        taken = list[_Hooks]()
        try:
            while (hooks := _HOOKS._top_saved_tensors_default_hooks(True)) and hooks[0].__module__ == _SAVING:
                taken.append(hooks)
                _HOOKS._pop_saved_tensors_default_hooks()
            with found(error_message):
                yield
        finally:
            for pack, unpack in reversed(taken):
                _HOOKS._push_saved_tensors_default_hooks(pack, unpack)

    return replaced((torch.autograd.graph, "disable_saved_tensors_hooks", disabled))


def without_bans(module: fx.GraphModule) -> fx.GraphModule:
    """Copy captured code in which a transform bans hooks on what is saved, and leave that out."""
    targets = _HOOKS._saved_tensors_hooks_disable, _HOOKS._saved_tensors_hooks_enable
    if not module.graph.find_nodes(op="call_function", target=targets[0]):
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for target in targets:
        for node in graph.find_nodes(op="call_function", target=target):
            graph.erase_node(node)
    copy = fx.GraphModule(module, graph)
    copy.meta = dict(module.meta)
    return copy
