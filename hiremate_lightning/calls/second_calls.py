"""Modules whose calls may be computed twice in a step that runs as the user wrote it.

Where a module is called in `torch.utils.checkpoint` only what it is given stays, as users do by hand with the layers of
a transformer. Nothing has to be captured for that, so a step of a new size can run so at once (`unplanned`). Which
modules may be called twice is seen in plain steps first: a second call must change nothing, and be given what the first
one was given, in the same settings of PyTorch. Batch norms update copies of their running statistics the second time.
"""

from __future__ import annotations

import copy
import logging
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import HiRemateError
from ..measuring.outside import Outside
from ..objects import is_of
from ..records.graph import Node
from ..records.plain_ways import Calls
from ..records.step import Step
from ..torch_private import hooks, saved_hooks, sharding, tensor_state
from .given import PLAIN_DATA, things_in
from .module_state import ModuleState, keeps_statistics
from .places import Numbers
from .slots import Slot, StandIn

log = logging.getLogger("hiremate_lightning")

OBSERVED_STEPS = 2  # plain ones, before modules are called twice
_WITH_STATE = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.ndarray, Iterator)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SecondCalls:
    """Finds modules that may be called twice, and calls them so.

    Args:
        root: The model.

    Attributes:
        fit: The paths of modules that may be called twice; None before enough plain steps have shown which.
    """

    def __init__(self, root: nn.Module) -> None:
        self.fit: frozenset[str] | None = None
        self._paths = _PathsInGraphs(root)
        inner = ((path, module) for path, module in root.named_modules() if path)
        self._modules = {} if sharding.has_units(root) else dict(inner)
        self._called = Counter[str]()  # in the call under way
        self._seen = Counter[str]()
        self._unfit = set[str]()
        self._observed = list[tuple[str, ModuleState, list[weakref.ref[torch.Tensor]], list[int]]]()
        self._outside = cache(Outside)

    def step_begins(self) -> None:
        """Forget what was observed in a step that has failed."""
        self._observed.clear()

    def step_ended(self) -> None:
        """Learn that a step has ended in which calls were observed."""
        self._observed.clear()
        if self.fit is None and max(self._seen.values(), default=0) >= OBSERVED_STEPS:
            self.fit = frozenset(path for path, count in self._seen.items() if count >= OBSERVED_STEPS) - self._unfit
            self._seen.clear()

    def calls_in(self, step: Step, parameters: Mapping[int, int]) -> Calls:
        """List the forward nodes of each call of the modules that may be called twice, by path.

        Args:
            step: A captured step.
            parameters: Identities of the parameters among its tensors.
        """
        found = {} if self.fit is None else self._paths.calls_in(step, parameters, self.fit)
        times = min(map(len, found.values()), default=0)
        return {path: calls for path, calls in found.items() if len(calls) == times}

    @contextmanager
    def observed(self) -> Iterator[None]:
        """See in a plain call which modules may be called twice."""
        if self.fit is not None:
            yield
            return
        self._called.clear()
        with self._replaced(self._modules, self._observe):
            yield
        self._unfit.update(path for path, count in self._called.items() if count > 1)
        self._seen.update(self._called.keys())

    @contextmanager
    def twice(self, paths: frozenset[str]) -> Iterator[None]:
        """Call modules once more in the backward, for what their forward has computed."""
        with self._replaced({path: self._modules[path] for path in paths}, self._call_twice):
            yield

    @contextmanager
    def _replaced(self, modules: dict[str, nn.Module], call: Callable[..., Any]) -> Iterator[None]:
        found = {module: hooks.get_call(module) for module in modules.values()}
        for path, module in modules.items():
            if found[module] is None or isinstance(found[module], Slot):
                hooks.set_call(module, StandIn(call, path, module))
            else:  # compiled by the user
                self._unfit.add(path)
        try:
            yield
        finally:
            for module, slot in found.items():
                hooks.set_call(module, slot)

    def _observe(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._called[path] += 1
        if not _may_be_given_again((args, kwargs)) or hooks.has_hooks(module):
            self._unfit.add(path)
            return hooks.plain_call(module, *args, **kwargs)
        given = _tensors_in((args, kwargs))
        versions, state = tensor_state.versions_of(given), self._state_of(path, module)
        result = hooks.plain_call(module, *args, **kwargs)
        if state is None or state.has_changed():
            self._unfit.add(path)
        else:
            self._observed.append((path, state, [weakref.ref(tensor) for tensor in given], versions))
        return result

    def backward_starts(self) -> None:
        """See which modules would not find in the backward what they found in the forward."""
        for path, state, references, versions in self._observed:
            pairs = ((reference(), version) for reference, version in zip(references, versions, strict=True))
            alive = [(tensor, version) for tensor, version in pairs if tensor is not None]
            is_same = tensor_state.versions_of([tensor for tensor, _ in alive]) == [version for _, version in alive]
            if not is_same or state.has_changed():
                self._unfit.add(path)
        self._observed.clear()

    def _call_twice(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or hooks.has_hooks(module):  # which may have come since
            return hooks.plain_call(module, *args, **kwargs)
        state = self._state_of(path, module)
        if state is None or not _may_be_given_again((args, kwargs)):
            return hooks.plain_call(module, *args, **kwargs)
        call = _ModuleTwice(path, module, state, args, kwargs)
        return checkpoint(call, *call.tensors, use_reentrant=False)

    def _state_of(self, path: str, module: nn.Module) -> ModuleState | None:
        """Note what a module reads beside its arguments; None where that can't be known."""
        try:
            return ModuleState(module, self._outside)
        except Exception as error:  # whatever objects raise when they are looked into
            log.debug("%s is called once: %s: %s", path, type(error).__name__, error)
            return None


class _PathsInGraphs:
    """Finds the paths of modules in captured graphs, whose nodes know them below the module that was captured."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = frozenset(path for path, _ in root.named_modules())
        named = root.named_parameters(remove_duplicate=False)
        self._owners = {id(parameter): name.rpartition(".")[0] for name, parameter in named}

    def calls_in(self, step: Step, parameters: Mapping[int, int], paths: frozenset[str]) -> dict[str, list[list[int]]]:
        """List the forward nodes of each call of some modules."""
        nodes, own = step.graph.nodes, dict[int, list[int]]()
        for index in step.graph.forward:
            owner = step.owners[index]
            if owner is not None:
                own.setdefault(owner[0], []).append(index)
        found = dict[str, list[list[int]]]()
        for members in own.values():
            prefix = self._prefix([nodes[index] for index in members], parameters)
            calls = dict[str, list[int]]()
            for index in members if prefix is not None else ():
                for path in _paths_around(f"{prefix}{nodes[index].module}"):
                    if path in paths:
                        calls.setdefault(path, []).append(index)
            for path, nodes_of_call in calls.items():
                found.setdefault(path, []).append(nodes_of_call)
        return found

    def _prefix(self, nodes: Sequence[Node], parameters: Mapping[int, int]) -> str | None:
        """Find the module below which these nodes are, by the parameters that they read, or by their own paths."""
        votes = Counter[str]()
        for node in nodes:
            read = (self._owners.get(parameters.get(t, 0), "") for t in node.inputs)
            own = node.module
            votes.update(owner.removesuffix(own) for owner in read if own and f".{owner}".endswith(f".{own}"))
        modules = {node.module for node in nodes} - {""}
        prefixes = {"", *(f"{module}." for module in self._modules if module)} if not votes else set(votes)
        found = [prefix for prefix in prefixes if all(prefix + module in self._modules for module in modules)]
        return found[0] if len(found) == 1 and modules else None


def _paths_around(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


class _ModuleTwice:
    """Calls a module with what it was given, again with copies of the objects that the first call may have changed.

    Args:
        path: Of the module.
        module: The module.
        state: What it reads beside its arguments, for both calls.
        args: What it is given.
        kwargs: What it is given by name.

    Attributes:
        tensors: The tensors that it was given.
    """

    def __init__(
        self, path: str, module: nn.Module, state: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._path, self._module, self._state = path, module, state
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._again = _apart((args, kwargs))
        self.tensors = _tensors_in((args, kwargs))
        self._numbers = Numbers(self.tensors)

    @saved_hooks.giving_way_to_transforms()
    def __call__(self, *_: torch.Tensor) -> Any:
        if self._given is not None:
            (args, kwargs), self._given = self._given, None
            return hooks.plain_call(self._module, *args, **kwargs)
        if self._numbers.changed() is not None:
            raise HiRemateError(
                f"An input of module {self._path!r} was changed in place after the call, which it was not in earlier "
                "steps, so that the module can't be computed again. Change a copy of that tensor."
            )
        self._state.check(self._path)
        args, kwargs = _apart(self._again)
        with self._state.put_back(), _statistics_apart(self._module):
            return hooks.plain_call(self._module, *args, **kwargs)


@contextmanager
def _statistics_apart(module: nn.Module) -> Iterator[None]:
    """Let batch norms update copies of their running statistics, on which nothing that they return depends."""
    norms = [norm for norm in module.modules() if keeps_statistics(norm)]
    found = [dict(norm.named_buffers(recurse=False)) for norm in norms]
    for norm, own in zip(norms, found, strict=True):
        for name, buffer in own.items():
            setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, own in zip(norms, found, strict=True):
            for name, buffer in own.items():
                setattr(norm, name, buffer)


def _may_be_given_again(values: Any) -> bool:
    """Whether a second call can be given the same: tensors, and objects of which copies are made."""
    try:
        _apart(values)
    except Exception:  # whatever an object raises where it is copied
        return False
    return True


def _apart(value: Any) -> Any:
    """Copy whatever a call may change of its arguments, except for the tensors among them."""
    if is_of(value, (torch.Tensor, *PLAIN_DATA)):
        return value
    if type(value) in (tuple, list):
        return type(value)(_apart(item) for item in value)
    if type(value) is dict:
        return {key: _apart(item) for key, item in value.items()}
    kept = _tensors_in(value)
    return copy.deepcopy(value, {id(tensor): tensor for tensor in kept})


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors that containers and objects hold, however deep.

    Raises:
        TypeError: If a module is among them: a copy would have weights of its own.
    """
    found = list(things_in(value))
    if any(is_of(thing, nn.Module) for thing in found):
        raise TypeError("a module is given as an argument")
    return [thing for thing in found if is_of(thing, torch.Tensor)]
