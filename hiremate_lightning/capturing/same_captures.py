"""Reuse the runner of an earlier capture if Dynamo captures the same graph again.

Dynamo captures equal graphs twice if a layer is first called late, as with randomly skipped layers, although its graph
equals that of the layers before. And the first call may change a value that Dynamo guards on: transformers' heads for
classification write the kind of loss into the configuration. The runner of the first graph runs the second graph too.

Two captures are the same if everything is equal on which AOTAutograd's trace depends: operations and constants of the
graph; kind, layout and shared memory of the inputs; and the settings of torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from ..torch_private import autocasting, hacks, tensor_state
from ..torch_private.facts import NotShownError, content_of_nodes, expect, facts_of, guard_counts
from ..torch_private.size_symbols import NUMBERS, expressions_in, values_in

Runner = Callable[..., Any]


class SameCaptures:
    """Weak cache of the runners of captured code; `used_again` is called if a runner is used for another capture."""

    def __init__(self, used_again: Callable[[], None] = lambda: None) -> None:
        self._used_again = used_again
        self._runs: weakref.WeakValueDictionary[Hashable, Runner] = weakref.WeakValueDictionary()

    def run_of(
        self, make: Callable[[fx.GraphModule, Sequence[Any]], Runner], module: fx.GraphModule, inputs: Sequence[Any]
    ) -> Runner:
        """Return the runner of an earlier capture of the same code, or else a new one from `make`."""
        run = self.find(module, inputs)
        if run is not None:
            self._used_again()
            return run
        guards_before = guard_counts()
        run = make(module, inputs)
        if guard_counts() == guards_before:
            self.keep(module, inputs, run)
        return run

    def find(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Runner | None:
        """Return the runner of an earlier capture of the same code, None if there is none."""
        return self._runs.get(_key(module, inputs))

    def keep(self, module: fx.GraphModule, inputs: Sequence[Any], run: Runner) -> None:
        """Store the runner of captured code, unless the code can't be compared."""
        key = _key(module, inputs)
        if key is not None:
            self._runs[key] = run


def _key(module: fx.GraphModule, inputs: Sequence[Any]) -> Hashable:
    """Return a key that is equal for equal code; None if the code can't be compared."""
    if not hacks.is_on("same captures"):
        return None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled()
    settings = (*modes, *autocasting.settings(), *tensor_state.kernel_settings(), torch.get_default_dtype())
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}
    try:
        return settings, _content_of_inputs(module, inputs), content_of_nodes(numbers, numbers)
    except NotShownError:
        return None


def _content_of_inputs(module: fx.GraphModule, inputs: Sequence[Any]) -> Hashable:
    """Return the content of inputs and the memory they share; symbols by order of appearance, with their ranges."""
    places = dict[Any, Any]()

    def content_of_size(number: Any) -> Hashable:
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
        content_of_size(value)
        if isinstance(value, torch.SymInt)
        else (isinstance(value, torch.nn.Parameter), *facts_of(value, content_of_size))
        for value in inputs
    )
    # Symbols without an input can't be compared, as a trace may depend on them; at definite sizes they have numbers.
    values, symbols = values_in(module), places.keys() | module.meta.get(NUMBERS, {}).keys()
    expect(not any(isinstance(value, (torch.SymFloat, torch.SymBool)) for value in values), "a number that is no size")
    expect(all(size.free_symbols <= symbols for size in expressions_in(values)), "a size that no input has")
    return facts, shared
