"""Custom operators: which of them give the same numbers when they run again.

PyTorch tags those of its own operators that draw random numbers. Operators of others (of `torch.library`, of compiled
extensions) may lack the tag, or add up in any order. So each is run twice, on made-up inputs, before a plan or a proof
may do so. Python code may read variables, which may hold another value in the backward: operators with Python code run
once, unless the user lists them as recomputable.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from ..capturing.capture import Captured
from ..rewriting.joint import CALLS_AN_OPERATOR, TRITON, name_of
from ..torch_private import aot, operators, tensor_state
from .apart import undisturbed
from .stand_ins import runner

log = logging.getLogger("hiremate_lightning")

_TORCHS_OWN = ("aten", "prims", "prim")
_KERNELS_OF_USERS = "hiremate::"  # operators that run kernels of users: their Python code reads no variables


def without_unsteady(captured: Captured, recomputable: Collection[str] = ()) -> Captured:
    """Return the captured code, in which custom operators that may give other numbers again run once only.

    Recomputable are operators with Python code that give the same numbers again, as the user says: "library::name".
    """
    custom = [i for i, node in enumerate(captured.fx_nodes) if captured.graph.nodes[i].is_pure and _is_custom(node)]
    by_key = {captured.graph.nodes[i].key: i for i in custom}
    if not by_key:
        return captured
    with undisturbed(captured.device):
        unsteady = {key for key, index in by_key.items() if not _is_steady(captured, index)}
    random = [i for i in custom if captured.graph.nodes[i].key in unsteady]
    reading = [i for i in custom if i not in random and _may_read_variables(captured.fx_nodes[i], recomputable)]
    _log_once(captured, random, "It gives other numbers when it runs again, or can't run alone")
    _log_once(captured, reading, "If its Python code always gives the same numbers, list it in recomputable_operators")
    return captured.running_once(random, reading) if random or reading else captured


def has_unsteady(captured: Captured) -> bool:
    """Whether a custom operator may give other numbers when it runs again at once, or change its inputs.

    Args:
        captured: Code that `without_unsteady` has returned.
    """
    pairs = zip(captured.graph.nodes, captured.fx_nodes, strict=False)
    return any((record.is_random or record.is_mutating) and _is_custom(node) for record, node in pairs)


def _log_once(captured: Captured, nodes: Sequence[int], why: str) -> None:
    for op in sorted({captured.graph.nodes[i].op for i in nodes}):
        log.info("%s runs once in a step, and its results are kept. %s", op, why)


def _may_read_variables(node: fx.Node, recomputable: Collection[str]) -> bool:
    operator = _operator_of(node)
    name = operators.name_of(operator)
    is_known = name in recomputable or name.startswith(_KERNELS_OF_USERS)
    return operators.has_python_code(operator) and not is_known


def _operator_of(node: fx.Node) -> Any:
    return node.args[0] if name_of(node.target) in CALLS_AN_OPERATOR else node.target


def _is_custom(node: fx.Node) -> bool:
    target = _operator_of(node)
    if name_of(target) == TRITON:
        return True
    return isinstance(target, aot.OpOverload) and target.namespace not in _TORCHS_OWN


def _is_steady(captured: Captured, index: int) -> bool:
    """Whether an operator gives the same numbers twice on made-up inputs, and draws none."""
    try:
        run = runner(captured, index)
        before = _random_states(captured.device)
        first = run()
        return before == _random_states(captured.device) and _are_equal(first, run)
    except Exception as error:  # a custom operator may refuse made-up inputs in any way: then it runs once
        log.debug("Could not run %s alone (%s: %s)", captured.graph.nodes[index].op, type(error).__name__, error)
        return False


def _random_states(device: torch.device) -> tuple[Any, ...]:
    on_device = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None
    _, numbers, *others = np.random.get_state(legacy=True)  # noqa: NPY002  what users may draw from
    return torch.get_rng_state().tolist(), on_device, random.getstate(), np.asarray(numbers).tolist(), others


def _are_equal(first: Any, run: Callable[[], Any]) -> bool:
    ones, others = (tensor_state.leaves(values) for values in (first, run()))
    if len(ones) != len(others):
        return False
    for one, other in zip(ones, others, strict=True):
        equal = one == other
        if isinstance(one, torch.Tensor):
            equal = (equal | ((one != one) & (other != other))).all()  # NaN equals NaN
        if not bool(equal):
            return False
    return True
