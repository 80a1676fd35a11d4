"""Functions that their author compiled, inside of captured code: they stay compiled, each call one operation.

Dynamo reads through them as through any other function. What it captures of such a call is marked, then cut out of its
graph (`cut_out`), and compiled as the author's torch.compile does it, into the same kernels: see `user_kernels`. Two
operators run those, one the forward and one the backward. To all that follows they are custom operators: measured, kept
or computed again.

What can't be one operation ends the graph, and runs as it does without a plan: functions compiled by another backend
than Inductor, with CUDA graphs or with dynamic=True, and those that write to their arguments or return views of them.

All of this is private to PyTorch; `test_user_compiled.py` fails loudly where it moves.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import unimplemented
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables.functions import UserFunctionVariable, WrapperUserFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from . import foreign_code, questions
from .user_kernels import KernelCall, KernelOperation, NotCompiledError, context_of, end_graph_at, ended

__all__ = ["NotCompiledError", "cut_out", "is_authors", "opaque_words"]

_MARK = "hiremate_user_compiled"
_inline = WrapperUserFunctionVariable.call_function
_inline_call: Any = InliningInstructionTranslator.inline_call
_inline_call = _inline_call.__func__


# ---------------------------------------------------------------- what Dynamo reads


def _call_function(variable: Any, tracer: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
    """Read through a wrapper; mark what is captured of it where torch.compile made it, end the graph at TorchScript."""
    if isinstance(variable.wrapper_obj, torch.jit.ScriptFunction):
        name = str(variable.wrapper_obj.name)
        unimplemented(
            gb_type=f"{name} is TorchScript",
            context=name,
            explanation="it runs as its author scripted it, outside of captured graphs",
            hints=[],
        )
    if hasattr(variable.wrapper_obj, "cache_info"):
        return foreign_code.call_cached(variable, tracer, arguments, named)
    if variable.attr_to_trace != "_torchdynamo_inline" or not _is_compiled(variable.wrapper_obj):
        return _inline(variable, tracer, arguments, named)
    return _marked(tracer, variable.wrapper_obj, lambda: _inline(variable, tracer, arguments, named))


def _call_inline(
    cls: Any, parent: Any, function: Any, arguments: list[Any], named: dict[str, Any], **options: Any
) -> Any:
    """Read through a function; mark what is captured of a method that was compiled in its class."""
    owner: type | None = None
    first = arguments[0] if arguments and isinstance(function, UserFunctionVariable) else None
    # Dynamo guards an argument where it reads it first, and names that line where the guard fails.
    if type(first) is LazyVariableTracker and not first.is_realized():
        owner = first.peek_type()
    elif isinstance(first, UserDefinedObjectVariable):
        owner = first.python_type()
    wrapper: Any = None if owner is None else inspect.getattr_static(owner, function.get_name(), None)
    if not _is_compiled(wrapper) or wrapper._torchdynamo_orig_callable is not function.get_function():
        return _inline_call(cls, parent, function, arguments, named, **options)
    return _marked(parent, wrapper, lambda: _inline_call(cls, parent, function, arguments, named, **options))


WHILE_CAPTURING = (
    (WrapperUserFunctionVariable, "call_function", _call_function),
    (InliningInstructionTranslator, "inline_call", classmethod(_call_inline)),  # type: ignore[arg-type]
)


def is_authors(compiler: Any) -> bool:
    """Whether an author's torch.compile captures code, with Inductor: not our own."""
    return type(innermost_backend(compiler)) is torch._TorchCompileInductorWrapper


def _is_compiled(function: Any) -> bool:
    """Whether torch.compile gave a function itself, not one that a decorator put around it since."""
    attribute = inspect.getattr_static(function, "_is_torch_compile", False)
    return bool(attribute) and getattr(function, "_torchdynamo_wrapper_id", None) == id(function)


def _marked(tracer: Any, function: Any, inline: Callable[[], Any]) -> Any:
    context = context_of(function)
    backend = innermost_backend(context.callback)
    if getattr(backend, "compiler_name", "") == "eager":  # it changes nothing about what runs
        with questions.as_compiled():
            return inline()
    reason = _why_apart(function, context, backend)
    if reason:
        name = function.__name__
        unimplemented(
            gb_type=f"{name} is compiled by its author",
            context=name,
            explanation=f"it stays as it is compiled, outside of captured graphs, since {reason}",
            hints=[],
        )
    before = set(tracer.output.graph.nodes)
    casts = tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in ("cpu", "cuda"))
    call = KernelCall(function, casts, torch.is_autocast_cache_enabled())
    with questions.as_compiled():
        result = inline()
    for node in tracer.output.graph.nodes:
        if node not in before and node.op != "placeholder":
            node.meta[_MARK] = call  # the outermost function's, where one calls another
    return result


def _why_apart(function: Any, context: Any, backend: Any) -> str:
    """Return the reason why a function can't be one operation of a graph, "" where it can."""
    if function in ended:
        return "it writes to its arguments, or returns views"
    if type(backend) is not torch._TorchCompileInductorWrapper:
        return "another backend than Inductor compiles it"
    if backend.config.get("triton.cudagraphs"):
        return "it runs in CUDA graphs"
    return "it is compiled with dynamic=True" if context._dynamic else ""


# ---------------------------------------------------------------- what is cut out


def cut_out(module: fx.GraphModule) -> list[KernelOperation]:
    """Put one call in the place of what Dynamo captured of each call of a compiled function; return these.

    Args:
        module: What Dynamo captured; it is changed.
    """
    operations = []
    for inner in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        calls: dict[KernelCall, list[fx.Node]] = {}
        for node in inner.graph.nodes:
            if _MARK in node.meta:
                calls.setdefault(node.meta[_MARK], []).append(node)
        for call, nodes in calls.items():
            if operation := _cut(inner, call, nodes):
                operations.append(operation)
        if operations:
            inner.recompile()
    return operations


def _cut(module: fx.GraphModule, call: KernelCall, nodes: list[fx.Node]) -> KernelOperation | None:
    inside = set(nodes)
    read = list(dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in inside))
    given = [node for node in nodes if any(user not in inside for user in node.users)]
    if not given:
        return None
    if not all(isinstance(node.meta.get("example_value"), torch.Tensor) for node in (*read, *given)):
        end_graph_at(call.function)
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in read:
        values[node] = graph.placeholder(node.name)
    for node in nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
        values[node].meta = {}
    graph.output(tuple(values[node] for node in given))
    operation = KernelOperation(call, fx.GraphModule(module, graph), len(_modules_of(nodes)) > 1)
    with module.graph.inserting_after(nodes[-1]):
        whole = module.graph.call_function(operation, tuple(read))
    origin = {name: value for name, value in nodes[-1].meta.items() if name != _MARK}
    whole.meta = {**origin, "example_value": tuple(node.meta["example_value"] for node in given)}
    after = whole
    for position, node in enumerate(given):
        with module.graph.inserting_after(after):
            after = module.graph.call_function(operator.getitem, (whole, position))
        after.meta = {**origin, "example_value": node.meta["example_value"]}
        node.replace_all_uses_with(after, lambda user: user not in inside)
    for node in reversed(nodes):
        module.graph.erase_node(node)
    return operation


def _modules_of(nodes: list[fx.Node]) -> set[str]:
    """Find the modules that call some operations, by their place in Dynamo's stack."""
    return {next(reversed(node.meta.get("nn_module_stack") or {"": None})) for node in nodes}


def opaque_words(name: str) -> str:
    """Warn that a compiled function calls modules, and what that costs."""
    return (
        f"Nothing inside of {name} is planned: its author compiled it, with the modules that it calls, and it stays "
        "compiled. Each of its calls is one operation, whose results are kept or computed again as a whole. To plan "
        "what is inside, leave @torch.compile off it, or compile only functions that it calls."
    )
