"""Changes in place that Dynamo has seen, whether its graph still makes them, and those that it would not capture."""

from __future__ import annotations

import logging
from collections import Counter
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.utils import proxy_args_kwargs
from torch._dynamo.variables import builder
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.weak import WeakIdKeyDictionary

from . import aot, foreign_code, tensor_state

log = logging.getLogger("hiremate_lightning")


def lost_changes(written: fx.GraphModule) -> list[str]:
    """List the inputs of captured code that the user's code changes in place more often than the captured code does.

    Dynamo runs each operation on stand-ins without memory as it reads it, and these count their changes. Later it drops
    what it takes for unread. So its graph is run on new stand-ins, which must count as many. They have numbers for
    sizes: where an operation has no rule for symbols, it would turn Dynamo's into numbers too. Inputs that share memory
    count each other's changes for Dynamo, and the new ones do not: their counts are added up.
    """
    inputs = list(written.graph.find_nodes(op="placeholder"))
    shown = [node.meta.get("example_value") for node in inputs]
    made_with = [_made_with.get(value, 0) if isinstance(value, torch.Tensor) else 0 for value in shown]
    counts = [_changes_of(value) - changes for value, changes in zip(shown, made_with, strict=True)]
    if not any(counts):
        return []
    try:
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), torch.no_grad():
            new = [_with_numbers(value) for value in shown]
            changes_before = [_changes_of(value) for value in new]
            fx.Interpreter(written).run(*new)
        again = [_changes_of(value) - changes for value, changes in zip(new, changes_before, strict=True)]
    except Exception as error:  # whatever needs a number, or a gradient
        log.debug("Changes in place could not be counted again: %s", error)
        return []
    is_simple = not any(isinstance(node.target, aot.HigherOrderOperator) for node in written.graph.nodes)
    storages = [tensor_state.storage_id(value) if tensor_state.is_dense(value) else None for value in shown]
    of_storage = Counter[int | None]()
    for storage, count in zip(storages, again, strict=True):
        of_storage[storage] += count
    pairs = zip(inputs, counts, (of_storage[storage] for storage in storages), strict=True)
    return [str(node.target) for node, before, now in pairs if before and (not now or (is_simple and now < before))]


def _noting_changes(*arguments: Any, **options: Any) -> Any:
    """Make a stand-in, and note how many changes it counts already: one where another stand-in has its memory."""
    stand_in = _stand_in(*arguments, **options)
    if isinstance(stand_in, torch.Tensor) and stand_in not in _made_with:
        _made_with[stand_in] = _changes_of(stand_in)
    return stand_in


def _write_by_copying(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Capture a call with an `out=` that is not contiguous, where Dynamo ends its graph.

    AOTAutograd traces the call as a result that is copied. The graph itself makes the call as the user wrote it, so
    that a proof sees where the copy has other numbers. Calls that draw random numbers or need gradients are left to
    Dynamo: the first draw others without `out=`, the second are errors.
    """
    out = kwargs.get("out")
    if out is None or not out.is_tensor() or foreign_code.draws(function.value):
        return _call(function, tx, args, kwargs)
    proxies = proxy_args_kwargs(args, {name: value for name, value in kwargs.items() if name != "out"})
    if not _is_result_like(out.as_proxy().node.meta.get("example_value"), tx.fake_mode, function.value, *proxies):
        return _call(function, tx, args, kwargs)
    named = {**proxies[1], "out": out.as_proxy()}
    proxy = tx.output.create_proxy("call_function", _writing(function.value), proxies[0], named)
    return wrap_fx_proxy(tx=tx, proxy=proxy)


def _is_result_like(out: Any, mode: FakeTensorMode, function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call gives a tensor that a stand-in which is not contiguous takes as it is, with no gradients."""
    if not isinstance(out, torch.Tensor) or out.is_contiguous():
        return False
    values = fx.node.map_aggregate(
        (args, kwargs), lambda value: value.node.meta["example_value"] if isinstance(value, fx.Proxy) else value
    )
    try:
        with mode:
            result = function(*values[0], **values[1])
    except Exception as error:  # whatever the call may raise: Dynamo will raise it again
        log.debug("A call with out= can not be traced without it: %s", error)
        return False
    if not isinstance(result, torch.Tensor) or result.requires_grad or out.requires_grad:
        return False
    return (result.shape, result.dtype, result.device) == (out.shape, out.dtype, out.device)


@cache
def _writing(function: Any) -> Any:
    """Return a function that calls another one with `out=`; where it is traced, its result is copied."""

    def write(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if is_fake(out):
            return out.copy_(function(*args, **kwargs))
        return function(*args, out=out, **kwargs)  # type: ignore[no-any-return]

    return write


_call = TorchInGraphFunctionVariable.call_function
_stand_in = builder.wrap_to_fake_tensor_and_record
_made_with: WeakIdKeyDictionary = WeakIdKeyDictionary()  # changes that stand-ins for inputs were made with
NOTED = ((builder, "wrap_to_fake_tensor_and_record", _noting_changes),)
COPIED = ((TorchInGraphFunctionVariable, "call_function", _write_by_copying),)


def _drop_unread_numbers(output: Any) -> None:
    """Drop the inputs whose numbers are guarded and that nothing reads, but none of the operations that change them.

    Dynamo tells both by the number that a tensor is known to hold. An operation in place returns its input, so it has
    that number too, and is unread as a rule.
    """
    shown = [(node, node.meta) for node in output.graph.nodes if node.op != "placeholder"]
    for node, _ in shown:
        node.meta = {}
    try:
        _drop_specialized(output)
    finally:
        for node, meta in shown:
            node.meta = meta


_drop_specialized = OutputGraph.remove_tensorify_specialized_graphargs
NUMBERS = ((OutputGraph, "remove_tensorify_specialized_graphargs", _drop_unread_numbers),)


def _changes_of(value: Any) -> int:
    return tensor_state.versions_of([value])[0] if isinstance(value, torch.Tensor) else 0


def _with_numbers(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value
    shape, strides = (map(tensor_state.int_hint, sizes) for sizes in (value.shape, value.stride()))
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=value.dtype, device=value.device)
