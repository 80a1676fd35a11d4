"""The repeated blocks of a model, whose calls may be computed twice in a step that runs as the user wrote it.

Blocks of one class under one parent (the layers of a transformer) keep most of what a step keeps. Where each of them is
called in `torch.utils.checkpoint` only their inputs stay, as users do by hand. Nothing has to be captured for that, so
a step of a new size can run so at once (`unplanned`). Which blocks may be called twice is seen in plain steps first: a
second call must change nothing, and be given what the first one was given.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..records.step import Step
from ..torch_private import hooks, sharding, tensor_state
from .slots import Slot

OBSERVED_CALLS = 2  # of the model, plain ones, before its blocks are called twice
_PLAIN_DATA = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


@dataclass(frozen=True)
class Blocks:
    """The blocks that may be called twice.

    Attributes:
        paths: Where they are in the model.
        modules: The paths of all modules of the model.
    """

    paths: frozenset[str]
    modules: frozenset[str]

    def calls_in(self, step: Step) -> list[list[int]]:
        """List the nodes of each call of a block that is captured whole, in order.

        The nodes of a captured graph tell their modules as these lie below the module whose code was captured. Where
        that may be several, nothing is listed: what isn't called twice keeps what it computes.
        """
        nodes, own = step.graph.nodes, dict[int, list[int]]()
        for index in step.graph.forward:
            owner = step.owners[index]
            if owner is not None:
                own.setdefault(owner[0], []).append(index)
        found = dict[str, list[list[int]]]()
        for members in own.values():
            prefix = self._prefix({nodes[index].module for index in members} - {""})
            calls = dict[str, list[int]]()
            for index in members:
                path = None if prefix is None else self._block_around(prefix + nodes[index].module)
                if path is not None:
                    calls.setdefault(path, []).append(index)
            for path, call in calls.items():
                found.setdefault(path, []).append(call)
        times = min(map(len, found.values()), default=0)
        return [call for calls in found.values() if len(calls) == times for call in calls]

    def _prefix(self, modules: set[str]) -> str | None:
        """Find the module below which all of these are, where there is just one."""
        prefixes = {"", *(f"{module}." for module in self.modules if module)}
        found = [prefix for prefix in prefixes if all(prefix + module in self.modules for module in modules)]
        return found[0] if len(found) == 1 and modules else None

    def _block_around(self, module: str) -> str | None:
        names = module.split(".")
        paths = (".".join(names[:end]) for end in range(1, len(names) + 1))
        return next((path for path in paths if path in self.paths), None)


class RepeatedBlocks:
    """Finds blocks that may be called twice, and calls them so.

    Args:
        root: The model.

    Attributes:
        fit: The blocks that may be called twice; None before enough plain calls have shown which.
    """

    def __init__(self, root: nn.Module) -> None:
        self.fit: Blocks | None = None
        self._modules = frozenset(path for path, _ in root.named_modules())
        self._blocks = {} if sharding.has_units(root) else dict(_repeated(root))
        self._called = Counter[str]()  # in the call of the model under way
        self._unfit = set[str]()
        self._observed = 0

    @property
    def count(self) -> int:
        """The number of blocks that may be called twice."""
        return 0 if self.fit is None else len(self.fit.paths)

    @contextmanager
    def observed(self) -> Iterator[None]:
        """See in a plain call of the model which blocks may be called twice."""
        if self._observed == OBSERVED_CALLS or not self._blocks:
            yield
            return
        self._called.clear()
        with self._replaced(self._blocks, self._observe):
            yield
        self._unfit.update(path for path in self._blocks if self._called[path] != 1)
        self._observed += 1
        if self._observed == OBSERVED_CALLS and (paths := self._blocks.keys() - self._unfit):
            self.fit = Blocks(frozenset(paths), self._modules)

    @contextmanager
    def twice(self) -> Iterator[None]:
        """Call blocks once more in the backward, for what their forward has computed."""
        assert self.fit is not None, "some were found"
        with self._replaced({path: self._blocks[path] for path in self.fit.paths}, self._call_twice):
            yield

    @contextmanager
    def _replaced(self, blocks: dict[str, nn.Module], call: Callable[..., Any]) -> Iterator[None]:
        found = {module: hooks.get_call(module) for module in blocks.values()}
        for path, module in blocks.items():
            if found[module] is None or isinstance(found[module], Slot):
                hooks.set_call(module, _Stand(call, path, module))
            else:  # compiled by the user
                self._unfit.add(path)
        try:
            yield
        finally:
            for module, slot in found.items():
                hooks.set_call(module, slot)

    def _observe(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._called[path] += 1
        before, _held = _state_of(module)  # what is held keeps its identity
        if not _may_be_given_again((args, kwargs)) or _has_hooks(module):
            self._unfit.add(path)
        result = hooks.plain_call(module, *args, **kwargs)
        if _state_of(module)[0] != before:
            self._unfit.add(path)
        return result

    def _call_twice(self, _: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or _has_hooks(module):  # which may have come since
            return hooks.plain_call(module, *args, **kwargs)
        call = _BlockCall(module, args, kwargs)
        return checkpoint(call, *_tensors_in((args, kwargs)), use_reentrant=False)


class _Stand:
    """Stands in for the call of a block during one call of its model."""

    def __init__(self, call: Callable[..., Any], path: str, module: nn.Module) -> None:
        self._call, self._path, self._module = call, path, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._path, self._module, args, kwargs)


class _BlockCall:
    """Calls a block with what it was given, again with copies of the objects that the first call may have changed."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module = module
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._again = _apart((args, kwargs))

    def __call__(self, *_: torch.Tensor) -> Any:
        args, kwargs = _apart(self._again) if self._given is None else self._given
        self._given = None
        return hooks.plain_call(self._module, *args, **kwargs)


def _repeated(parent: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """List the outermost modules with parts that have siblings of the same class."""
    classes = Counter(type(child) for child in parent.children())
    for name, child in parent.named_children():
        own = f"{path}.{name}" if path else name
        has_parts = next(child.children(), None) is not None
        if classes[type(child)] > 1 and has_parts and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield own, child
        else:
            yield from _repeated(child, own)


def _has_hooks(module: nn.Module) -> bool:
    """Whether functions of others are called with the module or its parts: twice, where these are called twice."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(inner.__dict__.get(name) for inner in module.modules() for name in names)


def _state_of(module: nn.Module) -> tuple[list[Any], list[Any]]:
    """Describe all that a call of a module may leave behind: in attributes, buffers, and generators.

    Returns:
        The description, and the objects whose identity is part of it.
    """
    found: list[Any] = [random.getstate(), pickle.dumps(np.random.get_state())]  # noqa: NPY002  what users may draw from
    seen, stack, held = set[int](), list[Any](), list[Any]()
    for inner in module.modules():
        seen.add(id(inner))
        stack += [vars(inner), dict(vars(type(inner)))]
    while stack:
        value = stack.pop()
        if isinstance(value, _PLAIN_DATA):
            found.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            held.append(value)
            found.append(len(value) if isinstance(value, dict) else id(value))
            stack.extend(_parts_of(value))
    tensors = [*module.buffers(), *module.parameters()]
    return [*found, *tensor_state.versions_of(tensors)], held


def _may_be_given_again(values: Any) -> bool:
    """Whether a second call can be given the same: tensors, and objects of which copies are made."""
    try:
        _apart(values)
    except Exception:  # whatever an object raises where it is copied
        return False
    return True


def _apart(value: Any) -> Any:
    """Copy whatever a call may change of its arguments, except for the tensors among them."""
    if isinstance(value, (torch.Tensor, *_PLAIN_DATA)):
        return value
    if type(value) in (tuple, list):
        return type(value)(_apart(item) for item in value)
    if type(value) is dict:
        return {key: _apart(item) for key, item in value.items()}
    kept = _reached(value)
    return copy.deepcopy(value, {id(tensor): tensor for tensor in kept})


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors in arguments, those in objects too."""
    return [found for found in _reached(value) if isinstance(found, torch.Tensor)]


def _reached(value: Any) -> list[Any]:
    """List the tensors that containers and objects hold, however deep.

    Raises:
        TypeError: If a module is among them: a copy would have weights of its own.
    """
    found, seen, stack = list[Any](), set[int](), [value]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, _PLAIN_DATA):
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            raise TypeError("a module is given as an argument")
        if isinstance(item, torch.Tensor):
            found.append(item)
        stack.extend(_parts_of(item))
    return found


def _parts_of(value: Any) -> list[Any]:
    """List what a container or an object holds; nothing for tensors, modules, classes and functions."""
    if isinstance(value, torch.Tensor | nn.Module | type | FunctionType | MethodType | ModuleType):
        return []
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())
