"""Switches off activation checkpointing and torch.compile inside of a planned model, and restores them.

transformers and diffusers keep the checkpoint function in each module with a flag, `gradient_checkpointing`;
`checkpoint_wrapper` of torch keeps it in the wrapper. A plan replaces this function by one that only calls. The flag
stays on, with its other effects: a model of transformers makes no cache while it is on. If a module's own code calls
torch.utils.checkpoint, nothing is replaced: the call is captured, and the plan decides what to recompute.

Code compiled by torch.compile is replaced too, of a whole model or of a part: `module.compile()` replaces the module's
own call, and `torch.compile(module)` returns a module, which may be a part of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from ..planning.plan import Plan
from ..records.graph import Graph
from ..records.schedule import with_checkpoints
from ..records.simulation import simulate_eager
from ..torch_private import hooks
from ..torch_private.compiled_by_torch import compiled_inside, run_eager
from ..units import format_bytes
from .slots import StandIn

FLAG, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
WRAPPER, WRAPPED_FUNCTION = "CheckpointWrapper", "checkpoint_fn"
CHECKPOINT_OPTIONS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


class ReplacedCheckpointing:
    """The checkpoint functions in the modules of one model, which are replaced while it is planned."""

    def __init__(self, root: nn.Module) -> None:
        self._root, self._is_described = root, False

    @cached_property
    def _places(self) -> list[tuple[str, nn.Module, str]]:
        return list(_find_places(self._root))

    def replace(self) -> None:
        """Replace all checkpoint functions, also those that were set since the last call."""
        for _, module, name in self._places:
            function = module.__dict__.get(name)
            if function is not None and type(function) is not _OnlyCalls:
                module.__dict__[name] = _OnlyCalls(function)

    def put_back(self) -> None:
        """Restore all checkpoint functions."""
        for _, module, name in self._places:
            function = module.__dict__.get(name)
            if isinstance(function, _OnlyCalls):
                module.__dict__[name] = function.replaced
        del self._places  # modules may be added before the next plan

    def paths(self) -> list[str]:
        """List the paths of the innermost modules that would be checkpointed without the plan."""
        on = []
        for path, module, name in self._places:
            is_asked = name == WRAPPED_FUNCTION or getattr(module, FLAG, False) is True
            if is_asked and module.__dict__.get(name) is not None:
                on.append(path)
        around = {path: f"{path}." if path else "" for path in on}
        return [path for path in on if not any(other != path and other.startswith(around[path]) for other in on)]

    def describe(self, plan: Plan) -> str | None:
        """Describe, once, the checkpointing that a plan replaces, and the peaks with and without it; None for none."""
        paths = self.paths()
        if self._is_described or not paths:
            return None
        self._is_described = True
        checkpointed = simulate_eager(with_checkpoints(plan.graph, _calls_of(plan.graph, paths)), plan.profile)
        with_it = format_bytes(plan.resident_bytes + checkpointed.peak_bytes)
        without = format_bytes(plan.unplanned_peak_bytes)
        return (
            f"HiRemate plan of {type(self._root).__name__}, in place of activation checkpointing "
            f"({len(paths)} module{'s' * (len(paths) != 1)}): peak about {with_it} with it, {without} without. "
            "Put back when the plan goes"
        )


def checkpointed_modules(root: nn.Module) -> int:
    """Count the modules of a model whose activation checkpointing a plan would replace."""
    return len(ReplacedCheckpointing(root).paths())


class CompiledCall(StandIn):
    """Replaces the call of a module that was compiled in place, which a `Finder` would not see.

    It calls `call` with the module, the compiled call, and the arguments; `call` plans it, or runs the compiled call.
    """

    def __init__(self, call: Callable[..., Any], module: nn.Module, compiled: Callable[..., Any]) -> None:
        self._call, self._module, self._compiled = call, module, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, by a plan or compiled; if torch.compile traces around it, let it trace the plain call."""
        if torch.compiler.is_compiling():
            return hooks.plain_call(self._module, *args, **kwargs)
        return self._call(self._module, self._compiled, args, kwargs)


def take_compiled(model: nn.Module) -> list[Callable[[], None]]:
    """Replace the compiled code in a model that is to be planned; return functions that restore it."""
    put_back = [run_eager(inner) for inner in compiled_inside(model)]
    for module in model.modules():
        call = hooks.get_call(module)
        if isinstance(call, CompiledCall):
            hooks.set_call(module, None)
            put_back.append(partial(hooks.set_call, module, call))
    return put_back


class _OnlyCalls:
    """Calls a function instead of checkpointing it. Copies and pickles of a module get the checkpoint function back."""

    def __init__(self, replaced: Callable[..., Any]) -> None:
        self.replaced = replaced
        # Reentrant checkpointing is an autograd function: without an argument that requires grad it has no gradients.
        self._is_reentrant = getattr(replaced, "keywords", {}).get("use_reentrant", False) in (True, None)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in CHECKPOINT_OPTIONS}
        has_gradients = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with torch.no_grad() if self._is_reentrant and not has_gradients else nullcontext():
            return function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (copy, (self.replaced,))


def _find_places(root: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield where checkpoint functions are kept, or may be later: path, module, and name of the attribute."""
    for path, module in root.named_modules():
        if any(kind.__name__ == WRAPPER for kind in type(module).__mro__):
            yield path, module, WRAPPED_FUNCTION
        elif hasattr(module, FLAG):
            yield path, module, FUNCTION


def _calls_of(graph: Graph, paths: Sequence[str]) -> list[list[int]]:
    """List the forward nodes of each module's call; a captured graph has only the ends of module paths."""
    split_paths = [path.split(".") if path else [] for path in paths]
    # A number alone names no module.
    ends = {".".join(parts[n:]) for parts in split_paths for n, first in enumerate(parts) if not first.isdigit()}
    calls = dict[str, list[int]]()
    for index in graph.forward:
        parts = graph.nodes[index].module.split(".")
        around = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        path = next((module for module in around if module in ends), None)
        if path is not None:
            calls.setdefault(path, []).append(index)
    return list(calls.values())
