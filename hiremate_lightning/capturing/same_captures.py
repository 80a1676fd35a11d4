"""Captured code that was captured before: what was made of a graph runs the same graph again.

A layer that is called late, as where layers are left out at random, is captured apart from the layers before it, though
its graph is theirs. And code may change in its first call what it then asks for: transformers' heads for classification
write into the configuration which loss to compute. What was made of the first graph runs the second one too.

What is compared is all that a trace by AOTAutograd depends on: operations and constants of the graph, inputs by kind,
layout, and what memory they share, and the settings of torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from ..torch_private import autocasting, hacks, tensor_state
from ..torch_private.facts import NotShownError, described_nodes, expect, facts_of, guard_counts
from ..torch_private.size_symbols import NUMBERS, expressions_in, values_in

Runner = Callable[..., Any]


class SameCaptures:
    """What runs in the place of captured code, as long as something else holds it; `tell` hears where it runs again."""

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        self._tell = tell
        self._runs: weakref.WeakValueDictionary[Hashable, Runner] = weakref.WeakValueDictionary()

    def run_of(
        self, make: Callable[[fx.GraphModule, Sequence[Any]], Runner], module: fx.GraphModule, inputs: Sequence[Any]
    ) -> Runner:
        """Return what runs captured code: what was made of the same code before, or else what is made now."""
        run = self.find(module, inputs)
        if run is not None:
            self._tell()
            return run
        guards_before = guard_counts()
        run = make(module, inputs)
        if guard_counts() == guards_before:
            self.keep(module, inputs, run)
        return run

    def find(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Runner | None:
        """Return what was made of the same code before; None where nothing was."""
        return self._runs.get(_key(module, inputs))

    def keep(self, module: fx.GraphModule, inputs: Sequence[Any], run: Runner) -> None:
        """Learn what was made of code."""
        key = _key(module, inputs)
        if key is not None:
            self._runs[key] = run


def _key(module: fx.GraphModule, inputs: Sequence[Any]) -> Hashable:
    """Return what is equal for the same code; None where it can't be told."""
    if not hacks.is_on("same captures"):
        return None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled()
    settings = (*modes, *autocasting.settings(), *tensor_state.kernel_settings(), torch.get_default_dtype())
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}
    try:
        return settings, _described_inputs(module, inputs), described_nodes(numbers, numbers)
    except NotShownError:
        return None


def _described_inputs(module: fx.GraphModule, inputs: Sequence[Any]) -> Hashable:
    """Describe inputs, and what memory they share; symbols for sizes by their place, with what they may be."""
    places = dict[Any, Any]()

    def described_size(number: Any) -> Hashable:
        if not isinstance(number, torch.SymInt):
            return int(number)
        expression, ranges = number.node.expr, number.node.shape_env.var_to_range
        symbols = sorted(expression.free_symbols, key=str)
        for symbol in symbols:
            places.setdefault(symbol, sympy.Symbol(f"s{len(places)}", integer=True))
        return expression.xreplace(places), *((ranges[s].lower, ranges[s].upper) for s in symbols)

    tensors = [value for value in inputs if not isinstance(value, torch.SymInt)]
    expect(all(map(tensor_state.is_dense, tensors)), "an input that is no dense tensor")
    storages = dict[int, int]()
    shared = tuple(storages.setdefault(tensor_state.storage_id(t), len(storages)) for t in tensors)
    facts = tuple(
        described_size(value)
        if isinstance(value, torch.SymInt)
        else (isinstance(value, torch.nn.Parameter), *facts_of(value, described_size))
        for value in inputs
    )
    # A trace may ask what other symbols are; those of code at definite sizes are numbers now.
    values, known = values_in(module), places.keys() | module.meta.get(NUMBERS, {}).keys()
    expect(not any(isinstance(value, (torch.SymFloat, torch.SymBool)) for value in values), "a number that is no size")
    expect(all(size.free_symbols <= known for size in expressions_in(values)), "a size that no input has")
    return facts, shared
