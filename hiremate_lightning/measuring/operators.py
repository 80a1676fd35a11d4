"""Run one operation of a captured graph alone, on made-up inputs of the shapes that it was traced with.

Custom operators run twice this way, to find those that give the same numbers again: only these may be recomputed.
PyTorch tags its own operators that draw random numbers. Custom operators (of `torch.library`, of compiled extensions)
may lack the tag, or add up in any order. Their Python code may read variables that hold another value in the backward:
operators with Python code run once, unless the user lists them as recomputable.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from ..capturing.capture import Captured
from ..housekeeping import log
from ..memory.metering import RandomState, undisturbed
from ..rewriting.kernels import as_eager
from ..rewriting.nodes import CALLS_AN_OPERATOR, TRITON, attribute_of, is_part, name_of
from ..rewriting.overwriting import Finish
from ..rewriting.replays import call_of, is_state, state_arguments
from ..torch_private import aot, operators, tensor_state

META = torch.device("meta")
DRAWN = 1 << 14  # random numbers drawn for a tensor; a larger tensor repeats them
_TORCHS_OWN = ("aten", "prims", "prim")
_KERNELS_OF_USERS = "hiremate::"  # operators that run kernels of users: their Python code reads no variables


def _loop_twice(condition: Callable[..., Any], body: Callable[..., Any], carried: Any, constant: Any, *_: Any) -> Any:
    condition(*carried, *constant)
    carried = body(*carried, *constant)
    return body(*carried, *constant)  # while the results of the first round exist


_PUTTING = {"aten.index_put.default", "aten.index_put_.default", "aten._unsafe_index_put.default"}
# Functions that run each path of an operator whose path depends on values: on made-up values a loop may never end.
COURSES: dict[str, tuple[Callable[..., Any], ...]] = {
    "cond": (
        lambda _, first, second, operands: first(*operands),
        lambda _, first, second, operands: second(*operands),
    ),
    "while_loop": (_loop_twice,),
}


def runner(
    captured: Captured,
    index: int,
    course: Callable[..., Any] | None = None,
    strides: Mapping[fx.Node, tuple[int, ...]] | None = None,
    device: torch.device | None = None,
) -> Callable[[], Any]:
    """Return a function that runs one operation of a captured graph on made-up inputs, on its device or another.

    `course` is called instead of the operation, with its arguments. `strides` has those of inputs that differ from the
    trace.
    """
    record, node = captured.graph.nodes[index], captured.fx_nodes[index]
    made: dict[fx.Node, Any] = {}

    def argument(source: fx.Node) -> Any:
        if source not in made:
            if strides is not None and source in strides:
                made[source] = made_up(source.meta["val"], device, strides[source])
            elif is_state(source):
                take: Any = source.target
                made[source] = take(*state_arguments(source, node, lambda read: made_up(read.meta["val"], META)))
            else:
                made[source] = stand_in(source)
        return made[source]

    if record.replays is not None:
        target, args, kwargs = call_of(record.op, node, [captured.fx_values[t] for t in record.inputs])
    elif not callable(node.target):
        raise TypeError("its target can't be called")
    else:
        target, args = as_eager(node)
        kwargs = dict(node.kwargs)
    args, kwargs = fx.node.map_arg((args, kwargs), argument)
    _make_valid(record.op, args)
    target = course or target
    finish = captured.finishes.get(node)
    if finish is None or finish.result not in (captured.fx_values[t] for t in record.outputs):
        return lambda: target(*args, **kwargs)
    for value in finish.reads:
        argument(value)
    for step in finish.steps:  # the unfinished result does not exist yet: its traced value stands for it
        _make_valid(str(step.target), fx.node.map_arg(step.args, lambda value: made.get(value, value.meta["val"])))
    return lambda: _finished(lambda: target(*args, **kwargs), finish, made)


def _make_valid(op: str, args: Sequence[Any]) -> None:
    """Change made-up inputs to valid ones: pivots count from one, masks choose as many elements as there are values."""
    if op in ("aten.linalg_lu_solve.default", "aten.lu_unpack.default"):
        args[1].fill_(1)
    elif op in ("aten.masked_scatter.default", "aten.masked_scatter_.default"):
        whole, mask, source = args
        _choose(mask, source.numel() * mask.numel() // max(1, whole.numel()))
    elif op == "aten.masked_scatter_backward.default":
        gradient, mask, shape = args
        _choose(mask, prod(shape) * mask.numel() // max(1, gradient.numel()))
    elif op in _PUTTING:
        whole, indices, values = args[:3]
        present = [(dimension, index) for dimension, index in enumerate(indices) if index is not None]
        if len(present) == 1 and present[0][1].dtype == torch.bool:
            ((dimension, mask),) = present
            after = whole.dim() - dimension - mask.dim()  # dimensions of the values behind the chosen elements
            count = values.shape[-after - 1] if values.dim() > after else 1
            if count != 1:  # one value is broadcast
                _choose(mask, count)


def _choose(mask: torch.Tensor, count: int) -> None:
    """Let a mask choose `count` of its elements, or fewer if the mask is expanded and shows each element repeatedly."""
    kept = [(size, stride) for size, stride in zip(mask.shape, mask.stride(), strict=True) if stride]
    distinct = mask.as_strided([size for size, _ in kept], [stride for _, stride in kept])
    chosen = count * distinct.numel() // max(1, mask.numel())
    distinct.copy_((torch.arange(distinct.numel(), device=distinct.device) < chosen).view(distinct.shape))


def _finished(run: Callable[[], Any], finish: Finish, made: Mapping[fx.Node, Any]) -> Any:
    """Run an operation, and the operations that finish one of its results; return all results.

    The operation runs here: while TorchDynamo watches frames, a caller would hold its result until this call ends.
    """
    result = run()
    parts = [result] if isinstance(result, torch.Tensor) else list(result)
    del result
    position: Any = finish.value.args[1] if is_part(finish.value) else 0
    last = finish.value
    there = {**made, last: parts[position]}
    parts[position] = None
    for step, target, args in finish.calls():
        args, kwargs = fx.node.map_arg((args, dict(step.kwargs)), there.__getitem__)
        there[step] = target(*args, **kwargs)
        del there[last], args  # as generated code does
        last = step
    parts[position] = there[last]
    return parts


# Positions of the seed and offset of dropout's mask: kernels return and read them on the host, unlike in the trace.
_PARTS_ON_HOST = {
    "aten._scaled_dot_product_efficient_attention.default": (2, 3),
    "aten._efficient_attention_forward.default": (2, 3),
}


def stand_in(source: fx.Node) -> Any:
    """Make a value with the shapes, strides, dtypes and devices of a node's value, as kernels return it."""
    value = attribute_of(source) if source.op == "get_attr" else source.meta.get("val")
    if source.target is operator.getitem:
        whole, part = source.args
        if isinstance(whole, fx.Node) and part in _PARTS_ON_HOST.get(str(whole.target), ()):
            return made_up(value, torch.device("cpu"))
    return made_up(value)


def made_up(value: Any, device: torch.device | None = None, strides: tuple[int, ...] | None = None) -> Any:
    """Make a value like the given one, on its device or another: numbers from 0 to 1, zeros for integers.

    So probabilities are valid: a CUDA kernel that asserts this would end the whole process.
    """
    if isinstance(value, torch.Tensor):
        size = [tensor_state.int_hint(s) for s in value.shape]
        stride = traced_strides(value) if strides is None else strides
        made = torch.empty_strided(size, stride, dtype=value.dtype, device=device or value.device)
        if value.is_conj() or value.is_neg():  # kernels that can't read such views copy them first
            return tensor_state.viewed_as(made.zero_(), value)
        if value.dtype.is_floating_point and 0 not in stride:
            return _drawn(made) if value.dtype.itemsize >= 2 else made.zero_()
        return made.fill_(1) if value.dtype.is_floating_point or value.dtype == torch.bool else made.zero_()
    if isinstance(value, (list, tuple)):
        return type(value)(made_up(v, device) for v in value)
    return tensor_state.int_hint(value) if isinstance(value, torch.SymInt) else value


def _drawn(made: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with repeated random numbers: to draw each one would take longer than most kernels."""
    flat = made.as_strided((made.untyped_storage().nbytes() // made.itemsize,), (1,), 0)
    drawn = flat.new_empty(DRAWN).uniform_()
    whole = flat.numel() // DRAWN * DRAWN
    flat[:whole].view(-1, DRAWN).copy_(drawn)
    flat[whole:].copy_(drawn[: flat.numel() - whole])
    return made


def traced_strides(value: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that a value was traced with."""
    return tuple(tensor_state.int_hint(s) for s in value.stride())


# ---------------------------------------------------------------- custom operators


def without_unsteady(captured: Captured, recomputable: Collection[str] = ()) -> Captured:
    """Return the captured code with custom operators marked to run once if they may give other numbers the next time.

    `recomputable` names operators ("library::name") whose Python code gives the same numbers again, as the user says.
    """
    custom = [i for i, node in enumerate(captured.fx_nodes) if captured.graph.nodes[i].is_pure and _is_custom(node)]
    by_key = {captured.graph.nodes[i].key: i for i in custom}
    if not by_key:
        return captured
    with undisturbed(captured.device):
        unsteady = {key for key, index in by_key.items() if not _is_steady(captured, index)}
    drawing = [i for i in custom if captured.graph.nodes[i].key in unsteady]
    reading = list[int]()
    for index in (i for i in custom if i not in drawing):
        operator = _operator_of(captured.fx_nodes[index])
        name = operators.name_of(operator)
        is_known = name in recomputable or name.startswith(_KERNELS_OF_USERS)
        if operators.has_python_code(operator) and not is_known:
            reading.append(index)
    _log_once(captured, drawing, "It gives other numbers when it runs again, or can't run alone")
    _log_once(captured, reading, "If its Python code always gives the same numbers, list it in recomputable_operators")
    return captured.running_once(drawing, reading) if drawing or reading else captured


def has_unsteady(captured: Captured) -> bool:
    """Whether a custom operator in code from `without_unsteady` changes its inputs, or gives other numbers again."""
    pairs = zip(captured.graph.nodes, captured.fx_nodes, strict=False)
    return any((record.is_random or record.is_mutating) and _is_custom(node) for record, node in pairs)


def _log_once(captured: Captured, nodes: Sequence[int], why: str) -> None:
    for op in sorted({captured.graph.nodes[i].op for i in nodes}):
        log.info("%s runs once in a step, and its results are kept. %s", op, why)


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
        before, first = RandomState(), run()
        if before != RandomState():
            return False
        torch.testing.assert_close(run(), first, rtol=0, atol=0, equal_nan=True)
        return True
    except Exception as error:  # a custom operator may refuse made-up inputs in any way: then it runs once
        log.debug("Could not run %s alone (%s: %s)", captured.graph.nodes[index].op, type(error).__name__, error)
        return False
