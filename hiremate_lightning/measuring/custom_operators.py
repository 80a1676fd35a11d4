"""Custom operators: which of them give the same numbers when they run again.

PyTorch tags those of its own operators that draw random numbers. Operators of others (of `torch.library`, of compiled
extensions) may lack the tag, or add up in any order. So each is run twice, on made-up inputs, before a plan or a proof
may do so. One that reads a variable of Python may find another value in the backward: it runs once.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import fx

from ..capturing.capture import Captured
from ..rewriting.joint import CALLS_AN_OPERATOR, TRITON, name_of
from ..torch_private import aot, custom_code, tensor_state
from .apart import undisturbed
from .outside import Outside, contents_of, is_code, is_of_library
from .python_calls import functions_called
from .stand_ins import runner

log = logging.getLogger("hiremate_lightning")

_TORCHS_OWN = ("aten", "prims", "prim")
_CONSTANT = (bool, int, float, complex, str, bytes)
_DATA = (*_CONSTANT, list, tuple, dict, set, deque, torch.Tensor, torch.Generator, SimpleNamespace, np.ndarray)


def without_unsteady(captured: Captured) -> Captured:
    """Return the same where custom operators run once that draw random numbers, or differ when run again."""
    custom = [i for i, node in enumerate(captured.fx_nodes) if captured.graph.nodes[i].is_pure and _is_custom(node)]
    by_key = {captured.graph.nodes[i].key: i for i in custom}
    if not by_key:
        return captured
    with undisturbed(captured.device):
        unsteady = {key for key, index in by_key.items() if not _is_steady(captured, index)}
    once = [i for i in custom if captured.graph.nodes[i].key in unsteady]
    for op in sorted({captured.graph.nodes[i].op for i in once}):
        log.info(
            "%s gives other numbers when it runs again, can't run alone, or reads variables of Python that may change: "
            "no plan runs it twice",
            op,
        )
    return captured.running_once(once) if once else captured


def has_unsteady(captured: Captured) -> bool:
    """Whether a custom operator may give other numbers when it runs again, draw from a generator, or change its inputs.

    Args:
        captured: What `without_unsteady` has returned.
    """
    pairs = zip(captured.graph.nodes, captured.fx_nodes, strict=False)
    return any(not record.is_pure and _is_custom(node) for record, node in pairs)


def _operator_of(node: fx.Node) -> Any:
    return node.args[0] if name_of(node.target) in CALLS_AN_OPERATOR else node.target


def _reads_variables(code: Sequence[Callable[..., Any]]) -> bool:
    """Whether the code of an operator reads data beside its arguments."""
    outside = Outside(code)
    values = [space.get(name) for space, names in outside.names for name in names]
    values += map(contents_of, outside.cells)
    values += [value for kind in outside.classes for name, value in vars(kind).items() if not name.startswith("__")]
    values += [value for value in outside.values if not isinstance(value, _CONSTANT)]
    return not outside.is_whole or any(_is_data(value) for value in values)


def _is_data(value: Any) -> bool:
    """Whether a value is other than code, and than what libraries need for themselves: a log, another operator."""
    if value is None or is_code(value):
        return False
    return isinstance(value, _DATA) or not is_of_library(type(value))


def _is_custom(node: fx.Node) -> bool:
    target = _operator_of(node)
    if name_of(target) == TRITON:
        return True
    return isinstance(target, aot.OpOverload) and target.namespace not in _TORCHS_OWN


def _is_steady(captured: Captured, index: int) -> bool:
    operator = _operator_of(captured.fx_nodes[index])
    defined = custom_code.code_of(operator)
    if _reads_variables(defined):
        return False
    try:
        run = runner(captured, index)
        before = _random_states(captured.device)
        is_seen_whole = defined or name_of(operator) == TRITON  # Triton compiles a kernel once, or refuses what changed
        first, called = (run(), defined) if is_seen_whole else functions_called(run, custom_code.arguments_of(operator))
        if called is None or _reads_variables(called):
            return False
        return before == _random_states(captured.device) and _are_equal(first, run)
    except Exception as error:  # a custom operator may refuse made-up inputs in any way: then it runs once
        log.debug("Could not run %s alone (%s: %s)", captured.graph.nodes[index].op, type(error).__name__, error)
        return False


def _random_states(device: torch.device) -> tuple[Any, ...]:
    on_device = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None
    _, numbers, *others = np.random.get_state(legacy=True)  # noqa: NPY002  what users may draw from
    return torch.get_rng_state().tolist(), on_device, random.getstate(), np.asarray(numbers).tolist(), others


def _are_equal(first: Any, run: Callable[[], Any]) -> bool:
    one, other = (tensor_state.leaves(values) for values in (first, run()))
    return len(one) == len(other) and all(map(_is_equal, one, other))


def _is_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    return bool(((one == other) | ((one != one) & (other != other))).all())
