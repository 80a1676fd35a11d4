"""Patch Dynamo's variable trackers where they trace code differently from what eager PyTorch runs.

Code that asks whether it is compiled gets False, as in eager PyTorch, since it may compute something else otherwise.
torch, this package and a few files of others ask only in order to be traceable: they get Dynamo's answer, True. So does
code that its author compiled. Code that asks whether a CUDA graph captures it gets False: planned code never is.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx
from torch._dynamo import variables
from torch._dynamo.eval_frame import _is_in_optimized_module
from torch._dynamo.exc import unimplemented
from torch._dynamo.external_utils import is_compiling
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.utils import proxy_args_kwargs
from torch._dynamo.variables import ConstantVariable, misc
from torch._dynamo.variables import torch as dynamo_torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ..housekeeping import log
from .hacks import around, instead_of, replaced, replaced_entries
from .operators import draws

# Functions of NumPy that do not round, or round as IEEE 754 says. `prod` is assumed to multiply sizes.
EXACT = frozenset(
    """
    abs absolute add all amax amin any arange argmax argmin array asarray ascontiguousarray astype atleast_1d ceil clip
    concatenate copy divide empty equal expand_dims eye fill flatten flip floor floor_divide full full_like greater
    greater_equal hstack isfinite isnan item less less_equal logical_and logical_not logical_or max maximum min minimum
    moveaxis multiply ndim negative nonzero not_equal ones ones_like permute prod ravel repeat reshape roll round shape
    sign size split sqrt square squeeze stack subtract swapaxes take tile tolist transpose true_divide vstack where
    zeros zeros_like
    """.split()  # noqa: SIM905 - a word a line is sixty lines
)
_ROUNDS = "NumPy may round otherwise than torch in its place"
_CONVERTS = 3  # bits of a formatted value's flags: !s, !r or !a
_NAMES = ("__module__", "__name__", "__qualname__")
_VARIABLES = "torch._dynamo.variables"


def end_graph(title: str, explanation: str) -> None:
    """Break Dynamo's graph at the instruction that it traces now."""
    unimplemented(gb_type=title, context="", explanation=explanation, hints=[])


# ---------------------------------------------------------------- logs, generators, checkpoints


@instead_of(f"{_VARIABLES}.misc.LoggingLoggerVariable.call_method")
def messages(read: Any, variable: Any, tracer: Any, name: str, values: list[Any], named: dict[str, Any]) -> Any:
    """Log `*_once` messages at capture, and drop messages that the logger does not show; else they break graphs."""
    level = getattr(logging, name.upper(), None)
    is_constant = all(value.is_python_constant() for value in (*values, *named.values()))
    if name.endswith("_once") and is_constant:
        constants = {key: value.as_python_constant() for key, value in named.items()}
        getattr(variable.value, name)(*(value.as_python_constant() for value in values), **constants)
    elif level is None or variable.value.isEnabledFor(level):
        return read(variable, tracer, name, values, named)
    return ConstantVariable.create(None)


@instead_of(f"{_VARIABLES}.misc.RandomVariable.call_method")
def generators(read: Any, variable: Any, tracer: Any, *arguments: Any) -> Any:
    """Break the graph at a generator that outlives the call: in captured code it would repeat its draws."""
    if variable.source is not None:
        explanation = "it draws outside of captured graphs, as it goes on from call to call"
        end_graph("A generator of random numbers that outlives the call", explanation)
    return read(variable, tracer, *arguments)


@instead_of(f"{_VARIABLES}.higher_order_ops.CheckpointHigherOrderVariable._call_function")
def checkpoints(read: Any, variable: Any, tracer: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
    """Run reentrant checkpoint without gradients if no argument has one; Dynamo traces it as the non-reentrant variant.

    Reentrant checkpoint is an autograd function: its result has a gradient only if a tensor among its own arguments has
    one. Without this patch such calls get gradients that eager PyTorch does not compute.
    """
    is_reentrant = "use_reentrant" not in named or named["use_reentrant"].as_python_constant() in (True, None)
    values = [a.realize() for a in arguments[1:]]
    tensors = (v.as_proxy().node.meta["example_value"] for v in values if isinstance(v, TensorVariable))
    if not is_reentrant or any(tensor.requires_grad for tensor in tensors):
        return read(variable, tracer, arguments, named)
    warnings.warn("None of the inputs have requires_grad=True. Gradients will be None", stacklevel=2)  # as eager does
    plain = VariableTracker.build(tracer, _without_gradients)
    return tracer.inline_user_function_return(plain, arguments, {})


def _without_gradients(function: Callable[..., Any], *arguments: Any) -> Any:
    with torch.no_grad():
        return function(*arguments)


@contextmanager
def checkpoints_in_segments() -> Iterator[None]:
    """Capture `checkpoint_sequential` in a `with` block; Dynamo breaks graphs at it, so that its layers get no plan."""

    def inline(_: Any, tracer: Any, *arguments: Any, **named: Any) -> Any:
        return tracer.inline_user_function_return(VariableTracker.build(tracer, _in_segments), list(arguments), named)

    rule, answer = {checkpoint_sequential: TorchInGraphFunctionVariable}, {checkpoint_sequential: inline}
    with replaced_entries(get_torch_obj_rule_map(), rule), replaced_entries(_handlers, answer):
        yield


def _in_segments(functions: Any, segments: int, value: Any, use_reentrant: Any = True, **settings: Any) -> Any:
    """Compute as `checkpoint_sequential` does: all segments but the last one are checkpointed."""
    layers = list(functions.children() if isinstance(functions, torch.nn.Sequential) else functions)
    size = len(layers) // segments

    def run(value: Any, first: int, end: int) -> Any:
        for layer in layers[first:end]:
            value = layer(value)
        return value

    for first in range(0, size * (segments - 1), size):
        value = checkpoint(run, value, first, first + size, use_reentrant=use_reentrant, **settings)
    return run(value, size * (segments - 1), len(layers))


@instead_of("torch._dynamo._trace_wrapped_higher_order_op.autograd_function_backward_rewritten")
def backwards(_: Any, backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make gradients contiguous before a backward, as Dynamo does, but accept None; else such code runs uncaptured."""

    def run(ctx: Any, *gradients: Any) -> Any:
        return backward(ctx, *[g if g is None else g.contiguous() for g in gradients])

    return run


def gradients_from_before() -> AbstractContextManager[None]:
    """Break graphs, in a `with` block, where a gradient must go through tensors computed before the captured code.

    Without it such a gradient silently lacks terms if arguments are passed by keyword, or if one tensor was computed
    from another.
    """
    handlers = TorchInGraphFunctionVariable._get_handlers()
    read = handlers.get(torch.autograd.grad)  # None before 2.13, where Dynamo breaks graphs at it
    return replaced_entries(handlers, {} if read is None else {torch.autograd.grad: around(read, _gradient)})


def _gradient(read: Callable[..., Any], variable: Any, tracer: Any, *arguments: Any, **named: Any) -> Any:
    for name in ("outputs", "inputs")[len(arguments) :]:  # by position: Dynamo checks these only
        if name in named:
            arguments = (*arguments, named.pop(name))
    inputs = arguments[1:2]
    outer = [tensor for i in inputs for tensor, source in dynamo_torch._collect_tensors_with_sources(i) if source]
    may_be_of_each_other = len(outer) > 1 and any(tensor.grad_fn is not None for tensor in outer)
    nodes = (node for i in inputs for node in dynamo_torch._collect_placeholder_nodes(i))
    examples = [node.meta["grapharg"].example for node in nodes if node.meta.get("grapharg") is not None]
    if may_be_of_each_other or any(getattr(example, "_backward_hooks", None) for example in examples):
        explanation = "they have hooks, or one may have been computed of another: the graph does not show it"
        end_graph("torch.autograd.grad of tensors from outside of the graph", explanation)
    return read(variable, tracer, *arguments, **named)


# ---------------------------------------------------------------- code that is not torch's


def call_cached(inline: Callable[..., Any], variable: Any, tracer: Any, *arguments: Any) -> Any:
    """Inline a function with cached results; break the graph if it draws or changes something: graphs repeat it."""
    changes, before = _changes(tracer), set(tracer.output.graph.nodes)
    result = inline(variable, tracer, *arguments)
    added = [node for node in tracer.output.graph.nodes if node not in before]
    is_drawn = any(draws(node.target) for node in added if node.op in ("call_function", "call_method"))
    if is_drawn or _changes(tracer) != changes:
        reason = "its results are cached, and it draws random numbers or changes something"
        end_graph(f"{variable.get_name()} runs as it is", reason)
    return result


def _changes(tracer: Any) -> tuple[int, int]:
    """Count the objects that captured code changed, and its draws of Python's own random numbers."""
    effects = tracer.output.side_effects
    existing = (v for v in effects.id_to_variable.values() if v.source is not None)
    return sum(map(effects.is_modified, existing)), len(tracer.output.random_calls)


@instead_of(f"{_VARIABLES}.misc.NumpyVariable.call_function")
def functions_of_numpy(read: Any, variable: Any, *arguments: Any) -> Any:
    """Break the graph at a function of NumPy that torch would round differently."""
    name = getattr(variable.value, "__name__", "")
    if not isinstance(variable.value, type) and name not in EXACT:
        end_graph(f"numpy.{name} runs as it is", _ROUNDS)
    return read(variable, *arguments)


@instead_of(f"{_VARIABLES}.tensor.NumpyNdarrayVariable.call_method")
def methods_of_arrays(read: Any, variable: Any, tracer: Any, name: str, *arguments: Any) -> Any:
    """Break the graph at a method of an array that torch would round differently."""
    if not name.startswith("__") and name not in EXACT:
        end_graph(f"ndarray.{name} runs as it is", _ROUNDS)
    return read(variable, tracer, name, *arguments)


@instead_of("torch._dynamo.guards.GuardBuilder.SEQUENCE_LENGTH")
def lengths(guard_length: Any, builder: Any, guard: Any) -> None:
    """Guard the number of items of a tuple, whatever its `__len__` returns; else each call captures the code again."""
    value = builder.get(guard)
    if not isinstance(value, tuple) or type(value).__len__ is tuple.__len__:
        guard_length(builder, guard)
        return
    length = tuple.__len__(value)
    builder.TYPE_MATCH(guard)
    verbose = [f"tuple.__len__({guard.name}) == {length}"]
    builder.get_guard_manager(guard).add_lambda_guard(lambda v: tuple.__len__(v) == length, verbose, guard.user_stack)


@instead_of("torch._dynamo.variables.torch.TorchInGraphFunctionVariable.call_function")
def copied_results(call: Callable[..., Any], function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Capture a call with a non-contiguous `out=`, at which Dynamo breaks the graph.

    AOTAutograd traces the call without `out=`, and then a copy. The captured graph makes the call as the user wrote it,
    so that a proof sees whether the copy has other numbers. Dynamo handles calls that draw random numbers or need
    gradients: the first draw other numbers without `out=`, the second are errors.
    """
    out = kwargs.get("out")
    if out is None or not out.is_tensor() or draws(function.value):
        return call(function, tx, args, kwargs)
    proxies = proxy_args_kwargs(args, {name: value for name, value in kwargs.items() if name != "out"})
    if not _is_result_like(out.as_proxy().node.meta.get("example_value"), tx.fake_mode, function.value, *proxies):
        return call(function, tx, args, kwargs)
    named = {**proxies[1], "out": out.as_proxy()}
    proxy = tx.output.create_proxy("call_function", _writing(function.value), proxies[0], named)
    return wrap_fx_proxy(tx=tx, proxy=proxy)


def _is_result_like(out: Any, mode: FakeTensorMode, function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call returns a tensor that a non-contiguous `out` can hold unchanged; neither may need gradients."""
    if not isinstance(out, torch.Tensor) or out.is_contiguous():
        return False
    values = fx.node.map_aggregate(
        (args, kwargs), lambda value: value.node.meta["example_value"] if isinstance(value, fx.Proxy) else value
    )
    try:
        with mode:
            result = function(*values[0], **values[1])
    except Exception as error:  # any error of the call: Dynamo raises it again
        log.debug("A call with out= can not be traced without it: %s", error)
        return False
    if not isinstance(result, torch.Tensor) or result.requires_grad or out.requires_grad:
        return False
    return (result.shape, result.dtype, result.device) == (out.shape, out.dtype, out.device)


@functools.cache
def _writing(function: Any) -> Any:
    """Return a function that calls another one with `out=`; on fake tensors it copies the result instead."""

    def write(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if is_fake(out):
            return out.copy_(function(*args, **kwargs))
        return function(*args, out=out, **kwargs)  # type: ignore[no-any-return]

    return write


@instead_of("torch._dynamo.output_graph.OutputGraph.remove_tensorify_specialized_graphargs")
def unread_numbers(drop: Callable[[Any], None], output: Any) -> None:
    """Drop unread inputs whose number Dynamo specialised, but no operation that changes a tensor in place.

    Dynamo finds what to drop by the number that a tensor is known to hold. An operation in place returns its input, so
    its result has that number too, and is usually unread. Without this patch a float64 counter keeps its value: the
    proof sees that, and the code runs eager.
    """
    shown = [(node, node.meta) for node in output.graph.nodes if node.op != "placeholder"]
    for node, _ in shown:
        node.meta = {}
    try:
        drop(output)
    finally:
        for node, meta in shown:
            node.meta = meta


# ---------------------------------------------------------------- numbers in strings, ranges, names


@instead_of("torch._dynamo.symbolic_convert.InstructionTranslatorBase._format_value")
def written_numbers(format_value: Any, translator: Any, specification: Any, flags: int) -> None:
    """Format a symbolic number into a string as its guarded value; Dynamo would lose its format.

    A string that already shows a tensor is formatted when the code runs, and the number with it: then messages of
    checks, which transformers formats in each call, are dropped as unread, and their code serves all sizes.
    """
    number = translator.stack[-1]
    if isinstance(number, SymNodeVariable):
        translator.pop()
        parts = reversed(translator.stack)
        before = next((p for p in parts if not (isinstance(p, ConstantVariable) and isinstance(p.value, str))), None)
        if isinstance(before, misc.StringFormatVariable) and not flags & _CONVERTS:  # formatted at run time
            form = f"{{:{specification.as_python_constant()}}}"
            translator.push(misc.StringFormatVariable(form, [number], {}))
            return
        translator.push(ConstantVariable.create(number.evaluate_expr()))
    format_value(translator, specification, flags)


@functools.cache
def _range_to_a_size() -> Any:
    """Return the class of a stepped range to a symbolic size: its items are those of a range to a number."""

    class RangeToASize(variables.RangeVariable):
        def __init__(self, items: list[VariableTracker], size: VariableTracker | None = None, **kwargs: Any) -> None:
            super().__init__(items, **kwargs)
            self.size = size

        @property
        def end(self) -> VariableTracker:
            return self.items[1] if self.size is None else self.size

    members = getattr(variables.RangeVariable, "tp_members", {})  # since 2.15
    if "stop" in members:
        stop = type(members["stop"])(lambda self, _: self.end, members["stop"].setter)
        setattr(RangeToASize, "tp_members", {**members, "stop": stop})  # noqa: B010 - earlier releases have none
        return RangeToASize
    name = "var_getattr" if hasattr(variables.RangeVariable, "var_getattr") else "tp_getattro_impl"  # before 2.14
    read = getattr(variables.RangeVariable, name)
    setattr(RangeToASize, name, lambda self, tracer, asked: self.end if asked == "stop" else read(self, tracer, asked))
    return RangeToASize


@instead_of(f"{_VARIABLES}.BuiltinVariable.call_function")
def ranges(call: Any, variable: Any, tracer: Any, arguments: list[VariableTracker], named: Any) -> Any:
    """Guard the number of steps of a range to a symbolic size (blocks of tokens); Dynamo would guard the size."""
    if variable.fn is range and len(arguments) == 3:
        start, size, step = (argument.realize() for argument in arguments)
        if isinstance(size, SymNodeVariable) and start.is_python_constant() and step.is_python_constant():
            first, end, width = start.as_python_constant(), cast(Any, size.sym_num), step.as_python_constant()
            goes_by_steps = width > 1 and end.node.has_hint()
            last = first + width * len(range(first, end.node.hint, width)) if goes_by_steps else first
            if last > first and last - width < end <= last:  # Dynamo guards these two comparisons
                return _range_to_a_size()([start, ConstantVariable.create(last), step], size)
    return call(variable, tracer, arguments, named)


@instead_of(f"{_VARIABLES}.builtin.GetAttrBuiltinVariable.call_function")
def names(read: Any, variable: Any, tracer: Any, arguments: list[Any], named: Any) -> Any:
    """Read `__name__` and the like of torch's functions and classes, at which 2.13 breaks graphs (peft's DoRA)."""
    asked, name, *default = arguments
    is_of_torch = isinstance(asked, TorchInGraphFunctionVariable)
    if is_of_torch and not default and name.is_python_constant():
        value = getattr(asked.value, name.as_python_constant(), None)
        if name.as_python_constant() in _NAMES and isinstance(value, str):
            return ConstantVariable.create(value)
    return read(variable, tracer, arguments, named)


# ---------------------------------------------------------------- questions whether code is compiled

_QUESTIONS = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.compiler.is_exporting,
    torch._utils.is_compiling,
    is_compiling,
    _is_in_optimized_module,
)
_OF_CUDA_GRAPHS = tuple(
    module.is_current_stream_capturing
    for module in (torch.cuda, torch.xpu)
    if hasattr(module, "is_current_stream_capturing")
)
# Files of other packages that ask only to be traceable, and compute the same with either answer.
SAME_EITHER_WAY = (str(Path("transformers", "utils", "output_capturing.py")),)
_TOOLS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


_handlers = TorchInGraphFunctionVariable._get_handlers()
_of_dynamo: dict[Any, Callable[..., Any]] = {question: _handlers[question] for question in _QUESTIONS}


def is_of_tools(file: str) -> bool:
    """Whether a source file is torch's or this package's, not the user's."""
    return file.startswith(_TOOLS)


def _file_of(tracer: Any) -> str:
    return "" if tracer is None else str(tracer.f_code.co_filename)


def _answer(question: Any, tracer: Any, *arguments: Any, **named: Any) -> Any:
    """Return False, or Dynamo's answer to code that asks only in order to be traceable."""
    if question.value in _of_dynamo and (
        is_of_tools(_file_of(tracer)) or _file_of(tracer.parent).endswith(SAME_EITHER_WAY)
    ):
        return _of_dynamo[question.value](question, tracer, *arguments, **named)
    return ConstantVariable.create(False)


@contextmanager
def as_in_eager() -> Iterator[None]:
    """Answer captured code that asks whether it is compiled as eager PyTorch does, in a `with` block."""
    rules = dict.fromkeys(_OF_CUDA_GRAPHS, TorchInGraphFunctionVariable)  # Dynamo does not know some of these
    answers = dict.fromkeys((*_QUESTIONS, *_OF_CUDA_GRAPHS), _answer)
    with replaced_entries(get_torch_obj_rule_map(), rules), replaced_entries(_handlers, answers):
        yield


def as_compiled() -> AbstractContextManager[None]:
    """Answer captured code that asks whether it is compiled as Dynamo does, in a `with` block."""
    return replaced_entries(_handlers, _of_dynamo)


def no_session() -> AbstractContextManager[None]:
    """Answer as eager PyTorch to code that runs while torch compiles: functions that users put into graphs untraced."""
    knows_sessions = hasattr(torch.compiler, "_compile_session_context")
    return replaced((torch.compiler, "_compile_session_context", nullcontext)) if knows_sessions else nullcontext()
